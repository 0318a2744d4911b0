"""Which settings go together, and which have no effect; what each alone may be is in `schema`.

Everything here is cheap and needs no worker: it runs before any is started.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path

from omegaconf import MISSING

from areal_sc.algorithms.named_loss import loss_of
from areal_sc.config.fields import check_ranges, value_at
from areal_sc.config.machine import (
    count_cuda_devices,
    interface_names,
    resolved_device,
    why_not_listen,
)
from areal_sc.config.model_context import known_context
from areal_sc.config.model_folder import check_model_folder
from areal_sc.config.schema import (
    ClipCenter,
    Device,
    Dtype,
    GRPOConfig,
    LrSchedule,
    NormScope,
    Resume,
    WeightUpdateMethod,
)
from areal_sc.config.sharing import differing_sections
from areal_sc.config.store_room import describe_largest_group, max_group_bytes
from areal_sc.engines.handles import make_actor, make_generator
from areal_sc.errors import ConfigError
from areal_sc.hub import fetch_model, is_hub_name, local_model

MIN_HEARTBEATS_TO_ORPHAN = 2
"""Heartbeats that must be missing before a worker gives its controller up."""

_IDLE = (
    # with this setting at this value, these have no effect; why, where that is not plain
    ("actor.optimizer.schedule", LrSchedule.constant, ["actor.optimizer.min_lr_ratio"], ""),
    ("actor.ppo.use_behavior_weight", False, ["actor.ppo.behavior_weight_cap"], ""),
    ("actor.ppo.advantage_std", NormScope.none, ["actor.ppo.advantage_eps"], ""),
    ("rollout.max_staleness", 0, ["rollout.over_bound"], "no group is ever over the bound"),
    (
        "rollout.max_rejection_rate",
        1,
        ["rollout.rejection_window"],
        "no share of rejections ends the run",
    ),
    (
        "checkpoint.every_steps",
        0,
        ["checkpoint.every_minutes", "checkpoint.keep"],
        "only the final model is kept",
    ),
    (
        "actor.ppo.num_minibatches",
        1,
        ["actor.ppo.clip_low", "actor.ppo.clip_high"],
        "the only update starts at the clip's centre",
    ),
)


def check_config(
    config: GRPOConfig, count_devices: Callable[[], int] = count_cuda_devices
) -> list[str]:
    """Checks every setting and what goes together.

    Args:
        count_devices: number of CUDA devices of this machine; asked only when it matters.
    Returns: warnings: settings without effect, and settings that are allowed but seldom meant.
    Raises:
        ConfigError: names the setting, its value, and what is allowed.
        ModelError: the folder at `actor.path` exists and cannot be read.
    """
    _check_python_values(config)
    check_ranges(config)
    _check_names(config)
    for key, is_met, expected in (*_batch_requirements(config), *_other_requirements(config)):
        if not is_met:
            raise ConfigError(f"{key}: expected {expected}, got {value_at(config, key)!r}")
    _check_store(config)
    loss_of(config.actor.ppo).search_path()  # raises where there is none
    make_generator(config.rollout).check(config)
    return [
        *_distribution_warnings(config),
        *_effect_warnings(config),
        *_step_warnings(config),
        *_kept_row_warnings(config),
        *_rank_warnings(config),
        *_check_devices(config, count_devices),
    ]


def check_models(config: GRPOConfig) -> None:
    """Checks that the models that the workers load are there; downloads those of the hub.

    Raises: ModelError: there is no such model, or a folder holds none that can be used.
    """
    for path, revision in _models(config):
        check_model_folder(local_model(path, revision))


def fetch_models(config: GRPOConfig) -> bool:
    """Downloads the models that are named as on the hub; tells whether there were any.

    What lies beside the run folder is a path, also when a script has yet to make it.

    Raises: ModelError: there is no such model, or it cannot be had.
    """
    beside = Path(config.run_dir).parts[0]
    named = [
        (path, revision)
        for path, revision in _models(config)
        if is_hub_name(path) and Path(path).parts[0] != beside
    ]
    for path, revision in named:
        fetch_model(path, revision)
    return bool(named)


def _models(config: GRPOConfig) -> set[tuple[str, str]]:
    actor, rollout = config.actor, config.rollout
    return {(actor.path, actor.revision), (rollout.path, rollout.revision)}


def _check_python_values(config: GRPOConfig) -> None:
    """Checks settings that were built in Python for what the loader makes sure of."""
    for key in ("run_dir", "total_steps", "actor.path", "rollout.path", "scheduler.run_dir"):
        if value_at(config, key) == MISSING:
            raise ConfigError(f"{key}: no value; set it in the YAML, or when GRPOConfig is made")
    for key, origin in differing_sections(config):
        raise ConfigError(
            f"{key}: differs from {origin}, which it has to be; set {origin}, and leave {key} out "
            "(after a change of it call areal_sc.config.sharing.join_sections)"
        )


def _check_names(config: GRPOConfig) -> None:
    """Names and lists, as far as this machine can tell; local workers are all that there are."""
    for key in ("run_dir", "actor.path", "rollout.path", "transport.bind"):
        if not value_at(config, key):
            raise ConfigError(f"{key}: expected a name, got an empty one")
    if config.overwrite and config.resume == Resume.must:
        raise ConfigError(
            "resume: must needs the run that overwrite=true would delete; give one of them"
        )
    if (why := why_not_listen(config.transport.bind)) is not None:
        raise ConfigError(
            "transport.bind: expected an IPv4 address of this machine, one of its network "
            f"interfaces ({', '.join(interface_names())}), or 0.0.0.0 for all (ports are chosen by "
            f"the system), got {config.transport.bind!r}: {why}"
        )


def _batch_requirements(config: GRPOConfig) -> Iterator[tuple[str, bool, str]]:
    """Numbers of rows and tokens that fit together: (setting, whether it is right, expected)."""
    rollout, ppo = config.rollout, config.actor.ppo
    num_episodes = rollout.train_batch_groups * rollout.group_size
    yield (
        "actor.ppo.num_minibatches",
        ppo.num_minibatches <= num_episodes,
        f"at most {num_episodes} (rollout.train_batch_groups * rollout.group_size, the episodes of "
        "a step)",
    )
    sizes = {NormScope.group: rollout.group_size, NormScope.batch: num_episodes}
    for key in ("advantage_mean", "advantage_std"):
        scope = value_at(ppo, key)
        yield (
            "rollout.group_size",
            sizes.get(scope, 2) >= 2,
            f"at least 2 with actor.ppo.{key}={scope} (one answer alone has no better or worse)",
        )
    context, named = rollout.max_context_tokens, "rollout.max_context_tokens"
    yield (
        "generation.max_new_tokens",
        not context or config.generation.max_new_tokens < context,
        f"less than {named}={context}, which is prompt and answer (0 takes the model's limit, at "
        "most actor.max_tokens_per_micro_batch)",
    )
    yield (
        "rollout.max_episode_tokens",
        rollout.episode_tokens >= context,
        f"0 or at least {named}={context}, the longest row",
    )
    yield (
        "actor.max_tokens_per_micro_batch",
        config.actor.max_tokens_per_micro_batch >= context,
        f"at least {named}={context}, the longest row",
    )
    for path, revision in _models(config):
        limit = known_context(path, revision) or context
        yield named, context <= limit, f"at most {limit} (the context of the model in {path})"


def _other_requirements(config: GRPOConfig) -> Iterator[tuple[str, bool, str]]:
    """As `_batch_requirements`, for the rest."""
    shared_memory, update = config.transport.shared_memory, config.weight_update
    yield (
        "generation.stop_token_ids",
        all(token >= 0 for token in config.generation.stop_token_ids),
        "token ids of at least 0",
    )
    for tracker in config.trackers:
        yield (
            "trackers",
            find_spec(tracker) is not None,
            f"packages that are installed (`pip install {tracker}`)",
        )
    yield (
        "transport.shared_memory",
        shared_memory in ("auto", "off") or os.path.isabs(os.path.expanduser(shared_memory)),
        "auto, off, or the absolute path of a folder",
    )
    least = MIN_HEARTBEATS_TO_ORPHAN * config.scheduler.heartbeat_interval_s
    yield (
        "scheduler.orphan_timeout_s",
        config.scheduler.orphan_timeout_s >= least,
        f"at least {least:g} ({MIN_HEARTBEATS_TO_ORPHAN} heartbeats of "
        "scheduler.heartbeat_interval_s)",
    )
    yield (
        "rollout.max_unavailable",
        update.method != WeightUpdateMethod.collective or not config.rollout.max_unavailable,
        "0 with weight_update.method=collective (a broadcast needs all servers at one time)",
    )
    yield (
        "weight_update.folder",
        update.method != WeightUpdateMethod.disk or bool(update.folder),
        "a folder that trainers and servers see",
    )


def _check_store(config: GRPOConfig) -> None:
    """Each limit leaves room for the groups of a batch that may lie there, each as a whole."""
    rollout = config.rollout
    num_groups = {
        "store_bytes": -(-rollout.train_batch_groups // rollout.num_workers),
        "node_store_bytes": rollout.train_batch_groups,  # all workers are on one node
    }
    for name, count in num_groups.items():
        limit, least = value_at(rollout, name), count * max_group_bytes(rollout)
        if limit < least and (limit or name == "store_bytes"):
            raise ConfigError(
                f"rollout.{name}: expected at least {least} (room for {count} of the "
                f"rollout.train_batch_groups={rollout.train_batch_groups} groups of a batch; "
                f"{describe_largest_group(rollout)}), got {limit}; give more room, or set smaller "
                "batches, or a smaller rollout.max_context_tokens"
            )


def _check_devices(config: GRPOConfig, count_devices: Callable[[], int]) -> list[str]:
    """Returns: a warning, where float32 is computed on CUDA."""
    actor, rollout = config.actor, config.rollout
    roles = (
        ("actor", make_actor(actor), actor.dtype, "parallel.data", actor.parallel.num_ranks),
        ("rollout", make_generator(rollout), rollout.dtype, "num_workers", rollout.num_workers),
    )
    if all(handle.devices[0] == Device.cpu for _, handle, _, _, _ in roles):
        return []
    num_devices = count_devices()
    slow = []
    for role, handle, dtype, setting, num_workers in roles:
        device = handle.devices[0]
        if resolved_device(device, num_devices, f"{role}.device") == Device.cpu:
            continue
        if num_workers > num_devices:
            raise ConfigError(
                f"{role}.{setting}: expected at most {num_devices} with {role}.device={device} "
                f"(the CUDA devices of this machine), got {num_workers}; {role}.device=cpu needs "
                "none"
            )
        if dtype == Dtype.float32:
            slow.append(f"{role}.dtype=float32")
    return slow and [
        f"{' and '.join(slow)} on CUDA: several times slower than bfloat16, which needs half "
        "the memory for it; the trainer's parameters and optimizer state are float32 anyway"
    ]


def _distribution_warnings(config: GRPOConfig) -> Iterator[str]:
    """Settings by which the trained distribution is not the one that was sampled from."""
    generation = config.generation
    for name, cuts in (("top_p", generation.top_p < 1), ("top_k", generation.top_k > 0)):
        if cuts:
            yield (
                f"generation.{name}={value_at(generation, name)} cuts the sampled distribution, "
                "the trainer's is over the whole vocabulary"
            )


def _effect_warnings(config: GRPOConfig) -> Iterator[str]:
    """Settings that the user changed and that change nothing."""
    defaults = GRPOConfig()
    for cause, idle_value, keys, why in _IDLE:
        for key in keys:
            value = value_at(config, key)
            if value_at(config, cause) != idle_value or value == value_at(defaults, key):
                continue
            if key.startswith("actor.ppo.clip_") and (
                config.actor.ppo.clip_center != ClipCenter.proximal
            ):
                continue
            reason = f": {why}" if why else ""
            yield f"{key}={value} has no effect with {cause}={str(idle_value).lower()}{reason}"


def _step_warnings(config: GRPOConfig) -> Iterator[str]:
    """Settings that take no effect in so few training steps."""
    optimizer, defaults = config.actor.optimizer, GRPOConfig()
    if 0 < optimizer.total_steps <= optimizer.warmup_steps:
        yield (
            f"actor.optimizer.warmup_steps={optimizer.warmup_steps} is not below "
            f"actor.optimizer.total_steps={optimizer.total_steps}: lr is never reached"
        )
    for section in ("evaluation", "checkpoint"):
        every = value_at(config, f"{section}.every_steps")
        is_default = every == value_at(defaults, f"{section}.every_steps")
        if every > config.total_steps and not is_default:
            yield (
                f"{section}.every_steps={every} has no effect with total_steps={config.total_steps}"
            )


def _kept_row_warnings(config: GRPOConfig) -> Iterator[str]:
    """Steps whose rows stay until a snapshot is on the disk, against snapshots and stores."""
    checkpoint, rollout = config.checkpoint, config.rollout
    wanted = min(checkpoint.every_steps, checkpoint.keep_rows_steps)
    if checkpoint.memory_every_steps == 0 and wanted < checkpoint.every_steps:
        yield (
            f"checkpoint.keep_rows_steps={checkpoint.keep_rows_steps}: without snapshots in memory "
            "the run ends when a train worker dies later than so many steps after a snapshot"
        )
    if not rollout.max_context_tokens:  # of a model that is not there yet
        return
    limits = [rollout.num_workers * rollout.store_bytes, rollout.node_store_bytes]
    num_groups = min(limit for limit in limits if limit) // max_group_bytes(rollout)
    # what is admitted, and the batch that is trained, come first
    num_steps = num_groups // rollout.train_batch_groups - (rollout.max_staleness + 2)
    if num_steps < wanted:
        yield (
            f"checkpoint.keep_rows_steps={checkpoint.keep_rows_steps}: the stores have room for "
            f"the rows of {max(0, num_steps)} steps beside those in use "
            f"({describe_largest_group(rollout)}), so snapshots are written more often; raise "
            "rollout.store_bytes, or lower it"
        )


def _rank_warnings(config: GRPOConfig) -> Iterator[str]:
    rollout, ranks = config.rollout, config.actor.parallel.data
    rows = rollout.train_batch_groups * rollout.group_size // config.actor.ppo.num_minibatches
    if rows < ranks:
        yield (
            f"actor.parallel.data={ranks}: a minibatch has {rows} rows, so some ranks are idle "
            "in it"
        )
