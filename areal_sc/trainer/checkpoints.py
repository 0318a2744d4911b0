"""Snapshots, which a run goes on from, and models on its way; both written beside training.

    checkpoints/step-<n>/engine/             weights, optimizer, schedule, RNG of every rank
    checkpoints/step-<n>/controllers.msgpack policy version, ledger, place in the prompt stream;
                                             before it one line: format, and checksum of the rest
    models/step-<n>/                         what `transformers`, SGLang and vLLM load

The ranks' files have checksums of their own. A snapshot gets its name once everything is on disk,
so one that has its name is whole. Rows that were generated but not trained are not kept: their
groups are generated again.

Train workers that die begin from snapshots in memory, which the controller takes by itself. Where
there is none of the present step, the run goes back to the newest of these.
"""

from __future__ import annotations

import logging
import shutil
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Literal

from areal_sc.controller.train.train_controller import TrainController
from areal_sc.errors import CheckpointError, RunFolderError, StaleTerm, StepsLost
from areal_sc.system.durable import commit_folder, partial_of
from areal_sc.trainer.beside import KeepsSnapshots
from areal_sc.trainer.run import Run
from areal_sc.trainer.snapshots import CONTROLLERS, SnapshotState, sealed

logger = logging.getLogger(__name__)

_FAILURES = (OSError, RunFolderError, CheckpointError, StepsLost)
"""Errors of writing: a full disk, for example, or the run goes back."""

_Kind = Literal["snapshot", "model"]


class Checkpoints(KeepsSnapshots):
    """Writes snapshots and models when they are due, one of each kind at a time.

    Every rank copies its state, and training goes on while that is written. The metrics file gets
    an event `snapshot`, `model`, `snapshot_failed` or `model_failed` when it ends. A failure is a
    warning: earlier ones are left as they were, and the run goes on.

    Args:
        others: further models; those that are trained are once a step, and in each snapshot.
    """

    def __init__(
        self,
        run: Run,
        actor: TrainController,
        rollout: SnapshotState,
        *others: TrainController,
    ) -> None:
        self._run = run
        self._actor = actor
        self._others = others
        self._rollout = rollout
        self._snapshot_began_s = time.monotonic()
        run.checkpoints = self
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="snapshots")
        self._running: dict[_Kind, tuple[int, Future[None]]] = {}
        self._exported: set[int] = set()  # steps whose models were begun, since the run went back
        run.beside.append(self)

    def after_step(self) -> None:
        """Begins what is due. The snapshot of the last step is on the disk when this returns.

        The evaluations and the export that follow may take long, and the run may be stopped then.
        """
        step = self._actor.version
        if step == self._run.config.total_steps:
            self._run.keep_last_step()
            self.collect()
            return
        due = self._due(step)
        self.collect(wait=bool(due))
        for kind in due:  # a model waits for a snapshot that has just been begun
            self._start(kind, step)

    def before_going_back(self) -> None:
        """Ends what was begun."""
        self.collect()
        self._exported.clear()  # the same steps will have other models

    def finish(self) -> None:
        """Ends what was begun, and leaves a snapshot of the present step."""
        step = self._actor.version
        self.collect()
        if not self._run.folder.snapshot_path(step).exists():
            self._start("snapshot", step)
            self.collect()

    def export(self) -> None:
        """Begins to write the present step's model to `models/step-<n>`, if nothing did yet."""
        step = self._actor.version
        if step not in self._exported:
            self.collect(wait="model" in self._running)
            self._start("model", step)

    def has_model(self, step: int) -> bool:
        """Whether the model of a step is there, as a whole."""
        begun, _ = self._running.get("model", (None, None))
        return begun != step and self._model_folder(step).exists()

    def collect(self, *, wait: bool = True) -> None:
        """Ends with what was begun; without `wait`, with what is complete."""
        for kind, (step, ended) in list(self._running.items()):
            if not (wait or ended.done()):
                continue
            del self._running[kind]
            try:
                ended.result()  # bounded by the time limit of the ranks' writing
            except _FAILURES as error:
                self._run.display.warning(
                    f"{kind} of step {step} could not be written: {error}; "
                    f"the run goes on without this {kind}"
                )
                continue
            if kind == "model":
                self._run.tell_model(step, self._model_folder(step))

    def _due(self, step: int) -> list[_Kind]:
        """A snapshot after so many steps, so many minutes, or so many rows, what comes first."""
        settings, due = self._run.config.checkpoint, list[_Kind]()
        limit_s = 60 * settings.every_minutes
        is_late = 0 < limit_s <= time.monotonic() - self._snapshot_began_s
        if settings.every_steps and (is_late or step % settings.every_steps == 0):
            due.append("snapshot")
        if settings.export_every_steps and step % settings.export_every_steps == 0:
            due.append("model")
        return due

    def _start(self, kind: _Kind, step: int) -> None:
        if kind == "model":
            self._exported.add(step)
        try:
            written = self._begin(kind, step)
        except _FAILURES as error:
            failed: Future[None] = Future()
            failed.set_exception(error)
            written = [failed]
        ended = self._thread.submit(self._complete, kind, step, written)
        self._running[kind] = step, ended

    def _begin(self, kind: _Kind, step: int) -> list[Future[None]]:
        """Returns once the ranks have copied their state; they write it meanwhile."""
        self._run.folder.check_term()
        if kind == "model":
            return [self._actor.begin_save_hf(self._model_folder(step))]
        models = [self._actor, *(model for model in self._others if model.version)]
        for model in models:
            if model.version != step:
                raise CheckpointError(
                    f"expected all models that are trained at version {step}, got {model.role} at "
                    f"{model.version}: one that is not trained once a step is in no snapshot"
                )
        folder = self._unfinished(step)
        for leftover in self._run.folder.checkpoints.glob("*.partial"):
            if leftover != folder:  # of a start that was killed; its ranks may still write here
                shutil.rmtree(leftover, ignore_errors=True)
        self._snapshot_began_s = time.monotonic()
        folder.mkdir(exist_ok=True)
        self._run.folder.write_atomic(folder / CONTROLLERS, sealed(self._rollout.state()))
        return [model.begin_snapshot() for model in models]

    def _complete(self, kind: _Kind, step: int, written: Sequence[Future[None]]) -> None:
        """Waits for the ranks, and gives a snapshot its name; on a thread of its own."""
        try:
            for of_model in written:
                of_model.result()
            self._run.folder.check_term()  # training has gone on for a while
            if kind == "snapshot":
                commit_folder(self._unfinished(step), self._run.folder.snapshot_path(step))
                for model in (self._actor, *(it for it in self._others if it.version)):
                    model.note_snapshot(step)
                for outdated in self._run.folder.snapshots()[: -self._run.config.checkpoint.keep]:
                    shutil.rmtree(outdated, ignore_errors=True)
        except StaleTerm:
            raise  # all that lies there is the other start's
        except _FAILURES as error:
            if kind == "snapshot":
                shutil.rmtree(self._unfinished(step), ignore_errors=True)
            self._run.log.event(f"{kind}_failed", step=step, error=str(error))
            raise
        self._run.log.event(kind, step=step)

    def _unfinished(self, step: int) -> Path:
        return partial_of(self._run.folder.snapshot_path(step))

    def _model_folder(self, step: int) -> Path:
        return self._run.folder.path / "models" / f"step-{step}"
