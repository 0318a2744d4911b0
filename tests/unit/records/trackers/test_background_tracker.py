"""A tracker that fails, hangs or is slow costs a warning, and neither the run nor its time."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from areal_sc.records.trackers import background
from areal_sc.records.trackers.background import BackgroundTracker
from areal_sc.records.trackers.base import Tracker


class Recorder(Tracker):
    def __init__(self) -> None:
        self.told: list[object] = []

    def on_model(self, step: int, folder: Path) -> None:
        self.told.append(step)

    def close(self) -> None:
        self.told.append("closed")


class Failing(Recorder):
    def on_model(self, step: int, folder: Path) -> None:
        super().on_model(step, folder)
        raise RuntimeError("no such project")


class Hanging(Recorder):
    def __init__(self) -> None:
        super().__init__()
        self.may_go_on = threading.Event()
        self.is_busy = threading.Event()

    def on_model(self, step: int, folder: Path) -> None:
        self.is_busy.set()
        assert self.may_go_on.wait(60)


def tell_steps(tracker: BackgroundTracker, steps: range) -> None:
    for step in steps:
        tracker.tell(lambda it, step=step: it.on_model(step, Path()))


def test_everything_is_told_in_order_before_the_end() -> None:
    recorder, warnings = Recorder(), list[str]()
    tracker = BackgroundTracker(recorder, warnings.append)
    tell_steps(tracker, range(500))
    tracker.close()
    assert recorder.told == [*range(500), "closed"]
    assert not warnings


def test_a_tracker_that_ends_its_thread_is_told_of_the_rest() -> None:
    class Exits(Failing):
        def on_model(self, step: int, folder: Path) -> None:
            self.told.append(step)
            raise SystemExit(3)

    exits, warnings = Exits(), list[str]()
    tracker = BackgroundTracker(exits, warnings.append)
    tell_steps(tracker, range(3))
    tracker.close()
    assert exits.told == [0, 1, 2, "closed"]
    assert "Exits failed: SystemExit: 3" in warnings[0]


def test_failures_are_told_once_with_their_cause_and_the_rest_is_tried() -> None:
    failing, warnings = Failing(), list[str]()
    tracker = BackgroundTracker(failing, warnings.append)
    tell_steps(tracker, range(3))
    tracker.close()
    assert failing.told == [0, 1, 2, "closed"]
    assert len(warnings) == 2
    assert "Failing failed: RuntimeError: no such project" in warnings[0]
    assert "3 calls failed" in warnings[1]


def test_a_tracker_that_hangs_keeps_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background, "CLOSE_TIMEOUT_S", 0.1)
    monkeypatch.setattr(background, "MAX_WAITING_EVENTS", 5)
    hanging, warnings = Hanging(), list[str]()
    tracker = BackgroundTracker(hanging, warnings.append)
    tell_steps(tracker, range(1))
    assert hanging.is_busy.wait(60)
    tell_steps(tracker, range(20))
    tracker.close()
    hanging.may_go_on.set()
    slow, ended = warnings
    assert "misses events" in slow
    assert "did not end within" in ended
