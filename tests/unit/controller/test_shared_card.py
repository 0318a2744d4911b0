"""Who waits for cards that two sides share, when all workers end or a side cannot leave."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from areal_sc.controller import shared_card
from areal_sc.controller.shared_card import SharedCard, Side
from areal_sc.errors import WorkerError

TIMEOUT_S = 30.0


async def leave_at_once() -> None:
    pass


def card_of(leave: Callable[[], Awaitable[None]]) -> SharedCard:
    card = SharedCard()
    card.share()
    for side in Side:
        card.join(side, enter=lambda: None, leave=leave)
    return card


async def hold(card: SharedCard, side: Side) -> None:
    async with asyncio.timeout(TIMEOUT_S), card.held(side):
        pass


async def test_the_end_of_the_workers_ends_who_waits_for_a_turn() -> None:
    is_asked = asyncio.Event()

    async def never_leave() -> None:
        is_asked.set()
        await asyncio.Event().wait()

    card = card_of(never_leave)
    waiting = asyncio.create_task(hold(card, Side.training))
    async with asyncio.timeout(TIMEOUT_S):
        await is_asked.wait()
    await card.close()
    with pytest.raises(WorkerError, match="training waited for its turn"):
        await waiting
    await hold(card, Side.generation)  # a later start


async def test_who_was_patient_in_an_earlier_start_changes_nothing_in_this_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(shared_card, "IDLE_S", 0.0)
    is_back = asyncio.Event()
    card = card_of(leave_at_once)
    card.join(Side.generation, enter=is_back.set, leave=leave_at_once)
    with card.wanted_when_idle():
        await card.close()
    await hold(card, Side.training)
    with card.wanted_when_idle():
        async with asyncio.timeout(TIMEOUT_S):
            await is_back.wait()


async def test_a_side_that_could_not_leave_is_not_asked_again_before_a_later_start() -> None:
    num_asked = 0

    async def fail_once() -> None:
        nonlocal num_asked
        num_asked += 1
        if num_asked == 1:
            raise WorkerError("it stays")

    card = card_of(fail_once)
    for _ in range(2):
        with pytest.raises(WorkerError, match="it stays"):
            await hold(card, Side.training)
    assert num_asked == 1
    assert not card.is_away_from(Side.training), "limits do not stand still for ever"
    await card.close()
    await hold(card, Side.training)
