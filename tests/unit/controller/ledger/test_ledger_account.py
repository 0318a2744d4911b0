"""The account that a journal gives of a run."""

from __future__ import annotations

from pathlib import Path

import pytest
from ledger_history import History, a_run
from simulation.disk import SimulatedDisk
from simulation.virtual_loop import in_virtual_time

from areal_sc.controller.ledger import journal as module
from areal_sc.controller.ledger.journal import segment_paths
from areal_sc.controller.ledger.ledger_account import (
    GroupAccount,
    LineageAccount,
    RunAccount,
    read_account,
)
from areal_sc.errors import RunFolderError
from areal_sc.system.disk import Disk

FOLDER = Path("/run/ledger")


def read(
    disk: Disk, folder: Path = FOLDER
) -> tuple[RunAccount, dict[tuple[int, int], GroupAccount]]:
    """The account, and that of each (lineage, group)."""
    found: dict[tuple[int, int], GroupAccount] = {}

    def note(group: GroupAccount) -> None:
        assert (group.lineage, group.group) not in found, "a group is told of twice"
        found[group.lineage, group.group] = group

    return read_account(folder, note, disk), found


@in_virtual_time
@pytest.mark.parametrize("segment_bytes", [4 << 20, 100], ids=["one segment", "many segments"])
async def test_every_group_is_accounted_for(
    monkeypatch: pytest.MonkeyPatch, segment_bytes: int
) -> None:
    monkeypatch.setattr(module, "SEGMENT_BYTES", segment_bytes)
    monkeypatch.setattr(module, "STATE_SHARE", 0)
    disk = SimulatedDisk()
    history = History(disk, FOLDER)
    a_run(history)
    await history.journal.close()
    assert (len(segment_paths(FOLDER, disk)) > 3) == (segment_bytes == 100)
    account, found = read(disk)
    told = {
        group: (g.outcome, g.worker, g.attempt, g.step, g.versions, g.num_rows, g.num_trained)
        for (_, group), g in found.items()
    }
    assert told == {
        0: ("trained", "rollout/0", 0, 0, (0, 0), 2, 2),
        1: ("trained", "rollout/2", 1, 1, (0, 1), 3, 3),
        2: ("rejected", None, 0, -1, None, 0, 0),
        3: ("finished", "rollout/0", 0, -1, (0, 2), 2, 0),
        4: ("running", "rollout/1", 0, -1, None, 0, 0),
        5: ("queued", None, 0, -1, None, 0, 0),
    }
    assert found[1, 2].cause == "reward_error"
    assert [found[1, group].index for group in range(6)] == [0, 10, 20, 30, 40, 50]
    assert (account.version, account.rows_lost, account.trained_again) == (2, 0, [])
    assert (account.totals["rows_trained"], account.totals["rows_trained_twice"]) == (5, 0)
    assert account.num_bytes == sum(map(len, disk.files.values()))


@in_virtual_time
async def test_what_a_later_lineage_does_not_go_on_from_is_undone() -> None:
    disk = SimulatedDisk()
    history = History(disk, FOLDER)
    for _ in range(4):
        history.admit()
    for group in range(3):
        history.run(group)
    history.train(0)
    saved = history.ledger.snapshot()
    history.train(1)
    history.ledger.reject(3, "stale")
    history.admit()
    history.run(4)
    history.ledger.consume([2, 4], 2)  # the run ends within that step
    history.begin(saved, 5)  # prompts of groups 1, 2 and 3 come again, as 5, 6 and 7
    for _ in range(3):
        history.admit()
    for group in (5, 6):
        history.run(group, "rollout/3")
    history.train(5)
    history.ledger.go_back(6, saved)
    for group in (8, 9):
        history.admit()
        history.run(group)
    history.train(9)
    history.admit()
    await history.journal.close()
    account, found = read(disk)
    assert {key: (g.outcome, g.step, g.is_undone, g.cause) for key, g in found.items()} == {
        (1, 0): ("trained", 0, False, ""),
        (1, 1): ("trained", 1, True, ""),
        (1, 2): ("consumed", 2, True, ""),
        (1, 3): ("rejected", -1, False, "stale"),
        (1, 4): ("consumed", 2, True, ""),
        (5, 5): ("trained", 1, True, ""),
        (5, 6): ("rejected", -1, False, "went_back"),
        (5, 7): ("rejected", -1, False, "went_back"),
        (6, 8): ("finished", -1, False, ""),
        (6, 9): ("trained", 1, False, ""),
        (6, 10): ("queued", -1, False, ""),
    }
    assert [found[key].index for key in ((5, 5), (5, 6), (5, 7), (6, 8))] == [10, 20, 30, 10]
    assert account.lineages == [
        LineageAccount(1, begun_at=0, version=2, counts_to=1),
        LineageAccount(5, begun_at=1, version=2, counts_to=1),
        LineageAccount(6, begun_at=1, version=2, counts_to=2),
    ]
    assert (account.version, account.num_undone, account.rows_lost) == (2, 4, 0)
    assert account.totals["rows_trained"] == account.totals["rows_consumed"] == 4
    assert account.totals["rejected"] == {"stale": 1, "went_back": 6}


@in_virtual_time
async def test_rows_that_are_lost_or_trained_twice_are_named() -> None:
    disk = SimulatedDisk()
    history = History(disk, FOLDER)
    for group in range(3):
        history.admit()
        history.run(group)
    first = history.ledger.consume([0], 0)
    history.ledger.record_trained(first[0].rows)
    history.ledger.publish(1)
    history.train(1, left_out=1)
    history.ledger.consume([2], 2)
    history.ledger.record_trained(first[0].rows[:1])
    history.ledger.publish(3)
    await history.journal.close()
    account, found = read(disk)
    assert (account.rows_lost, account.totals["rows_trained_twice"]) == (1, 1)
    assert account.trained_again == [(0, 2)]
    assert (found[1, 1].num_rows, found[1, 1].num_trained) == (2, 1)
    assert found[1, 2].outcome == "consumed"


@in_virtual_time
async def test_a_journal_that_is_being_written_is_read_as_far_as_it_goes() -> None:
    disk = SimulatedDisk()
    history = History(disk, FOLDER)
    a_run(history)
    await history.journal.close()
    (path,) = disk.files
    disk.files[path] = disk.files[path][:-2]
    account, found = read(disk)
    assert account.num_cut_bytes > 0
    assert found[1, 4].outcome == "queued", "its start is not there yet"


@in_virtual_time
async def test_records_that_are_missing_between_two_segments_are_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "SEGMENT_BYTES", 100)
    monkeypatch.setattr(module, "STATE_SHARE", 0)
    disk = SimulatedDisk()
    history = History(disk, FOLDER)
    a_run(history)
    await history.journal.close()
    first, second, *_ = segment_paths(FOLDER, disk)
    whole = disk.files[first]
    disk.files[first] = whole[:-2]
    with pytest.raises(RunFolderError, match=f"{first} is damaged: it ends within a record"):
        read(disk)
    disk.files[first] = disk.files[second]
    with pytest.raises(RunFolderError, match=f"{second} does not follow"):
        read(disk)


def test_a_folder_without_a_journal(tmp_path: Path) -> None:
    with pytest.raises(RunFolderError, match="there is no journal"):
        read(Disk(), tmp_path / "ledger")
