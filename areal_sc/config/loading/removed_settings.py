"""Settings that an older areal_sc had, and what to do in their place."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

LIKE_ACTOR: Final = ("reference", "critic", "teacher", "reward_model")
"""Sections of models that take most of their settings from the actor's."""

ROOM_FOR_REPEATS: Final = tuple(
    f"{section}.{name}"
    for section in ("checkpoint", "actor", "critic")
    for name in ("memory_every_steps", "keep_rows_steps")
)

REMOVED: Final[Mapping[str, str]] = MappingProxyType(
    {
        "rollout.field_bytes": "workflows say what their fields take: leave it out",
        "evaluation.cut_is_wrong": "it is generation.cut_answers now: `judged` in place of false",
        "actor.num_workers": "it is called actor.parallel.data now",
        "scheduler.slurm.train.role_workers": "it follows from actor.parallel: leave it out",
        "scheduler.slurm.heterogeneous": "nodes that differ are a job each now: leave it out",
        **dict.fromkeys(
            (
                *("actor.is_frozen", "actor.head", "critic.is_frozen", "critic.head"),
                *("reference.is_frozen", "teacher.is_frozen", "reward_model.is_frozen"),
                *("reference.head", "teacher.head", "reward_model.head"),
            ),
            "it follows from what the model is for: leave it out",
        ),
        **dict.fromkeys(
            (f"{role}.random_init" for role in LIKE_ACTOR),
            "it is actor.random_init where path is actor.path: leave it out",
        ),
        **dict.fromkeys(
            (
                f"{role}.lora.{name}"
                for role in ("teacher", "reward_model")
                for name in ("rank", "alpha", "targets")
            ),
            "the folder of the adapter says it: leave it out",
        ),
        **dict.fromkeys(
            (
                f"{role}.lora.{name}"
                for role in ("teacher", "reward_model")
                for name in ("dropout", "save_merged", "publish_merged")
            ),
            "such a model is never trained, nor written: leave it out",
        ),
        **dict.fromkeys(
            (
                *("transport.chunk_bytes", "transport.max_inflight_chunks"),
                *("sglang.control_timeout_s", "sglang.stop_timeout_s", "sglang.probe_interval_s"),
                *("vllm.control_timeout_s", "vllm.stop_timeout_s", "vllm.probe_interval_s"),
                *("scheduler.max_log_bytes", "scheduler.shutdown_timeout_s"),
                *("rollout.max_prefill_tokens", "transport.stalled_peer_timeout_s"),
                *("rollout.max_lost_s", "scheduler.shipping_timeout_s", "actor.optimizer.eps"),
                *("actor.optimizer.beta1", "critic.optimizer.beta1", "rollout.sandbox.environment"),
                *("critic.optimizer.eps", "actor.ppo.advantage_eps", "weight_update.bucket_bytes"),
                *("actor.ppo.gate_positive", "actor.ppo.gate_negative", "servers.busy_limit_s"),
                *("sglang.hung_after_s", "vllm.hung_after_s"),
                *("sglang.busy_limit_s", "vllm.busy_limit_s"),
            ),
            "it is a constant now: leave it out",
        ),
        **{
            f"{section}.{name}": advice
            for section in ("sglang", "vllm")
            for name, advice in {
                "host": "servers listen on loopback, where their workers are: leave it out",
                "ports": "free ones are found: leave it out",
                "num_servers": "a rollout worker has one server: set rollout.num_workers to the "
                "number of servers, and rollout.max_running_sequences to what one of them runs",
                "devices": "a server has the GPUs that its worker gets: leave it out, and limit "
                "the run's GPUs by CUDA_VISIBLE_DEVICES",
                "max_restarts": "a worker is started again with its server: it is "
                "scheduler.max_deaths now",
                **{
                    name: f"both kinds of servers have it in one place, servers.{name}"
                    for name in (
                        *("tp_size", "environment", "urls", "api_key_env", "start_timeout_s"),
                    )
                },
            }.items()
        },
        **dict.fromkeys(
            ROOM_FOR_REPEATS,
            "a step is repeated from its own snapshot in memory: leave it out, or say whether "
            "there are such snapshots by checkpoint.memory_snapshots",
        ),
        **dict.fromkeys(
            (
                f"{section}.{name}"
                for section in ("samples", "rollout.samples")
                for name in ("groups_per_step", "max_chars", "show")
            ),
            "records.keep says which answers are kept, and `python -m areal_sc samples RUN_DIR` "
            "shows them",
        ),
        **dict.fromkeys(
            (
                *("rollout.step_timeout_s", "transport.pull_timeout_s"),
                "weight_update.step_timeout_s",
            ),
            "it follows from the size of the model: leave it out",
        ),
        "rollout.sandbox.num_processes": "it is the number of cores: leave it out",
        **dict.fromkeys(
            (f"{role}.revision" for role in ("actor", *LIKE_ACTOR)),
            "it is a part of path now: owner/model@revision",
        ),
        "actor.ppo.kl_estimator": "what is learned is the same with each: leave it out",
        "actor.ppo.divergence": "it is the total variation, tv, always: leave it out, and set "
        "max_divergence in its units, of [0, 1]",
        **{
            f"scheduler.slurm.{section}qos": "set it as a flag: "
            f"scheduler.slurm.{section}extra_flags: [--qos=...]"
            for section in ("", "train.", "rollout.")
        },
        "transport.shared_memory_bytes": "it follows from weights and a batch: leave it out",
        "actor.logprob_chunk_tokens": "it follows from the room of the device: leave it out; "
        "actor.max_tokens_per_micro_batch bounds what a pass takes",
        "scheduler.ray.namespace": "it is always areal_sc: leave it out",
    }
)
"""Setting -> what to do."""

FORMER_DEFAULTS: Final[Mapping[str, object]] = MappingProxyType(
    {
        "actor.ppo.advantage_eps": 1e-6,
        "actor.ppo.gate_positive": 1.0,
        "actor.ppo.gate_negative": 1.05,
        **dict.fromkeys(
            (f"{role}.revision" for role in ("actor", *LIKE_ACTOR)),
            "it is a part of path now: owner/model@revision",
        ),
        "actor.ppo.divergence": "tv",
        "actor.ppo.kl_estimator": "k1",
        "rollout.max_lost_s": 300.0,
        "rollout.sandbox.num_processes": 0,
        "rollout.sandbox.environment": ["PATH", "LANG"],
    }
)
"""What holds now, of settings that became constants: an older run that has it says nothing else."""


def moved_to(key: str, elsewhere: Mapping[str, str]) -> str:
    """The only place of a setting that had a second one; "": `key` never was such a place.

    Args: elsewhere: `shared_settings` without those that are apart.
    """
    for path, template in elsewhere.items():
        if f"{key}.".startswith(f"{path}."):
            target, _, text = template.removeprefix("${").partition("}")
            return "" if text else target + key.removeprefix(path)
    return ""


def actors(key: str) -> str:
    """The actor's setting of the name that one of another model has; "": it is of none."""
    role, _, name = key.partition(".")
    return f"actor.{name}" if role in LIKE_ACTOR and name else ""
