"""What TRL, verl and AReaL call their settings, and what stands for them here."""

from __future__ import annotations

import re
from typing import Final

_SAME: Final = """
actor.path = model base_model pretrain model_name_or_path model_name model_path
    init_from_pretrained_path hf_checkpoint
actor.path (owner/model@revision) = model_revision
actor.optimizer.lr = learning_rate actor_lr actor_learning_rate
actor.optimizer.schedule = lr_scheduler_type lr_scheduler lr_decay_style lr_scheduler_kwargs
actor.optimizer.warmup_steps (below 1: a share) = warmup_ratio lr_warmup_steps
    lr_warmup_steps_ratio warmup_steps_proportion num_warmup_steps
actor.optimizer.beta1 or actor.optimizer.beta2 = betas adam_betas optimizer.beta
actor.optimizer.beta1 = adam_beta1
actor.optimizer.beta2 = adam_beta2
actor.optimizer.eps = adam_epsilon adam_eps
actor.optimizer.max_grad_norm = grad_clip gradient_clipping clip_grad
actor.ppo.num_minibatches (how many, not how large; a batch is gone through once) =
    ppo_mini_batch_size mini_batch_size ppo_n_minibatches num_mini_batches num_iterations ppo_epochs
    steps_per_generation
actor.ppo.clip_low and actor.ppo.clip_high = epsilon clip_ratio eps_clip cliprange clip_range
    clip_eps clip_epsilon
actor.ppo.clip_low = clip_ratio_low epsilon_low
actor.ppo.clip_high = clip_ratio_high epsilon_high eps_clip_higher
actor.ppo.clip_dual = delta clip_ratio_c c_clip
actor.ppo.behavior_weight_cap = behav_imp_weight_cap behave_imp_weight_cap
    vllm_importance_sampling_cap tis_imp_ratio_cap rollout_is_threshold
actor.ppo.behavior_weight and actor.ppo.behavior_weight_bound = behave_imp_weight_mode
    vllm_importance_sampling_mode rollout_is rejection_sampling.
actor.ppo.behavior_weight_floor = rollout_is_threshold_lower
actor.ppo.max_second_moment = m2_threshold
actor.ppo.clip_center = use_decoupled_loss prox_logp_method
actor.ppo.ratio = importance_sampling_level
actor.ppo.gain=soft_gate = use_sapo_loss
actor.ppo.gate_positive = tau_pos sapo_tau_pos sapo_temperature_pos
actor.ppo.gate_negative = tau_neg sapo_tau_neg sapo_temperature_neg
actor.ppo.advantage_std = scale_rewards norm_adv_by_std_in_grpo adv_norm std_level
actor.ppo.advantage and actor.ppo.advantage_std = adv_estimator mean_level advantage_estimator
actor.ppo.discount (with actor.ppo.advantage=gae) = gamma
actor.ppo.gae_lambda (with actor.ppo.advantage=gae) = lam
actor.algorithm, or actor.ppo.loss and actor.ppo.gain = loss_type policy_loss loss_mode loss_fn
actor.ppo.aggregation = loss_agg_mode
actor.ppo.kl_coefficient (it needs the field reference_logprobs; docs/several-models.md) = beta
    kl_coef kl_ctl kl_ctrl kl_loss_coef kl_beta use_kl_loss init_kl_coef kl_penalty
actor.ppo.kl_estimator = kl_loss_type
actor.ppo.kl_place = use_kl_in_reward
actor.ppo.entropy_coefficient = entropy_coeff entropy_coef ent_coef
actor.max_tokens_per_micro_batch (how many of them follows) = gradient_accumulation_steps
    ppo_micro_batch_size ppo_micro_batch_size_per_gpu ppo_max_token_len_per_gpu
    log_prob_micro_batch_size log_prob_micro_batch_size_per_gpu micro_batch_size mb_spec
    max_tokens_per_mb n_mbs micro_train_batch_size micro_rollout_batch_size use_dynamic_bsz
actor.activation_checkpointing = gradient_checkpointing enable_gradient_checkpointing
actor.cpu_offload = param_offload optimizer_offload offload_params offload_policy
actor.dtype = precision bf16 fp16 torch_dtype model_dtype mixed_precision
actor.compile_layers = torch_compile use_torch_compile
actor.lora.rank = use_peft use_lora peft_config. lora_rank lora_r
actor.lora.alpha = lora_alpha
actor.lora.targets = target_modules lora_target_modules
actor.engine = strategy train_backend actor.backend deepspeed. fsdp. fsdp_config. zero_stage
actor.parallel.data = data_parallel_size fsdp_size n_gpus_per_node dp dp_size
actor.parallel.sequence = ulysses_sequence_parallel_size context_parallel_size
actor.parallel.pipeline = pp pp_size pipeline_model_parallel_size pipeline_parallel_size
actor.parallel.expert = expert_model_parallel_size expert_parallel_size
actor.parallel.tensor, or servers.tp_size = tensor_model_parallel_size tensor_parallel_size
    vllm_tensor_parallel_size tp
actor.parallel and rollout.num_workers = allocation_mode nnodes cluster. n_nodes gpus num_gpus
    n_gpus world_size rollout_num_gpus actor_num_gpus_per_node vllm_num_engines
generation = gconfig. sampling_params generation_kwargs
generation.temperature = rollout_temperature
generation.stop = stop_strings stop_sequences
generation.max_new_tokens = max_completion_length max_response_length response_length max_tokens
    generate_max_len rollout_max_response_len
generation.cut_answers=wrong (their reward is 0; none is left out) = mask_truncated_completions
rollout.engine = use_vllm vllm_mode rollout.name inference_backend
rollout.max_context_tokens (prompt and answer together) = max_prompt_length prompt_length
    max_model_len max_length context_length max_seq_len vllm_max_model_length prompt_max_len
    train_dataset.max_length
rollout.group_size = num_generations rollout.n n n_samples num_return_sequences n_samples_per_prompt
    num_generations_per_prompt
rollout.train_batch_groups (prompts a step, of all devices together) = batch_size train_batch_size
    per_device_train_batch_size rollout_batch_size global_batch_size generation_batch_size
    gen_batch_size consumer_batch_size num_prompts_per_step over_sampling_batch_size
    train_dataset.batch_size
rollout.max_staleness = max_head_offpolicyness staleness_threshold max_off_policy_steps async_level
    max_off_policy_level
rollout.max_concurrent_groups = max_concurrent_rollouts
rollout.soft_length = overlong_buffer. overlong_reward_penalty
rollout.max_running_sequences = max_num_seqs max_running_requests
sglang.args or vllm.args (arguments of these programs, by their own names) = gpu_memory_utilization
    vllm_gpu_memory_utilization mem_fraction_static enforce_eager max_num_batched_tokens
total_steps (an epoch is prompts / rollout.train_batch_groups steps) = epochs num_steps
    num_train_epochs total_epochs total_train_epochs num_epochs max_steps total_training_steps
    total_train_steps max_train_steps num_rollout total_rollout_steps
evaluation.every_steps = eval_steps test_freq eval_freq evaluator. eval_interval eval_strategy
evaluation.num_prompts = val_batch_size eval_batch_size per_device_eval_batch_size
    valid_dataset.batch_size
checkpoint.every_steps = save_steps save_freq saver. checkpointer. recover_freq save_interval
    save_strategy
evaluation.stop_after = early_stopping_patience
checkpoint.keep_best = metric_for_best_model load_best_model_at_end
checkpoint.keep = save_total_limit max_actor_ckpt_to_keep
run_dir (snapshots are in its checkpoints/) = checkpoint_dir save_path ckpt_path logging_dir
    load_checkpoint
run_dir = output_dir default_local_dir fileroot run_name experiment_name trial_name
resume = resume_from_checkpoint resume_mode recover.
trackers = report_to trainer.logger stats_logger. use_wandb wandb.
tracker_project = project_name wandb_project
"""
"""Our setting, or several, and the words that mean it elsewhere.

A word with a dot in it is more exact than one without; one with a dot at its end is a section.
"""

