"""Evaluations of a run on held-out prompts, one at a time, beside training."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass

from areal_sc.config.schema import GRPOConfig
from areal_sc.controller.evaluation import EvaluationOutcome
from areal_sc.controller.rollout import RolloutController
from areal_sc.trainer.metrics import EvaluationResult
from areal_sc.workflows.base import Workflow
from areal_sc.workflows.sources import PromptSource


@dataclass
class _Pending:
    """An evaluation that goes on."""

    name: str
    step: int
    temperature: float
    outcome: Future[EvaluationOutcome]


class Evaluations:
    """Begins evaluations, and keeps what they gave.

    begin     returns at once; training goes on
    collect   waits for the one that goes on, if any, keeps its result and tells it

    Args:
        config: how many prompts, and the temperature of the run.
        rollout: plays them.
        prompts: held-out ones; None: nothing is ever evaluated.
        workflow: the episode.
        tell: is called with each result, and with the outcome that it was made of.

    Attributes:
        results: in the order in which they were collected.
    """

    def __init__(
        self,
        config: GRPOConfig,
        rollout: RolloutController,
        prompts: PromptSource | None,
        workflow: Workflow,
        tell: Callable[[EvaluationResult, EvaluationOutcome], None],
    ) -> None:
        self.results: list[EvaluationResult] = []
        self._config = config
        self._rollout = rollout
        self._prompts = prompts
        self._workflow = workflow
        self._tell = tell
        self._pending: _Pending | None = None

    def register(self) -> None:
        """What is wrong with prompts or workflow shows here, before a worker is started.

        Raises: WorkflowError: a worker could not build one of them.
        """
        if self._prompts is not None:
            self._rollout.register(self._prompts, self._workflow)

    def begin(self, name: str, step: int, temperature: float | None = None) -> None:
        """Evaluates the current policy; the evaluation before has been collected.

        Args:
            name, step: as of `EvaluationResult`.
            temperature: None: that of the run.
        """
        assert self._pending is None, "the evaluation before is not collected"
        if self._prompts is None:
            return
        self._pending = _Pending(
            name,
            step,
            self._config.generation.temperature if temperature is None else temperature,
            self._rollout.begin_evaluation(
                self._prompts,
                self._workflow,
                num_prompts=self._config.evaluation.num_prompts,
                temperature=temperature,
            ),
        )

    def collect(self, *, wait: bool) -> None:
        """Ends with the evaluation that was begun, if any; without `wait`, if it is complete.

        Raises: what the evaluation raised.
        """
        if self._pending is None or not (wait or self._pending.outcome.done()):
            return
        pending, self._pending = self._pending, None
        outcome = pending.outcome.result()  # bounded by the groups' own time limit
        result = EvaluationResult(
            name=pending.name,
            step=pending.step,
            reward=outcome.reward,
            accuracy=outcome.metrics.get("accuracy"),
            num_prompts=outcome.num_prompts,
            version_min=outcome.versions[0],
            version_max=outcome.versions[1],
            temperature=pending.temperature,
        )
        self.results.append(result)
        self._tell(result, outcome)
