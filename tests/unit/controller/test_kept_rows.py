"""Rows of trained steps stay as long as the step may be repeated, and room allows."""

from __future__ import annotations

import pytest

from areal_sc.controller.kept_rows import KeptRows
from areal_sc.metadata import RowMetadata
from areal_sc.workers.calls import GroupAttempt


def rows_of(step: int) -> list[RowMetadata]:
    """One group a step, with the step's number."""
    return [
        RowMetadata(
            group_id=step,
            attempt=0,
            sequence_length=3,
            reward=0.0,
            admitted_version=step,
            version_spans=((step, 1),),
            episode=0,
        )
    ]


def kept(rows: KeptRows) -> list[int]:
    return [step for step in range(9) if rows.has(GroupAttempt(step, 0))]


@pytest.fixture
def rows() -> KeptRows:
    made = KeptRows()
    made.keep_from(0, is_being_covered=False)
    for step in range(4):
        made.keep(step, rows_of(step))
    return made


def test_nothing_stays_unless_it_is_asked_for() -> None:
    made = KeptRows()
    made.keep(0, rows_of(0))
    assert kept(made) == []
    assert not made.let_go()


def test_rows_go_once_their_step_is_covered(rows: KeptRows) -> None:
    assert kept(rows) == [0, 1, 2, 3]
    assert not rows.has(GroupAttempt(1, 1)), "rows of another attempt"
    rows.keep_from(2, is_being_covered=False)
    rows.keep(1, rows_of(1))  # covered already
    assert kept(rows) == [2, 3]


def test_where_room_is_short_the_oldest_step_goes_and_it_is_said_once(
    rows: KeptRows, caplog: pytest.LogCaptureFixture
) -> None:
    assert rows.let_go()
    assert rows.let_go()
    assert kept(rows) == [2, 3]
    assert [r.getMessage().count("lack room for the rows of step 1,") for r in caplog.records] == [
        1
    ]
    assert rows.has_let_go
    rows.keep_from(3, is_being_covered=False)
    assert rows.has_let_go, "steps are still uncovered"
    rows.keep_from(4, is_being_covered=False)
    assert not rows.has_let_go


def test_rows_that_a_snapshot_will_cover_soon_stay(rows: KeptRows) -> None:
    rows.keep_from(0, is_being_covered=True)
    assert not rows.let_go()
    rows.keep_from(3, is_being_covered=True)
    assert kept(rows) == [3]
