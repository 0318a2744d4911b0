"""How long the controllers' waits may take."""

from __future__ import annotations

import asyncio

import pytest

from areal_sc.controller.background import Background
from areal_sc.errors import WaitTimeout

LIMIT_S = 0.02


async def test_a_wait_without_change_ends() -> None:
    background = Background(LIMIT_S, lambda: "groups: none")
    with pytest.raises(WaitTimeout, match=r"0\.02 s without any change for rows; groups: none"):
        await background.wait("rows")


async def test_while_a_machine_is_waited_for_nothing_does() -> None:
    looks: list[asyncio.Task[None] | None] = []
    was_asked_twice = asyncio.Event()

    def is_held_up() -> bool:
        looks.append(asyncio.current_task())
        if len(looks) == 2:
            was_asked_twice.set()
        return len(looks) < 5

    background = Background(LIMIT_S, lambda: "", is_held_up)
    with pytest.raises(WaitTimeout):
        await background.wait("rows")
    assert len(looks) == 5
    looks.clear()
    was_asked_twice.clear()
    waiting = asyncio.create_task(background.wait("rows"))
    await was_asked_twice.wait()
    background.notify()
    await waiting
