"""One step of a training loop: where its time goes, and its record."""

from __future__ import annotations

import logging
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal

from areal_sc.controller.background import Standstill
from areal_sc.controller.ledger.ledger_records import WENT_BACK
from areal_sc.controller.rollout.rejections import STALE, RejectionCounts
from areal_sc.controller.rollout.rollout_controller import RolloutController
from areal_sc.controller.rollout.staleness import StalenessStats
from areal_sc.controller.train.train_controller import TrainController
from areal_sc.errors import StepLost
from areal_sc.metadata import BatchMetadata
from areal_sc.records.metrics import StepMetrics, without_empty_means
from areal_sc.rejection import RejectionKind

logger = logging.getLogger(__name__)

_NOT_REJECTED = (WENT_BACK, RejectionKind.prompt_too_long)
_REJECTED = "rejected_episodes/"
"""Before a cause in the counters."""

Part = Literal["wait", "train", "sync"]


def count(actor: TrainController, rollout: RolloutController) -> dict[str, float]:
    """All counters of workers and controllers, summed; since the start of the workers."""
    ranks = actor.begin_worker_stats()
    counters = {
        "wasted_tokens": rollout.rejections.wasted_tokens,
        **{f"{_REJECTED}{c}": n for c, n in rollout.rejections.by_cause().items()},
        "rejected_groups": sum(
            n for r, n in rollout.account()["rejected"].items() if r not in _NOT_REJECTED
        ),
        **{f"episodes_again/{c}": n for c, n in rollout.groups.episodes_again.items()},
        "controller_bytes": actor.num_bytes + rollout.num_bytes,
        "worker_restarts": actor.num_restarts + rollout.num_restarts,
        **actor.publication_stats,
    }
    for worker in (*rollout.worker_stats(), *ranks.result()):
        for name, value in worker.items():
            counters[name] = counters.get(name, 0) + value
    return counters


def count_from(
    before: Mapping[str, float], actor: TrainController, rollout: RolloutController
) -> dict[str, float]:
    """`count` to go on from: what workers did while no script recorded it is still to count.

    Args:
        before: at the end of the newest step that an earlier start has recorded.
    """
    counters = count(actor, rollout)
    return {name: min(n, before.get(name, n)) for name, n in counters.items()}


def rejections_in(counters: Mapping[str, float]) -> RejectionCounts:
    """What was rejected when `count` gave these."""
    episodes = {
        name.removeprefix(_REJECTED): int(n)
        for name, n in counters.items()
        if name.startswith(_REJECTED)
    }
    num_stale = episodes.pop(STALE, 0)
    return RejectionCounts(episodes, num_stale)


class BareStep:
    """A training step that goes on; it begins when it is made.

    Attributes:
        number: from 1.
        lost: why it ends without a new version; None: it does not.
    """

    def __init__(self, actor: TrainController, standstill: Standstill) -> None:
        self.number = actor.version + 1
        self.lost: StepLost | None = None
        self._standstill = standstill
        self._began = time.monotonic()
        self._held_before_s = standstill.held_s

    @property
    def held_s(self) -> float:
        """Seconds of a pause since it began."""
        return self._standstill.held_s - self._held_before_s

    @property
    def seconds(self) -> float:
        """Seconds since it began, without those of a pause."""
        return time.monotonic() - self._began - self.held_s

    def lose(self, error: StepLost) -> None:
        """Ends the step; the next one has its number or, after `StepsLost`, an earlier one."""
        logger.warning("step=%d is lost: %s", self.number, error)
        self.lost = error


