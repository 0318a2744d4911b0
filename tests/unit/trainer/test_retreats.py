from __future__ import annotations

import pytest

from areal_sc.errors import StepsLost
from areal_sc.trainer.run import Retreats

CAUSE = StepsLost("the memory of node 3 is gone")


def test_a_run_that_gets_nowhere_ends_with_the_cause() -> None:
    retreats = Retreats(2)
    retreats.note_retreat(4, CAUSE)
    retreats.note_retreat(2, CAUSE)
    with pytest.raises(StepsLost, match=r"3 times without a step beyond step 4.*node 3 is gone"):
        retreats.note_retreat(4, CAUSE)


def test_a_further_step_is_progress() -> None:
    retreats = Retreats(1)
    for step in (3, 4, 5):
        retreats.note_retreat(step, CAUSE)


def test_none_is_borne_where_no_death_is() -> None:
    with pytest.raises(StepsLost):
        Retreats(0).note_retreat(1, CAUSE)
