"""A walk over the schema: what a run does not read is told, and nothing that it reads."""

from __future__ import annotations

import logging
import math
from typing import Any

import pytest
import torch
from loss_rows import made_tokens

from areal_sc.algorithms.named_loss import BUILT_IN, loss_of
from areal_sc.config.loading.loader import compose_config
from areal_sc.config.loading.presets import preset_names
from areal_sc.config.ppo_settings import POLICY_LOSSES, PPOConfig
from areal_sc.config.schema import ActorConfig, GRPOConfig
from areal_sc.preflight import idle_settings as module
from areal_sc.preflight.idle_settings import ScriptFacts, idle_in_script, idle_settings
from areal_sc.preflight.load import load_config

GIVEN = {"run_dir": "r", "total_steps": 100, "actor.path": "no/model"}
SILENT = ScriptFacts(has_agents=True, evaluates=True)

IDLE = (
    # the last one of each line has no effect beside the others; `SWITCHES` has those of the loss
    "servers.tp_size=4",
    "sglang.args={a:1}",
    "servers.start_timeout_s=5",
    "rollout.engine=sglang vllm.python=x",
    "rollout.engine=vllm sglang.args={a:1}",
    "rollout.engine=sglang servers.api_key_env=KEY",
    "rollout.engine=sglang servers.urls=['http://a:1'] servers.tp_size=2",
    "rollout.engine=sglang servers.urls=['http://a:1'] servers.environment={A:b}",
    "rollout.engine=vllm servers.urls=['http://a:1'] rollout.device=cuda",
    "scheduler.slurm.partition=gpu",
    "scheduler.slurm.train.nodes=2",
    "scheduler.ray.nodes=2",
    "+scheduler.settings.a=1",
    "scheduler.type=ray scheduler.slurm.nodes=2",
    "scheduler.type=slurm scheduler.ray.address=a:1",
    "scheduler.type=slurm scheduler.slurm.train.partition=gpu",
    "scheduler.type=slurm scheduler.slurm.rollout.time_limit=1:00:00",
    "scheduler.type=slurm scheduler.slurm.train.nodes=1 scheduler.slurm.rollout.nodes=1 "
    "scheduler.slurm.nodes=4",
    "reference.dtype=bfloat16",
    "reference.parallel.data=2",
    "critic.optimizer.lr=7",
    "critic.ppo.num_minibatches=2",
    "critic.path=c actor.lora.rank=4 critic.lora.publish_merged=false",
    "teacher.parallel.data=2",
    "teacher.lora.path=a",
    "reward_model.cpu_offload=true",
    "actor.ppo.loss=cross_entropy reward_model.path=m",
    "actor.lora.alpha=3",
    "actor.lora.targets=[q_proj]",
    "actor.lora.path=adapter",
    "actor.lora.publish_merged=false",
    "actor.optimizer.min_lr_ratio=0.1",
    "actor.optimizer.total_steps=50",
    "actor.device=cpu actor.dtype=bfloat16 actor.flash_attention=3",
    "actor.flash_attention=3",
    "actor.device=cpu actor.cpu_offload=true",
    "actor.ppo.max_divergence=0.1",
    "actor.ppo.aggregation_tokens=77",
    "actor.ppo.discount=0.9",
    "actor.ppo.gae_lambda=0.9",
    "actor.ppo.kl_estimator=k2",
    "actor.ppo.kl_place=reward",
    "actor.ppo.clip_center=behavior actor.ppo.behavior_weight_cap=2",
    "actor.ppo.clip_center=behavior actor.ppo.behavior_weight=sequence",
    "actor.ppo.behavior_weight=none actor.ppo.behavior_weight_floor=0.5",
    "actor.algorithm=sapo actor.ppo.clip_high=0.3",
    "actor.algorithm=cispo actor.ppo.clip_dual=9",
    "actor.algorithm=sft actor.ppo.advantage=batch",
    "actor.algorithm=distillation actor.ppo.advantage_std=batch",
    "actor.algorithm=dpo actor.ppo.entropy_coefficient=0.1",
    "actor.algorithm=sft actor.ppo.clip_center=behavior",
    "actor.ppo.loss=mine:loss actor.ppo.kl_coefficient=0.1",
    "actor.ppo.loss=mine:loss actor.ppo.aggregation=prompt",
    "actor.ppo.advantage=mine:advantage actor.ppo.advantage_std=batch",
    "actor.ppo.advantage_std=none actor.ppo.advantage_deviation=sample",
    "actor.ppo.num_minibatches=1 actor.ppo.clip_low=0.1",
    "actor.ppo.num_minibatches=1 actor.ppo.ratio=sequence",
    "rollout.max_staleness=0 rollout.over_bound=mask",
    "rollout.max_staleness=0 rollout.admission=eager",
    "rollout.max_rejection_rate=1 rollout.rejection_window=5",
    "rollout.soft_length.penalty=2",
    "rollout.soft_length.margin_tokens=9",
    "rollout.autoscale.min=2",
    "rollout.float32_output_layer=true",
    "weight_update.folder=elsewhere",
    "weight_update.whole_every_steps=9",
    "scheduler.type=ray weight_update.method=disk weight_update.whole_every_steps=9",
    "checkpoint.every_steps=0 checkpoint.keep=5",
    "checkpoint.every_steps=0 checkpoint.every_minutes=5",
    "checkpoint.every_steps=0 checkpoint.stop_within_s=5",
    "checkpoint.keep_best=accuracy",
    "tracker_project=mine",
    "agents.max_turns=3",
    "agents.network=session",
    "evaluation.greedy=false",
    "evaluation.num_samples=4",
)

