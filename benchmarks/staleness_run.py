"""One run of the staleness benchmark: its learning curve, and what became of its tokens."""

from __future__ import annotations

import statistics
import time
from concurrent.futures import Future
from dataclasses import dataclass

import numpy as np
import report
from letter_sort_job import HELD_OUT_SEED, LetterSortJob, Step, training_steps
from letter_sort_task import LetterSortPrompts, letter_sort_reward

from areal_sc import GRPOConfig, RolloutController, SingleTurnWorkflow, Workflow
from areal_sc.controller.rollout.evaluation import EvaluationOutcome, EvaluationSet
from areal_sc.metadata import BatchMetadata


@dataclass(frozen=True)
class Evaluations:
    """When the learning curve is measured, and with how many prompts a point."""

    every_steps: int
    num_prompts: int
    num_final_prompts: int


@dataclass(frozen=True)
class Point:
    """Accuracy of a policy version, `at_s` seconds after the start of the loop."""

    at_s: float
    accuracy: float


@dataclass(frozen=True)
class Run:
    """What one run measured.

    Attributes:
        curve: of versions at equal distances, the first and the last included.
        num_generated_tokens: without those of evaluations. Every group ends within the run, so
            what was not used is wasted.
    """

    steps: list[Step]
    curve: list[Point]
    num_generated_tokens: float

    @property
    def auc(self) -> float:
        """Area under the learning curve: its mean over the versions."""
        return statistics.mean(point.accuracy for point in self.curve)

    def auc_until(self, end_s: float) -> float:
        """Its mean over the first `end_s` seconds, with lines between the points."""
        times = [point.at_s for point in self.curve]
        accuracies = [point.accuracy for point in self.curve]
        return float(np.interp(np.linspace(0.0, end_s, 1001), times, accuracies).mean())

    @property
    def duration_s(self) -> float:
        return self.curve[-1].at_s

    def record(self) -> report.Metrics:
        """Masked tokens were left out of the loss, wasted ones came into no batch."""
        staleness = [step.staleness for step in self.steps]
        num_masked = sum(of_step.num_tokens_masked for of_step in staleness)
        num_used = num_masked + sum(of_step.num_tokens_trained for of_step in staleness)
        return {
            "auc": self.auc,
            "batch_auc": statistics.mean(step.accuracy for step in self.steps),
            "final_accuracy": self.curve[-1].accuracy,
            "s_per_step": self.duration_s / len(self.steps),
            "masked_share": num_masked / num_used,
            "wasted_share": 1 - num_used / self.num_generated_tokens,
            "token_staleness_max": max(of_step.token_max for of_step in staleness),
            "group_staleness_max": max(of_step.group_max for of_step in staleness),
        }


def measure(
    job: LetterSortJob,
    config: GRPOConfig,
    lengths: dict[str, float],
    workflow: Workflow,
    evaluations: Evaluations,
    *,
    is_held: bool,
) -> Run:
    """Trains for `total_steps` steps.

    Args:
        is_held: publishes a version only when every admitted group has ended, so that the batch
            of version i is sampled by version max(0, i - max_staleness) alone.
    """
    steps: list[Step] = []
    with job.workers(config) as workers:
        rollout = workers.rollout
        rollout.groups.admission.total_steps = config.total_steps
        evaluator = _Evaluator(rollout, lengths, config.seed)

        def before_step(version: int) -> None:
            is_due = version % evaluations.every_steps == 0
            if is_held or is_due:
                rollout.wait_for_weights()
            if is_due:
                evaluator.begin(steps[-1].ended_s if steps else 0.0, evaluations.num_prompts)

        def before_publication(batch: BatchMetadata) -> None:
            if is_held:
                oldest = max(0, batch.global_step - config.rollout.max_staleness)
                _check_versions(batch, oldest)
                _wait_for_running_groups(rollout)
                evaluator.collect()

        for step in training_steps(
            workers,
            config.total_steps,
            LetterSortPrompts(config.seed, **lengths),
            workflow,
            before_step=before_step,
            before_publication=before_publication,
        ):
            steps.append(step)
        rollout.wait_for_weights()
        evaluator.begin(steps[-1].ended_s, evaluations.num_final_prompts)
        evaluator.collect()
        num_generated_tokens = workers.num_generated_tokens() - evaluator.num_generated_tokens
    return Run(steps, evaluator.curve, num_generated_tokens)


class _Evaluator:
    """Evaluates on held-out prompts, beside training; one evaluation at a time."""

    def __init__(self, rollout: RolloutController, lengths: dict[str, float], seed: int) -> None:
        self.curve: list[Point] = []
        self.num_generated_tokens = 0.0
        self._rollout = rollout
        self._prompts = LetterSortPrompts(seed + HELD_OUT_SEED, **lengths)
        self._workflow = SingleTurnWorkflow(letter_sort_reward)
        self._pending: tuple[float, Future[list[EvaluationOutcome]]] | None = None

    def begin(self, at_s: float, num_prompts: int) -> None:
        """Evaluates the weights that the rollout worker holds."""
        self.collect()
        outcome = self._rollout.begin_evaluation(
            [EvaluationSet(self._prompts, self._workflow, num_prompts)], ["held_out"]
        )
        self._pending = (at_s, outcome)

    def collect(self) -> None:
        """Waits for the evaluation that goes on, if any."""
        if self._pending is None:
            return
        at_s, pending = self._pending
        self._pending = None
        (outcome,) = pending.result()
        self.curve.append(Point(at_s, outcome.reward))
        self.num_generated_tokens += outcome.num_prompts * outcome.metrics["completion_tokens"]


def _check_versions(batch: BatchMetadata, expected: int) -> None:
    versions = {version for row in batch.rows for version, _ in row.version_spans}
    assert versions == {expected}, (
        f"the batch of version {batch.global_step} was sampled by the versions "
        f"{sorted(versions)}; expected {expected} alone"
    )


def _wait_for_running_groups(rollout: RolloutController) -> None:
    deadline_s = time.monotonic() + rollout.config.group_timeout_s
    while (account := rollout.account())["queued"] + account["running"]:
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"groups that do not end: {account}")
        time.sleep(0.01)
