"""Who reads large trees at a time."""

from __future__ import annotations

import pytest

from areal_sc.shipping import tree_turns
from areal_sc.shipping.tree_turns import IDLE_S, MAX_TURNS, TreeTurns


def test_so_many_read_at_a_time_and_who_does_not_read_any_more_has_no_turn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now_s = 0.0
    monkeypatch.setattr(tree_turns.time, "monotonic", lambda: now_s)
    turns, readers = TreeTurns(), [f"node-{number}" for number in range(MAX_TURNS)]
    assert all(turns.take_turn(reader) for reader in readers)
    assert all(turns.take_turn(reader) for reader in readers), "they have theirs"
    assert not turns.take_turn("late")
    turns.end(readers[0])
    assert turns.take_turn("late")
    now_s = 0.9 * IDLE_S
    turns.note_read("late")
    turns.note_read("nobody's turn")
    now_s = 1.1 * IDLE_S
    assert all(turns.take_turn(f"new-{number}") for number in range(MAX_TURNS - 1))
    assert not turns.take_turn("one too many"), "the late one still reads"