class Step(BareStep):
    """A step that trains on what was generated.

    Attributes:
        counters: at the end of the step before; once it is recorded, at its own.
    """

    def __init__(
        self,
        actor: TrainController,
        rollout: RolloutController,
        counters: Mapping[str, float],
        tell: Callable[[StepMetrics], None],
    ) -> None:
        super().__init__(actor, rollout.standstill)
        self.counters = counters
        self._actor = actor
        self._rollout = rollout
        self._tell = tell
        self._spent: dict[Part, float] = {"wait": 0.0, "train": 0.0, "sync": 0.0}

    @contextmanager
    def timed(self, part: Part) -> Iterator[None]:
        """The block's time goes to waiting for the batch, to training, or to publishing."""
        began = time.monotonic()
        try:
            yield
        finally:
            self._spent[part] += time.monotonic() - began

    def record(self, batch: BatchMetadata, stats: Mapping[str, float]) -> StepMetrics:
        """Ends the step, and tells what was measured of it; the time of a pause does not count.

        Args:
            stats: what `ppo_update` returned, and whatever else is worth keeping.
        """
        staleness = StalenessStats.of(batch.rows, batch.global_step, batch.min_token_version)
        before, now = self.counters, count(self._actor, self._rollout)

        def new(name: str) -> int:
            return int(now.get(name, 0) - before.get(name, 0))  # none: no worker was up then

        metrics = StepMetrics(
            step=self.number,
            reward=statistics.fmean(batch.episode_rewards),
            group_staleness_mean=staleness.group_mean,
            group_staleness_max=staleness.group_max,
            token_staleness_mean=staleness.token_mean,
            token_staleness_max=staleness.token_max,
            lead=self._rollout.groups.admission.lead,
            slack=self._rollout.groups.admission.slack,
            num_rows=batch.total_batch_size,
            num_generated_tokens=new("generated_tokens"),
            num_trained_tokens=staleness.num_tokens_trained,
            num_masked_tokens=staleness.num_tokens_masked,
            num_wasted_tokens=new("wasted_tokens") + new("cancelled_tokens"),
            num_rejected_groups=new("rejected_groups"),
            rejected_episodes={
                name.removeprefix(_REJECTED): int(count - before.get(name, 0))
                for name, count in now.items()
                if name.startswith(_REJECTED) and count > before.get(name, 0)
            },
            mean_sequence_length=batch.num_tokens / batch.total_batch_size,
            step_time_s=self.seconds,
            wait_s=max(0.0, self._spent["wait"] - self.held_s),  # held in `prepare_batch`
            train_s=self._spent["train"],
            sync_s=self._spent["sync"],
            num_train_workers=self._actor.engine.num_workers,
            num_rollout_workers=self._rollout.num_workers,
            max_staleness=self._rollout.config.staleness_bound,
            **of_groups(batch, before, now),
            controller_bytes=new("controller_bytes"),
            published_bytes=new("published_bytes"),
            workflow=self._rollout.batch_metrics,
            train=without_empty_means(stats),
            counters=now,
        )
        self.counters = now
        self._tell(metrics)
        return metrics


def of_groups(
    batch: BatchMetadata, before: Mapping[str, float], now: Mapping[str, float]
) -> dict[str, Any]:
    """The fields of `StepMetrics` that tell of groups.

    Args:
        before, now: counters at the end of the step before, and of this one.
    """
    longest: dict[int, int] = {}
    rewards: dict[int, list[float]] = {}
    episode_rewards = batch.episode_rewards
    for rows, reward in zip(batch.episodes, episode_rewards, strict=True):
        rewards.setdefault(batch.rows[rows[0]].group_id, []).append(reward)
    for row in batch.rows:
        longest[row.group_id] = max(row.num_loss_tokens, longest.get(row.group_id, 0))
    compared = [its for its in rewards.values() if len(its) > 1]
    freedom = sum(len(its) - 1 for its in compared)
    num, group_s = (now.get(k, 0.0) - before.get(k, 0.0) for k in ("finished_groups", "group_s"))
    return {
        "group_time_s": group_s / num if num > 0 and group_s >= 0 else None,
        "signal_share": len(batch.groups_with_signal) / len(rewards),
        "num_groups": len(rewards),
        "reward_std": math.sqrt(_squares(episode_rewards) / len(episode_rewards)),
        "reward_std_in_groups": math.sqrt(sum(map(_squares, compared)) / freedom)
        if compared
        else None,
        "num_one_episode_groups": len(rewards) - len(compared),
        "longest_tokens_mean": statistics.fmean(longest.values()),
        "longest_tokens_std": statistics.pstdev(longest.values()),
        "longest_tokens_max": max(longest.values()),
    }


def _squares(values: Sequence[float]) -> float:
    """Summed, of the distances to the mean."""
    mean = statistics.fmean(values)
    return sum((value - mean) ** 2 for value in values)
