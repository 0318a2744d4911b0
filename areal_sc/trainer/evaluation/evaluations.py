"""Evaluations of a run on held-out prompts, one at a time, beside training.

consumes     the policy of the step that has just been made, every so many steps
waits for    nothing: an evaluation that is due while another one goes on begins when that ends
unblocked by the end of the run, which waits for the last ones
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any, Final

from areal_sc.controller.rollout.evaluation import EvaluationOutcome, EvaluationSet
from areal_sc.controller.rollout.rollout_controller import RolloutController
from areal_sc.errors import ConfigError, StepLost
from areal_sc.records.metrics import EvaluationResult
from areal_sc.records.metrics_log import History
from areal_sc.rejection import describe_counts
from areal_sc.trainer.beside import BesideTraining
from areal_sc.trainer.evaluation.best_model import BestModel
from areal_sc.trainer.evaluation.evaluation_sets import (
    Given,
    configured_sets,
    evaluation_sets,
    results_of_sets,
)
from areal_sc.trainer.run import Run
from areal_sc.workflows.base import Workflow

MAX_CUT: Final = 0.5
"""Share of cut answers from which on a warning says so: the limit of tokens decides then."""


class Evaluations(BesideTraining):
    """Begins evaluations, and tells what they gave to everybody who follows the run.

    Each set of prompts has results of its own, `SET/periodic`; all sets together have `periodic`.

    Args:
        run: its settings say how many prompts, how often, and whether greedily at the end.
        prompts: held-out ones: one set, or several by name, each alone or as an `EvaluationSet`;
            None: there are none beside those of `evaluation.sets`.
        workflow: of the sets that have none of their own.
    Raises: ConfigError: the run has another one, or settings of evaluations are wrong.
        WorkflowError: a set is empty, or a worker could not build the prompts or the workflow.
    """

    def __init__(
        self,
        run: Run,
        rollout: RolloutController,
        prompts: Given,
        workflow: Workflow,
    ) -> None:
        if any(isinstance(it, Evaluations) for it in run.beside):
            raise ConfigError(
                "Evaluations: expected one of a run, got another: their results could not be told "
                "apart; give it several sets of prompts by name"
            )
        self._run = run
        self._rollout = rollout
        settings = run.config.evaluation
        configured = configured_sets(settings, workflow)
        self._sets = evaluation_sets(prompts, configured, workflow, settings)
        self._best = BestModel(run, {n: it.num_samples or 1 for n, it in self._sets.items()})
        self._running: Future[list[EvaluationOutcome]] | None = None
        self._named: dict[str, Any] = {}  # what is known of its result
        self._asked_temperature: float | None = None
        self._is_lost = False  # it gave nothing, and is to be begun again
        self._is_due = False  # one that waits for the one before to end
        self._recorded: set[tuple[str, int]] = set()
        run.beside.append(self)
        for one in self._sets.values():  # what is wrong shows before a worker is started
            assert one.workflow is not None
            rollout.register(one.prompts, one.workflow)

    def begin(self, name: str, temperature: float | None = None) -> None:
        """Evaluates the current policy; the evaluation before is waited for.

        Args:
            name: see `EvaluationResult`.
            temperature: None: that of each set, or else of the run.
        """
        self.collect()
        sets = self._at(temperature)
        if not sets or (name, self._rollout.version) in self._recorded:
            return
        self._running = self._rollout.begin_evaluation(
            sets,
            [_name_of(of_set, name) for of_set in self._sets],
            cut_is_wrong=self._run.config.generation.cut_answers.is_inaccurate,
        )
        self._asked_temperature = temperature
        self._named = {"name": name, "step": self._rollout.version}

    def _at(self, temperature: float | None) -> list[EvaluationSet]:
        """The sets at a temperature; none where all of them are greedy already."""
        sets = list(self._sets.values())
        if temperature is None:
            return sets
        if temperature == 0 and all(one.temperature == 0 for one in sets):
            return []
        return [
            replace(
                one,
                temperature=temperature,
                num_samples=1 if temperature == 0 else one.num_samples,
            )
            for one in sets
        ]

    def collect(self, *, wait: bool = True) -> None:
        """Ends with the evaluation that was begun, if any; without `wait`, if it is complete.

        Raises: what the evaluation raised. ConfigError: it lacks the number of
            `checkpoint.keep_best`.
        """
        if self._running is None or not (wait or self._running.done()):
            return
        running, self._running = self._running, None
        try:
            outcomes = running.result()  # bounded by the groups' own time limit
        except StepLost as error:  # the next call that trains says so, or the run is paused
            self._is_lost = True
            self._run.display.warning(
                f"the evaluation of step {self._named['step']} is lost: {error}"
            )
            return
        results = self._results(outcomes)
        self._warn(outcomes)
        for result in results:
            self._tell(result)
        self._best.note_results(results)

    def _tell(self, result: EvaluationResult) -> None:
        self._run.tell(lambda tracker: tracker.on_evaluation(result))

    def _results(self, outcomes: Sequence[EvaluationOutcome]) -> list[EvaluationResult]:
        """The result of each set that has a name, then that of all together."""
        usual = self._run.config.generation.temperature
        temperatures = [
            usual if one.temperature is None else one.temperature
            for one in self._at(self._asked_temperature)
        ]
        whole, step = self._named["name"], self._named["step"]
        names = [name and _name_of(name, whole) for name in self._sets]
        return results_of_sets(outcomes, names, temperatures, whole, step)

    def _warn(self, outcomes: Sequence[EvaluationOutcome]) -> None:
        """Warns of answers that count as wrong for another reason than what they say."""
        for name, one in zip(self._sets, outcomes, strict=True):
            num_answers = one.num_prompts * one.num_samples
            what = f"{num_answers} answers of the evaluation{f' of {name}' if name else ''}"
            if one.first_rejection is not None:
                causes = describe_counts(one.rejected)
                self._run.display.warning(
                    f"{one.num_rejected} of {what} were rejected ({causes}): they count as wrong "
                    "in its accuracy, and are in no other mean; for example: "
                    f"{one.first_rejection.describe()}"
                )
            cut_answers = self._run.config.generation.cut_answers
            if one.num_cut > MAX_CUT * num_answers and cut_answers.is_inaccurate:
                self._run.display.warning(
                    f"{one.num_cut} of {what} were cut by generation.max_new_tokens, or by the "
                    "context, and count as wrong; where answers need no end of their own, set "
                    "generation.cut_answers=judged"
                )

    def take_over(self, history: History) -> None:
        """What an earlier start has recorded is not done again; what it had begun, or lost, is."""
        evaluations = history.evaluations
        self._recorded = {(result.name, result.step) for result in evaluations}
        self._best.remember(evaluations, self._rollout.version)
        version, every_steps = self._rollout.version, self._run.config.evaluation.every_steps
        due = version - version % every_steps if every_steps else 0
        is_done = any(r.name == "periodic" and r.step >= due for r in evaluations)
        if due > 0 and not is_done and version < self._run.config.total_steps:
            self._begin_periodic()

    def gone_back(self, step: int) -> None:
        """The run has gone back to a step.

        An evaluation that went on, or was lost on the way, begins again: at once, or, if it was of
        a later step, when that step is made. The policy of an earlier step is nowhere any more.
        """
        self._is_due = False
        if self._running is not None and self._named["step"] <= step:
            self.collect(wait=False)
        if self._running is not None:
            self._running.cancel()
            self._running, self._is_lost = None, True
        is_lost, self._is_lost = self._is_lost, False
        self._recorded = {(name, at) for name, at in self._recorded if at <= step}
        self._best.remember(self._best.results, step)
        if is_lost and self._named["step"] == step:
            self.begin(self._named["name"], self._asked_temperature)
        elif is_lost and self._named["step"] < step:
            self._run.display.warning(
                f"the evaluation of step {self._named['step']} is not repeated: the run goes on "
                f"from step {step}"
            )

    def after_step(self) -> None:
        """Every `evaluation.every_steps` steps but the last begins one."""
        version, every_steps = self._rollout.version, self._run.config.evaluation.every_steps
        is_last = version == self._run.config.total_steps
        self._is_due |= bool(every_steps) and version % every_steps == 0 and not is_last
        self.collect(wait=is_last)
        if self._is_due and self._running is None and not is_last:
            self._begin_periodic()
        self._best.settle()

    @property
    def has_enough(self) -> bool:
        """Whether training is to end: see `evaluation.stop_after`."""
        return self._best.has_enough

    def finish(self) -> None:
        """Evaluates the trained model, at the run's temperature and, by default, greedily."""
        self._run.keep_last_step()
        self._rollout.wait_for_weights()
        self._best.begin()
        self.begin("after")
        if self._run.config.evaluation.greedy:
            self.begin("greedy", temperature=0.0)
        self.collect()
        self._best.finish()

    def _begin_periodic(self) -> None:
        self._is_due = False
        self._best.begin()
        self.begin("periodic")


def _name_of(its_set: str, evaluation: str) -> str:
    """The name of what a set gives in an evaluation."""
    return f"{its_set}/{evaluation}" if its_set else evaluation
