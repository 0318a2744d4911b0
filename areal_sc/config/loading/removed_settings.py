"""Settings that an older areal_sc had, and what to do in their place."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Final

LIKE_ACTOR: Final = ("reference", "critic", "teacher", "reward_model")
"""Sections of models that take most of their settings from the actor's."""

_SERVERS: Final = ("sglang", "vllm")
_SLURM: Final = ("scheduler.slurm", "scheduler.slurm.train", "scheduler.slurm.rollout")
_WITH_ADAPTER: Final = ("teacher", "reward_model")


def _each(sections: Iterable[str], names: str) -> list[str]:
    """Settings of these names in each of the sections."""
    return [f"{section}.{name}" for section in sections for name in names.split()]


ROOM_FOR_REPEATS: Final = tuple(
    _each(("checkpoint", "actor", "critic"), "memory_every_steps keep_rows_steps")
)

_BY_ADVICE: Final[Mapping[str, list[str]]] = {
    "it is a constant now: leave it out": [
        *_each(("transport",), "chunk_bytes max_inflight_chunks stalled_peer_timeout_s"),
        *_each(("scheduler",), "max_log_bytes shutdown_timeout_s shipping_timeout_s"),
        *_each(("rollout",), "max_prefill_tokens max_lost_s sandbox.environment"),
        "actor.ppo.advantage_eps",
        *_each(("weight_update",), "bucket_bytes"),
        *_each(("servers", *_SERVERS), "busy_limit_s"),
        *_each(_SERVERS, "control_timeout_s stop_timeout_s probe_interval_s hung_after_s"),
    ],
    "it follows from the size of the model: leave it out": [
        *_each(("rollout", "weight_update"), "step_timeout_s"),
        "transport.pull_timeout_s",
    ],
    "it follows from weights and a batch: leave it out": ["transport.shared_memory_bytes"],
    "it is what is free there: leave it out; rollout.store_bytes is for each rollout worker": [
        *_each(("actor", *LIKE_ACTOR), "store_bytes"),
        "rollout.node_store_bytes",
    ],
    "it follows from the room of the device: leave it out; actor.max_tokens_per_micro_batch bounds "
    "what a pass takes": ["actor.logprob_chunk_tokens"],
    "it follows from actor.parallel: leave it out": ["scheduler.slurm.train.role_workers"],
    "it is rollout.num_workers: leave it out": ["scheduler.slurm.rollout.role_workers"],
    "say what a whole node has, by cpus_per_node and memory_per_node of the same section": _each(
        _SLURM, "cpus_per_worker memory_per_worker"
    ),
    "it follows from what the model is for: leave it out": _each(
        ("actor", *LIKE_ACTOR), "is_frozen head"
    ),
    "it is actor.random_init where path is actor.path: leave it out": _each(
        LIKE_ACTOR, "random_init"
    ),
    "it is a part of path now: owner/model@revision": _each(
        ("actor", "rollout", *LIKE_ACTOR), "revision"
    ),
    "the folder of the adapter says it: leave it out": _each(
        _WITH_ADAPTER, "lora.rank lora.alpha lora.targets"
    ),
    "such a model is never trained, nor written: leave it out": _each(
        _WITH_ADAPTER, "lora.dropout lora.save_merged lora.publish_merged"
    ),
    "it is the number of cores: leave it out": ["rollout.sandbox.num_processes"],
    "workflows say what their fields take: leave it out": ["rollout.field_bytes"],
    "it is generation.cut_answers now: `judged` in place of false": ["evaluation.cut_is_wrong"],
    "it is called actor.parallel.data now": ["actor.num_workers"],
    "nodes that differ are a job each now: leave it out": ["scheduler.slurm.heterogeneous"],
    "it is a flag of sbatch now: --qos=... in the extra_flags of the same section": _each(
        _SLURM, "qos"
    ),
    "it is always areal_sc: leave it out": ["scheduler.ray.namespace"],
    "servers listen on loopback, where their workers are: leave it out": _each(_SERVERS, "host"),
    "free ones are found: leave it out": _each(_SERVERS, "ports"),
    "a rollout worker has one server: set rollout.num_workers to the number of servers, and "
    "rollout.max_running_sequences to what one of them runs": _each(_SERVERS, "num_servers"),
    "a server has the GPUs that its worker gets: leave it out, and limit the run's GPUs by "
    "CUDA_VISIBLE_DEVICES": _each(_SERVERS, "devices"),
    "a worker is started again with its server: it is scheduler.max_deaths now": _each(
        _SERVERS, "max_restarts"
    ),
    **{
        f"both kinds of servers have it in one place, servers.{name}": _each(_SERVERS, name)
        for name in ("tp_size", "environment", "urls", "api_key_env", "start_timeout_s")
    },
    "a step is repeated from its own snapshot in memory: leave it out, or say whether there are "
    "such snapshots by checkpoint.memory_snapshots": list(ROOM_FOR_REPEATS),
    "records.keep says which answers are kept, and `python -m areal_sc samples RUN_DIR` shows "
    "them": _each(("samples", "rollout.samples"), "groups_per_step max_chars show"),
}

REMOVED: Final[Mapping[str, str]] = MappingProxyType(
    {name: advice for advice, names in _BY_ADVICE.items() for name in names}
)
"""Setting -> what to do."""

FORMER_DEFAULTS: Final[Mapping[str, object]] = MappingProxyType(
    {
        "actor.ppo.advantage_eps": 1e-6,
        **dict.fromkeys((f"{role}.revision" for role in ("actor", "rollout", *LIKE_ACTOR)), ""),
        "rollout.max_lost_s": 300.0,
        "rollout.node_store_bytes": 0,
        **dict.fromkeys((f"{nodes}.cpus_per_worker" for nodes in _SLURM), 0),
        **dict.fromkeys((f"{nodes}.memory_per_worker" for nodes in _SLURM), ""),
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
