"""The journal on a simulated disk, and on the real one."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
from simulation.disk import SimulatedDisk
from simulation.virtual_loop import in_virtual_time, run_virtual
from small_disk import small_disk

from areal_sc.controller.ledger import journal as module
from areal_sc.controller.ledger.journal import (
    HEADER,
    Journal,
    read_segment,
    segment_paths,
    to_frame,
)
from areal_sc.controller.ledger.ledger import Ledger, replay
from areal_sc.controller.ledger.ledger_account import read_account
from areal_sc.controller.ledger.ledger_records import LedgerState, Publish
from areal_sc.errors import RunFolderError
from areal_sc.metadata import BatchMetadata, PromptReference, RowMetadata
from areal_sc.system.disk import Disk

FOLDER = Path("/run/ledger")
FIRST = FOLDER / "000001.journal"


def begun(disk: Disk, folder: Path = FOLDER) -> tuple[Journal, Ledger]:
    journal, ledger = Journal(folder, disk), Ledger()
    journal.begin(ledger.snapshot)
    ledger.journal = journal.append
    return journal, ledger


def admit(ledger: Ledger) -> None:
    ledger.admit(PromptReference(0, ledger.num_prompts_taken, 7), 0)


def replayed(content: bytes, path: Path = FIRST) -> Ledger:
    segment = read_segment(content, path)
    ledger = Ledger.restore(segment.state)
    replay(ledger, segment.records)
    return ledger


async def written(disk: SimulatedDisk) -> bytes:
    """A journal of three admissions."""
    journal, ledger = begun(disk)
    for _ in range(3):
        admit(ledger)
    await journal.close()
    return disk.files[FIRST]


@in_virtual_time
async def test_what_durable_has_waited_for_is_on_the_disk_and_gives_the_ledger_again() -> None:
    disk = SimulatedDisk()
    journal, ledger = begun(disk)
    for _ in range(5):
        admit(ledger)
        await journal.durable()
        assert replayed(disk.durable[FIRST]).snapshot() == ledger.snapshot()
    admit(ledger)
    assert replayed(disk.durable[FIRST]).snapshot() != ledger.snapshot()
    await journal.close()
    assert replayed(disk.durable[FIRST]).snapshot() == ledger.snapshot()


def test_many_that_wait_share_one_sync() -> None:
    disk = SimulatedDisk(latency_s=1.0)

    async def write() -> float:
        journal, ledger = begun(disk)
        await journal.durable()

        async def one() -> None:
            admit(ledger)
            await journal.durable()

        first = asyncio.create_task(one())
        await asyncio.sleep(0.5)
        await asyncio.gather(first, *(one() for _ in range(1000)))
        return asyncio.get_running_loop().time()

    assert run_virtual(write()) == 3.0, "the segment, the first that waited, and all others"
    assert disk.num_syncs == 2


@in_virtual_time
async def test_one_that_gives_up_waiting_leaves_the_others_theirs() -> None:
    disk = SimulatedDisk(latency_s=1.0)
    journal, ledger = begun(disk)
    admit(ledger)
    waits = [asyncio.create_task(journal.durable()) for _ in range(2)]
    await asyncio.sleep(0.5)
    waits[0].cancel()
    await waits[1]
    assert len(read_segment(disk.durable[FIRST], FIRST).records) == 1


@in_virtual_time
async def test_short_writes_are_gone_on_with() -> None:
    disk = SimulatedDisk()
    disk.max_write_bytes = 5
    assert await written(disk) == await written(SimulatedDisk())


@in_virtual_time
@pytest.mark.parametrize("change", ["create", "write", "sync"])
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
async def test_a_failure_of_the_disk_is_final_and_says_what_to_do(change: str, number: int) -> None:
    disk = SimulatedDisk()

    def fail(made: str, path: Path) -> None:
        if made == change:
            raise OSError(number, "the disk says no")

    journal, ledger = begun(disk)
    admit(ledger)
    if change != "create":
        await journal.durable()
    disk.before = fail
    admit(ledger)
    with pytest.raises(RunFolderError, match=rf"cannot write {FIRST}: the disk says no.*start"):
        await journal.durable()
    disk.before = lambda made, path: None
    before = dict(disk.files)
    with pytest.raises(RunFolderError, match="the disk says no"):
        await journal.durable()
    with pytest.raises(RunFolderError, match="the disk says no"):
        admit(ledger)
    await journal.close()
    assert disk.files == before, "nothing is written after a failure"


@in_virtual_time
async def test_a_file_that_ends_anywhere_gives_what_was_whole_or_an_error() -> None:
    content = await written(SimulatedDisk())
    head = len(HEADER + to_frame(LedgerState()))
    ends = [head]
    for record in read_segment(content, FIRST).records:
        ends.append(ends[-1] + len(to_frame(record)))
    assert ends[-1] == len(content)
    for end in range(len(content)):
        if end < head:
            with pytest.raises(RunFolderError, match=str(FIRST)):
                read_segment(content[:end], FIRST)
            continue
        segment = read_segment(content[:end], FIRST)
        assert len(segment.records) == sum(whole <= end for whole in ends[1:])
        assert segment.num_bytes == max(whole for whole in ends if whole <= end)


@in_virtual_time
async def test_a_flipped_bit_anywhere_is_noticed() -> None:
    content = await written(SimulatedDisk())
    for place in range(len(content)):
        for bit in range(8):
            damaged = bytearray(content)
            damaged[place] ^= 1 << bit
            with pytest.raises(RunFolderError, match=str(FIRST)):
                read_segment(bytes(damaged), FIRST)


@in_virtual_time
async def test_another_format_version_is_refused() -> None:
    content = (await written(SimulatedDisk())).replace(b" 1\n", b" 2\n", 1)
    with pytest.raises(RunFolderError, match="expected format_version 1, got 2: another version"):
        read_segment(content, FIRST)


@in_virtual_time
async def test_a_large_segment_is_followed_by_another_that_begins_with_the_whole_state(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "SEGMENT_BYTES", 500)
    disk = SimulatedDisk()
    ledgers: dict[Path, LedgerState] = {}
    journal, ledger = begun(disk)
    for _ in range(200):
        admit(ledger)
        ledger.reject(ledger.num_prompts_taken - 1, "stale")
        if len(ledgers) % 3 == 0:  # at times a segment begins within what waits
            await journal.durable()
        ledgers[FOLDER] = ledger.snapshot()
    await journal.close()
    paths = segment_paths(FOLDER, disk)
    assert len(paths) > 10
    states = [replayed(disk.durable[path], path).snapshot() for path in paths]
    heads = [read_segment(disk.durable[path], path).state for path in paths]
    assert states[:-1] == heads[1:]
    assert states[-1] == ledgers[FOLDER]
    assert max(map(len, disk.files.values())) < 1000


def crashes(write: Callable[[Disk], Coroutine[Any, Any, None]]) -> list[SimulatedDisk]:
    """The disk as a crash before each of its changes leaves it."""
    left: list[SimulatedDisk] = []
    disk = SimulatedDisk()

    def note(change: str, path: Path) -> None:
        copy = SimulatedDisk()
        copy.files, copy.durable = dict(disk.durable), dict(disk.durable)
        left.append(copy)

    disk.before = note
    run_virtual(write(disk))
    return left


def test_a_crash_at_any_change_of_the_disk_leaves_all_that_was_durable(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "SEGMENT_BYTES", 200)
    durable = [0]  # admissions, at each crash

    async def write(disk: Disk) -> None:
        journal, ledger = begun(disk)
        for number in range(12):
            admit(ledger)
            await journal.durable()
            durable[0] = number + 1
            if disk.names(FOLDER):
                newest = segment_paths(FOLDER, disk)[-1]
                assert replayed(disk.read(newest)).num_prompts_taken >= durable[0]

    left = crashes(write)
    assert len(left) > 12
    taken = []
    for disk in left:
        paths = segment_paths(FOLDER, disk)
        taken.append(replayed(disk.files[paths[-1]]).num_prompts_taken if paths else 0)
    assert taken == sorted(taken)
    assert set(taken) == set(range(12)), "each admission is there, from its own sync on"


@in_virtual_time
async def test_a_new_start_cuts_what_was_cut_short_and_begins_a_segment(
    caplog: pytest.LogCaptureFixture,
) -> None:
    disk = SimulatedDisk()
    content = await written(disk)
    disk.files[FIRST] = content[:-3]
    disk.files[FOLDER / ".000002.journal.ab12.partial"] = b"half"
    disk.durable = dict(disk.files)
    journal, ledger = begun(disk)
    admit(ledger)
    await journal.close()
    assert [path.name for path in segment_paths(FOLDER, disk)] == [
        "000001.journal",
        "000002.journal",
    ]
    assert len(disk.files) == 2, "what a killed process had begun is gone"
    assert "a last record was cut short" in caplog.text
    first = read_segment(disk.files[FIRST], FIRST)
    assert (len(first.records), first.num_bytes) == (2, len(disk.files[FIRST]))
    assert len(read_segment(disk.files[FOLDER / "000002.journal"], FIRST).records) == 1


@in_virtual_time
async def test_a_new_start_refuses_a_damaged_journal() -> None:
    disk = SimulatedDisk()
    content = bytearray(await written(disk))
    content[-1] ^= 1
    disk.files[FIRST] = bytes(content)
    journal, _ = begun(disk)
    with pytest.raises(RunFolderError, match=r"000001.journal is damaged at byte .* Move"):
        await journal.durable()
    await journal.close()
    assert disk.files == {FIRST: bytes(content)}


@in_virtual_time
async def test_a_missing_segment_is_named() -> None:
    disk = SimulatedDisk()
    await written(disk)
    disk.files[FOLDER / "000003.journal"] = b""
    with pytest.raises(RunFolderError, match=r"000002\.journal is missing"):
        segment_paths(FOLDER, disk)


def test_the_same_on_the_real_disk(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = tmp_path / "ledger"

    async def start() -> None:
        journal, ledger = begun(Disk(), folder)
        for _ in range(3):
            await asyncio.gather(*(journal.durable() for _ in range(10)))
            admit(ledger)
        await journal.close()
        path = segment_paths(folder, Disk())[-1]
        assert replayed(path.read_bytes()).snapshot() == ledger.snapshot()

    asyncio.run(start())
    first = folder / "000001.journal"
    first.write_bytes(first.read_bytes()[:-1])
    (folder / ".000002.journal.0.partial").write_bytes(b"half")
    asyncio.run(start())
    assert sorted(path.name for path in folder.iterdir()) == ["000001.journal", "000002.journal"]
    assert "cut short" in caplog.text
    assert len(read_segment(first.read_bytes(), first).records) == 2


def test_a_full_real_disk_leaves_what_was_durable(tmp_path: Path) -> None:
    async def start() -> int:
        journal, ledger = begun(Disk(), tmp_path)
        await journal.durable()
        num_durable = 0
        failure = ""
        with small_disk(2000):
            while not failure:
                admit(ledger)
                try:
                    await journal.durable()
                    num_durable += 1
                except RunFolderError as error:
                    failure = str(error)
        assert "journal: File too large" in failure
        await journal.close()
        return num_durable

    num_durable = asyncio.run(start())
    (path,) = segment_paths(tmp_path, Disk())
    segment = read_segment(path.read_bytes(), path)
    assert len(segment.records) == num_durable > 10
    assert segment.num_bytes == path.stat().st_size < 2000  # half a record was taken back


@in_virtual_time
async def test_a_disk_that_does_not_answer_ends_the_run(caplog: pytest.LogCaptureFixture) -> None:
    journal, ledger = begun(SimulatedDisk(latency_s=1e6))
    admit(ledger)
    with pytest.raises(RunFolderError, match=r"disk of /run/ledger .* transport\.write"):
        await journal.durable()
    assert asyncio.get_running_loop().time() < 2 * 3600
    assert "waited for the disk of /run/ledger" in caplog.text, "long before"


def test_a_step_that_was_cut_off_before_its_publication_is_written_anew() -> None:
    disk = SimulatedDisk()

    async def train(journal: Journal, ledger: Ledger) -> None:
        ledger.record_trained_counts({0: 2})
        ledger.publish(ledger.version + 1)
        await journal.close()

    async def begin() -> None:
        journal, ledger = begun(disk)
        admit(ledger)
        ledger.start(0, "rollout/0")
        row = RowMetadata(0, 0, 9, 1.0, 0, ((0, 5),), 0)
        assert ledger.finish(0, 0, BatchMetadata("g0", 0, (), (row, row)))
        ledger.consume([0], 0)
        await train(journal, ledger)

    run_virtual(begin())
    publication = to_frame(Publish(0, 1))
    assert disk.files[FIRST].endswith(publication)
    disk.files[FIRST] = disk.files[FIRST][: -len(publication)]

    async def again() -> Ledger:
        journal = Journal(FOLDER, disk)
        ledger = journal.take_up(Ledger())
        assert (ledger.version, ledger.account()["rows_trained"]) == (0, 0)
        await train(journal, ledger)
        return ledger

    account = run_virtual(again()).account()
    assert (account["rows_trained"], account["rows_trained_twice"]) == (2, 0)
    read = read_account(FOLDER, lambda group: None, disk)
    assert (read.totals, read.trained_again, read.version) == (account, [], 1)
