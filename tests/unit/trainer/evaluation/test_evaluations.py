from __future__ import annotations

import math
from concurrent.futures import Future
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from unit.trainer.conftest import Follower, shown

from areal_sc.controller.rollout.evaluation import EvaluationOutcome, EvaluationSet
from areal_sc.errors import ConfigError, StepLost, StepsLost, WorkflowError
from areal_sc.records.metrics import EvaluationResult
from areal_sc.records.metrics_log import History
from areal_sc.rejection import Rejection, RejectionKind
from areal_sc.trainer.evaluation.evaluations import Evaluations
from areal_sc.trainer.run import Run

OUTCOME = EvaluationOutcome(
    num_prompts=3,
    num_rejected=1,
    reward=0.5,
    metrics={"accuracy": 0.25, "turns": 1.5},
    versions=(2, 4),
    num_samples=4,
    num_cut=2,
    rejected={"reward_error": 1},
    accuracy_interval=(0.125, 0.5),
    pass_at_k={1: 0.25, 2: 0.375, 4: 0.75},
    first_rejection=Rejection(RejectionKind.reward_error, "boom"),
)


class InWorkers(str):
    """The name of a workflow that no agent outside plays."""

    __slots__ = ()
    waits_outside = False


class Rollout:
    """Keeps what it is asked to play; the test gives the outcome, or `outcome` is given at once."""

    def __init__(self, outcome: EvaluationOutcome | None = None) -> None:
        self.registered: list[tuple[Any, Any]] = []
        self.asked: list[tuple[int | None, float | None]] = []
        self.num_samples: list[int | None] = []
        self.sets: list[EvaluationSet] = []
        self.version = 4
        self._outcome = outcome
        self.running: Future[list[EvaluationOutcome]] = Future()

    def register(self, prompts: Any, workflow: Any) -> None:
        self.registered.append((prompts, workflow))

    def wait_for_weights(self) -> None:
        self.asked.append((0, None))

    def begin_evaluation(
        self, sets: list[EvaluationSet], names: list[str], *, cut_is_wrong: bool
    ) -> Future[list[EvaluationOutcome]]:
        assert cut_is_wrong
        assert len(names) == len(sets)
        self.sets = sets
        self.asked.append((sets[0].num_prompts, sets[0].temperature))
        self.num_samples.append(sets[0].num_samples)
        self.running = Future()
        if self._outcome is not None:
            self.running.set_result([self._outcome] * len(sets))
        return self.running


def evaluations(run: Run, rollout: Any, prompts: Any = "prompts") -> Evaluations:
    workflow: Any = InWorkers("workflow")
    run.beside.clear()  # a test's next start
    return Evaluations(run, rollout, prompts, workflow)


def test_a_result_is_told_when_the_evaluation_is_done(run: Run, follower: Follower) -> None:
    rollout = Rollout()
    beside = evaluations(run, rollout)
    assert rollout.registered == [("prompts", "workflow")]  # before a worker is started
    beside.collect()  # nothing goes on, so nothing is waited for
    beside.begin("periodic")
    rollout.version = 6  # what comes after does not enter it
    assert rollout.asked == [(7, None)]
    beside.collect(wait=False)
    assert follower.told == []
    rollout.running.set_result([OUTCOME])
    beside.collect(wait=False)
    beside.collect()  # once
    result = EvaluationResult(
        name="periodic",
        step=4,
        reward=0.5,
        num_prompts=3,
        version_min=2,
        version_max=4,
        temperature=0.75,
        num_rejected=1,
        rejected_answers={"reward_error": 1},
        num_cut=2,
        num_samples=4,
        accuracy_low=0.125,
        accuracy_high=0.5,
        pass_at={"1": 0.25, "2": 0.375, "4": 0.75},
        workflow={"accuracy": 0.25, "turns": 1.5},
    )
    assert follower.told == [result]
    assert History.read(run.folder.metrics_path).evaluations == [result]
    assert (
        "1 of 12 answers of the evaluation were rejected (reward_error x1): they count as wrong in "
        "its accuracy, and are in no other mean; for example: reward_error"
    ) in shown(run)
    assert "pass@2=0.375 pass@4=0.75 rejected=1 cut=2" in shown(run)
    assert "evaluation=periodic step=4 accuracy=0.25" in shown(run)