ACTING = (
    "seed=3",
    "overwrite=true",
    "generation.temperature=0.5",
    "generation.top_k=4",
    "generation.cut_answers=wrong",
    "actor.random_init=true",
    "actor.lora.rank=4 actor.lora.alpha=3 actor.lora.save_merged=false",
    "actor.engine=megatron",
    "actor.parallel.tensor=2",
    "actor.dtype=bfloat16 actor.flash_attention=3",
    "actor.activation_checkpointing=layers actor.activation_offload=true",
    "actor.cpu_offload=true",
    "actor.compile_layers=true",
    "actor.num_threads=3",
    "actor.optimizer.lr=3",
    "actor.optimizer.warmup_steps=5",
    "actor.optimizer.schedule=linear actor.optimizer.min_lr_ratio=0.1",
    "actor.optimizer.schedule=cosine actor.optimizer.total_steps=50",
    "actor.ppo.num_minibatches=1",
    "actor.ppo.advantage=gae actor.ppo.advantage_std=none actor.ppo.discount=0.9",
    "actor.ppo.advantage=mine:advantage +actor.ppo.advantage_settings.a=1",
    "actor.ppo.num_minibatches=1 actor.ppo.clip_center=behavior actor.ppo.clip_high=0.3",
    "actor.algorithm=cispo actor.ppo.clip_high=3",
    "actor.algorithm=dppo actor.ppo.max_divergence=0.2",
    "actor.algorithm=dr_grpo actor.ppo.aggregation_tokens=77",
    "actor.ppo.kl_coefficient=0.1 actor.ppo.kl_place=reward",
    "actor.ppo.loss=mine:loss actor.ppo.kl_coefficient=0.1 actor.ppo.kl_place=reward",
    "actor.ppo.loss=mine:loss actor.ppo.clip_center=behavior actor.ppo.advantage=batch",
    "actor.ppo.loss=mine:loss +actor.ppo.loss_settings.a=1",
    "actor.algorithm=dpo +actor.ppo.loss_settings.label_smoothing=0.1",
    "reference.path=r reference.dtype=bfloat16 reference.parallel.data=2",
    "critic.path=c critic.optimizer.lr=7 critic.ppo.num_minibatches=2",
    "critic.path=c +critic.ppo.loss_settings.value_clip=0.3",
    "teacher.path=t teacher.device=cpu",
    "reward_model.path=m reward_model.cpu_offload=true",
    "rollout.engine=sglang servers.tp_size=4 sglang.python=x",
    "rollout.engine=vllm servers.tp_size=2",
    "rollout.engine=sglang servers.urls=['http://a:1'] servers.api_key_env=KEY",
    "rollout.dtype=bfloat16 rollout.float32_output_layer=true",
    "rollout.num_workers=3",
    "rollout.autoscale.max=4 rollout.autoscale.min=2",
    "rollout.over_bound=mask",
    "rollout.keep_groups=with_signal",
    "rollout.choose_prompts=with_signal",
    "rollout.soft_length.limit_tokens=90 rollout.soft_length.margin_tokens=9",
    "rollout.rejection_window=5",
    "rollout.num_reward_processes=3",
    "rollout.sandbox.read=[x]",
    "weight_update.method=disk weight_update.folder=elsewhere",
    "scheduler.type=slurm weight_update.whole_every_steps=9",
    "rollout.admission=eager",
    "scheduler.type=slurm scheduler.slurm.partition=gpu scheduler.slurm.train.nodes=2 "
    "scheduler.slurm.train.constraint=high",
    "scheduler.type=ray scheduler.ray.nodes=2",
    "scheduler.type=mine:Scheduler +scheduler.settings.a=1",
    "scheduler.heartbeat_interval_s=3",
    "transport.encrypt=true",
    "checkpoint.keep=5 checkpoint.every_minutes=5",
    "checkpoint.keep_best=accuracy evaluation.every_steps=5 evaluation.stop_after=2",
    "records.keep=none records.max_bytes=2000000",
    "evaluation.every_steps=5 evaluation.greedy=false evaluation.num_samples=4",
    "evaluation.sets=[{name:a,prompts:b}] evaluation.num_samples=4",
    "+task.anything=3",
)


