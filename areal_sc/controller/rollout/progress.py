"""Says what a run waits for when nothing finishes, and ends one that only loses time.

consumes     numbers of groups that run and that finished; reports of the workers' episodes
waits for    the next look, every `LOOK_S`, and the reports, `REPORT_TIMEOUT_S` at most
unblocked by the clock

Workers are asked only while groups run and none has finished since the look before: then a worker's
report is the only news of episodes that were rejected, because a group replies when all of its
episodes have ended.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from areal_sc.controller.background import Standstill
from areal_sc.controller.rollout.groups import Groups
from areal_sc.controller.rollout.rejections import Rejections
from areal_sc.controller.rollout.rollout_workers import RolloutWorkers
from areal_sc.controller.shared_card import Side
from areal_sc.errors import TooManyRejections
from areal_sc.workers.calls import AGENT_OUTSIDE, EpisodesReport

LOOK_S: Final = 5.0
MAX_LOST_S: Final = 300.0
"""A run ends in which, for so long, episodes were rejected and none was kept."""
FIRST_NOTICE_S: Final = 40.0
"""Silence that is told. It doubles with each notice, and is twice the longest silence that ended
with a finished group: a run of slow groups tells it in its first step only."""

_MAX_WORKERS_NAMED: Final = 8


@dataclass(eq=False)
class ProgressWatch:
    """Looks after the groups of one RolloutController.

    Args:
        groups: those of training, and others.
        standstill: of the run.
    """

    workers: RolloutWorkers
    rejections: Rejections
    groups: Sequence[Groups]
    standstill: Standstill

    def __post_init__(self) -> None:
        self._seen_finished = 0
        self._quiet_since_s = 0.0
        self._notice_after_s = FIRST_NOTICE_S
        self._ended: dict[str, tuple[int, int]] = {}  # worker -> episodes kept, rejected
        self._lost_since_s: float | None = None

    async def run(self) -> None:
        """Looks, for ever.

        Raises: TooManyRejections: for more than `MAX_LOST_S` all were lost.
        """
        self._quiet_since_s = asyncio.get_running_loop().time()
        while True:
            await asyncio.sleep(LOOK_S)
            await self._look(asyncio.get_running_loop().time())

    async def _look(self, now_s: float) -> None:
        quiet_s = now_s - self._quiet_since_s
        num_finished = sum(groups.num_finished for groups in self.groups)
        stands_still = self.standstill.is_on or self.workers.card.is_away_from(Side.generation)
        is_awaited = self._num_awaited and not stands_still
        if num_finished != self._seen_finished or not is_awaited:
            if num_finished != self._seen_finished:
                self._notice_after_s = max(FIRST_NOTICE_S, 2 * quiet_s)
            self._seen_finished, self._quiet_since_s = num_finished, now_s
            self._lost_since_s = None
            return
        reports = await self.workers.episode_reports()
        for report in reports.values():
            for rejection in report.new_causes if report else ():
                self.rejections.note_rejection(rejection)
        self._check_lost(reports, now_s)
        if quiet_s >= self._notice_after_s:
            self._notice_after_s = 2 * quiet_s
            self.rejections.warn(self._describe(reports, quiet_s))

    @property
    def _num_awaited(self) -> int:
        return sum(groups.num_awaited for groups in self.groups)

    def _check_lost(self, reports: Mapping[str, EpisodesReport | None], now_s: float) -> None:
        """Time is lost from the first rejection on, up to the newest, while nothing is kept.

        None is lost while agents outside are waited for, who may take their time.
        """
        before = self._ended
        self._ended = before | {
            name: (report.num_kept, report.num_rejected)
            for name, report in reports.items()
            if report is not None
        }
        (kept, rejected), (old_kept, old_rejected) = map(_totals, (self._ended, before))
        waits = (wait.what for report in reports.values() if report for wait in report.waiting)
        if AGENT_OUTSIDE in waits:
            self._lost_since_s = None
            return
        if kept != old_kept:
            self._lost_since_s = None
        if rejected == old_rejected:
            return
        if self._lost_since_s is None:
            self._lost_since_s = now_s
        lost_s = now_s - self._lost_since_s
        if lost_s > MAX_LOST_S:
            raise TooManyRejections(
                f"for {lost_s:.0f} s episodes were rejected, none was kept, and no group finished; "
                f"the limit is {MAX_LOST_S:g} s. For example: {self.rejections.describe_example()}"
            )

    def _describe(self, reports: Mapping[str, EpisodesReport | None], quiet_s: float) -> str:
        """What runs, for how long, what it waits for, and where."""
        busy = {name: r for name, r in reports.items() if r is None or r.waiting}
        parts = [_describe_worker(name, report) for name, report in busy.items()]
        if len(parts) > _MAX_WORKERS_NAMED:
            parts[_MAX_WORKERS_NAMED:] = [f"and {len(parts) - _MAX_WORKERS_NAMED} more workers"]
        rejected = sum(r.num_rejected for r in reports.values() if r is not None)
        if rejected:
            parts.append(f"{rejected} episodes were rejected so far")
        return (
            f"nothing has finished for {quiet_s:.0f} s; {self._num_awaited} groups are open; "
            + "; ".join(parts)
        )


def _totals(ended: Mapping[str, tuple[int, int]]) -> tuple[int, int]:
    return sum(kept for kept, _ in ended.values()), sum(lost for _, lost in ended.values())


def _describe_worker(name: str, report: EpisodesReport | None) -> str:
    if report is None:
        return f"{name} does not answer: the workflow blocks its event loop; its log says where"
    waits = ", ".join(
        f"{wait.num_episodes} wait for {wait.what} (up to {wait.longest_s:.0f} s)"
        for wait in report.waiting
    )
    return f"episodes on {name}: {waits}"
