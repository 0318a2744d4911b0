"""How connections share an event loop, on a clock that only their moves advance."""

from __future__ import annotations

import asyncio

import pytest
from unit.transport.bulk.keeping_sink import until

from areal_sc.transport.bulk import turns as turns_module
from areal_sc.transport.bulk.turns import TURN_S, Turns


class Clock:
    """Stands for `time` in the module."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def monotonic(self) -> float:
        return self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(turns_module, "time", made)
    return made


class Connection:
    """Has `num_frames` to move; each takes a quarter of a turn."""

    def __init__(self, name: str, num_frames: int, clock: Clock, log: list[str]) -> None:
        self._name = name
        self._left = num_frames
        self._clock = clock
        self._log = log

    def move(self) -> bool:
        self._log.append(self._name)
        self._clock.now_s += TURN_S / 4
        self._left -= 1
        return self._left > 0


async def test_what_is_alone_moves_at_once(clock: Clock) -> None:
    log: list[str] = []
    turns = Turns()
    turns.ask(Connection("a", 3, clock, log).move)
    assert log == ["a", "a", "a"]
    turns.ask(Connection("b", 1, clock, log).move)
    assert log[3:] == ["b"]  # it had a quarter left
    turns.ask(Connection("c", 1, clock, log).move)
    assert log[4:] == []
    await until(lambda: log[4:] == ["c"])


async def test_everything_else_runs_between_two_turns(clock: Clock) -> None:
    log: list[str] = []
    turns = Turns()
    turns.ask(Connection("a", 12, clock, log).move)

    def tick() -> None:
        log.append("|")
        if log.count("a") < 12:
            asyncio.get_running_loop().call_soon(tick)

    tick()
    await until(lambda: log.count("a") == 12)
    assert "".join(log) == "aaaa|aaaa|aaaa" or "".join(log) == "aaaa|aaaa|aaaa|"


async def test_connections_move_one_after_the_other(clock: Clock) -> None:
    log: list[str] = []
    turns = Turns()
    for name in "abcdef":
        turns.ask(Connection(name, 4, clock, log).move)
    await until(lambda: len(log) == 24)
    assert log[:4] == ["a"] * 4  # nobody else had asked yet
    assert sorted(log) == sorted("abcdef" * 4)
    for start in range(4, 24, 5):
        assert sorted(log[start : start + 5]) == list("bcdef")  # a round each


async def test_a_move_may_ask_for_another(clock: Clock) -> None:
    log: list[str] = []
    turns = Turns()
    answer = Connection("answer", 1, clock, log)

    def receive() -> bool:
        log.append("request")
        turns.ask(answer.move)
        log.append("received")
        return False

    turns.ask(receive)
    assert log == ["request", "received", "answer"]