_NONE: Final = """
the reference model is the one of section reference (docs/several-models.md), never replaced = ref.
    ref_model. sync_ref_model ref_model_sync_steps ref_model_mixup_alpha
the critic is the model of section critic, with a loss and an optimizer of its own
    (docs/several-models.md) = vf_coef value_loss_coef cliprange_value critic_warmup
    critic_learning_rate
the tokenizer is that of actor.path = tokenizer_path tokenizer_name
generation samples always; evaluation.greedy is for the end = do_sample gconfig.greedy
answers are sampled by generation.temperature, generation.top_p and generation.top_k alone = min_p
    repetition_penalty presence_penalty frequency_penalty min_new_tokens num_beams
the script gives rewards: SingleTurnWorkflow(reward), not a setting = reward_funcs reward_fn
    reward_fn_path custom_reward_function. reward_manager rm_type reward_scaling reward_bias
    normalize_reward
a reward model is the one of section reward_model, by its path (docs/reward-model.md) =
    reward_pretrain
the script gives rewards and weights: SingleTurnWorkflow({'right': (right, 1.0), ...}), not a
    setting = reward_weights
the script gives prompts: load_prompts(...); `task` is for settings of its own, not a setting =
    train_files val_files train_dataset valid_dataset. train_dataset. eval_dataset. dataset.
    dataset_name dataset_path prompt_data input_key label_key prompt_key max_samples shuffle_dataset
    filter_overlong_prompts system_prompt prompt_template
the optimizer is AdamW = optim optimizer.type optimizer_type
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
