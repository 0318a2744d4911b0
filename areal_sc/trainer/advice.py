"""Lines of advice for a run: each kind once."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from areal_sc.config.schema import GRPOConfig, OverBound
from areal_sc.planning.advice import make_plan, shares_devices
from areal_sc.planning.cores import cores_of, shared_cores
from areal_sc.planning.figures import newest_figures
from areal_sc.quantities import percent, short_duration
from areal_sc.records.metrics import StepMetrics

NUM_STEPS: Final = 16
"""Steps that have to agree before a line is told of them."""
MAX_WAIT_SHARE: Final = 0.3
"""Share of its time that the trainer may wait for generation before a line says so."""
MIN_BUSY_SHARE: Final = 0.4
"""Share of the time that servers have to be busy; below it a line says so."""
MAX_ANSWERS: Final = 1024
"""Most answers of a step for a plan at the end of a run: with more of them it takes minutes."""
WORTH: Final = 0.1
"""Share of a step that another operating point must save to be worth a line at a run's end."""

MAX_TAIL: Final = 2
"""A group older than this many times the bound is far over it."""

MAX_LOST_SHARE: Final = 0.1
"""Masked or wasted share of tokens above which the bound costs more than it should."""

logger = logging.getLogger(__name__)


class Adviser:
    """Says each thing once."""

    def __init__(self, config: GRPOConfig, run_dir: Path) -> None:
        self._config = config
        self._run_dir = run_dir
        self._see_plan = f"`python -m areal_sc plan {run_dir}` says what another split would give"
        self._newest: deque[StepMetrics] = deque(maxlen=NUM_STEPS + 1)
        self._has_told_tail = False
        self._has_told_balance = False

    def on_step(self, metrics: StepMetrics) -> Iterator[str]:
        """What a step gives reason for."""
        self._newest.append(metrics)
        if not self._has_told_tail and (text := tail_advice(self._config, metrics)):
            self._has_told_tail = True
            yield text
        if not self._has_told_balance and (text := self._balance()):
            self._has_told_balance = True
            yield text

    def at_end(self, steps: Sequence[StepMetrics]) -> str | None:
        """What another operating point would have saved, or may save, if it is worth a line.

        Args:
            steps: of the whole run.
        """
        rollout = self._config.rollout
        if rollout.train_batch_groups * rollout.group_size > MAX_ANSWERS:
            return None
        try:
            if newest_figures(steps, self._config) is None:
                return None  # before cores are tried out, for a second
            plan = make_plan(steps, self._config, cores=shared_cores(self._config))
        except Exception:  # the run has ended, and well
            logger.exception("nothing can be said of other operating points")
            return None
        if plan is None:
            return None
        if not plan.settings or plan.saved_share < WORTH:
            return plan.hint or None
        return (
            f"with {plan.settings} a step would take about {short_duration(plan.advised.step_s)}, "
            f"not {short_duration(plan.present.step_s)}: {self._see_plan}"
        )

    def _balance(self) -> str | None:
        """Whether one side waits for the other for most of the time."""
        if len(self._newest) <= NUM_STEPS:
            return None
        before, *steps = self._newest
        spent_s = sum(step.step_time_s for step in steps)
        wait_share = sum(step.wait_s for step in steps) / spent_s
        idle_share = self._idle_share(before, steps[-1], spent_s)
        if wait_share > MAX_WAIT_SHARE:
            waits = f"the trainer waits for episodes {percent(wait_share)} of the time"
            if idle_share is None:
                return f"{waits}: {self._see_plan}"
            return (
                f"{waits}, and servers generate {percent(1 - idle_share)} of it only: rewards, "
                "tools or the workflow take the rest; the time line of "
                f"`python -m areal_sc page {self._run_dir}` shows which"
            )
        if cores_of(self._config) is not None or shares_devices(self._config):
            return None  # what one side leaves the other takes
        if idle_share is not None:
            return f"servers are busy {percent(1 - idle_share)} of the time only: {self._see_plan}"
        return None

    def _idle_share(self, before: StepMetrics, last: StepMetrics, spent_s: float) -> float | None:
        """Share of the time in which servers had no answer to go on with, if it is a large one.

        Returns: None: they are busy enough, or it is not known.
        """
        num_workers = last.num_rollout_workers
        busy_s = [step.counters.get("busy_s") for step in (before, last)]
        if busy_s[0] is None or busy_s[1] is None or not num_workers:
            return None
        busy_share = (busy_s[1] - busy_s[0]) / (spent_s * num_workers)
        return 1 - busy_share if 0 <= busy_share < MIN_BUSY_SHARE else None


def tail_advice(config: GRPOConfig, metrics: StepMetrics) -> str | None:
    """What to change when the step's slowest groups do not fit the run's staleness bound.

    Returns: one sentence, or None while the tail is acceptable.
    """
    bound = config.rollout.max_staleness
    match config.rollout.over_bound:
        case OverBound.train if metrics.group_staleness_max > MAX_TAIL * max(bound, 1):
            found = (
                f"groups were trained up to {metrics.group_staleness_max} policy versions old, "
                f"rollout.max_staleness is {bound}"
            )
            choice = "mask, wait or regenerate"
        case OverBound.mask if metrics.masked_share > MAX_LOST_SHARE:
            found = (
                f"{metrics.masked_share:.0%} of the tokens are masked, "
                f"older than rollout.max_staleness={bound} allows"
            )
            choice = "train"
        case OverBound.regenerate if metrics.wasted_share > MAX_LOST_SHARE:
            found = (
                f"{metrics.wasted_share:.0%} of the generated tokens are thrown away, "
                f"their groups older than rollout.max_staleness={bound} allows"
            )
            choice = "train or mask"
        case _:  # with `wait` no group is over the bound; the price shows as waiting time
            return None
    most = config.actor.ppo.tried_staleness
    raising = f"raise rollout.max_staleness, to {most} at most, " if bound < most else ""
    return (
        f"{found}: {raising}give generation more workers "
        f"(rollout.num_workers) or shorter answers (generation.max_new_tokens), or choose "
        f"rollout.over_bound={choice}"
    )
