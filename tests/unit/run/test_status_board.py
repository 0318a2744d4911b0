"""`status.json` while a run writes it: its age, who is asked, and what it may cost."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest
from waiting import wait_until

from areal_sc.errors import WorkerLost
from areal_sc.run import status_board
from areal_sc.run.run_files import RunFiles
from areal_sc.run.run_status import Phase, RoleStatus, RunStatus, WorkerStatus, read_status
from areal_sc.run.status_board import MIN_PAUSE_S, StatusBoard

LIMIT_S = 60.0


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "status.json"


@pytest.fixture
def board(path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[StatusBoard]:
    monkeypatch.setattr(status_board, "EVERY_S", 0.3)
    with closing(StatusBoard()) as board:
        board.keep(RunFiles(path.parent), None, 300.0)
        yield board


@pytest.fixture
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    """Of controllers: it turns in a thread of its own."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    yield loop
    loop.call_soon_threadsafe(loop.stop)
    thread.join(20)
    loop.close()


def status(path: Path) -> RunStatus:
    found = read_status(path)
    assert found is not None
    return found


def status_with(path: Path, is_so: Callable[[RunStatus], object]) -> RunStatus:
    """The first one of which something is true."""
    return wait_until(lambda: found if is_so(found := status(path)) else None)


def follow(board: StatusBoard, loop: asyncio.AbstractEventLoop, role: RoleStatus) -> None:
    async def begin() -> None:
        board.follow("rollout", lambda: RoleStatus(time.time(), role.version, workers=role.workers))

    asyncio.run_coroutine_threadsafe(begin(), loop).result(20)


def test_it_is_there_at_once_and_stays_fresh_without_any_news(
    board: StatusBoard, path: Path
) -> None:
    first = status(path)
    assert (first.orphan_timeout_s, first.end) == (300.0, None)
    status_with(path, lambda s: s.written > first.written + 1.0)


def test_what_changes_is_written_soon_and_is_progress(board: StatusBoard, path: Path) -> None:
    before = status(path).progressed
    board.note_phases([Phase("start-up", 1.0), Phase("training", 2.0, 3, 9, "steps")])
    found = status_with(path, lambda s: s.phases)
    assert [phase.name for phase in found.phases] == ["start-up", "training"]
    assert found.progressed > before


def test_many_changes_are_one_write(board: StatusBoard, path: Path) -> None:
    inodes, began = set[int](), time.monotonic()
    while time.monotonic() < began + 4 * MIN_PAUSE_S or len(inodes) < 2:
        assert time.monotonic() < began + LIMIT_S
        board.note_phases([Phase("training", 2.0, len(inodes), 9, "steps")])
        inodes.add(path.stat().st_mtime_ns)
    assert len(inodes) <= (time.monotonic() - began) / MIN_PAUSE_S + 2


def test_an_event_loop_that_stands_still_shows_by_the_age_of_what_it_said(
    board: StatusBoard, path: Path, loop: asyncio.AbstractEventLoop
) -> None:
    follow(board, loop, RoleStatus(0.0, 7))
    said = status_with(path, lambda s: s.roles).roles["rollout"]
    assert said.version == 7
    go_on = threading.Event()
    loop.call_soon_threadsafe(go_on.wait, LIMIT_S)
    try:
        found = status_with(path, lambda s: s.written > s.roles["rollout"].looked + 1.0)
    finally:
        go_on.set()
    status_with(path, lambda s: s.roles["rollout"].looked > found.written)


def test_a_controller_that_ends_leaves_what_it_knew_but_no_workers(
    board: StatusBoard, path: Path, loop: asyncio.AbstractEventLoop
) -> None:
    worker = WorkerStatus("rollout/0", "ready", 1, "host", "a1", 0.0, 0)
    follow(board, loop, RoleStatus(0.0, 7, workers=[worker]))
    status_with(path, lambda s: s.roles and s.roles["rollout"].workers)

    async def leave() -> None:
        board.leave("rollout")

    asyncio.run_coroutine_threadsafe(leave(), loop).result(20)
    found = status_with(path, lambda s: not s.roles["rollout"].workers)
    assert found.roles["rollout"].version == 7


@pytest.mark.parametrize(
    ("error", "code", "cause"),
    [
        (None, 0, ""),
        (WorkerLost("rollout/0 is lost\nand more"), 5, "WorkerLost: rollout/0 is lost"),
        (KeyboardInterrupt(), 130, "KeyboardInterrupt: "),
        (OSError("no rows-\udcff.txt"), 1, "OSError: no rows-?.txt"),
        (ExceptionGroup("g", [ValueError("a")]), 1, "ExceptionGroup: g (1 sub-exception)"),
    ],
)
def test_the_end_is_told(
    error: BaseException | None, code: int, cause: str, board: StatusBoard, path: Path
) -> None:
    if error is not None:
        board.note_end(error)
    board.close()
    end = status(path).end
    assert end is not None
    assert (end.exit_code, end.cause) == (code, cause)


def test_a_folder_that_cannot_be_written_is_told_once_and_may_come_back(
    board: StatusBoard, path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    away = path.parent.with_name("away")
    path.parent.rename(away)
    give_up = time.monotonic() + LIMIT_S
    while not caplog.records:
        board.note_phases([])
        assert time.monotonic() < give_up
        time.sleep(0.02)
    board.note_phases([])
    time.sleep(2 * MIN_PAUSE_S)
    (told,) = caplog.records  # which file was missing, depends on the moment
    assert told.getMessage().startswith(f"{path} is not written any more: [Errno 2]")
    away.rename(path.parent)
    status_with(path, lambda s: s.written > time.time() - 1.0)
