"""Lines of advice for a run: each kind once."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from areal_sc.config.schema import GRPOConfig, OverBound
from areal_sc.planning.advice import busy_share, shares_devices
from areal_sc.quantities import percent
from areal_sc.records.metrics import StepMetrics

NUM_STEPS: Final = 16
"""Steps that have to agree before a line is told of them."""
MAX_WAIT_SHARE: Final = 0.3
"""Share of its time that the trainer may wait for generation before a line says so."""
MIN_BUSY_SHARE: Final = 0.4
"""Share of the time that servers have to be busy; below it a line says so."""

MAX_TAIL: Final = 2
"""A group older than this many times the bound is far over it."""

MAX_LOST_SHARE: Final = 0.1
"""Masked or wasted share of tokens above which the bound costs more than it should."""


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

    def _balance(self) -> str | None:
        """Whether one side waits for the other for most of the time."""
        if len(self._newest) <= NUM_STEPS:
            return None
        steps = [*self._newest]
        spent_s = sum(step.step_time_s for step in steps[1:])
        wait_share = sum(step.wait_s for step in steps[1:]) / spent_s
        known = busy_share(steps)
        busy = 1.0 if known is None else known
        if wait_share > MAX_WAIT_SHARE:
            waits = (
                "rollout is the bound: the trainer waits for episodes "
                f"{percent(wait_share)} of the time"
            )
            if busy >= MIN_BUSY_SHARE:
                return f"{waits}: {self._see_plan}"
            return (
                f"{waits}, and servers generate {percent(busy)} of it only: rewards, "
                "tools or the workflow take the rest; the time line of "
                f"`python -m areal_sc page {self._run_dir}` shows which"
            )
        if busy < MIN_BUSY_SHARE and not shares_devices(self._config):
            return f"servers are busy {percent(busy)} of the time only: {self._see_plan}"
        return None


def tail_advice(config: GRPOConfig, metrics: StepMetrics) -> str | None:
    """What to change when the step's slowest groups do not fit the run's staleness bound.

    Returns: one sentence, or None while the tail is acceptable.
    """
    bound = config.rollout.staleness_bound
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
