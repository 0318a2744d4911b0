"""Numbers that follow from the model and the machine, put in place of settings that nobody set.

    lengths of rows                      see `take_context`
    transport.shared_memory_bytes = 0    weights and a batch of rows, where that is much
    limits of time, at their defaults    what slow hardware takes, where that is longer

A limit of time ends what hangs. The defaults are enough for small models; what takes as long as its
limit with a large one is no hang.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from areal_sc.config.fields import shared_settings, value_at
from areal_sc.config.schema import Device, GRPOConfig, RolloutEngine, further_models
from areal_sc.config.slurm_settings import SchedulerType
from areal_sc.config.transport_settings import AUTO, MIN_ROOM_BYTES
from areal_sc.engines.handle_base import ADAM_STATES, FLOAT32_BYTES
from areal_sc.preflight.checks import check_config
from areal_sc.preflight.plan import plan_ranks
from areal_sc.sizing.machine import count_cuda_devices, resolved_device
from areal_sc.sizing.model_context import known_shape, num_parameters, take_context
from areal_sc.sizing.store_room import max_group_bytes
from areal_sc.sizing.worker_plan import DTYPE_BYTES

_BYTES_PER_S: Final = 32 << 20
"""A network or disk that is shared with others has as much: a quarter of gigabit Ethernet."""

_OPERATIONS_PER_S: Final = {Device.cpu: 1e10, Device.cuda: 2e13}
"""One process computes as much: on a core that others want, too; on a tenth of a large GPU."""

_PASSES: Final = 4
"""A step takes a token forward, again with checkpointing, and backward, which is two of them."""


def complete_config(
    config: GRPOConfig,
    count_devices: Callable[[], int] = count_cuda_devices,
    *,
    generates: bool = True,
) -> list[str]:
    """Puts the numbers in place, as far as the model is there yet, and checks all settings.

    Arguments, warnings and errors are those of `check_config`, of a run whose script may have more.
    """
    take_context(config, generates=generates)
    warnings = check_config(config, count_devices, generates=generates, may_have_more=True)
    if known_shape(config.actor.path) is None:
        return warnings
    transport = config.transport
    if generates and transport.shared_memory == AUTO and not transport.shared_memory_bytes:
        needed = _shared_memory_bytes(config)
        if needed > MIN_ROOM_BYTES:
            _put(config, "transport.shared_memory_bytes", needed)
    limits = _slow_seconds(config, count_devices, generates=generates)
    for key, slow_s in limits.items():
        section, _, name = key.rpartition(".")
        if value_at(config, key) == getattr(type(value_at(config, section)), name) < slow_s:
            _put(config, key, float(round(slow_s)))
    return warnings


def _shared_memory_bytes(config: GRPOConfig) -> int:
    """What a node needs without which the run cannot go on: one with all workers, or with few."""
    rollout, of_ranks = config.rollout, [rank.store_bytes for rank in plan_ranks(config.actor)]
    is_here = config.scheduler.type == SchedulerType.local
    num_stores = 1 if is_here else rollout.fewest_workers
    of_rows = -(-rollout.train_batch_groups // num_stores) * max_group_bytes(rollout)
    return of_rows + (sum(of_ranks) if is_here else max(of_ranks))


def _slow_seconds(
    config: GRPOConfig, count_devices: Callable[[], int], *, generates: bool
) -> dict[str, float]:
    """Setting -> what slow hardware takes for the largest model, or for a batch of full rows."""
    actor, rollout = config.actor, config.rollout
    largest = max(map(num_parameters, (actor, *further_models(config).values())))

    def pass_s(device: Device) -> float:
        """A forward pass of one token takes so long."""
        is_known = device != Device.auto or config.scheduler.type != SchedulerType.local
        kind = resolved_device(device, 1 if is_known else count_devices())
        return 2 * largest / _OPERATIONS_PER_S[kind]

    num_tokens = rollout.train_batch_groups * rollout.group_size * rollout.episode_tokens
    of_weights = largest * DTYPE_BYTES[actor.dtype] / _BYTES_PER_S
    of_state = largest * (1 + ADAM_STATES) * FLOAT32_BYTES / _BYTES_PER_S
    of_step = _PASSES * pass_s(actor.device) * num_tokens / actor.parallel.num_ranks
    limits = {
        "transport.call_timeout_s": of_weights + of_step,
        "transport.write_timeout_s": of_state,
    }
    if not generates:
        return limits
    if rollout.engine == RolloutEngine.local:
        limits["rollout.step_timeout_s"] = pass_s(rollout.device) * rollout.max_prefill_tokens
    else:
        limits["servers.start_timeout_s"] = of_weights
    limits["rollout.group_timeout_s"] = 2 * config.agents.episode_timeout_s  # one may run again
    of_pulls = ("transport.pull_timeout_s", "weight_update.step_timeout_s")
    return limits | dict.fromkeys(of_pulls, of_weights)


def _put(config: GRPOConfig, key: str, value: float) -> None:
    """Sets a value in its section, and in those that share it."""
    section, _, name = key.rpartition(".")
    before, shared = value_at(config, key), shared_settings(type(config))
    for place in (section, *(path for path, of in shared.items() if of == f"${{{section}}}")):
        if getattr(value_at(config, place), name) == before:
            setattr(value_at(config, place), name, value)
