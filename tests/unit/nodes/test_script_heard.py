"""When an agent believes that nobody needs it, and what it tells its script."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Iterator

import pytest

from areal_sc.config.schema import SchedulerConfig
from areal_sc.errors import NotPermitted, PeerLost, RunFolderError
from areal_sc.nodes.joining import JOIN_LIMIT_S
from areal_sc.nodes.script_heard import ScriptHeard, Wishes
from areal_sc.nodes.spec import Wish
from areal_sc.system.process import SNAPSHOT_SIGNALS

LIMIT_S = 100.0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[float]]:
    """Its only element is the time in seconds; the standard input is open, and empty."""
    now = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    read_end, write_end = os.pipe()
    with os.fdopen(read_end) as open_input, os.fdopen(write_end):
        monkeypatch.setattr(sys, "stdin", open_input)
        yield now


def heard(*, has_workers: bool, is_far: bool, wishes: Wishes | None = None) -> ScriptHeard:
    config = SchedulerConfig(orphan_timeout_s=LIMIT_S, heartbeat_interval_s=1.0)
    wishes = Wishes(lambda: None) if wishes is None else wishes
    return ScriptHeard(config, wishes, lambda: has_workers, is_far=is_far)


@pytest.mark.parametrize(
    ("has_workers", "is_far", "is_needed"),
    [(False, False, True), (True, False, False), (False, True, False), (True, True, False)],
)
def test_an_open_input_tells_of_a_script_on_this_machine_alone(
    clock: list[float], has_workers: bool, is_far: bool, is_needed: bool
) -> None:
    script = heard(has_workers=has_workers, is_far=is_far)
    clock[0] = LIMIT_S - 1
    assert script.needs_node
    clock[0] = LIMIT_S + 1
    assert script.needs_node == is_needed
    script.note_contact()
    assert script.needs_node


async def test_a_far_script_that_answers_keeps_an_agent_without_workers(
    clock: list[float],
) -> None:
    script, answers = heard(has_workers=False, is_far=True), [True]

    async def join(limit_s: float) -> None:
        if not answers[0]:
            raise PeerLost("no way")

    while clock[0] < 2 * LIMIT_S:
        clock[0] += 1.0
        assert not await script.is_done(join)
        assert script.needs_node
    answers[0] = False
    while script.needs_node:
        clock[0] += 1.0
        assert not await script.is_done(join)
    assert 3 * LIMIT_S - 10 < clock[0] < 3 * LIMIT_S + 10

    async def refused(limit_s: float) -> None:
        raise NotPermitted("another agent has taken the place of this one")

    async def failing(limit_s: float) -> None:
        raise RunFolderError("the disk of the script is full")

    clock[0] += 10.0
    assert not await script.is_done(failing)
    clock[0] += 10.0
    assert await script.is_done(refused)


@pytest.mark.parametrize("is_stopped", [False, True])
async def test_an_agent_whose_script_never_answers_ends_soon_at_once_if_the_run_is_to_end(
    clock: list[float], is_stopped: bool
) -> None:
    wishes = Wishes(lambda: None)
    script = heard(has_workers=False, is_far=True, wishes=wishes)
    passes_s: list[float] = []

    async def join(limit_s: float) -> None:
        assert not script.is_lately
        clock[0] += limit_s
        passes_s.append(limit_s)
        if is_stopped and len(passes_s) == 2:
            wishes.add(Wish.stop)
        raise PeerLost("no way")

    with pytest.raises(PeerLost):
        await script.meet(join, asyncio.Event())
    assert set(passes_s) == {5.0}  # five intervals
    assert sum(passes_s) == (10.0 if is_stopped else JOIN_LIMIT_S)


async def test_an_agent_has_met_its_script_when_that_answers_and_goes_when_it_is_refused() -> None:
    script, answers = heard(has_workers=False, is_far=True), [PeerLost("no way"), None]

    async def join(limit_s: float) -> None:
        if answer := answers.pop(0):
            raise answer

    await script.meet(join, asyncio.Event())
    assert answers == []
    assert script.is_lately
    answers.append(NotPermitted("another agent has taken the place of this one"))
    with pytest.raises(NotPermitted):
        await script.meet(join, asyncio.Event())


async def test_an_agent_that_is_ended_waits_for_no_script() -> None:
    script, ended = heard(has_workers=False, is_far=True), asyncio.Event()

    async def join(limit_s: float) -> None:
        ended.set()
        await asyncio.Event().wait()

    await asyncio.wait_for(script.meet(join, ended), 30)
    assert not script.is_lately


async def test_each_warning_that_time_is_over_asks_for_a_snapshot() -> None:
    def end() -> None:
        raise AssertionError("it is not asked to end")

    heard = asyncio.Event()
    wishes = Wishes(heard.set)
    wishes.take_signals(lambda: True, end)
    for number in SNAPSHOT_SIGNALS:
        heard.clear()
        signal.raise_signal(number)
        await asyncio.wait_for(heard.wait(), LIMIT_S)
    assert wishes.since(0) == [Wish.snapshot] * len(SNAPSHOT_SIGNALS)
    assert not wishes.are_of_end
