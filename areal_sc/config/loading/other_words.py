"""What TRL, verl and AReaL call their settings, and what stands for them here."""

from __future__ import annotations

import re
from typing import Final

_SAME: Final = """
actor.path = model base_model pretrain model_name_or_path model_name model_path hf_checkpoint
actor.path (owner/model@revision) = model_revision
actor.optimizer.lr = learning_rate actor_lr actor_learning_rate
actor.optimizer.schedule = lr_scheduler_type lr_scheduler lr_decay_style lr_scheduler_kwargs
actor.optimizer.warmup_steps (below 1: a share) = warmup_ratio lr_warmup_steps lr_warmup_steps_ratio
actor.optimizer.beta1 or actor.optimizer.beta2 = betas adam_betas optimizer.beta
actor.optimizer.max_grad_norm = grad_clip gradient_clipping clip_grad
actor.ppo.num_minibatches (how many, not how large; a batch is gone through once) =
    ppo_mini_batch_size mini_batch_size ppo_n_minibatches num_mini_batches num_iterations ppo_epochs
actor.ppo.clip_low and actor.ppo.clip_high = epsilon clip_ratio eps_clip cliprange clip_range
actor.ppo.clip_low = clip_ratio_low epsilon_low
actor.ppo.clip_high = clip_ratio_high epsilon_high eps_clip_higher
actor.ppo.behavior_weight_cap = behav_imp_weight_cap behave_imp_weight_cap tis_imp_ratio_cap
actor.ppo.ratio = importance_sampling_level
actor.ppo.advantage_std = scale_rewards norm_adv_by_std_in_grpo adv_norm std_level
actor.ppo.advantage and actor.ppo.advantage_std = adv_estimator mean_level advantage_estimator
actor.ppo.discount (with actor.ppo.advantage=gae) = gamma
actor.ppo.gae_lambda (with actor.ppo.advantage=gae) = lam
actor.algorithm, or actor.ppo.loss and actor.ppo.gain = loss_type policy_loss loss_mode loss_fn
actor.ppo.aggregation = loss_agg_mode
actor.ppo.kl_coefficient (it needs the field reference_logprobs; docs/several-models.md) = beta
    kl_coef kl_ctl kl_ctrl kl_loss_coef kl_beta use_kl_loss init_kl_coef kl_penalty
actor.ppo.entropy_coefficient = entropy_coeff entropy_coef ent_coef
actor.max_tokens_per_micro_batch (how many of them follows) = gradient_accumulation_steps
    ppo_micro_batch_size ppo_micro_batch_size_per_gpu ppo_max_token_len_per_gpu micro_batch_size
actor.activation_checkpointing = gradient_checkpointing enable_gradient_checkpointing
actor.cpu_offload = param_offload optimizer_offload offload_params offload_policy
actor.dtype = precision bf16 fp16 torch_dtype model_dtype mixed_precision
actor.lora.rank = use_peft use_lora peft_config. lora_rank lora_r
actor.lora.alpha = lora_alpha
actor.lora.targets = target_modules lora_target_modules
actor.engine = strategy train_backend actor.backend deepspeed. fsdp. fsdp_config. zero_stage
actor.parallel.data = data_parallel_size fsdp_size n_gpus_per_node dp dp_size
actor.parallel.pipeline = pp pp_size pipeline_model_parallel_size pipeline_parallel_size
actor.parallel.sequence = ulysses_sequence_parallel_size context_parallel_size
actor.parallel.tensor, or servers.tp_size = tensor_model_parallel_size tensor_parallel_size tp
actor.parallel and rollout.num_workers = allocation_mode nnodes cluster. n_nodes gpus num_gpus
actor.optimizer.type = optim optimizer_type
generation = gconfig. sampling_params generation_kwargs
generation.temperature = rollout_temperature
generation.max_new_tokens = max_completion_length max_response_length response_length max_tokens
generation.cut_answers=wrong (their reward is 0; none is left out) = mask_truncated_completions
rollout.engine = use_vllm vllm_mode rollout.name inference_backend
rollout.max_context_tokens (prompt and answer together) = max_prompt_length prompt_length
    max_model_len max_length context_length max_seq_len
rollout.group_size = num_generations rollout.n n n_samples num_return_sequences n_samples_per_prompt
rollout.train_batch_groups (prompts a step, of all devices together) = batch_size train_batch_size
    per_device_train_batch_size rollout_batch_size global_batch_size train_dataset.batch_size
rollout.max_staleness = max_head_offpolicyness staleness_threshold max_off_policy_steps async_level
rollout.max_running_sequences = max_num_seqs max_running_requests
sglang.args or vllm.args (arguments of these programs, by their own names) = gpu_memory_utilization
total_steps (an epoch is prompts / rollout.train_batch_groups steps) = epochs num_steps
    num_train_epochs total_epochs total_train_epochs max_steps total_training_steps num_rollout
evaluation.every_steps = eval_steps test_freq eval_freq evaluator. eval_interval eval_strategy
checkpoint.every_steps = save_steps save_freq saver. checkpointer. recover_freq save_interval
checkpoint.keep_best = metric_for_best_model load_best_model_at_end
checkpoint.keep = save_total_limit max_actor_ckpt_to_keep
run_dir = output_dir default_local_dir fileroot run_name experiment_name trial_name
resume = resume_from_checkpoint resume_mode recover.
trackers = report_to trainer.logger stats_logger. use_wandb wandb.
"""
"""Our setting, or several, and the words that mean it elsewhere.

A word with a dot in it is more exact than one without; one with a dot at its end is a section.
"""

_NONE: Final = """
the reference model is the one of section reference (docs/several-models.md), never replaced = ref.
the critic is the model of section critic, with a loss and an optimizer of its own
    (docs/several-models.md) = vf_coef value_loss_coef cliprange_value critic_warmup
    critic_learning_rate
the tokenizer is that of actor.path = tokenizer_path tokenizer_name
generation samples always; evaluation.greedy is for the end = do_sample gconfig.greedy
answers are sampled by generation.temperature, generation.top_p and generation.top_k alone = min_p
    repetition_penalty presence_penalty frequency_penalty num_beams
the script gives rewards: SingleTurnWorkflow(reward), not a setting = reward_funcs reward_fn rm_type
the script gives prompts: load_prompts(...); `task` is for settings of its own, not a setting =
    train_files val_files train_dataset valid_dataset. train_dataset. eval_dataset.
the script gives the chat template its arguments: SingleTurnWorkflow(...,
    chat_template_arguments={...}), not a setting = enable_thinking apply_chat_template
    chat_template chat_template_kwargs
"""
"""What to do where there is no such setting, and the words for it."""


def _by_word(table: str, says: str) -> dict[str, str]:
    found: dict[str, str] = {}
    for line in re.sub(r"\n +", " ", table).strip().splitlines():
        meaning, _, words = line.rpartition(" = ")
        for word in words.split():
            found |= dict.fromkeys([word, word.rstrip(".")], says + meaning)
    return found


_ABSENT: Final = _by_word(_NONE, "")
OTHER_WORDS: Final = _by_word(_SAME, "here that is ") | _ABSENT


def meant_by(key: str, *, is_ours: bool = False) -> str:
    """What stands here for a setting of others; "" where the word is not known.

    Args:
        is_ours: we have a setting of this name, in another section.
    """
    *sections, name = key.split(".")
    around = [f"{section}." for section in reversed(sections)]
    words = [".".join(key.split(".")[-2:]), *(word for word in around if word in _ABSENT)]
    if not is_ours:
        words += [name, *around]
    return next((OTHER_WORDS[word] for word in words if word in OTHER_WORDS), "")
