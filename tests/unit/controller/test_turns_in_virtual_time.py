"""Training runs on machines without room for both sides, in which everything may fail."""

from __future__ import annotations

from collections import Counter
from unittest.mock import patch

import pytest
from simulation import fault_run
from simulation.faults import FaultKind

from areal_sc.controller.shared_card import SharedCard
from areal_sc.controller.turns import Turns

SEEDS = 200


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_memory_is_never_over_the_card_and_the_run_goes_on() -> None:
    """`FaultRun` checks each step, `play_in_turns` the cards; workers, what they sample from."""
    struck: Counter[str] = Counter()
    for seed in range(SEEDS):
        try:
            run = fault_run.play_in_turns(seed)
        except BaseException as error:
            error.add_note(f"seed {seed}")
            raise
        for (kind, _), num_faults in run.faults.struck.items():
            struck[kind] += num_faults
    assert set(struck) >= {kind for kind in FaultKind if "kill" in kind or "lose" in kind}


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_card_that_is_given_away_too_early_is_found() -> None:
    def give_at_once(self: SharedCard, side: object) -> object:
        return original(self, side)

    original = SharedCard._give_up
    with (
        patch.object(Turns, "may_use", lambda self, side: True),
        pytest.raises(BaseException, match="node-"),
    ):
        for seed in range(5):
            fault_run.play_in_turns(seed)
