"""What each number of a configuration may be, whatever the other settings are."""

from __future__ import annotations

import math
from dataclasses import dataclass

from areal_sc.config.keys import value_at
from areal_sc.config.schema import GRPOConfig
from areal_sc.errors import ConfigError


@dataclass(frozen=True)
class Range:
    """Numbers from `low` to `high`; an open end is not itself allowed."""

    low: float = -math.inf
    high: float = math.inf
    low_open: bool = False
    high_open: bool = False
    infinite: bool = False  # infinity is allowed

    def __contains__(self, value: float) -> bool:
        if math.isnan(value) or (math.isinf(value) and not self.infinite):
            return False
        above = value > self.low if self.low_open else value >= self.low
        below = value < self.high if self.high_open else value <= self.high
        return above and below

    def __str__(self) -> str:
        low = f"{'above' if self.low_open else 'at least'} {_plain(self.low)}"
        if math.isinf(self.high):
            return low
        return f"{low} and {'below' if self.high_open else 'at most'} {_plain(self.high)}"


COUNT = Range(low=1)
NOT_NEGATIVE = Range(low=0)
POSITIVE = Range(low=0, low_open=True)
SHARE = Range(low=0, high=1)
DECAY = Range(low=0, high=1, high_open=True)

RANGES: dict[str, Range] = {
    "total_steps": COUNT,
    "seed": NOT_NEGATIVE,
    "generation.max_new_tokens": COUNT,
    "generation.temperature": POSITIVE,
    "generation.top_p": Range(low=0, high=1, low_open=True),
    "generation.top_k": NOT_NEGATIVE,
    "actor.parallel.data": COUNT,
    "actor.max_tokens_per_micro_batch": COUNT,
    "actor.logprob_chunk_tokens": COUNT,
    "actor.num_threads": COUNT,
    "actor.store_bytes": COUNT,
    "actor.seed": NOT_NEGATIVE,
    "actor.optimizer.lr": NOT_NEGATIVE,
    "actor.optimizer.beta1": DECAY,
    "actor.optimizer.beta2": DECAY,
    "actor.optimizer.eps": POSITIVE,
    "actor.optimizer.weight_decay": NOT_NEGATIVE,
    "actor.optimizer.max_grad_norm": NOT_NEGATIVE,
    "actor.optimizer.warmup_steps": NOT_NEGATIVE,
    "actor.optimizer.min_lr_ratio": SHARE,
    "actor.optimizer.total_steps": COUNT,
    "actor.ppo.num_minibatches": COUNT,
    "actor.ppo.clip_low": Range(low=0, high=1, low_open=True),
    "actor.ppo.clip_high": POSITIVE,
    "actor.ppo.behavior_weight_cap": Range(low=0, low_open=True, infinite=True),
    "actor.ppo.advantage_eps": POSITIVE,
    "rollout.total_steps": NOT_NEGATIVE,
    "rollout.num_workers": COUNT,
    "rollout.max_running_sequences": COUNT,
    "rollout.max_context_tokens": Range(low=2),
    "rollout.max_prefill_tokens": COUNT,
    "rollout.num_threads": COUNT,
    "rollout.seed": NOT_NEGATIVE,
    "rollout.train_batch_groups": COUNT,
    "rollout.group_size": COUNT,
    "rollout.max_staleness": NOT_NEGATIVE,
    "rollout.max_concurrent_groups": COUNT,
    "rollout.store_bytes": COUNT,
    "rollout.node_store_bytes": NOT_NEGATIVE,
    "rollout.group_timeout_s": POSITIVE,
    "rollout.reward_timeout_s": POSITIVE,
    "rollout.num_reward_processes": COUNT,
    "rollout.max_rejection_rate": Range(low=0, high=1, low_open=True),
    "rollout.rejection_window": COUNT,
    "rollout.max_unavailable": NOT_NEGATIVE,
    "sglang.num_servers": COUNT,
    "sglang.tp_size": COUNT,
    "sglang.start_timeout_s": POSITIVE,
    "sglang.control_timeout_s": POSITIVE,
    "sglang.stop_timeout_s": POSITIVE,
    "sglang.probe_interval_s": POSITIVE,
    "sglang.hung_after_s": POSITIVE,
    "sglang.busy_limit_s": POSITIVE,
    "sglang.max_restarts": COUNT,
    "weight_update.bucket_bytes": COUNT,
    "weight_update.step_timeout_s": POSITIVE,
    "scheduler.startup_timeout_s": POSITIVE,
    "scheduler.heartbeat_interval_s": POSITIVE,
    "scheduler.hung_after_s": POSITIVE,
    "scheduler.orphan_timeout_s": POSITIVE,
    "scheduler.shutdown_timeout_s": POSITIVE,
    "transport.chunk_bytes": Range(low=1024, high=4 << 20),
    "transport.max_inflight_chunks": COUNT,
    "transport.call_timeout_s": POSITIVE,
    "transport.pull_timeout_s": POSITIVE,
    "transport.stalled_peer_timeout_s": POSITIVE,
    "evaluation.every_steps": NOT_NEGATIVE,
    "evaluation.num_prompts": COUNT,
    "checkpoint.every_steps": NOT_NEGATIVE,
    "checkpoint.every_minutes": NOT_NEGATIVE,
    "checkpoint.keep": COUNT,
    "checkpoint.export_every_steps": NOT_NEGATIVE,
}


def check_ranges(config: GRPOConfig) -> None:
    """Raises: ConfigError: names the setting, its value, and what is allowed."""
    for key, allowed in RANGES.items():
        value = value_at(config, key)
        if not isinstance(value, int | float):  # only settings built in Python have other types
            raise ConfigError(f"{key}: expected a number, got {value!r}")
        if value not in allowed:
            raise ConfigError(f"{key}: expected {_kind(value)} {allowed}, got {value}")


def _plain(bound: float) -> str:
    """Whole numbers with all their digits."""
    return str(int(bound)) if float(bound).is_integer() else f"{bound:g}"


def _kind(value: float) -> str:
    if isinstance(value, float):
        return "a finite number" if math.isinf(value) else "a number"
    return "an integer"