def test_a_second_one_of_a_run_is_refused(run: Run) -> None:
    """Else the results of one would be taken for those of the other."""
    evaluations(run, Rollout())
    workflow: Any = InWorkers("workflow")
    with pytest.raises(ConfigError, match="give it several sets of prompts by name"):
        Evaluations(run, Rollout(), "prompts", workflow)  # type: ignore[arg-type]


def test_the_trained_model_is_evaluated_at_two_temperatures(run: Run, follower: Follower) -> None:
    rollout = Rollout(OUTCOME)
    run.config.evaluation.num_samples = 4
    evaluations(run, rollout).finish()
    assert rollout.num_samples == [4, 1], "all greedy answers to a prompt are the same"
    assert rollout.asked == [(0, None), (7, None), (7, 0.0)]
    assert [(r.name, r.temperature) for r in follower.told] == [("after", 0.75), ("greedy", 0.0)]


def test_periodic_ones_are_begun_after_so_many_steps_but_not_after_the_last(
    run: Run, follower: Follower
) -> None:
    run.config.evaluation.every_steps, run.config.total_steps = 3, 9
    rollout = Rollout(OUTCOME)
    beside = evaluations(run, rollout)
    for rollout.version in range(1, 10):
        beside.after_step()
    assert [(result.name, result.step) for result in follower.told] == [
        ("periodic", 3),
        ("periodic", 6),
    ]


def test_a_failure_is_raised_once(run: Run, follower: Follower) -> None:
    rollout = Rollout()
    beside = evaluations(run, rollout)
    beside.begin("after")
    rollout.running.set_exception(WorkflowError("all 7 evaluation prompts were rejected"))
    with pytest.raises(WorkflowError, match="all 7"):
        beside.collect()
    beside.collect()
    assert follower.told == []


@pytest.mark.parametrize(
    "error",
    [
        StepsLost("no state is left"),  # the run goes back at the next call that trains
        StepLost("the run is paused, and the script is to end"),
    ],
)
def test_an_evaluation_that_is_lost_ends_nothing_else(
    run: Run, follower: Follower, error: StepLost
) -> None:
    rollout = Rollout()
    beside = evaluations(run, rollout)
    beside.begin("periodic")
    rollout.running.set_exception(error)
    beside.collect()
    assert follower.told == []
    assert f"the evaluation of step 4 is lost: {error}" in shown(run)


def test_without_prompts_nothing_is_evaluated(run: Run) -> None:
    rollout = Rollout()
    beside = evaluations(run, rollout, prompts=None)
    beside.begin("before")
    beside.collect()
    assert (rollout.registered, rollout.asked) == ([], [])


def test_an_evaluation_of_an_abandoned_step_is_dropped(run: Run, follower: Follower) -> None:
    rollout = Rollout()
    beside = evaluations(run, rollout)
    beside.begin("periodic")
    dropped, rollout.version = rollout.running, 3
    beside.gone_back(3)
    assert dropped.cancelled()
    beside.collect()
    assert (rollout.asked, follower.told) == ([(7, None)], [])


@pytest.mark.parametrize("state", ["goes on", "is lost", "was lost", "is done"])
def test_an_evaluation_of_the_step_that_a_run_goes_back_to_is_not_lost(
    run: Run, follower: Follower, state: str
) -> None:
    rollout = Rollout()
    beside = evaluations(run, rollout)
    beside.begin("mine", temperature=0.5)
    first, rollout.version = rollout.running, 6  # the run goes on beside it
    if state in ("is lost", "was lost"):
        first.set_exception(StepsLost("no state is left"))
    if state == "was lost":
        beside.collect()
    if state == "is done":
        first.set_result([OUTCOME])
    rollout.version = 4
    beside.gone_back(4)
    if state != "is done":
        assert rollout.asked == [(7, 0.5)] * 2
        rollout.running.set_result([OUTCOME])
    beside.collect()
    assert [(result.name, result.step, result.temperature) for result in follower.told] == [
        ("mine", 4, 0.5)
    ]
    beside.gone_back(4)
    assert len(rollout.asked) == (1 if state == "is done" else 2), "once"


def test_an_evaluation_of_an_earlier_step_is_not_made_of_another_policy(
    run: Run, follower: Follower
) -> None:
    rollout = Rollout()
    beside = evaluations(run, rollout)
    beside.begin("before")
    rollout.version += 2
    beside.gone_back(rollout.version)
    assert len(rollout.asked) == 1
    beside.collect()
    assert follower.told == []


