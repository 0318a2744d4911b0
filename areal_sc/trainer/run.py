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
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, nullcontext
from dataclasses import asdict
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self, TypeVar
from uuid import UUID, uuid4

import yaml

from areal_sc.config.loading.loader import config_text, typed
from areal_sc.config.parallel_settings import Placement
from areal_sc.config.schema import GRPOConfig
from areal_sc.controller.base import Controller
from areal_sc.controller.rollout.rollout_controller import RolloutController
from areal_sc.controller.starting import TakenOver, start
from areal_sc.controller.train.train_controller import TrainController
from areal_sc.errors import RunFolderError, StepsLost
from areal_sc.fleet.worker_life import FleetEvent, PauseWished, Scaled
from areal_sc.log import Screen
from areal_sc.preflight.checks import check_models
from areal_sc.preflight.machine_limits import check_disk, check_named_memory
from areal_sc.preflight.sizes import complete_config
from areal_sc.records.learning_curve import plot_learning_curve
from areal_sc.records.metrics import StepMetrics, Summary, summarize
from areal_sc.records.metrics_log import History, MetricsLog
from areal_sc.records.trackers.background import BackgroundTracker
from areal_sc.records.trackers.base import RunDescription, Tracker
from areal_sc.records.trackers.kinds import make_tracker
from areal_sc.run.run_folder import Opening, RunFolder
from areal_sc.run.run_status import PauseWish, told_pause
from areal_sc.run.run_status import Phase as StatusPhase
from areal_sc.schedulers.base import Scheduler
from areal_sc.schedulers.factory import make_scheduler
from areal_sc.system.process import process_age_s, refuse_in_worker, refuse_several_starts
from areal_sc.trainer.advice import Adviser
from areal_sc.trainer.beside import BesideTraining, KeepsSnapshots
from areal_sc.trainer.display import Display, ShownPhase, make_display
from areal_sc.trainer.failure import Terminated, log_of_run
from areal_sc.trainer.learning_rules import LearningHealth
from areal_sc.trainer.outages import Outage, Outages
from areal_sc.trainer.snapshots import (
    SnapshotState,
    check_resumed,
    compare_with_begin,
    load_latest_snapshot,
)
from areal_sc.trainer.steps import BareStep, Step, count_from, rejections_in
from areal_sc.trainer.stopping import stop_wishes

logger = logging.getLogger(__name__)

S = TypeVar("S", bound=BareStep)

IN_TURNS: Final = (
    "placement=turns: training and generation use a GPU one after the other, so that generation "
    "stands still while a step is trained"
)


