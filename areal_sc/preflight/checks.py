"""Which settings go together, and which have no effect; what each alone may be is in `schema`.

Everything here is cheap and needs no worker: it runs before any is started.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from importlib.util import find_spec

from omegaconf import MISSING

from areal_sc.config.fields import check_ranges, value_at
from areal_sc.config.machine import (
    count_cuda_devices,
    interface_names,
    resolved_device,
    why_not_listen,
)
from areal_sc.config.model_folder import check_model_folder, read_model_shape
from areal_sc.config.schema import (
    ClipCenter,
    Device,
    Dtype,
    GRPOConfig,
    LrSchedule,
    NormScope,
    OverBound,
    Resume,
    RolloutConfig,
    WeightUpdateMethod,
)
from areal_sc.config.sharing import differing_sections
from areal_sc.config.store_room import describe_largest_group, max_group_bytes
from areal_sc.engines.handles import make_actor, make_generator
from areal_sc.errors import ConfigError
from areal_sc.hub import cached_model, fetch_model, is_hub_name, local_model

MIN_HEARTBEATS_TO_ORPHAN = 2
"""Heartbeats that must be missing before a worker gives its controller up."""


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
    _check_lists_and_names(config)
    _check_transport(config)
    _check_batch(config)
    _check_lengths(config)
    _check_model_context(config)
    _check_store(config)
    _check_times(config)
    _check_weight_update(config)
    make_generator(config.rollout).check(config)
    num_devices = _check_devices(config, count_devices)
    return [
        *_distribution_warnings(config),
        *_effect_warnings(config),
        *_step_warnings(config),
        *_rank_warnings(config),
        *_dtype_warnings(config, num_devices),
    ]


def check_models(config: GRPOConfig) -> None:
    """Checks that the models that the workers load are there; downloads those of the hub.

    Raises: ModelError: there is no such model, or a folder holds none that can be used.
    """
    for path, revision in _models(config):
        check_model_folder(local_model(path, revision))


def fetch_models(config: GRPOConfig) -> bool:
    """Downloads the models that are named as on the hub; tells whether there were any.

    Raises: ModelError: there is no such model, or it cannot be had.
    """
    named = [model for model in _models(config) if is_hub_name(model[0])]
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


def _check_lists_and_names(config: GRPOConfig) -> None:
    for key in ("run_dir", "actor.path", "rollout.path", "transport.bind"):
        if not value_at(config, key):
            raise ConfigError(f"{key}: expected a name, got an empty one")
    for token in config.generation.stop_token_ids:
        if token < 0:
            raise ConfigError(
                f"generation.stop_token_ids: expected token ids of at least 0, got {token}"
            )
    for tracker in config.trackers:
        if find_spec(tracker) is None:
            raise ConfigError(
                f"trackers: {tracker} is not installed; `pip install {tracker}`, or leave it out"
            )
    if config.overwrite and config.resume == Resume.must:
        raise ConfigError(
            "resume: must needs the run that overwrite=true would delete; give one of them"
        )


def _check_transport(config: GRPOConfig) -> None:
    """What this machine has; local workers are all that there are."""
    bind, shared_memory = config.transport.bind, config.transport.shared_memory
    if (why := why_not_listen(bind)) is not None:
        names = ", ".join(interface_names())
        raise ConfigError(
            "transport.bind: expected an IPv4 address of this machine, one of its network "
            f"interfaces ({names}), or 0.0.0.0 for all (ports are chosen by the system), got "
            f"{bind!r}: {why}"
        )
    is_folder = os.path.isabs(os.path.expanduser(shared_memory))
    if shared_memory not in ("auto", "off") and not is_folder:
        raise ConfigError(
            "transport.shared_memory: expected auto, off, or the absolute path of a folder, got "
            f"{shared_memory!r}"
        )


def _check_batch(config: GRPOConfig) -> None:
    rollout, ppo = config.rollout, config.actor.ppo
    num_episodes = rollout.train_batch_groups * rollout.group_size
    if ppo.num_minibatches > num_episodes:
        raise ConfigError(
            f"actor.ppo.num_minibatches: expected at most {num_episodes} "
            "(rollout.train_batch_groups * rollout.group_size, the episodes of a step), "
            f"got {ppo.num_minibatches}"
        )
    for key in ("advantage_mean", "advantage_std"):
        scope = value_at(ppo, key)
        sizes = {NormScope.group: rollout.group_size, NormScope.batch: num_episodes}
        size = sizes.get(scope, 2)
        if size < 2:
            raise ConfigError(
                f"rollout.group_size: expected at least 2 with actor.ppo.{key}={scope} "
                f"(one answer alone has no better or worse), got {rollout.group_size}"
            )


def _check_lengths(config: GRPOConfig) -> None:
    context = config.rollout.max_context_tokens
    if config.generation.max_new_tokens >= context:
        raise ConfigError(
            f"generation.max_new_tokens: expected less than rollout.max_context_tokens={context}, "
            f"which is prompt and answer, got {config.generation.max_new_tokens}"
        )
    if config.rollout.episode_tokens < context:
        raise ConfigError(
            f"rollout.max_episode_tokens: expected 0 or at least "
            f"rollout.max_context_tokens={context}, the longest row, "
            f"got {config.rollout.max_episode_tokens}"
        )
    if config.actor.max_tokens_per_micro_batch < context:
        raise ConfigError(
            f"actor.max_tokens_per_micro_batch: expected at least "
            f"rollout.max_context_tokens={context}, the longest row, "
            f"got {config.actor.max_tokens_per_micro_batch}"
        )


def _check_model_context(config: GRPOConfig) -> None:
    for path, revision in _models(config):
        folder = cached_model(path, revision)
        shape = read_model_shape(folder) if folder else None
        limit = shape.max_context_tokens if shape else None
        if limit is not None and config.rollout.max_context_tokens > limit:
            raise ConfigError(
                f"rollout.max_context_tokens: expected at most {limit} "
                f"(the context of the model in {path}), got {config.rollout.max_context_tokens}"
            )


def _check_store(config: GRPOConfig) -> None:
    rollout = config.rollout
    # a group lies whole in one store
    groups_per_worker = -(-rollout.train_batch_groups // rollout.num_workers)
    _require_room("rollout.store_bytes", rollout.store_bytes, groups_per_worker, rollout)
    if rollout.node_store_bytes:
        # the local scheduler starts all workers on one node
        num_groups = rollout.train_batch_groups
        _require_room("rollout.node_store_bytes", rollout.node_store_bytes, num_groups, rollout)


def _require_room(key: str, limit: int, num_groups: int, rollout: RolloutConfig) -> None:
    """Raises: ConfigError: the limit is less than that many groups of a batch may take."""
    least = num_groups * max_group_bytes(rollout)
    if limit < least:
        raise ConfigError(
            f"{key}: expected at least {least} (room for {num_groups} of the "
            f"rollout.train_batch_groups={rollout.train_batch_groups} groups of a batch; "
            f"{describe_largest_group(rollout)}), got {limit}; give more room, or smaller batches "
            "or shorter contexts"
        )


def _check_times(config: GRPOConfig) -> None:
    scheduler = config.scheduler
    least = MIN_HEARTBEATS_TO_ORPHAN * scheduler.heartbeat_interval_s
    if scheduler.orphan_timeout_s < least:
        raise ConfigError(
            f"scheduler.orphan_timeout_s: expected at least {least:g} "
            f"({MIN_HEARTBEATS_TO_ORPHAN} heartbeats of scheduler.heartbeat_interval_s), "
            f"got {scheduler.orphan_timeout_s:g}"
        )


def _check_weight_update(config: GRPOConfig) -> None:
    rollout, update = config.rollout, config.weight_update
    is_collective = update.method == WeightUpdateMethod.collective
    if is_collective and rollout.max_unavailable:
        raise ConfigError(
            "rollout.max_unavailable: expected 0 with weight_update.method=collective (a "
            f"broadcast needs all servers at one time), got {rollout.max_unavailable}"
        )
    if update.method == WeightUpdateMethod.disk and not update.folder:
        raise ConfigError("weight_update.folder: expected a folder that trainers and servers see")


def _check_devices(config: GRPOConfig, count_devices: Callable[[], int]) -> int:
    """Returns: number of CUDA devices; 0 where none is asked for."""
    roles = [
        (
            "actor",
            make_actor(config.actor).devices[0],
            "parallel.data",
            config.actor.parallel.num_ranks,
        ),
        (
            "rollout",
            make_generator(config.rollout).devices[0],
            "num_workers",
            config.rollout.num_workers,
        ),
    ]
    if all(device == Device.cpu for _, device, _, _ in roles):
        return 0
    num_devices = count_devices()
    for role, device, setting, num_workers in roles:
        kind = resolved_device(device, num_devices, f"{role}.device")
        if kind == Device.cuda and num_workers > num_devices:
            raise ConfigError(
                f"{role}.{setting}: expected at most {num_devices} with "
                f"{role}.device={device} (the CUDA devices of this machine), got "
                f"{num_workers}; {role}.device=cpu needs none"
            )
    return num_devices


def _distribution_warnings(config: GRPOConfig) -> Iterator[str]:
    """Settings by which the trained distribution is not the one that was sampled from."""
    generation = config.generation
    if generation.top_p < 1:
        yield (
            f"generation.top_p={generation.top_p:g} cuts the sampled distribution, "
            "the trainer's is over the whole vocabulary"
        )
    if generation.top_k > 0:
        yield (
            f"generation.top_k={generation.top_k} cuts the sampled distribution, "
            "the trainer's is over the whole vocabulary"
        )


def _effect_warnings(config: GRPOConfig) -> Iterator[str]:
    """Settings that the user changed and that change nothing."""
    ppo, optimizer, rollout = config.actor.ppo, config.actor.optimizer, config.rollout
    without_effect = [
        # (the setting, whether something makes it idle, what does)
        (
            "actor.optimizer.min_lr_ratio",
            optimizer.schedule == LrSchedule.constant,
            "actor.optimizer.schedule=constant",
        ),
        (
            "actor.ppo.behavior_weight_cap",
            not ppo.use_behavior_weight,
            "actor.ppo.use_behavior_weight=false",
        ),
        (
            "actor.ppo.advantage_eps",
            ppo.advantage_std == NormScope.none,
            "actor.ppo.advantage_std=none",
        ),
        (
            "rollout.over_bound",
            rollout.max_staleness == 0 and rollout.over_bound != OverBound.train,
            "rollout.max_staleness=0: no group is ever over the bound",
        ),
        (
            "rollout.rejection_window",
            rollout.max_rejection_rate == 1,
            "rollout.max_rejection_rate=1: no share of rejections ends the run",
        ),
        *(
            (
                f"checkpoint.{name}",
                config.checkpoint.every_steps == 0,
                "checkpoint.every_steps=0: only the final model is kept",
            )
            for name in ("every_minutes", "keep")
        ),
    ]
    if ppo.clip_center == ClipCenter.proximal and ppo.num_minibatches == 1:
        # the policy of the only minibatch is the proximal one, so its ratio is 1
        reason = "actor.ppo.num_minibatches=1: the only update starts at the clip's centre"
        without_effect += [
            (f"actor.ppo.{name}", True, reason) for name in ("clip_low", "clip_high")
        ]
    defaults = GRPOConfig()
    for key, is_idle, reason in without_effect:
        value = value_at(config, key)
        if is_idle and value != value_at(defaults, key):
            yield f"{key}={value} has no effect with {reason}"


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


def _rank_warnings(config: GRPOConfig) -> Iterator[str]:
    rollout, ranks = config.rollout, config.actor.parallel.data
    rows = rollout.train_batch_groups * rollout.group_size // config.actor.ppo.num_minibatches
    if rows < ranks:
        yield (
            f"actor.parallel.data={ranks}: a minibatch has {rows} rows, so some ranks are idle "
            "in it"
        )


def _dtype_warnings(config: GRPOConfig, num_devices: int) -> Iterator[str]:
    roles = {
        "actor": (make_actor(config.actor).devices[0], config.actor.dtype),
        "rollout": (make_generator(config.rollout).devices[0], config.rollout.dtype),
    }
    named = [
        f"{role}.dtype=float32"
        for role, (device, dtype) in roles.items()
        if dtype == Dtype.float32 and resolved_device(device, num_devices) == Device.cuda
    ]
    if named:
        yield (
            f"{' and '.join(named)} on CUDA: several times slower than bfloat16, which needs half "
            "the memory for it; the trainer's parameters and optimizer state are float32 anyway"
        )