@pytest.mark.parametrize("has_result", [False, True])
def test_a_resumed_run_does_an_evaluation_that_was_begun_and_not_recorded(
    run: Run, has_result: bool
) -> None:
    run.config.evaluation.every_steps = 2
    rollout: Any = Rollout(OUTCOME)
    beside = evaluations(run, rollout)
    if has_result:
        beside.begin("periodic")
        beside.collect()
        beside = evaluations(run, rollout := Rollout(OUTCOME))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("areal_sc.trainer.run.load_latest_snapshot", lambda *_: (4, []))
        actor: Any = SimpleNamespace(share_weights=lambda _: None)
        run.beside[:] = [beside]
        run._resume(actor, rollout)
    assert rollout.asked == ([] if has_result else [(7, None)])


def test_sets_have_results_of_their_own_and_one_together(run: Run, follower: Follower) -> None:
    rollout: Any = Rollout()
    run.config.evaluation.num_samples = 2
    workflow: Any = InWorkers("workflow")
    sets: Any = {
        "easy": [{"prompt": "1"}],
        "hard": EvaluationSet("rows", InWorkers("its own"), num_samples=8),  # type: ignore[arg-type]
    }
    run.beside.clear()
    beside = Evaluations(run, rollout, sets, workflow)
    assert rollout.registered == [([{"prompt": "1"}], "workflow"), ("rows", "its own")]
    beside.begin("before")
    assert [(it.num_samples, it.num_prompts) for it in rollout.sets] == [(2, None), (8, None)]
    hard = replace(OUTCOME, metrics={"accuracy": 0.75}, accuracy_interval=(0.5, 0.8), num_samples=8)
    rollout.running.set_result([OUTCOME, hard])
    beside.collect()
    told = {result.name: result for result in follower.told}
    assert list(told) == ["easy/before", "hard/before", "before"]
    together = told["before"]
    assert together.accuracy == 0.5, "each set counts alike"
    assert (together.num_prompts, together.num_samples, together.num_rejected) == (6, 0, 2)
    low = 0.5 - math.hypot(0.25 - 0.125, 0.75 - 0.5) / 2
    assert together.accuracy_low == pytest.approx(low)
    assert together.workflow == {"accuracy": 0.5}, "the hard one tells no turns"


def test_sets_may_have_temperatures_of_their_own(run: Run, follower: Follower) -> None:
    rollout: Any = Rollout(OUTCOME)
    run.config.evaluation.num_samples = 4
    workflow: Any = InWorkers("workflow")
    run.beside.clear()
    sets = {"a": EvaluationSet("rows"), "b": EvaluationSet("rows", temperature=0.0)}  # type: ignore[arg-type]
    beside = Evaluations(run, rollout, sets, workflow)
    beside.finish()
    found = {result.name: result.temperature for result in follower.told}
    assert math.isnan(found.pop("after"))
    assert found == {"a/after": 0.75, "b/after": 0.0, "a/greedy": 0, "b/greedy": 0, "greedy": 0}
    assert "nan" not in shown(run)
    assert rollout.num_samples == [4, 1]


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ([], "set of prompts is empty"),
        ({"a": []}, "'a' is empty"),
        ({"a": EvaluationSet([])}, "'a' is empty"),
        ({"": ["rows"]}, "expected a name"),
        ({"a/b": ["rows"]}, "without '/'"),
    ],
)
def test_a_set_that_cannot_be_evaluated_is_told_before_the_start(
    run: Run, prompts: Any, message: str
) -> None:
    with pytest.raises((ConfigError, WorkflowError), match=message):
        evaluations(run, Rollout(), prompts)


def test_no_step_waits_for_an_evaluation_that_goes_on(run: Run, follower: Follower) -> None:
    """One that is due meanwhile begins when that ends, of the policy of that time."""
    run.config.evaluation.every_steps = 2
    rollout = Rollout()
    beside = evaluations(run, rollout)
    rollout.version = 2
    beside.after_step()
    first = rollout.running
    for rollout.version in (3, 4, 5):
        beside.after_step()
    assert (len(rollout.asked), rollout.running) == (1, first)
    first.set_result([OUTCOME])
    rollout.version = 7
    beside.after_step()
    assert len(rollout.asked) == 2
    rollout.running.set_result([OUTCOME])
    beside.collect()
    assert [(it.name, it.step) for it in follower.told] == [("periodic", 2), ("periodic", 7)]
