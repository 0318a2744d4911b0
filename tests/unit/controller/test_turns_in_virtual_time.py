"""Training runs on machines without room for both sides, in which everything may fail."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import pytest
from simulation import fault_run
from simulation.behavior import Behavior
from simulation.faults import FaultKind
from simulation.faulty_cluster import FaultyCluster
from simulation.settings import Settings
from simulation.training_run import TrainingRun
from simulation.virtual_loop import run_virtual

from areal_sc.config.parallel_settings import Placement
from areal_sc.controller.shared_card import Turns

pytestmark = pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnraisableExceptionWarning"  # the coroutines of dead processes
)
DEADLY = {
    FaultKind.kill_rollout,
    FaultKind.hang_rollout,
    FaultKind.kill_train,
    FaultKind.hang_train,
    FaultKind.kill_controllers,
}


def play(seeds: Iterable[int]) -> None:
    """`FaultRun` checks each step, `play_in_turns` the cards; workers, what they sample with."""
    struck, most_used = Counter[str](), 0.0
    for seed in seeds:
        try:
            run = fault_run.play_in_turns(seed)
        except BaseException as error:
            error.add_note(f"seed {seed}")
            raise
        struck.update(kind for kind, _ in run.faults.struck)
        assert run.cluster.cards
        most_used = max(most_used, run.cluster.cards.most_used)
    assert most_used == 1, "no card was ever full"
    assert set(struck) >= DEADLY, "a kind of fault has never struck"


def test_memory_is_never_over_the_card_and_the_run_goes_on() -> None:
    play([*range(40), 325])  # which loses all workers of a machine


@pytest.mark.long
def test_the_same_under_more_schedules() -> None:
    play(range(40, 200))


def test_training_may_take_longer_than_a_group(caplog: pytest.LogCaptureFixture) -> None:
    settings = Settings(
        num_steps=4,
        placement=Placement.turns,
        group_timeout_s=1.0,
        weight_step_timeout_s=1.0,
        behavior=Behavior(training_s=500.0),
    )
    run = TrainingRun(settings, FaultyCluster)
    run.cluster.config.transport.call_timeout_s = 10_000.0
    assert run.rollout._background._limit_s < 500
    run_virtual(run.play())
    assert run.duration_s > 4 * 500
    assert "nothing has finished" not in caplog.text


def test_a_card_that_is_given_away_too_early_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Turns, "may_use", lambda self, side: True)
    with pytest.raises(AssertionError, match="node-"):
        fault_run.play_in_turns(0)
