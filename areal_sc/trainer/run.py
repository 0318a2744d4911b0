"""A run: its folder, its workers' scheduler, and everybody who is told how it goes.

    with Run(config) as run:                          folder, metrics file, display, scheduler
        with run.training(actor, rollout) as steps:   workers; after a crash, the newest snapshot
            for step in steps:                        the steps that are left
                ...
                step.record(batch, stats)             to the metrics file, the display, trackers
        run.finish(...)                               model, summary, learning curve

Training itself is the caller's: `PPOTrainer` is a run whose loop is written already.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Self
from uuid import UUID, uuid4

import yaml

from areal_sc.config.loader import config_text, typed
from areal_sc.config.model_context import take_context
from areal_sc.config.schema import GRPOConfig
from areal_sc.controller.control_loop import start
from areal_sc.controller.rollout import RolloutController
from areal_sc.controller.train import TrainController
from areal_sc.errors import RunFolderError
from areal_sc.log import logging_to
from areal_sc.preflight.checks import check_config, check_models
from areal_sc.run_folder import Opening, RunFolder
from areal_sc.samples import Sample
from areal_sc.schedulers.base import Scheduler
from areal_sc.schedulers.factory import make_scheduler
from areal_sc.trainer.advice import tail_advice
from areal_sc.trainer.checkpoints import load_latest_snapshot
from areal_sc.trainer.display import Display, make_display
from areal_sc.trainer.learning_curve import plot_learning_curve
from areal_sc.trainer.metrics import StepMetrics, Summary, summarize
from areal_sc.trainer.metrics_log import History, MetricsLog
from areal_sc.trainer.outages import Outage, Outages
from areal_sc.trainer.resume_checks import check_resumed
from areal_sc.trainer.steps import Step, count
from areal_sc.trainer.trackers.background import BackgroundTracker
from areal_sc.trainer.trackers.base import RunDescription, Tracker
from areal_sc.trainer.trackers.kinds import make_tracker

logger = logging.getLogger(__name__)


class Run:
    """One run in its folder, from the start of its script to its summary. A context manager.

    Args:
        config: the run's settings.
        trackers: further ones than `config.trackers` names. They are told what happens without
            the run waiting for them, so they can neither stop nor slow it.

    Attributes:
        scheduler: starts the workers; its fork server begins to import at once.
        log: the metrics file.
    """

    folder: RunFolder
    scheduler: Scheduler
    display: Display
    log: MetricsLog

    def __init__(self, config: GRPOConfig, trackers: Sequence[Tracker] = ()) -> None:
        self.config = config
        self._given_trackers = list(trackers)
        self._trackers: list[BackgroundTracker] = []
        self._stack = ExitStack()
        self._is_open = False
        self._opening = Opening.start
        self._began = time.monotonic()
        self._first_step_s: float | None = None
        self._has_advised = False
        self._shown_samples: tuple[Sample, ...] = ()

    def __enter__(self) -> Self:
        self.config = typed(self.config)
        take_context(self.config)
        warnings = check_config(self.config)
        trackers = [*map(make_tracker, self.config.trackers), *self._given_trackers]
        with ExitStack() as stack:  # nothing stays open when something of this fails
            self.folder = RunFolder(self.config.run_dir)
            self._opening = self.folder.open(
                config_text=config_text(self.config),
                resume=self.config.resume.value,
                overwrite=self.config.overwrite,
            )
            stack.callback(self.folder.close)
            stack.enter_context(_log_of_run(self.folder))
            for warning in warnings:
                logger.warning("%s", warning)
            self.scheduler = make_scheduler(self.config.scheduler, self.folder)
            stack.callback(self.scheduler.close)
            self.display = make_display(
                run_dir=self.folder.path, total_steps=self.config.total_steps
            )
            stack.callback(self.display.close)
            self.log = MetricsLog(self.folder.metrics_path)
            stack.callback(self.log.close)
            for tracker in trackers:
                self._trackers.append(BackgroundTracker(tracker, self.display.warning))
                stack.callback(self._trackers[-1].close)
            self._begin_trackers()
            if self._opening is Opening.overwrite:
                self.display.warning(
                    f"the earlier run in {self.folder.path} was deleted: overwrite"
                )
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
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._is_open = False
        self._stack.__exit__(kind, error, trace)

    @contextmanager
    def training(
        self, actor: TrainController, rollout: RolloutController
    ) -> Iterator[Iterator[Step]]:
        """Starts the workers, goes back to the newest snapshot, and gives the steps that are left.

        As with `start`, every worker is gone when the block has ended. A step ends when the next
        one is asked for, and must have published its weights by then. A loop that catches
        `BatchLost` calls `step.lose(error)`, and goes on with the next step.

        Raises: ModelError: a model cannot be used. CheckpointError: no snapshot can be read. And
            what `start` raises.
        """
        check_models(self.config)  # before any worker is started
        if self._opening is Opening.resume:
            for warning in check_resumed(self.folder):
                self.display.warning(warning)
        rollout.rejections.on_warning = self.display.warning
        outages = Outages(self._tell_outage, lambda: rollout.groups.run_again)
        actor.on_outage = rollout.on_outage = outages.note
        rollout.has_display = True
        with ExitStack() as stack:
            with self.display.phase("start-up"):
                stack.enter_context(start(actor, rollout))
                if self._opening is Opening.resume:
                    self._resume(actor, rollout)
            yield stack.enter_context(closing(self._steps(actor, rollout)))

    def tell(self, event: Callable[[Tracker], None]) -> None:
        """Calls one of their methods for everybody who follows the run."""
        event(self.log)
        event(self.display)
        for tracker in self._trackers:
            tracker.tell(event)

    def tell_model(self, step: int, folder: Path) -> None:
        """Says that a model lies in a folder."""
        self.tell(lambda tracker: tracker.on_model(step, folder))

    def finish(self, actor: TrainController, rollout: RolloutController) -> Summary:
        """Writes the model, the learning curve and, last, the summary: the run is finished."""
        model = self.folder.path / "model"
        actor.save_hf(model)
        self.tell_model(actor.version, model)
        account = rollout.account()
        logger.info("account=%s", account)
        history = History.read(self.folder.metrics_path)
        summary = summarize(
            history.steps,
            history.evaluations,
            wall_time_s=time.monotonic() - self._began,
            first_step_s=self._first_step_s,
            num_rows_trained=account["rows_trained"],
            num_rows_trained_twice=account["rows_trained_twice"],
            num_worker_restarts=history.num_worker_restarts,
            num_episodes_rejected=rollout.rejections.num_episodes,
            rejected_episodes=rollout.rejections.by_cause(),
        )
        plot_learning_curve(history, self.folder.path.name, self.folder.learning_curve_path)
        self.folder.write_atomic(self.folder.summary_path, summary.to_json())
        self.tell(lambda tracker: tracker.on_finish(summary))
        return summary

    def _begin_trackers(self) -> None:
        if not self._trackers:
            return
        description = RunDescription(
            id=self._tracker_id(),
            name=self.folder.path.name,
            folder=self.folder.path,
            project=self.config.tracker_project,
            settings=yaml.safe_load(config_text(self.config)),
        )
        self.tell(lambda tracker: tracker.on_start(description))

    def _tell_outage(self, outage: Outage) -> None:
        logger.warning("%s", outage)
        self.display.warning(str(outage))
        self.log.event("workers_restarted", **asdict(outage))

    def _tracker_id(self) -> str:
        """The run's name for trackers, from the first start on."""
        path = self.folder.tracker_id_path
        try:
            return UUID(hex=path.read_text()).hex
        except (OSError, ValueError) as error:
            if not isinstance(error, FileNotFoundError):
                self.display.warning(f"{path} is damaged ({error}): trackers begin a new run")
        name = uuid4().hex
        self.folder.write_atomic(path, name.encode())
        return name

    def _resume(self, actor: TrainController, rollout: RolloutController) -> None:
        step, warnings = load_latest_snapshot(self.folder, actor, rollout)
        for warning in warnings:
            self.display.warning(warning)
        actor.share_weights(rollout)
        self.display.note(f"resumed after step {step}")
        self.log.event("resumed", step=step)

    def _steps(
        self, actor: TrainController, rollout: RolloutController
    ) -> Generator[Step, None, None]:
        total, counters = self.config.total_steps, count(actor, rollout)
        tell = partial(self._tell_step, rollout)
        with self.display.phase("training", total, "steps") as phase:
            phase.advance(actor.version)
            while actor.version < total:
                step = Step(actor, rollout, counters, tell)
                yield step
                if step.is_lost:
                    continue
                if actor.version != step.number:
                    raise RuntimeError(
                        f"step {step.number} ended at policy version {actor.version}: call "
                        "actor.publish_weights(rollout) once a step"
                    )
                counters = step.counters
                phase.advance()

    def _tell_step(self, rollout: RolloutController, metrics: StepMetrics) -> None:
        if self._first_step_s is None:
            self._first_step_s = _process_age_s()
        self.tell(lambda tracker: tracker.on_step(metrics))
        samples = rollout.newest_samples
        if self.config.samples.show and samples and samples is not self._shown_samples:
            self._shown_samples = samples
            self.display.show_samples([s for s in samples if s.group == samples[0].group])
        advice = tail_advice(self.config.rollout, metrics)
        if advice and not self._has_advised:  # once a run
            self._has_advised = True
            self.display.warning(advice)


@contextmanager
def _log_of_run(folder: RunFolder) -> Iterator[None]:
    """The script's log is the run's; an error that ends the run tells `run_script` its folder."""
    path = folder.logs / "controller.log"
    with ExitStack() as stack:
        try:
            stack.enter_context(logging_to("controller", path))
        except OSError as error:
            raise RunFolderError(f"cannot write {path}: {error.strerror}") from error
        try:
            yield
        except BaseException as error:
            error.run_dir = folder.path  # type: ignore[attr-defined]
            raise


def _process_age_s() -> float:
    """Seconds since this process was started."""
    started_ticks = float(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    uptime_s = float(Path("/proc/uptime").read_text().split()[0])
    return uptime_s - started_ticks / os.sysconf("SC_CLK_TCK")
