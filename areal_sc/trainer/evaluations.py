"""Evaluations of a run on held-out prompts, one at a time, beside training."""

from __future__ import annotations

from collections.abc import Sized
from concurrent.futures import Future
from typing import Any

from areal_sc.controller.rollout.evaluation import EvaluationOutcome
from areal_sc.controller.rollout.rollout_controller import RolloutController
from areal_sc.errors import ConfigError, StepsLost
from areal_sc.records.metrics import EvaluationResult
from areal_sc.records.metrics_log import History
from areal_sc.sources.row_file import PromptSource
from areal_sc.trainer.beside import BesideTraining
from areal_sc.trainer.run import Run
from areal_sc.workflows.base import Workflow


class Evaluations(BesideTraining):
    """Begins evaluations, and tells what they gave to everybody who follows the run.

    Args:
        run: its settings say how many prompts, how often, and whether greedily at the end.
        prompts: held-out ones; None: nothing is ever evaluated.
        name: of these prompts, before that of each result (`NAME/periodic`): further evaluations
            of one run need one.
        num_samples: answers a prompt; None: `evaluation.num_samples`. A greedy evaluation has one.
    Raises: ConfigError: another one of the run has this name. WorkflowError: a worker could not
        build the prompts or the workflow.
    """

    def __init__(
        self,
        run: Run,
        rollout: RolloutController,
        prompts: PromptSource | None,
        workflow: Workflow,
        *,
        name: str = "",
        num_samples: int | None = None,
    ) -> None:
        self._name: str = name
        self._num_samples = num_samples or run.config.evaluation.num_samples
        if any(isinstance(it, Evaluations) and it._name == name for it in run.beside):
            raise ConfigError(
                f"Evaluations: expected a name of its own for each of a run, got {name!r} twice: "
                "their results could not be told apart; give name=..."
            )
        self._run = run
        self._rollout = rollout
        is_empty = isinstance(prompts, Sized) and not len(prompts)
        self._prompts = prompts = None if is_empty else prompts
        self._workflow = workflow
        self._running: Future[EvaluationOutcome] | None = None
        self._named: dict[str, Any] = {}  # what is known of its result
        self._asked_temperature: float | None = None
        self._is_lost = False  # it gave nothing, and is to be begun again
        self._recorded: set[tuple[str, int]] = set()
        run.beside.append(self)
        if prompts is not None:
            rollout.register(prompts, workflow)  # what is wrong shows before a worker is started

    def begin(self, name: str, temperature: float | None = None) -> None:
        """Evaluates the current policy; the evaluation before is waited for.

        Args:
            name: as of `EvaluationResult`.
            temperature: None: that of the run.
        """
        self.collect()
        name = self._full(name)
        if self._prompts is None or (name, self._rollout.version) in self._recorded:
            return
        self._running = self._rollout.begin_evaluation(
            self._prompts,
            self._workflow,
            num_prompts=self._run.config.evaluation.num_prompts,
            num_samples=1 if temperature == 0 else self._num_samples,
            temperature=temperature,
        )
        self._asked_temperature = temperature
        if temperature is None:
            temperature = self._run.config.generation.temperature
        self._named = {"name": name, "step": self._rollout.version, "temperature": temperature}

    def _full(self, name: str) -> str:
        return f"{self._name}/{name}" if self._name else name

    def collect(self, *, wait: bool = True) -> None:
        """Ends with the evaluation that was begun, if any; without `wait`, if it is complete.

        Raises: what the evaluation raised.
        """
        if self._running is None or not (wait or self._running.done()):
            return
        running, self._running = self._running, None
        try:
            outcome = running.result()  # bounded by the groups' own time limit
        except StepsLost as error:  # the next call that trains says so, and the run goes back
            self._is_lost = True
            self._run.display.warning(
                f"the evaluation of step {self._named['step']} is lost: {error}"
            )
            return
        if outcome.first_rejection is not None:
            self._run.display.warning(
                f"{outcome.num_rejected} of {outcome.num_prompts * outcome.num_samples} answers of "
                "the evaluation were rejected: they count as wrong in its accuracy, and are in no "
                f"other mean; for example: {outcome.first_rejection.describe()}"
            )
        low, high = outcome.accuracy_interval or (None, None)
        result = EvaluationResult(
            **self._named,
            reward=outcome.reward,
            num_prompts=outcome.num_prompts,
            num_rejected=outcome.num_rejected,
            num_samples=outcome.num_samples,
            accuracy_low=low,
            accuracy_high=high,
            pass_at={str(k): value for k, value in outcome.pass_at_k.items()},
            version_min=outcome.versions[0],
            version_max=outcome.versions[1],
            workflow=outcome.metrics,
        )
        self._run.tell(lambda tracker: tracker.on_evaluation(result))

    def take_over(self, history: History) -> None:
        """What an earlier start has recorded is not done again; what it had begun, or lost, is."""
        evaluations = history.evaluations
        self._recorded = {(result.name, result.step) for result in evaluations}
        version, every_steps = self._rollout.version, self._run.config.evaluation.every_steps
        due = version - version % every_steps if every_steps else 0
        is_done = any(r.name == self._full("periodic") and r.step >= due for r in evaluations)
        if due > 0 and not is_done and version < self._run.config.total_steps:
            self.begin("periodic")

    def gone_back(self, step: int) -> None:
        """The run has gone back to a step.

        An evaluation that went on, or was lost on the way, begins again: at once, or, if it was of
        a later step, when that step is made. The policy of an earlier step is nowhere any more.
        """
        if self._running is not None and self._named["step"] <= step:
            self.collect(wait=False)
        if self._running is not None:
            self._running.cancel()
            self._running, self._is_lost = None, True
        is_lost, self._is_lost = self._is_lost, False
        self._recorded = {(name, at) for name, at in self._recorded if at <= step}
        if is_lost and self._named["step"] == step:
            self.begin(self._named["name"].rpartition("/")[2], self._asked_temperature)
        elif is_lost and self._named["step"] < step:
            self._run.display.warning(
                f"the evaluation of step {self._named['step']} is not repeated: the run goes on "
                f"from step {step}"
            )

    def after_step(self) -> None:
        """Every `evaluation.every_steps` steps but the last begins one."""
        version, every_steps = self._rollout.version, self._run.config.evaluation.every_steps
        is_last = version == self._run.config.total_steps
        if every_steps and version % every_steps == 0 and not is_last:
            self.begin("periodic")
        self.collect(wait=is_last)

    def finish(self) -> None:
        """Evaluates the trained model, at the run's temperature and, by default, greedily."""
        self._run.keep_last_step()
        self._rollout.wait_for_weights()
        self.begin("after")
        if self._run.config.evaluation.greedy:
            self.begin("greedy", temperature=0.0)
        self.collect()
