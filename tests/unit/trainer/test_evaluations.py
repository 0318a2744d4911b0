from __future__ import annotations

from concurrent.futures import Future
from typing import Any

import pytest

from areal_sc.config.schema import EvaluationConfig, GenerationConfig, GRPOConfig
from areal_sc.controller.evaluation import EvaluationOutcome
from areal_sc.errors import WorkflowError
from areal_sc.trainer.evaluations import Evaluations
from areal_sc.trainer.metrics import EvaluationResult

OUTCOME = EvaluationOutcome(
    num_prompts=3,
    num_rejected=1,
    reward=0.5,
    metrics={"accuracy": 0.25},
    versions=(2, 4),
    rejection_example="boom",
)


class Rollout:
    """Keeps what it is asked to play; the test gives the outcome."""

    def __init__(self) -> None:
        self.registered: list[tuple[Any, Any]] = []
        self.asked: list[tuple[int | None, float | None]] = []
        self.outcome: Future[EvaluationOutcome] = Future()

    def register(self, prompts: Any, workflow: Any) -> None:
        self.registered.append((prompts, workflow))

    def begin_evaluation(
        self, prompts: Any, workflow: Any, *, num_prompts: int | None, temperature: float | None
    ) -> Future[EvaluationOutcome]:
        self.asked.append((num_prompts, temperature))
        self.outcome = Future()
        return self.outcome


Told = list[tuple[EvaluationResult, EvaluationOutcome]]


def evaluations(prompts: Any = "prompts") -> tuple[Evaluations, Rollout, Told]:
    config = GRPOConfig(
        generation=GenerationConfig(temperature=0.75), evaluation=EvaluationConfig(num_prompts=7)
    )
    rollout, told = Rollout(), []

    def tell(result: EvaluationResult, outcome: EvaluationOutcome) -> None:
        told.append((result, outcome))

    return Evaluations(config, rollout, prompts, "workflow", tell), rollout, told


def test_a_result_comes_when_the_evaluation_is_done() -> None:
    beside, rollout, told = evaluations()
    beside.collect(wait=True)  # nothing goes on, so nothing is waited for
    beside.begin("periodic", 4)
    assert rollout.asked == [(7, None)]
    beside.collect(wait=False)
    assert (beside.results, told) == ([], [])
    rollout.outcome.set_result(OUTCOME)
    beside.collect(wait=False)
    beside.collect(wait=True)  # once
    result = EvaluationResult(
        name="periodic",
        step=4,
        reward=0.5,
        num_prompts=3,
        version_min=2,
        version_max=4,
        temperature=0.75,
        accuracy=0.25,
    )
    assert beside.results == [result]
    assert told == [(result, OUTCOME)]


def test_a_temperature_of_its_own_is_in_the_result() -> None:
    beside, rollout, _ = evaluations()
    beside.begin("greedy", 4, temperature=0.0)
    rollout.outcome.set_result(OUTCOME)
    beside.collect(wait=True)
    assert rollout.asked == [(7, 0.0)]
    assert beside.results[0].temperature == 0.0


def test_a_failure_is_raised_once() -> None:
    beside, rollout, told = evaluations()
    beside.begin("after", 4)
    rollout.outcome.set_exception(WorkflowError("all 7 evaluation prompts were rejected"))
    with pytest.raises(WorkflowError, match="all 7"):
        beside.collect(wait=True)
    beside.collect(wait=True)
    assert (beside.results, told) == ([], [])


def test_without_prompts_nothing_is_evaluated() -> None:
    beside, rollout, _ = evaluations(prompts=None)
    beside.register()
    beside.begin("before", 0)
    beside.collect(wait=True)
    assert (rollout.registered, rollout.asked) == ([], [])


def test_prompts_and_workflow_are_registered_beforehand() -> None:
    beside, rollout, _ = evaluations()
    beside.register()
    assert rollout.registered == [("prompts", "workflow")]
