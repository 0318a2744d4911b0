"""The life of every group and row, as the journal tells it."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from ledger_history import History, a_run

from areal_sc.controller.ledger.group_lives import (
    PromptLife,
    RowFate,
    RowLife,
    group_lives,
    read_lives,
)
from areal_sc.controller.ledger.ledger_account import GroupAccount, read_account
from areal_sc.errors import RunFolderError
from areal_sc.system.disk import Disk


def lives_of(run: Path, play: Callable[[History], None]) -> dict[int, PromptLife]:
    async def write() -> None:
        history = History(Disk(), run / "ledger")
        play(history)
        await history.journal.close()

    asyncio.run(write())
    return {life.group: life for life in group_lives(run)}


def fates(rows: list[RowLife]) -> list[str]:
    return [row.fate.value for row in rows]


def test_each_group_is_told_from_its_prompt_to_the_version_that_it_made(tmp_path: Path) -> None:
    lives = lives_of(tmp_path, a_run)
    assert list(lives) == [0, 1, 2, 3, 4, 5]
    one = lives[1]
    assert (one.index, one.admitted_version) == (10, 0)
    assert [(it.attempt, it.worker, it.why) for it in one.attempts] == [
        (0, "rollout/1", "worker lost"),
        (1, "rollout/2", ""),
    ]
    assert [(row.episode, row.row) for row in one.rows] == [(0, 0), (0, 1), (0, 2)]
    for place, row in enumerate(one.rows):
        assert (row.fate, row.step, row.version, row.place) == (RowFate.trained, 2, 2, place)
        assert (row.reward, row.num_tokens, row.num_interruptions) == (1.0, 9, 1)
        assert (row.rank, row.minibatch) == (None, None)  # nobody has said
    assert lives[2].rejected == "reward_error"
    assert fates(lives[3].rows) == ["waiting"] * 2
    assert [it.worker for it in lives[4].attempts] == ["rollout/1"]
    assert lives[5].attempts == []


def test_the_rank_and_the_minibatch_of_a_row_are_told(tmp_path: Path) -> None:
    def play(history: History) -> None:
        ledger = history.ledger
        for group in (history.admit(), history.admit()):
            history.run(group)
        batches = ledger.consume((1, 0), 0)
        rows = [row for batch in batches for row in batch.rows]
        first, second = (((3,), (0,)), ((), (1,))), (((2,),), ((0,),))
        ledger.record_trained([rows[3], rows[0], rows[1], rows[2], rows[0]], (first, second))
        ledger.publish(1)

    lives = lives_of(tmp_path, play)
    found = {
        row.place: (row.rank, row.minibatch, row.version) for g in (0, 1) for row in lives[g].rows
    }
    assert read_lives(tmp_path / "ledger", Disk(), {0}) == {0: lives[0]}, "in their places"
    # the second update trains row 0 again
    assert found == {3: (0, 0, 1), 0: (1, 2, 1), 1: (1, 1, 1), 2: (0, 2, 1)}


def test_rows_that_are_not_trained_have_a_reason(tmp_path: Path) -> None:
    def play(history: History) -> None:
        ledger = history.ledger
        for _ in range(6):
            history.admit()
        for group in range(5):
            history.run(group)
        history.train(0)
        state = ledger.snapshot()
        ledger.requeue(1, "its rows are gone with their worker")
        ledger.reject(2, "stale", returns_prompt=True)
        history.train(3, left_out=1)
        ledger.consume((4,), ledger.version)
        ledger.take_back(ledger.version)
        history.begin(state, 2)  # groups 1, 3, 4 and 5 are given up

    lives = lives_of(tmp_path, play)
    back = "the run went back to version 1"
    assert [(row.fate, row.why) for row in lives[0].rows] == [(RowFate.trained, "")] * 2
    lost = [(row.fate, row.why) for row in lives[1].attempts[0].rows]
    assert lost[0][0] in (RowFate.lost, RowFate.rejected)
    assert all(why for _, why in lost)
    assert [(row.fate, row.why) for row in lives[2].rows] == [(RowFate.rejected, "stale")] * 2
    assert [(row.fate, row.why) for row in lives[3].rows] == [(RowFate.undone, back)] * 2
    assert [(row.fate, row.why, row.step) for row in lives[4].rows] == [
        (RowFate.rejected, back, None)
    ] * 2
    assert lives[5].rejected == back


def test_lives_and_accounts_say_the_same(tmp_path: Path) -> None:
    """`read_account` follows the ledger itself; these lives do not."""

    def play(history: History) -> None:
        rng, ledger = random.Random(7), history.ledger
        state = ledger.snapshot()
        for _ in range(300):
            for _ in range(rng.randrange(4)):
                history.admit()
            in_state: dict[str, list[int]] = {}
            for group in ledger.unconsumed():
                in_state.setdefault(group.state.value, []).append(group.group_id)
            for group in in_state.get("queued", ())[:3]:
                if rng.random() < 0.2:
                    ledger.start(group, "rollout/1")
                    ledger.requeue(group, "lost")
                elif rng.random() < 0.2:
                    ledger.reject(group, "reward_error")
                else:
                    history.run(group, num_rows=rng.randint(1, 3))
            done = in_state.get("finished", [])
            if done and rng.random() < 0.2:
                ledger.requeue(done.pop(), "its rows are gone")
            if len(done) > 2:
                history.train(*done[:2], left_out=rng.random() < 0.1)
            if rng.random() < 0.1:
                state = ledger.snapshot()
            if rng.random() < 0.03:
                history.begin(state, ledger.lineage + 1)
                state = ledger.snapshot()

    lives = lives_of(tmp_path, play)
    some = set(lives) & set(range(0, 10_000, 7))
    assert read_lives(tmp_path / "ledger", Disk(), some) == {it: lives[it] for it in some}
    accounts: list[GroupAccount] = []
    read_account(tmp_path / "ledger", accounts.append)
    assert sorted(it.group for it in accounts) == list(lives)
    num = Counter[str]()
    for account in accounts:
        life = lives[account.group]
        assert (life.index, life.admitted_version) == (account.index, account.admitted_version)
        assert (life.lineage <= account.lineage) is True
        num[account.outcome] += 1
        if account.outcome == "rejected":
            assert life.rejected, account
            assert all(row.fate in (RowFate.rejected, RowFate.lost) for row in life.rows), account
        elif account.is_undone:
            assert fates(life.rows) == ["undone"] * account.num_rows, account
            num["undone"] += 1
        else:
            trained = [row for row in life.rows if row.fate is RowFate.trained]
            if account.num_trained == account.num_rows:
                assert len(trained) == account.num_trained
        every = [row for attempt in life.attempts for row in attempt.rows]
        for row in every:
            if row.fate in (RowFate.lost, RowFate.rejected, RowFate.undone):
                assert row.why
    assert min(num[name] for name in ("rejected", "undone", "trained")) > 20


def test_without_a_journal_there_are_no_lives(tmp_path: Path) -> None:
    with pytest.raises(RunFolderError, match="no training step has begun"):
        list(group_lives(tmp_path))
