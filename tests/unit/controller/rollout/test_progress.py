"""The watch over groups that do not finish, in virtual time."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
from simulation.behavior import Behavior
from simulation.settings import Settings
from simulation.training_run import TrainingRun
from simulation.virtual_loop import in_virtual_time, run_virtual

from areal_sc.config.schema import RolloutConfig
from areal_sc.controller.background import Standstill
from areal_sc.controller.rollout import progress
from areal_sc.controller.rollout.progress import FIRST_NOTICE_S, LOOK_S, ProgressWatch
from areal_sc.controller.rollout.rejections import Rejections
from areal_sc.controller.shared_card import SharedCard
from areal_sc.errors import TooManyRejections
from areal_sc.rejection import Rejection, RejectionKind
from areal_sc.workers.calls import AGENT_OUTSIDE, EpisodesReport, Waiting


def notices_of(generation_s: Any, duration_s: float, **changes: Any) -> list[tuple[float, str]]:
    """(time, text) of what a run tells within the duration."""
    told: list[tuple[float, str]] = []

    async def scenario() -> None:
        settings = Settings(behavior=Behavior(generation_s=generation_s), **changes)
        async with TrainingRun(settings).started() as run:
            run.rollout.rejections.warn = lambda text: told.append((run.cluster.now_s, text))
            step = asyncio.create_task(run.step(checks_business=False))
            await asyncio.wait([step], timeout=duration_s)
            step.cancel()
            await asyncio.gather(step, return_exceptions=True)

    run_virtual(scenario())
    return told


def test_what_runs_is_told_within_a_minute_and_then_less_and_less_often() -> None:
    told = notices_of(10_000.0, 1000.0)
    assert told[0][0] < 60
    assert 4 <= len(told) <= 6
    gaps = [later - earlier for (earlier, _), (later, _) in pairwise(told)]
    assert gaps == sorted(gaps)
    pattern = (
        r"nothing has finished for \d+ s; 8 groups are open; episodes on rollout/0: "
        r"4 wait for generation .*; episodes on rollout/1: .*"
    )
    assert re.fullmatch(pattern, told[0][1])


def test_groups_that_finish_in_time_are_no_news() -> None:
    assert notices_of(FIRST_NOTICE_S - LOOK_S, 500.0) == []


@in_virtual_time
async def test_a_pause_is_no_news() -> None:
    told: list[str] = []
    behavior = Behavior(generation_s=10_000.0)
    async with TrainingRun(Settings(behavior=behavior)).started() as run:
        run.rollout.rejections.warn = told.append
        step = asyncio.create_task(run.step())
        await asyncio.sleep(1.0)
        await run.rollout.pause_async()
        await asyncio.sleep(500.0)
        assert told == []
        step.cancel()
        await asyncio.gather(step, return_exceptions=True)


class Workers:
    """One worker, whose reports a test gives; one that is missing was not in time."""

    def __init__(self, reports: list[EpisodesReport | None]) -> None:
        self.card = SharedCard()
        self._reports = reports

    async def episode_reports(self) -> Mapping[str, EpisodesReport | None]:
        return {"rollout/0": self._reports.pop(0)}


@pytest.fixture(autouse=True)
def lost_after_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "MAX_LOST_S", 2.5 * LOOK_S)


HUNG = Rejection(RejectionKind.reward_timeout, "took longer", place="task.py:3")


def watched(reports: list[EpisodesReport | None], told: list[str]) -> ProgressWatch:
    rejections = Rejections(RolloutConfig(rejection_window=100, max_rejection_rate=0.5))
    rejections.warn = told.append
    workers: Any = Workers(reports)
    groups: Any = SimpleNamespace(num_awaited=1, num_finished=0)
    return ProgressWatch(workers, rejections, [groups], Standstill())


def test_time_that_only_rejections_end_is_lost() -> None:
    told: list[str] = []
    reports: list[EpisodesReport | None] = [
        EpisodesReport(num_rejected=1, new_causes=(HUNG,)),
        EpisodesReport(num_rejected=2),
        EpisodesReport(num_kept=1, num_rejected=3),  # one is kept: from here on anew
        None,
        EpisodesReport(num_kept=1, num_rejected=4),
        EpisodesReport(num_kept=1, num_rejected=4),
        EpisodesReport(num_kept=1, num_rejected=5),
    ]
    with pytest.raises(
        TooManyRejections, match=rf"for {4 * LOOK_S:.0f} s .*reward_timeout: task\.py:3"
    ):
        run_virtual(watched(reports, told).run())
    assert reports == []
    assert sum("the first for this cause: reward_timeout: task.py:3" in text for text in told) == 1


def test_a_few_rejections_at_one_time_lose_no_time() -> None:
    """As of prompts that are too long, while the answers to all others take hours."""
    told: list[str] = []
    reports: list[EpisodesReport | None] = [EpisodesReport(num_rejected=8)] * 30
    with pytest.raises(IndexError):  # the test has no more reports
        run_virtual(watched(reports, told).run())
    assert any("8 episodes were rejected" in text for text in told)


def test_no_time_is_lost_while_agents_outside_are_waited_for() -> None:
    """A person rejects one episode, plays the next for minutes, and rejects that, too."""
    waiting = (Waiting(AGENT_OUTSIDE, 3, 400.0),)
    reports: list[EpisodesReport | None] = [
        EpisodesReport(waiting, num_rejected=number) for number in range(1, 9)
    ]
    with pytest.raises(IndexError):  # the test has no more reports
        run_virtual(watched(reports, []).run())
