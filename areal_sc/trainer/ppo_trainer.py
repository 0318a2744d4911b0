"""PPOTrainer: THE training loop, with evaluation, snapshots, recovery, metrics and display.

    for each policy version:
        rollout.prepare_batch            waits for generation           wait_s
        compute_advantages
        compute_proximal_logprobs
        ppo_update                       trains                         train_s
        publish_weights                  version += 1                   sync_s

Generation never waits for this loop; it is limited by the staleness bound alone. Evaluations
within a run go on beside it.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

from areal_sc.config.checks import check_config, check_models
from areal_sc.config.loader import config_text
from areal_sc.config.schema import GRPOConfig
from areal_sc.controller.control_loop import start
from areal_sc.controller.evaluation import EvaluationOutcome
from areal_sc.controller.rollout import RolloutController
from areal_sc.controller.staleness import StalenessStats
from areal_sc.controller.train import TrainController
from areal_sc.engines.handles import FSDPPPOActor, make_generator
from areal_sc.errors import CheckpointError
from areal_sc.log import setup_logging
from areal_sc.metadata import BatchMetadata
from areal_sc.run_folder import Opening, RunFolder
from areal_sc.schedulers.base import Scheduler
from areal_sc.schedulers.factory import make_scheduler
from areal_sc.trainer.advice import tail_advice
from areal_sc.trainer.display import RunDisplay, make_display
from areal_sc.trainer.evaluations import Evaluations
from areal_sc.trainer.exports import ModelExports
from areal_sc.trainer.learning_curve import plot_learning_curve
from areal_sc.trainer.metrics import (
    PLANE_COUNTERS,
    UPDATE_COUNTERS,
    EvaluationResult,
    StepMetrics,
    Summary,
    summarize,
)
from areal_sc.trainer.metrics_log import (
    MetricsLog,
    read_metrics,
    surviving_evaluations,
    surviving_steps,
)
from areal_sc.trainer.recovery import SnapshotWriter, load_latest_snapshot
from areal_sc.workflows.base import Workflow
from areal_sc.workflows.sources import PromptSource

logger = logging.getLogger(__name__)


@dataclass
class _Totals:
    """Counters of the rollout workers at the end of the step before."""

    generated_tokens: float = 0.0
    wasted_tokens: float = 0.0
    rejected_groups: int = 0
    controller_bytes: int = 0


@dataclass
class _Clock:
    """Seconds of one step by what they went to."""

    began: float = field(default_factory=time.monotonic)
    spent: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        began = time.monotonic()
        try:
            yield
        finally:
            self.spent[name] = self.spent.get(name, 0.0) + time.monotonic() - began


class PPOTrainer:
    """Owns the run folder, the scheduler and the display of one run.

    Use it as a context manager when something runs before `fit` in the same run, a warm start
    say; `fit` alone opens and closes it by itself.

    Attributes:
        config: the run's settings.
        folder: the run folder.
        scheduler: lends the nodes that workers run on; its agent begins to import at once.
        display: shows the run.
    """

    folder: RunFolder
    scheduler: Scheduler
    display: RunDisplay

    def __init__(self, config: GRPOConfig) -> None:
        self.config = config
        self._stack = ExitStack()
        self._is_open = False
        self._opening = Opening.start
        self._totals = _Totals()
        self._began = time.monotonic()
        self._first_step_s: float | None = None
        self._has_advised = False

    def __enter__(self) -> Self:
        warnings = check_config(self.config)
        with ExitStack() as stack:  # nothing stays open when something of this fails
            self.folder = RunFolder(self.config.run_dir)
            self._opening = self.folder.open(
                config_text=config_text(self.config),
                resume=self.config.resume.value,
                overwrite=self.config.overwrite,
            )
            stack.callback(self.folder.close)
            setup_logging("controller", self.folder.logs / "controller.log")
            for warning in warnings:
                logger.warning("%s", warning)
            self.scheduler = make_scheduler(self.config.scheduler, self.folder)
            stack.callback(self.scheduler.close)
            self.display = stack.enter_context(
                make_display(run_dir=self.folder.path, total_steps=self.config.total_steps)
            )
            self._log = stack.enter_context(MetricsLog(self.folder.metrics_path))
            self._snapshots = SnapshotWriter(self.folder, self.config.checkpoint, self._log.event)
            self._exports = ModelExports(self.folder.path / "models", self._log.event)
            if self._opening is Opening.restart:
                self.display.warning(
                    f"an earlier start in {self.folder.path} left no snapshot, so the run starts "
                    "again from nothing; what is left of that start is in previous/"
                )
            self._stack = stack.pop_all()
        self._is_open = True
        return self

    def __exit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._is_open = False
        self._stack.close()

    def fit(
        self,
        workflow: Workflow,
        prompts: PromptSource,
        *,
        evaluation_prompts: PromptSource | None = None,
        evaluation_workflow: Workflow | None = None,
    ) -> Summary:
        """Trains for `total_steps` steps and leaves the model in `<run_dir>/model`.

        Args:
            workflow: the episode; run `rollout.group_size` times a prompt.
            prompts: a dataset, or a list of dicts.
            evaluation_prompts: held-out prompts; None: nothing is evaluated.
            evaluation_workflow: None: as for training.
        Returns: the numbers of `summary.json`.
        """
        if not self._is_open:
            with self:
                return self.fit(
                    workflow,
                    prompts,
                    evaluation_prompts=evaluation_prompts,
                    evaluation_workflow=evaluation_workflow,
                )
        check_models(self.config)  # before any worker is started
        actor = TrainController(FSDPPPOActor(self.config.actor), self.scheduler)
        rollout = RolloutController(make_generator(self.config.rollout), self.scheduler)
        evaluations = Evaluations(
            self.config,
            rollout,
            evaluation_prompts,
            evaluation_workflow or workflow,
            self._show_evaluation,
        )
        with self.display.phase("datasets"):  # what is wrong ends the run before a worker starts
            rollout.register(prompts, workflow)
            evaluations.register()
        with ExitStack() as stack:
            with self.display.phase("start-up"):
                stack.enter_context(start(actor, rollout))
                self._resume(actor, rollout, evaluations)
            self._train(actor, rollout, workflow, prompts, evaluations)
            summary = self._finish(actor, rollout, evaluations)
        self.display.finish(summary, self.folder.path)
        return summary

    def _train(
        self,
        actor: TrainController,
        rollout: RolloutController,
        workflow: Workflow,
        prompts: PromptSource,
        evaluations: Evaluations,
    ) -> None:
        total = self.config.total_steps
        with self.display.phase("training", total, "steps") as phase:
            phase.advance(actor.version)
            if actor.version == 0:
                evaluations.begin("before", actor.version)
            for step in range(actor.version, total):
                clock = _Clock()
                with clock.part("wait"):
                    batch = rollout.prepare_batch(prompts, workflow)
                with clock.part("train"):
                    batch = actor.compute_advantages(batch)
                    batch = actor.compute_proximal_logprobs(batch)
                    stats = actor.ppo_update(batch)
                if step == 0:
                    evaluations.collect(wait=True)  # the first one sees no publication
                with clock.part("sync"):
                    actor.publish_weights(rollout)
                self._record_step(batch, rollout, actor, stats, clock)
                phase.advance()
                self._after_step(actor, rollout, evaluations)
            self._collect_writes(wait=True)
            evaluations.collect(wait=True)

    def _after_step(
        self, actor: TrainController, rollout: RolloutController, evaluations: Evaluations
    ) -> None:
        is_last = actor.version == self.config.total_steps
        evaluations.collect(wait=False)
        if _is_due(actor.version, self.config.evaluation.every_steps) and not is_last:
            evaluations.collect(wait=True)
            evaluations.begin("periodic", actor.version)
        self._collect_writes(wait=False)
        is_snapshot_due = self._snapshots.is_due(actor.version)
        is_export_due = _is_due(actor.version, self.config.checkpoint.export_every_steps)
        if (is_snapshot_due or is_export_due) and not is_last:
            self._collect_writes(wait=True)
        if is_snapshot_due and not is_last:
            with self._or_without("snapshot"):
                self._snapshots.begin(actor, rollout)
        if is_export_due and not is_last:  # waits for a snapshot that has just been begun
            with self._or_without("model"):
                self._exports.begin(actor)

    def _collect_writes(self, *, wait: bool) -> None:
        with self._or_without("snapshot"):
            self._snapshots.collect(wait=wait)
        with self._or_without("model"):
            self._exports.collect(wait=wait)

    @contextmanager
    def _or_without(self, what: str) -> Iterator[None]:
        try:
            yield
        except CheckpointError as error:
            self.display.warning(f"{error}; the run goes on without this {what}")

    def _finish(
        self, actor: TrainController, rollout: RolloutController, evaluations: Evaluations
    ) -> Summary:
        rollout.wait_for_weights()
        evaluations.begin("after", actor.version)
        evaluations.collect(wait=True)
        if self.config.evaluation.greedy:
            evaluations.begin("greedy", actor.version, temperature=0.0)
            evaluations.collect(wait=True)
        actor.save_hf(self.folder.path / "model")
        account = rollout.account()
        logger.info("account=%s", account)
        summary = summarize(
            surviving_steps(read_metrics(self.folder.metrics_path)),
            evaluations.results,
            wall_time_s=time.monotonic() - self._began,
            first_step_s=self._first_step_s,
            num_rows_trained=account["rows_trained"],
            num_rows_trained_twice=account["rows_trained_twice"],
            num_rows_rejected=rollout.rejections.rows.total() + rollout.rejections.num_stale_rows,
        )
        plot_learning_curve(self.folder.metrics_path, self.folder.learning_curve_path)
        self.folder.write_atomic(self.folder.summary_path, summary.to_json().encode())
        return summary

    def _record_step(
        self,
        batch: BatchMetadata,
        rollout: RolloutController,
        actor: TrainController,
        stats: dict[str, float],
        clock: _Clock,
    ) -> None:
        staleness = StalenessStats.of(batch.rows, batch.global_step, batch.min_token_version)
        workers = rollout.worker_stats()
        now = _Totals(
            generated_tokens=sum(worker["generated_tokens"] for worker in workers),
            wasted_tokens=rollout.rejections.wasted_tokens
            + sum(worker["cancelled_tokens"] for worker in workers),
            rejected_groups=sum(rollout.account()["rejected"].values()),
            controller_bytes=actor.num_bytes + rollout.num_bytes,
        )
        before, self._totals = self._totals, now
        metrics = StepMetrics(
            step=actor.version,
            reward=sum(row.reward for row in batch.rows) / batch.total_batch_size,
            accuracy=rollout.batch_metrics.get("accuracy"),
            group_staleness_mean=staleness.group_mean,
            group_staleness_max=staleness.group_max,
            token_staleness_mean=staleness.token_mean,
            token_staleness_max=staleness.token_max,
            num_rows=batch.total_batch_size,
            num_generated_tokens=int(now.generated_tokens - before.generated_tokens),
            num_trained_tokens=staleness.num_tokens_trained,
            num_masked_tokens=staleness.num_tokens_masked,
            num_wasted_tokens=int(now.wasted_tokens - before.wasted_tokens),
            num_rejected_groups=now.rejected_groups - before.rejected_groups,
            mean_sequence_length=batch.num_tokens / batch.total_batch_size,
            step_time_s=time.monotonic() - clock.began,
            wait_s=clock.spent["wait"],
            train_s=clock.spent["train"],
            sync_s=clock.spent["sync"],
            controller_bytes=now.controller_bytes - before.controller_bytes,
            train=stats,
            counters={
                **{
                    name: sum(worker[name] for worker in [*workers, *actor.worker_stats()])
                    for name in PLANE_COUNTERS
                },
                **{
                    name: sum(worker.get(name, 0) for worker in workers) for name in UPDATE_COUNTERS
                },
                **actor.publication_stats,
            },
        )
        if self._first_step_s is None:
            self._first_step_s = _process_age_s()
        self._log.step(metrics)
        self.display.step(metrics)
        self._advise(metrics)

    def _advise(self, metrics: StepMetrics) -> None:
        """One line of advice, once a run, when its tail goes far over the bound."""
        advice = tail_advice(
            max_staleness=self.config.rollout.max_staleness,
            over_bound=self.config.rollout.over_bound,
            group_staleness_max=metrics.group_staleness_max,
            masked_share=metrics.masked_share,
            wasted_share=metrics.wasted_share,
        )
        if advice and not self._has_advised:
            self._has_advised = True
            self.display.warning(advice)

    def _show_evaluation(self, result: EvaluationResult, outcome: EvaluationOutcome) -> None:
        if outcome.num_rejected:
            self.display.warning(
                f"{outcome.num_rejected} prompts of the evaluation were rejected; for example: "
                f"{outcome.rejection_example}"
            )
        self._log.evaluation(result)
        self.display.evaluation(result)

    def _resume(
        self, actor: TrainController, rollout: RolloutController, evaluations: Evaluations
    ) -> None:
        if self._opening is not Opening.resume:
            return
        step, warnings = load_latest_snapshot(self.folder, actor, rollout)
        for warning in warnings:
            self.display.warning(warning)
        actor.share_weights(rollout)
        self._totals.rejected_groups = sum(rollout.account()["rejected"].values())
        self.display.note(f"resumed after step {step}")
        self._log.event("resumed", step=step)
        evaluations.results = surviving_evaluations(read_metrics(self.folder.metrics_path))


def _is_due(version: int, every: int) -> bool:
    return every > 0 and version % every == 0


def _process_age_s() -> float:
    """Seconds since this process was started."""
    started_ticks = float(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    uptime_s = float(Path("/proc/uptime").read_text().split()[0])
    return uptime_s - started_ticks / os.sysconf("SC_CLK_TCK")