def composed(settings: str) -> GRPOConfig:
    return compose_config(None, settings.split(" "), GRPOConfig, GIVEN)


@pytest.mark.parametrize("settings", IDLE)
def test_a_setting_without_effect_is_told(settings: str) -> None:
    key = settings.rpartition(" ")[2].partition("=")[0].lstrip("+")
    (told,) = idle_settings(composed(settings), ScriptFacts())
    assert told.startswith(f"{key.removesuffix('.a')}=")
    assert " has no effect with" in told


@pytest.mark.parametrize("settings", ACTING)
def test_a_setting_that_acts_is_not_told(settings: str) -> None:
    assert list(idle_settings(composed(settings), ScriptFacts())) == []


@pytest.mark.parametrize("name", preset_names())
def test_what_an_algorithm_sets_is_no_setting_of_the_users(name: str) -> None:
    assert list(idle_settings(composed(f"actor.algorithm={name}"), ScriptFacts())) == []


def test_every_condition_can_be_asked() -> None:
    config = composed("critic.path=c")
    facts = ScriptFacts()
    asked = [
        module._cause(config, prefix, condition, facts)
        for _, _, conditions in module._all_settings()
        for prefix, condition in conditions
    ]
    assert any(asked)
    assert not all(asked)


def test_settings_of_one_cause_are_told_together() -> None:
    config = composed("servers.tp_size=4 servers.start_timeout_s=2 scheduler.ray.nodes=2")
    together, alone = idle_settings(config, ScriptFacts())
    assert together == (
        "servers.tp_size=4, servers.start_timeout_s=2.0 have no effect with rollout.engine=local"
    )
    assert alone == "scheduler.ray.nodes=2 has no effect with scheduler.type=local"


def test_what_a_script_does_decides_too() -> None:
    config = composed("agents.max_turns=3 evaluation.greedy=false servers.tp_size=2")
    (known,) = idle_settings(config, SILENT)
    assert known.startswith("servers.tp_size=2")
    assert idle_in_script(config, ScriptFacts(has_agents=True)) == [
        "evaluation.greedy=false has no effect without prompts for evaluations"
    ]
    assert idle_in_script(config, ScriptFacts(evaluates=True)) == [
        "agents.max_turns=3 has no effect without a workflow of agents"
    ]
    assert idle_in_script(config, SILENT) == []


