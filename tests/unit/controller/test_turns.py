"""The two sides of a card: whose turn it is, whatever happens in whatever order."""

from __future__ import annotations

import random

import pytest

from areal_sc.controller.shared_card import Side, Turns


def holder_of(turns: Turns) -> Side | None:
    """Who may use the memory, where nobody has to leave."""
    assert turns.advance() is None
    return next(filter(turns.may_use, Side), None)


def test_training_interrupts_generation_and_gives_the_card_back() -> None:
    turns = Turns()
    turns.want(Side.generation)
    assert holder_of(turns) is Side.generation
    turns.want(Side.training)
    assert turns.advance() is Side.generation
    assert holder_of(turns) is None
    turns.left()
    assert holder_of(turns) is Side.training
    turns.done(Side.training)
    assert turns.advance() is Side.training
    turns.left()
    assert holder_of(turns) is Side.generation


def test_who_is_patient_waits_until_training_is_idle() -> None:
    turns = Turns()
    turns.want(Side.training)
    turns.advance()
    turns.left()
    turns.advance()
    turns.wait_for_idle(1)
    turns.done(Side.training)
    assert turns.advance() is None, "between two calls of a step"
    turns.is_idle = True
    assert turns.advance() is Side.training
    turns.left()
    turns.advance()
    assert turns.may_use(Side.generation)


def test_a_side_that_nobody_wants_any_more_stays() -> None:
    turns = Turns()
    with pytest.raises(AssertionError, match="done more often"):
        turns.done(Side.training)
    with pytest.raises(AssertionError, match="was not asked"):
        turns.left()
    assert holder_of(turns) is Side.generation


@pytest.mark.parametrize("seed", range(200))
def test_random_schedules(seed: int) -> None:
    """One side at a time; whoever is wanted gets its turn, training within one change of hands."""
    rng, turns = random.Random(seed), Turns()
    wants, leaving, num_changes = {side: 0 for side in Side}, False, 0
    for _ in range(200):
        match rng.randrange(5):
            case 0 | 1:
                if wants[side := rng.choice(list(Side))] < 2:
                    wants[side] += 1
                    turns.want(side)
            case 2 | 3:
                if wants[side := rng.choice(list(Side))]:
                    wants[side] -= 1
                    turns.done(side)
            case 4 if leaving:
                turns.left()
                leaving, num_changes = False, num_changes + 1
        asked = turns.advance()
        assert not (asked and leaving), "asked twice"
        assert asked in (None, turns.holder)
        leaving |= asked is not None
        assert sum(map(turns.may_use, Side)) <= 1
        if not leaving:  # nobody who comes first is left waiting
            first = Side.training if wants[Side.training] else Side.generation
            assert not wants[first] or turns.may_use(first)
    assert num_changes > 0