class Run:
    """One run in its folder, from the start of its script to its summary. A context manager.

    Args:
        config: the run's settings.
        trackers: further ones than `config.trackers` names. They are told what happens without
            the run waiting for them, so they can neither stop nor slow it.

    Attributes:
        scheduler: starts the workers; its fork server begins to import at once.
        log: the metrics file.
        generates: what it trains on is generated, and not the rows of a data set.
        checkpoints: what writes its snapshots, once there is one.
        beside: what goes on beside training.
    """

    folder: RunFolder
    scheduler: Scheduler
    display: Display
    log: MetricsLog
    generates = True
    checkpoints: KeepsSnapshots | None = None
    _retreats: Retreats
    _adviser: Adviser

    def __init__(self, config: GRPOConfig, trackers: Sequence[Tracker] = ()) -> None:
        refuse_in_worker("Run")
        refuse_several_starts()
        self.config = config
        self._given_trackers = list(trackers)
        self._trackers: list[BackgroundTracker] = []
        self._stack = ExitStack()
        self._is_open = False
        self._opening = Opening.start
        self._began = time.monotonic()
        self._first_step_s: float | None = None
        self._health = LearningHealth(config.actor.dtype)
        self._counted: Mapping[str, float] = {}  # at the end of the newest step
        self.beside: list[BesideTraining] = []
        self._others: Sequence[TrainController] = ()

    def __enter__(self) -> Self:
        self.config = typed(self.config)
        warnings = complete_config(self.config, generates=self.generates)
        if self.generates:
            check_named_memory(self.config)
        warnings += check_disk(self.config, generates=self.generates)
        trackers = [*map(make_tracker, self.config.trackers), *self._given_trackers]
        with ExitStack() as stack:  # nothing stays open when something of this fails
            self.folder = RunFolder(self.config.run_dir)
            self._opening = self.folder.open(
                config_text=config_text(self.config),
                resume=self.config.resume.value,
                overwrite=self.config.overwrite,
                total_steps=self.config.total_steps,
            )
            stack.callback(self.folder.close)
            shown = None if self.config.dry_run else self.folder.path
            self.display = make_display(run_dir=shown, total_steps=self.config.total_steps)
            stack.callback(self.display.close)
            if not self.config.dry_run:
                max_bytes = self.config.scheduler.max_log_bytes
                screen = Screen(self.display.warning, self.display.note)
                stack.enter_context(log_of_run(self.folder, max_bytes, screen))
            for warning in warnings:
                logger.warning("%s", warning)
            self.scheduler = make_scheduler(self.config.scheduler, self.folder)
            stack.callback(self.scheduler.close)
            self.display.on_phases = self._note_phases
            self.log = MetricsLog(self.folder.metrics_path)
            stack.callback(self.log.close)
            for tracker in trackers:
                self._trackers.append(BackgroundTracker(tracker, self.display.warning))
                stack.callback(self._trackers[-1].close)
            if self._trackers:
                description = run_description(self.folder, self.config, self.display.warning)
                self.tell(lambda tracker: tracker.on_start(description))
            for warning in self.folder.warnings:
                self.display.warning(warning)
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
        if error is not None:
            self.scheduler.status.note_end(error)
        self._stack.__exit__(kind, error, trace)

    def opened(self) -> AbstractContextManager[object]:
        """A context in which it is open; at its end it is as it was before."""
        return nullcontext() if self._is_open else self

    @contextmanager
    def training(
        self, actor: TrainController, rollout: RolloutController, *others: TrainController
    ) -> Iterator[Iterator[Step]]:
        """Starts the workers, goes back to the newest snapshot, and gives the steps that are left.

        As with `start`, every worker is gone when the block has ended. A step ends when the next
        one is asked for, and must have published its weights by then. A loop that catches
        `StepLost` calls `step.lose(error)`, and goes on with the next step: the same one, or, when
        train workers cannot go on from where they died, one after the newest snapshot.

        Args:
            others: further models: a frozen one, say; `Checkpoints` gets them, too.
        Raises: ModelError: a model cannot be used. CheckpointError: no snapshot can be read. And
            what `start` raises.
        """
        self._adviser = Adviser(self.config, self.folder.path)

        def begin() -> Step:
            return Step(actor, rollout, self._counted, self._tell_step)

        with self._started(actor, rollout, *others):
            if self.config.dry_run:
                yield iter([begin()])
                return
            with closing(self._steps(actor, rollout, begin)) as steps:
                yield steps

    @contextmanager
    def _started(
        self, actor: TrainController, rollout: SnapshotState, *others: TrainController
    ) -> Iterator[None]:
        """Starts the workers, and goes on from what an earlier start has left."""
        check_models(self.config)  # before any worker is started
        compare_with_begin(self.folder, self.config)
        if self.generates and self._has_snapshot:
            for warning in check_resumed(self.folder):
                self.display.warning(warning)
        generators = [rollout] if isinstance(rollout, RolloutController) else []
        controllers: list[Controller] = [actor, *others, *generators]
        if self.config.dry_run:
            with start(*controllers):
                yield
            return

        def groups_run_again() -> Mapping[str, int]:
            return generators[0].groups.run_again if generators else {}

        outages = Outages(self.display.show_outages, self._tell_outage, groups_run_again)
        self._retreats = Retreats(self.config.scheduler.max_deaths)
        self._others = others
        with ExitStack() as stack:
            for controller in controllers:
                stack.enter_context(controller.heard_by(outages.hear))
            stack.enter_context(controllers[-1].heard_by(self._tell_wished))
            if self.generates and self.config.rollout.placement is Placement.turns:
                self.display.note(IN_TURNS)
            with self.display.phase("start-up"):
                taken = stack.enter_context(start(*controllers))
                if taken is not None:
                    self._take_over(taken, rollout)
                elif self._has_snapshot:
                    self._resume(actor, rollout)
                elif self._opening is Opening.attach:
                    self._begin_again()
            yield

    @property
    def _has_snapshot(self) -> bool:
        """Whether there is one to go on from."""
        is_attached = self._opening is Opening.attach
        return self._opening is Opening.resume or (is_attached and bool(self.folder.snapshots()))

    def tell(self, event: Callable[[Tracker], None]) -> None:
        """Calls one of their methods for everybody who follows the run."""
        event(self.log)
        event(self.display)
        event(self._health)
        for tracker in self._trackers:
            tracker.tell(event)

    def tell_model(self, step: int, folder: Path) -> None:
        """Says that a model lies in a folder."""
        self.tell(lambda tracker: tracker.on_model(step, folder))

    def keep_last_step(self) -> None:
        """Has a snapshot of the newest step on the disk, also where a loop ended before its time.

        What follows may take long, and be stopped.
        """
        if self.checkpoints is not None and self.config.checkpoint.every_steps:
            self.checkpoints.finish()

    def finish(self, actor: TrainController, rollout: RolloutController) -> Summary:
        """Writes the model, the learning curve and, last, the summary: the run is finished."""
        self.keep_last_step()
        self._write_model(actor)
        account = rollout.account()
        logger.info("account=%s", account)
        history = History.read(self.folder.metrics_path)
        plot_learning_curve(history, self.folder.path.name, self.folder.learning_curve_path)
        summary = self._write_summary(
            history,
            num_rows_trained=account["rows_trained"],
            num_rows_trained_twice=account["rows_trained_twice"],
            num_episodes_rejected=rollout.rejections.num_episodes,
            rejected_episodes=rollout.rejections.by_cause(),
        )
        if left_out := len(rollout.rejections.left_out):
            self.display.note(f"{left_out} prompts left no room for an answer, and were left out")
        for complaint in self._health.complaints.values():
            self.display.warning(f"learning, at the end: {complaint}")
        return summary

    def _write_model(self, actor: TrainController) -> None:
        model = self.folder.path / "model"
        actor.save_hf(model)
        self.tell_model(actor.version, model)

    def _write_summary(self, history: History, **counts: Any) -> Summary:
        """The last file of a run: it is finished."""
        summary = summarize(
            history.steps,
            history.evaluations,
            wall_time_s=time.monotonic() - self._began,
            first_step_s=self._first_step_s,
            num_worker_restarts=history.num_worker_restarts,
            **counts,
        )
        self.folder.write_atomic(self.folder.summary_path, summary.to_json())
        self.tell(lambda tracker: tracker.on_finish(summary))
        return summary

    def _tell_outage(self, outage: Outage) -> None:
        logger.info("%s", outage)
        self.display.warning(str(outage))
        self.log.event("workers_restarted", **asdict(outage))

    def _tell_wished(self, event: FleetEvent) -> None:
        match event:
            case Scaled(before, number, why):
                self.display.note(f"{number} rollout workers instead of {before}: {why}")
                self.log.event("scaled", before=before, num_workers=number, cause=why)
            case PauseWished(PauseWish(since, by) as wish):
                self.display.show_pause(told_pause(wish, self.folder.path))
                self.log.event("paused", by=by, since=since)
            case PauseWished():
                self.display.show_pause("")
                self.log.event("pause_ended")

    def _resume(self, actor: TrainController, rollout: SnapshotState) -> None:
        history = History.read(self.folder.metrics_path)
        self._health.remember(history)
        step = self._load_newest(actor, rollout)
        last = history.steps[-1].step if history.steps else step
        lost = f"; {last - step} later steps are lost, and trained again" if last > step else ""
        self.display.note(f"resumed after step {step}{lost}")
        self.log.event("resumed", step=step)
        for other in self.beside:
            other.take_over(History.read(self.folder.metrics_path))

    def _go_back(self, actor: TrainController, rollout: SnapshotState, lost: StepsLost) -> None:
        """In place, to the newest snapshot, or to the initial model; workers stay."""
        begun_at = actor.version
        while True:
            self._retreats.note_retreat(begun_at, lost)
            for other in self.beside:
                other.before_going_back()
            try:
                step = self._load_newest(actor, rollout)
                break
            except StepsLost as again:
                lost = again
        self.log.event("went_back", from_step=begun_at, step=step, cause=str(lost))
        self.display.warning(f"went back from step {begun_at} to step {step}: {lost}")

    def _load_newest(self, actor: TrainController, rollout: SnapshotState) -> int:
        step, warnings = load_latest_snapshot(self.folder, actor, rollout, *self._others)
        for warning in warnings:
            self.display.warning(warning)
        for other in self.beside:
            other.gone_back(step)
        if isinstance(rollout, RolloutController):
            actor.share_weights(rollout)
        return step

    def _begin_again(self) -> None:
        """Workers of an earlier start live, but the ranks cannot go on; nothing was saved."""
        self.log.event("resumed", step=0)
        self.display.warning(
            "the run starts again from nothing: the train workers of the start before could not "
            "go on (the log says why), and there is no snapshot"
        )

    def _take_over(self, taken: TakenOver, rollout: SnapshotState) -> None:
        """An earlier start was killed, and its workers live: nothing is loaded."""
        history = History.read(self.folder.metrics_path)
        self._health.remember(history)
        last = history.steps[-1] if history.steps else None
        self._counted = last.counters if last else {}
        if isinstance(rollout, RolloutController):
            rollout.rejections.restore(rejections_in(self._counted))
        if taken.version and (last is None or last.step < taken.version):
            self.display.warning(
                f"step {taken.version} was trained, but the script was killed before it could "
                f"record that: {self.folder.metrics_path} lacks it"
            )
        self.display.note(str(taken))
        told = taken._asdict()
        self.log.event("reattached", step=told.pop("version"), **told)
        for other in self.beside:
            other.take_over(history)

    def _steps(
        self, actor: TrainController, rollout: SnapshotState, begin: Callable[[], S]
    ) -> Generator[S, None, None]:
        if isinstance(rollout, RolloutController):
            self._counted = count_from(self._counted, actor, rollout)
        total, settings = self.config.total_steps, self.config.checkpoint
        limit_s = settings.stop_within_s if self.checkpoints and settings.every_steps else 0.0
        with (
            self.display.phase("training", total, "steps", actor.version) as phase,
            stop_wishes(limit_s, partial(self._tell_stop, actor)) as stop,
            actor.heard_by(stop.hear),
        ):
            rollout.standstill.is_left = lambda: stop.is_due
            while True:
                if stop.takes_snapshot() and self.checkpoints is not None:
                    self.checkpoints.finish()
                if stop.asked_by is not None and self.checkpoints is not None:
                    raise Terminated(stop.asked_by)
                if actor.version > total:  # as workers that live tell, which have no snapshot of it
                    raise RunFolderError(
                        f"expected total_steps of at least {actor.version}, which are trained "
                        f"already, got {total}; raise it"
                    )
                if actor.version == total:
                    return
                step = begin()
                yield step
                if isinstance(step.lost, StepsLost):
                    self._go_back(actor, rollout, step.lost)
                    phase.advance(actor.version - phase.done)
                if step.lost is not None:
                    continue
                if actor.version != step.number:
                    raise RuntimeError(
                        f"step {step.number} ended at policy version {actor.version}: call "
                        "actor.publish_weights(rollout) once a step"
                    )
                phase.advance()

    def _tell_stop(self, actor: TrainController, stopped_by: str) -> None:
        self.display.note(
            f"{stopped_by}: finishing step {actor.version + 1} and its snapshot, in "
            f"{self.config.checkpoint.stop_within_s:g} s at most; {stopped_by} again stops now"
        )

    def _note_phases(self, phases: Sequence[ShownPhase]) -> None:
        self.scheduler.status.note_phases(
            [StatusPhase(p.name, p.since, p.done, p.total, p.unit) for p in phases]
        )

    def _tell_metrics(self, metrics: StepMetrics) -> None:
        if self._first_step_s is None:
            self._first_step_s = process_age_s()
        self.tell(lambda tracker: tracker.on_step(metrics))

    def _tell_step(self, metrics: StepMetrics) -> None:
        self._tell_metrics(metrics)
        self._counted = metrics.counters
        for complaint in self._health.take_untold():
            self.display.warning(f"learning: {complaint}")
        if not self._health.complaints:  # what learns nothing need not be fast
            for advice in self._adviser.on_step(metrics):
                self.display.warning(advice)


