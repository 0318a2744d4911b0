from __future__ import annotations

import pytest
from builders import Clock

from areal_sc.engines.busy_time import BusyTime


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_an_answer_is_counted_with_what_ran_beside_it(clock: Clock) -> None:
    busy = BusyTime(clock)
    clock.now_s = 10.0  # idle until now
    busy.note(1)
    first = busy.begin()
    clock.now_s = 12.0
    busy.note(2)
    second = busy.begin()
    clock.now_s = 14.0
    busy.end(second, 10)  # two ran for its 2 s
    busy.note(1)
    clock.now_s = 18.0
    busy.end(first, 20)  # 8 s: 1.25 ran on average
    busy.note(0)
    clock.now_s = 30.0
    busy.note(0)
    turns = busy.turns
    assert busy.busy_s == 8.0
    assert turns.turn_tokens == 30
    assert turns.turn_answers == pytest.approx(10 * 2 + 20 * 1.25)
    assert turns.turn_answers2 == pytest.approx(10 * 4 + 20 * 1.25**2)
    assert turns.turn_s == pytest.approx(2 + 8)
    assert turns.turn_answers_s == pytest.approx(2 * 2 + 1.25 * 8)


def test_an_attempt_without_a_token_tells_nothing(clock: Clock) -> None:
    busy = BusyTime(clock)
    busy.note(1)
    begun = busy.begin()
    busy.end(begun, 3)  # in no time
    clock.now_s += 1.0
    busy.end(begun, 0)
    assert busy.turns.turn_tokens == 0


def test_a_turn_does_not_count_the_time_in_which_new_weights_stop_a_server(clock: Clock) -> None:
    busy = BusyTime(clock)
    busy.note(2)
    begun = busy.begin()
    clock.now_s += 4.0
    busy.stop()
    clock.now_s += 10.0
    busy.note(1)  # one is cancelled meanwhile
    clock.now_s += 10.0
    busy.go_on()
    clock.now_s += 4.0
    busy.stop(until_s=clock.now_s + 1.0)
    clock.now_s += 3.0
    busy.end(begun, 10)
    assert busy.busy_s == 31.0
    assert busy.turns.turn_s == pytest.approx(4 + 4 + 2)
    assert busy.turns.turn_answers == pytest.approx(10 * (4 * 2 + 6 * 1) / 10)