def test_a_run_on_rows_reads_nothing_of_generation() -> None:
    settings = ("rollout.num_workers=3", "actor.ppo.clip_low=0.1", "evaluation.num_samples=3")
    for key in settings:
        (told,) = idle_settings(composed(key), ScriptFacts(generates=False))
        assert told == f"{key} has no effect in a run on rows of a data set"
    for key in ("evaluation.every_steps=3", "actor.optimizer.lr=1", "checkpoint.keep=3"):
        assert not list(idle_settings(composed(key), ScriptFacts(generates=False)))


def test_loading_tells(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        given = GIVEN | {"actor.path": "no_such_model", "actor.ppo.max_divergence": 0.1}
        load_config(given, count_devices=lambda: 0)
    told = [record.getMessage() for record in caplog.records]
    assert any(text.startswith("actor.ppo.max_divergence=0.1 has no effect") for text in told)


SWITCHES: dict[str, Any] = {
    "ratio": "sequence",
    "clip_low": 0.05,
    "clip_high": 0.05,
    "clip_dual": 1.25,
    "max_divergence": 0.01,
    "behavior_weight": "sequence",
    "behavior_weight_bound": "clamp",
    "behavior_weight_floor": 0.9,
    "behavior_weight_cap": 1.1,
    "max_second_moment": 0.01,
    "max_behavior_kl": 0.01,
    "aggregation": "sequence",
    "aggregation_tokens": 7,
    "kl_coefficient": 0.5,
    "kl_estimator": "k2",
    "entropy_coefficient": 0.2,
}
SHAPE = [(6, 0, 0), (3, 0, 1), (1, 1, 0), (5, 1, 0), (7, 1, 1), (4, 2, 0)]


@pytest.mark.parametrize("gain", ["clip", "stop_gradient_clip", "soft_gate", "divergence", "none"])
@pytest.mark.parametrize("center", ["proximal", "behavior", "interpolated"])
def test_what_is_told_of_switches_is_what_the_loss_does(gain: str, center: str) -> None:
    """Each switch is changed beside others: gradients and loss say whether it was read."""
    others = (
        ("token", "token", 0.0, 0.0, math.inf),
        ("token", "constant", 0.3, 0.5, 1.5),
        ("none", "token", 0.3, 0.5, 1.5),
        ("token", "constant", 0.0, 0.0, 1.5),
    )
    for weight, aggregation, beta, floor, cap in others:
        given: dict[str, Any] = {
            "gain": gain,
            "clip_center": center,
            "behavior_weight": weight,
            "behavior_weight_floor": floor,
            "behavior_weight_cap": cap,
            "aggregation": aggregation,
            "kl_coefficient": beta,
            "max_divergence": 0.1 if gain == "divergence" else math.inf,
        }
        usual = [outcome(given, seed) for seed in range(2)]
        for name, value in SWITCHES.items():
            if name == "ratio" and gain == "divergence":
                continue  # refused together
            changed = given | {name: value}
            acts = [outcome(changed, seed) for seed in range(2)] != usual
            ppo = PPOConfig(**(changed | {"num_minibatches": 4}))
            config = GRPOConfig(run_dir="r", total_steps=9, actor=ActorConfig(path="m", ppo=ppo))
            told = any(f"actor.ppo.{name}=" in text for text in idle_settings(config, SILENT))
            assert told is not acts, (changed, name)


def outcome(given: dict[str, Any], seed: int) -> list[float]:
    tokens = made_tokens(SHAPE, seed)
    loss, _ = loss_of(PPOConfig(**given)).load()(tokens)
    gradients = torch.autograd.grad(
        loss, (tokens.logprobs, tokens.entropy), allow_unused=True, materialize_grads=True
    )
    return [loss.item(), *gradients[0].tolist(), *gradients[1].tolist()]


@pytest.mark.parametrize("name", BUILT_IN)
def test_other_losses_read_none_of_the_switches(name: str) -> None:
    if name in POLICY_LOSSES:
        return
    for switch, value in SWITCHES.items():
        ppo = PPOConfig(loss=name, **{switch: value})
        config = GRPOConfig(run_dir="r", total_steps=9, actor=ActorConfig(path="m", ppo=ppo))
        (told,) = idle_settings(config, SILENT)
        assert told.startswith(f"actor.ppo.{switch}=")