class Retreats:
    """Counts how often a run went back since the farthest step was made. Pure state.

    Args:
        max_retreats: without a step beyond that; the next one ends the run.
    """

    def __init__(self, max_retreats: int) -> None:
        self._max_retreats = max_retreats
        self._farthest = 0
        self._num = 0

    def note_retreat(self, step: int, cause: StepsLost) -> None:
        """The run is about to go back from a step.

        Raises: StepsLost: it has done so too often.
        """
        if step > self._farthest:
            self._farthest, self._num = step, 0
        self._num += 1
        if self._num > self._max_retreats:
            raise StepsLost(
                f"the run went back {self._num} times without a step beyond step "
                f"{self._farthest}, scheduler.max_deaths is {self._max_retreats}; the last time: "
                f"{cause}"
            ) from cause


def run_description(
    folder: RunFolder, config: GRPOConfig, warn: Callable[[str], None]
) -> RunDescription:
    """The run as trackers know it; its name for them is in its folder from the first start on.

    Args:
        warn: is called when that name cannot be read, and there is a new one.
    """
    return RunDescription(
        id=_tracker_id(folder, warn),
        name=folder.path.name,
        folder=folder.path,
        project=config.tracker_project,
        settings=yaml.safe_load(config_text(config)),
    )


def _tracker_id(folder: RunFolder, warn: Callable[[str], None]) -> str:
    path = folder.tracker_id_path
    try:
        return UUID(hex=path.read_text()).hex
    except (OSError, ValueError) as error:
        if not isinstance(error, FileNotFoundError):
            warn(f"{path} is damaged ({error}): trackers begin a new run")
    name = uuid4().hex
    folder.write_atomic(path, name.encode())
    return name
