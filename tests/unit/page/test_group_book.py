"""The life of every group, as the ledger's journal tells it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from ledger_history import History, a_run

from areal_sc.controller.ledger.ledger_account import GroupAccount, read_account
from areal_sc.page.group_book import GroupBook, GroupQuery
from areal_sc.system.disk import Disk


def written(folder: Path, what: Callable[[History], Any]) -> GroupBook:
    async def write() -> None:
        history = History(Disk(), folder)
        what(history)
        await history.journal.close()

    asyncio.run(write())
    return GroupBook(folder)


@pytest.fixture
def book(tmp_path: Path) -> GroupBook:
    return written(tmp_path / "ledger", a_run)


def what(book: GroupBook, group: int) -> list[str]:
    return [event["what"] for event in book.lives({group})[group]["events"]]


def test_it_is_the_ledgers_account(book: GroupBook, tmp_path: Path) -> None:
    groups: list[GroupAccount] = []
    account = read_account(tmp_path / "ledger", groups.append)
    told = book.found(GroupQuery())
    assert [it["group"] for it in told["groups"]] == [5, 4, 3, 2, 1, 0]
    by_id = {it.group: it for it in groups}
    for it in told["groups"]:
        of = by_id[it["group"]]
        assert (it["outcome"], it["worker"], it["num_rows"], it["cause"]) == (
            of.outcome,
            of.worker,
            of.num_rows,
            of.cause,
        )
        assert it["step"] == (of.step + 1 if of.step >= 0 else None)
    assert told["account"]["totals"] == account.totals
    assert told["outcomes"] == {
        "trained": 2,
        "rejected": 1,
        "finished": 1,
        "running": 1,
        "queued": 1,
    }
    assert told["causes"] == {"reward_error": 1}
    assert told["damage"] == []


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        (GroupQuery(outcome="trained"), [1, 0]),
        (GroupQuery(cause="reward_error"), [2]),
        (GroupQuery(worker="rollout/2"), [1]),
        (GroupQuery(step=1), [0]),
        (GroupQuery(step=2), [1]),
        (GroupQuery(group=4), [4]),
        (GroupQuery(outcome="trained", step=7), []),
    ],
)
def test_groups_are_chosen(book: GroupBook, query: GroupQuery, expected: list[int]) -> None:
    told = book.found(query)
    assert [it["group"] for it in told["groups"]] == expected
    assert told["num_fitting"] == len(expected)


def test_groups_come_in_pages(book: GroupBook) -> None:
    first = book.found(GroupQuery(), 0, 4)
    rest = book.found(GroupQuery(), first["next"], 4)
    assert [it["group"] for it in (*first["groups"], *rest["groups"])] == [5, 4, 3, 2, 1, 0]
    assert rest["next"] is None


def test_a_life_is_told_from_its_admission_to_the_version_that_it_made(book: GroupBook) -> None:
    assert what(book, 1) == [
        *("admitted", "started", "requeued", "started", "finished"),
        *("consumed", "trained", "published"),
    ]
    life = book.lives({1})[1]["events"]
    assert life[2] == {"what": "requeued", "attempt": 1, "cause": "worker lost"}
    assert (life[3]["worker"], life[3]["attempt"]) == ("rollout/2", 1)
    assert [row.versions for row in life[4]["rows"]] == [((0, 5), (1, 5))] * 3
    assert (life[5]["step"], life[7]["version"]) == (2, 2)
    assert what(book, 2) == ["admitted", "rejected"]
    assert book.lives({2})[2]["events"][1]["cause"] == "reward_error"
    assert book.lives({99}) == {}


def test_what_a_run_went_back_behind_is_told(tmp_path: Path) -> None:
    def back(history: History) -> None:
        for _ in range(3):
            history.admit()
        history.run(0)
        history.train(0)
        state = history.ledger.snapshot()
        history.run(1)
        history.train(1)
        history.begin(state, 2)

    book = written(tmp_path / "ledger", back)
    assert what(book, 0)[-1] == "published"
    assert what(book, 1)[-1] == "went back"
    assert what(book, 2)[-1] == "went back"
    told = book.found(GroupQuery(outcome="undone"))
    assert [it["group"] for it in told["groups"]] == [1]


def test_where_a_journal_is_damaged_is_told(book: GroupBook, tmp_path: Path) -> None:
    path = tmp_path / "ledger" / "000001.journal"
    content = bytearray(path.read_bytes())
    content[-3] ^= 0xFF
    path.write_bytes(content)
    told = book.found(GroupQuery())
    assert "is damaged at byte" in told["damage"][0]


@pytest.mark.parametrize("content", [None, b"", b"areal_sc-ledger 9\n", b"anything"])
def test_a_journal_that_is_none_is_told(tmp_path: Path, content: bytes | None) -> None:
    if content is not None:
        (tmp_path / "000001.journal").write_bytes(content)
    told = GroupBook(tmp_path).found(GroupQuery())
    assert told["groups"] == []
    assert told["account"] is None
    assert told["damage"]
