"""The board of a node, and the thread that beats beside a worker's event loop."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import stat
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from areal_sc.errors import IncarnationMismatch, ProtocolError, TransportError
from areal_sc.transport import beats
from areal_sc.transport.beat_board import BEAT, Beat, BeatBoard, this_node
from areal_sc.transport.beats import BeatServer
from areal_sc.transport.curve import CurveAuthenticator
from areal_sc.transport.keys import RunKeys
from areal_sc.transport.rpc.method import pack
from areal_sc.transport.rpc.transport import ZmqTransport

LIMIT_S = 30.0


async def until(is_so: Callable[[], Any]) -> None:
    give_up = time.monotonic() + LIMIT_S
    while not is_so():
        assert time.monotonic() < give_up
        await asyncio.sleep(0.01)


# ---------------------------------------------------------------------- the board


@pytest.fixture
def board(tmp_path: Path) -> BeatBoard:
    return BeatBoard(tmp_path / "run" / "beats")


def test_everybody_on_the_node_reads_the_whole_board(board: BeatBoard, tmp_path: Path) -> None:
    board.write("rollout/0", "a1", time.monotonic_ns() - 5_000_000_000)
    neighbour = BeatBoard(tmp_path / "run" / "beats")
    neighbour.write("train/12", "b2", time.monotonic_ns())
    seen = {beat.name: beat for beat in board.read_all()}
    assert seen.keys() == {"rollout/0", "train/12"}
    first = seen["rollout/0"]
    assert (first.incarnation, first.pid) == ("a1", os.getpid())
    assert 0 <= first.beat_age_s < LIMIT_S
    assert 5 <= first.turn_age_s < 5 + LIMIT_S
    assert [beat.name for beat in neighbour.read_all()] == ["rollout/0", "train/12"]
    for each in (board, neighbour):
        each.close()


def test_the_beat_of_a_new_life_replaces_that_of_the_old_one(board: BeatBoard) -> None:
    board.write("rollout/0", "old", time.monotonic_ns())
    board.write("rollout/0", "new", time.monotonic_ns())
    assert [beat.incarnation for beat in board.read_all()] == ["new"]
    board.remove("rollout/0")
    assert board.read_all() == []


def test_the_board_is_this_users_alone(board: BeatBoard, tmp_path: Path) -> None:
    board.write("rollout/0", "a", 0)
    board.renew_lease()
    folder = tmp_path / "run" / "beats"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert {stat.S_IMODE(file.stat().st_mode) for file in folder.iterdir()} == {0o600}
    assert all(file.stat().st_size <= 128 for file in folder.iterdir())
    board.close()


def test_what_is_no_beat_is_not_there(board: BeatBoard, tmp_path: Path) -> None:
    folder = tmp_path / "run" / "beats"
    board.write("rollout/0", "a", time.monotonic_ns())
    record = (folder / "rollout-0.beat").read_bytes()
    foreign = {
        "empty": b"",
        "short": record[:-1],
        "long": record + b"x",
        "another name": record,
        "flipped": bytes([record[0] ^ 1]) + record[1:],
        "torn": record[:20] + bytes(20) + record[40:],
        "noise": os.urandom(len(record)),
        "huge": bytes(1 << 20),
    }
    for number, content in enumerate(foreign.values(), start=1):
        (folder / f"rollout-{number}.beat").write_bytes(content)
    (folder / "train-1.beat").mkdir()
    (folder / "train-2.beat").symlink_to(folder / "rollout-0.beat")
    os.mkfifo(folder / "train-3.beat")
    (folder / "notes.txt").write_text("mine")
    assert [beat.name for beat in board.read_all()] == ["rollout/0"]
    board.close()


def test_a_board_that_is_gone_is_empty(board: BeatBoard, tmp_path: Path) -> None:
    (tmp_path / "run" / "beats").rmdir()
    assert board.read_all() == []
    assert board.lease_age_s() is None
    with pytest.raises(OSError, match="No such file"):
        board.write("rollout/0", "a", 0)


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(TransportError, match="file/beats"):
        BeatBoard(tmp_path / "file" / "beats")


def test_the_lease_tells_when_a_controller_was_heard(board: BeatBoard, tmp_path: Path) -> None:
    assert board.lease_age_s() is None
    BeatBoard(tmp_path / "run" / "beats").renew_lease()
    age_s = board.lease_age_s()
    assert age_s is not None
    assert 0 <= age_s < LIMIT_S
    for content in (b"", b"ASL1" + bytes(12), os.urandom(16)):
        (tmp_path / "run" / "beats" / "lease").write_bytes(content)
        assert board.lease_age_s() is None


def _beat_without_end(folder: Path) -> None:
    board = BeatBoard(folder)
    for number in range(1 << 40):
        board.write(f"rollout/{number % 2}", ("a" if number % 3 else "b") * 32, 1)


def test_no_reader_ever_sees_half_a_beat(board: BeatBoard, tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    writer = context.Process(target=_beat_without_end, args=(tmp_path / "run" / "beats",))
    writer.start()
    try:
        num_read = 0
        give_up = time.monotonic() + LIMIT_S
        while num_read < 5_000:
            assert time.monotonic() < give_up, f"{num_read} beats were read"
            for beat in board.read_all():
                assert beat.name in ("rollout/0", "rollout/1")
                assert beat.incarnation in ("a" * 32, "b" * 32)
                assert beat.pid == writer.pid
                num_read += 1
    finally:
        writer.kill()
        writer.join(LIMIT_S)


def test_beats_cross_the_wire() -> None:
    beat = Beat("rollout/0", "a", 1, 0.5, 0.25)
    assert BEAT.read_reply(pack((beat, beat))) == (beat, beat)


@pytest.mark.parametrize(
    "wire",
    [
        None,
        {},
        [1],
        [[]],
        ["abcde"],
        [["rollout/0", "a", 1, 0.5]],
        [["rollout/0", "a", 1, 0.5, 0.25, 0]],
        [["rollout/0", "a", "1", 0.5, 0.25]],
        [[None, "a", 1, 0.5, 0.25]],
        [["rollout/0", "a", 1, -0.5, 0.25]],
        [["rollout/0", "a", 1, float("nan"), 0.25]],
    ],
)
def test_what_are_no_beats_is_refused(wire: Any) -> None:
    with pytest.raises(ProtocolError, match="beat: the reply is not of the declared type"):
        BEAT.read_reply(pack(wire))


def test_processes_of_one_node_agree_on_its_name() -> None:
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        assert pool.apply(this_node) == this_node()


# ---------------------------------------------------------------------- the thread


class BeatingWorker:
    """A beat server whose worker is this test.

    Attributes:
        is_orphaned: it was told that no controller is there.
        exit_codes: with which it would have ended its process by force.
    """

    def __init__(self, folder: Path, name: str, keys: RunKeys, **changes: Any) -> None:
        self.name = name
        self.is_orphaned = False
        self.exit_codes: list[int] = []
        self.authenticator = CurveAuthenticator(keys, name)
        self.server = BeatServer(
            BeatBoard(folder),
            **{
                "name": name,
                "incarnation": "a1",
                "bind": "tcp://127.0.0.1",
                "interval_s": 0.1,
                "orphan_timeout_s": 1000.0,
                "on_orphaned": self._note_orphaned,
                "authenticator": self.authenticator,
                "end_process": self.exit_codes.append,
                **changes,
            },
        )

    def _note_orphaned(self) -> None:
        self.is_orphaned = True


@pytest.fixture(scope="module")
def keys() -> RunKeys:
    return RunKeys.create()


@asynccontextmanager
async def beating(
    folder: Path, name: str, keys: RunKeys, **changes: Any
) -> AsyncIterator[tuple[BeatingWorker, str]]:
    worker = BeatingWorker(folder, name, keys, **changes)
    address = await worker.server.start()
    try:
        yield worker, address
    finally:
        await worker.server.close()


async def ask(
    address: str, name: str, keys: RunKeys, timeout_s: float = LIMIT_S
) -> tuple[Beat, ...]:
    transport = ZmqTransport(authenticator=CurveAuthenticator(keys, "controller"))
    try:
        connection = transport.connect(address, name, "a1")
        return await connection.call(BEAT, None, timeout_s=timeout_s)
    finally:
        await transport.close()


async def test_one_worker_speaks_for_its_node(tmp_path: Path, keys: RunKeys) -> None:
    board = BeatBoard(tmp_path)
    async with (
        beating(tmp_path, "rollout/0", keys) as (_, address),
        beating(tmp_path, "rollout/1", keys),
    ):
        assert board.lease_age_s() is None
        seen = await ask(address, "rollout/0", keys)
        assert [beat.name for beat in seen] == ["rollout/0", "rollout/1"]
        assert all(beat.beat_age_s < LIMIT_S and beat.turn_age_s < LIMIT_S for beat in seen)
        assert board.lease_age_s() is not None, "a call renews the lease of the node"
    assert board.read_all() == [], "who has ended is not on the board"
    assert not any(thread.name == "beats" for thread in threading.enumerate())


async def test_a_stranger_hears_nothing_and_renews_no_lease(tmp_path: Path, keys: RunKeys) -> None:
    async with beating(tmp_path, "rollout/0", keys) as (worker, address):
        give_up = time.monotonic() + LIMIT_S
        while not worker.authenticator.num_refused:  # a busy machine may not let it come so far
            assert time.monotonic() < give_up
            with pytest.raises(TransportError):
                await ask(address, "rollout/0", RunKeys.create(), timeout_s=0.5)
        assert BeatBoard(tmp_path).lease_age_s() is None


async def test_a_blocked_event_loop_beats_on_and_is_seen_not_to_turn(
    tmp_path: Path, keys: RunKeys
) -> None:
    async with beating(tmp_path, "rollout/0", keys) as (_, address):
        seen: list[Beat] = []

        async def watch() -> None:
            give_up = time.monotonic() + LIMIT_S
            while not seen or seen[-1].turn_age_s < 1.0:
                assert time.monotonic() < give_up
                seen.extend(await ask(address, "rollout/0", keys))

        watching = threading.Thread(target=lambda: asyncio.run(watch()))
        watching.start()
        watching.join()  # blocks the loop of the test, which is that of the worker
        assert seen[-1].beat_age_s < 0.5 < 1.0 < seen[-1].turn_age_s
        give_up = time.monotonic() + LIMIT_S
        while seen[-1].turn_age_s > 0.5:
            assert time.monotonic() < give_up
            seen = await ask(address, "rollout/0", keys)


async def test_a_blocked_event_loop_is_said_to_be_and_where(
    tmp_path: Path,
    keys: RunKeys,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(beats, "BLOCKED_WARNING_S", 0.3)
    async with beating(tmp_path, "rollout/0", keys):
        give_up = time.monotonic() + LIMIT_S
        while not caplog.records:
            assert time.monotonic() < give_up
            time.sleep(0.05)  # noqa: ASYNC251 - the worker does it wrong
        time.sleep(0.5)  # noqa: ASYNC251
    (line,) = caplog.records
    assert "the event loop has not turned for" in line.getMessage()
    assert "test_a_blocked_event_loop_is_said_to_be_and_where" in line.getMessage()


async def test_a_worker_that_no_controller_asks_is_an_orphan(tmp_path: Path, keys: RunKeys) -> None:
    async with beating(tmp_path, "rollout/0", keys, orphan_timeout_s=0.5) as (worker, _):
        await until(lambda: worker.is_orphaned)
        assert worker.exit_codes == []


async def test_a_neighbour_that_is_asked_is_enough(
    tmp_path: Path, keys: RunKeys, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[BeatServer] = []
    look = BeatServer._look_after_lease

    def noted(server: BeatServer) -> None:
        look(server)
        looks.append(server)

    monkeypatch.setattr(BeatServer, "_look_after_lease", noted)
    async with (
        beating(tmp_path, "rollout/0", keys, orphan_timeout_s=1000.0) as (asked, address),
        beating(tmp_path, "rollout/1", keys, orphan_timeout_s=1000.0) as (neighbour, _),
    ):
        await ask(address, "rollout/0", keys)
        for worker in (asked, neighbour):  # as if they had lived for longer than that
            worker.server._started_ns -= 2000 * 10**9
            looks.clear()
            await until(lambda worker=worker: looks.count(worker.server) >= 2)  # type: ignore[misc]
        assert not asked.is_orphaned
        assert not neighbour.is_orphaned


async def test_an_orphan_that_hangs_is_ended_by_force(
    tmp_path: Path, keys: RunKeys, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(beats, "ORPHAN_GRACE_S", 0.3)
    async with beating(tmp_path, "rollout/0", keys, orphan_timeout_s=0.5) as (worker, _):
        give_up = time.monotonic() + LIMIT_S
        while not worker.exit_codes:
            assert time.monotonic() < give_up
            time.sleep(0.05)  # noqa: ASYNC251 - it hangs
        assert set(worker.exit_codes) == {beats.ORPHAN_EXIT_CODE}


async def test_a_board_that_cannot_be_written_is_said_and_survived(
    tmp_path: Path, keys: RunKeys, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "beats"
    worker = BeatingWorker(folder, "rollout/0", keys)
    folder.rmdir()
    address = await worker.server.start()
    try:
        (beat,) = await ask(address, "rollout/0", keys)
        assert (beat.name, beat.beat_age_s) == ("rollout/0", 0.0)
        assert "beat_not_written node=rollout/0" in caplog.text
    finally:
        await worker.server.close()


async def test_an_interface_that_cannot_be_bound_is_named(tmp_path: Path, keys: RunKeys) -> None:
    worker = BeatingWorker(tmp_path, "rollout/0", keys, bind="tcp://203.0.113.7")
    with pytest.raises(TransportError, match=r"203\.0\.113\.7"):
        await worker.server.start()
    await worker.server.close()


async def test_calls_for_another_life_are_refused(tmp_path: Path, keys: RunKeys) -> None:
    async with beating(tmp_path, "rollout/0", keys, incarnation="b2") as (_, address):
        with pytest.raises(IncarnationMismatch, match="a1"):
            await ask(address, "rollout/0", keys)
