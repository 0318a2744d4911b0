"""RolloutController: what a script sees of generation.

    prompts (references)                 publish_weights
         |                                     |
    TrainingGroups ------------------- RolloutWorkers ---- Fleet ----> rollout workers
     admission, batches       |         runs of groups,     calls,
         |                    |         weights, stores     liveness
      batch             OutsideGroups
                         rollout_batch, evaluations

All of it runs on the one event loop of the `start` block. Generation goes on between two calls;
what fails meanwhile is raised by the next call that waits.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from typing import Any

from msgspec import Struct

from areal_sc.config.schema import RolloutConfig
from areal_sc.controller.background import Background
from areal_sc.controller.base import Controller, blocking
from areal_sc.controller.batch_samples import BatchSamples
from areal_sc.controller.evaluation import EvaluationOutcome
from areal_sc.controller.group import RolloutSource
from areal_sc.controller.journal import Journal
from areal_sc.controller.ledger_records import LedgerState
from areal_sc.controller.node_workers import Member
from areal_sc.controller.outside_groups import OutsideGroups
from areal_sc.controller.progress import ProgressWatch
from areal_sc.controller.recovery import Recovery
from areal_sc.controller.rejections import RejectionCounts, Rejections
from areal_sc.controller.rollout_workers import RolloutWorkers
from areal_sc.controller.runtime import Runtime
from areal_sc.controller.training_groups import TrainingGroups
from areal_sc.controller.weight_updates import RPC_MARGIN_S, update_timeout_s
from areal_sc.engines.handle_base import GeneratorHandle
from areal_sc.errors import RunFolderError, WorkerError, WorkerLost
from areal_sc.metadata import BatchMetadata, RowMetadata
from areal_sc.run_folder import RunFolder
from areal_sc.samples import Sample
from areal_sc.schedulers.base import Scheduler
from areal_sc.weights import WeightsReference
from areal_sc.workers import calls
from areal_sc.workers.spec import ROLLOUT_ROLE
from areal_sc.workflows.base import Workflow
from areal_sc.workflows.row_file import PromptSource

logger = logging.getLogger(__name__)


class RolloutState(Struct, frozen=True):
    """What a new controller needs to go on; a snapshot keeps it."""

    training: LedgerState
    rejections: RejectionCounts


class RolloutController(Controller):
    """Runs the user's workflow over prompts on any number of rollout workers.

    Methods block, and have awaitable twins: see TrainController.

    Attributes:
        groups: those of training, and their ledger.
        rejections: what was thrown away.
        has_display: whether a `Run` shows the samples.
    """

    engine: GeneratorHandle
    has_display: bool = False

    def __init__(
        self, engine: GeneratorHandle, scheduler: Scheduler, *, runtime: Runtime | None = None
    ) -> None:
        engine = engine.with_context()
        super().__init__(engine, scheduler, ROLLOUT_ROLE, runtime)
        self.config: RolloutConfig = engine.config
        self.measures_free_memory = engine.takes_free_memory
        self._background = Background(
            RPC_MARGIN_S
            + max(self.config.group_timeout_s + RPC_MARGIN_S, update_timeout_s(engine)),
            lambda: f"groups: {self.groups.ledger.account()}",
        )
        self._workers = RolloutWorkers(engine, self.fleet, self._background, self._needs)
        self.rejections = Rejections(self.config.rejection_window, self.config.max_rejection_rate)
        new_id = self._runtime.new_id
        self._folder = RunFolder(scheduler.config.run_dir)
        self._journal = Journal(self._folder.ledger, self._runtime.disk, self._give_up)
        self.groups = TrainingGroups(
            self.config,
            self._workers,
            self.rejections,
            self._background,
            self._sources.make_readable,
            self._journal.durable,
            new_id,
        )
        self._samples = BatchSamples(
            self.config.samples, self.fleet, self._background, self._folder.samples_path
        )
        self._outside = OutsideGroups(
            self.config,
            self._workers,
            self.rejections,
            self._sources.make_readable,
            self._background,
            new_id,
        )
        self._workers.on_progress = self._note_progress
        self._workers.on_rows_lost = self._lose_rows
        self._watch = ProgressWatch(
            self._workers,
            self.rejections,
            self.config.max_lost_s,
            lambda: self._outside.num_open + self.groups.num_awaited,
            lambda: self._outside.num_finished + self.groups.num_finished,
        )

    @property
    def version(self) -> int:
        """The policy version that admission and batch forming count from."""
        return self.groups.version

    @property
    def batch_metrics(self) -> dict[str, float]:
        """Means of the workflow's own metrics over the newest batch."""
        return self.groups.batch_metrics

    @property
    def newest_samples(self) -> tuple[Sample, ...]:
        """The newest lines of `samples.jsonl`: what the model wrote, of the last batch read."""
        return self._samples.newest

    async def start_async(self) -> None:
        """Starts the workers and builds the engine in each.

        Raises: WorkerStartError, ModelError: with the worker's own words.
        """
        if self.config.samples.show and not self.has_display:
            logger.warning(
                "samples.show=true has no effect in a loop without a `Run`: print "
                "rollout.newest_samples, or read them with `python -m areal_sc samples %s`",
                self.scheduler.config.run_dir,
            )
        configs = [self.engine.of_worker(index) for index in range(self.config.num_workers)]
        await self._launch(ROLLOUT_ROLE, configs)
        self._workers.track(self.fleet.members)
        self._workers.check_room()
        await self._workers.initialize()
        self._recovery = Recovery(
            self.fleet,
            {member.name: [member] for member in self.fleet.members},
            self.fleet.config.max_deaths,
            self._workers.bring_up,
            self._give_up,
            self._workers.recount_soon,
        )
        self._recovery.on_outage = self.on_outage
        self._workers.is_ready = self._recovery.is_ready
        self._background.start(self._watch.run(), "progress")

    async def close_async(self) -> None:
        """Ends all running groups, then the workers."""
        self.groups.end()
        if self._recovery is not None:
            await self._recovery.close()
        await self._background.close()
        self._samples.close()
        self.groups.ledger.journal = None  # a later start begins to write it anew
        try:
            await self._journal.close()
        finally:
            await super().close_async()

    async def prepare_batch_async(self, prompts: PromptSource, workflow: Workflow) -> BatchMetadata:
        """The batch to train the current policy version on, however often it is asked for.

        Its rows live until the next version is published. Generation goes on from here, also
        between two calls, and admits what the staleness bound allows. New prompts, or a new
        workflow, are for groups that are admitted from now on; groups that were admitted before
        keep theirs. A batch whose rows are lost with a node's memory is formed anew.

        Raises: WorkflowError: the workflow or dataset cannot be used, or a stream ended.
            ConfigError: all of `total_steps` are trained. TooManyRejections: most episodes are
            rejected. WorkerLost: a worker died too often. WaitTimeout: no group ended for longer
            than a group may take. RunFolderError: the journal cannot be written.
        """
        source = await self._register_async(prompts, workflow)
        self._outside.forget()
        self._begin_journal()
        batch = await self.groups.next_batch(source)
        self._samples.begin(batch)
        return batch

    async def rollout_batch_async(
        self, prompts: PromptSource, workflow: Workflow, num_groups: int | None = None
    ) -> BatchMetadata:
        """Runs `num_groups` groups (None: the whole dataset), in order, and waits for all.

        They are outside of admission, staleness and the ledger, and so have negative group ids;
        rejected groups are missing from the batch. Its rows live until the next `rollout_batch` or
        `prepare_batch`.

        Raises: WorkflowError: every group was rejected, or a stream ended. WorkerLost: a worker
            died too often. WaitTimeout: the stores have no room for so many groups.
        """
        source = await self._register_async(prompts, workflow)
        self._outside.forget()
        return await self._outside.run_batch(
            source, source.num_wanted(num_groups, "num_groups"), self.version
        )

    async def evaluate_async(
        self,
        prompts: PromptSource,
        workflow: Workflow,
        *,
        num_prompts: int | None = None,
        temperature: float | None = None,
    ) -> EvaluationOutcome:
        """Runs one episode a prompt and averages rewards and metrics; trains on nothing.

        With several workers it runs on one, which keeps its weights until the evaluation is done;
        with one worker, or where that one is lost meanwhile, `versions` tells which versions took
        part. Training generation goes on.

        Args:
            prompts: the dataset; its first `num_prompts` rows are evaluated.
            workflow: the episode.
            num_prompts: None: all; a stream has no such number, so it has to be given.
            temperature: replaces that of the run; 0 is greedy; None keeps it.
        Raises: WorkflowError: every prompt was rejected, or a stream ended. WorkerLost: a worker
            died too often.
        """
        source = await self._register_async(prompts, workflow)
        num_wanted = source.num_wanted(num_prompts, "num_prompts")
        return await self._outside.evaluate(
            source, min(num_wanted, source.num_prompts or num_wanted), temperature
        )

    def begin_evaluation(
        self,
        prompts: PromptSource,
        workflow: Workflow,
        *,
        num_prompts: int | None = None,
        temperature: float | None = None,
    ) -> Future[EvaluationOutcome]:
        """`evaluate` beside training: returns at once; the result is in the future."""
        self._sources.register_prompts(prompts)
        return self._submit(
            self.evaluate_async(prompts, workflow, num_prompts=num_prompts, temperature=temperature)
        )

    async def state_async(self) -> RolloutState:
        """What a new controller needs to go on from here; see `restore`."""
        return RolloutState(self.groups.ledger.snapshot(), self.rejections.snapshot())

    async def account_async(self) -> dict[str, Any]:
        """Where every group ever admitted is; see `Ledger.account`."""
        return self.groups.ledger.account()

    def restore(self, state: RolloutState) -> None:
        """Goes on from `state`, before the first batch; unconsumed groups are generated again."""
        self.groups.restore(state.training)
        self.rejections.restore(state.rejections)

    async def pause_async(self) -> None:
        """Stops admission and generation; running groups keep their state."""
        self.groups.pause()
        await self._workers.pause(True)

    async def resume_async(self) -> None:
        """Goes on after `pause`."""
        await self._workers.pause(False)
        self.groups.resume()

    async def record_version_async(self, version: int, trained_rows: Iterable[RowMetadata]) -> None:
        """Notes that a policy version exists; `receive_weights` with it follows.

        Args:
            trained_rows: the rows whose training made it.
        Raises: RunFolderError: the journal cannot be written.
        """
        self.groups.record_version(version, trained_rows)
        await self._journal.durable()

    def has_taken_back(self, rows: Iterable[RowMetadata]) -> bool:
        """Whether some of these rows were in a batch that was formed anew."""
        return any(map(self.groups.ledger.was_taken_back, rows))

    def receive_weights(self, weights: WeightsReference) -> None:
        """A new policy version exists: workers begin to pull it, admission counts from it."""
        self.groups.begin_version(weights.version)
        self._workers.updates.receive(weights)
        self.groups.admit()
        self._background.notify()

    def renew_weights(self, weights: WeightsReference) -> None:
        """The weights of the current version are to be had elsewhere from now on."""
        self._workers.updates.renew(weights)

    def keep_rows(self, first_step: int, *, is_being_covered: bool) -> None:
        """Trained rows stay, in case that their step has to be repeated.

        Args:
            first_step: those of this step and later ones, as far as the stores have room.
            is_being_covered: a snapshot is being written. Admission waits for its end rather than
                that rows go which it will cover.
        """
        self.groups.keep_rows(first_step, is_being_covered=is_being_covered)
        self._background.notify()

    @property
    def has_let_go_of_rows(self) -> bool:
        """Whether rows that no snapshot on the disk covers had to go, for lack of room."""
        return self.groups.kept_rows.has_let_go

    async def hold_updates_async(self) -> int:
        """Waits until no worker updates its weights; none begins before `receive_weights`.

        Returns: the oldest version that a worker holds.
        """
        return await self._workers.updates.hold()

    def end_hold(self) -> None:
        """The version that updates were held for does not come."""
        self._workers.updates.end_hold()

    async def wait_for_weights_async(self) -> None:
        """Waits until every worker holds the newest version, but for those that are lost.

        These get it when they are started again, before anything else.
        """
        await self._workers.updates.wait_until_newest()

    @property
    def current_members(self) -> list[Member]:
        """The workers that hold weights; those that are started again have to pull some first."""
        return self._workers.updates.current_members

    def _begin_journal(self) -> None:
        """With the first batch, also after `restore`: its first record is the state by then."""
        ledger = self.groups.ledger
        if ledger.journal is None:
            ledger.begin_lineage(self._folder.lineage)
            self._journal.begin(ledger.snapshot)
            ledger.journal = self._journal.append

    def _note_loss(self, member: Member, loss: WorkerLost) -> None:
        self._workers.note_loss(member)
        super()._note_loss(member, loss)

    def _give_up(self, cause: WorkerError | RunFolderError) -> None:
        super()._give_up(cause)
        self._background.fail(cause)

    def _note_progress(self, member: Member) -> None:
        if self._recovery is not None:
            self._recovery.note_progress(member)

    def _lose_rows(self, runs: Sequence[calls.GroupAttempt]) -> None:
        self._outside.lose_rows(runs)
        self.groups.lose_rows(runs)

    def _needs(self, run: calls.GroupAttempt) -> bool:
        owner = self._outside if run.group_id < 0 else self.groups
        return owner.needs(run)

    def register(self, prompts: PromptSource, workflow: Workflow) -> RolloutSource:
        """Names both for the workers; to be called beforehand only to see what is wrong early.

        Raises: WorkflowError: the dataset is empty, or a worker could not build one of them.
        """
        dataset = self._sources.register_prompts(prompts)
        return RolloutSource(
            dataset,
            self._sources.register_workflow(workflow),
            self._sources.num_rows(dataset),
        )

    async def _register_async(self, prompts: PromptSource, workflow: Workflow) -> RolloutSource:
        self._check_loop()
        await self._sources.register_prompts_async(prompts)
        return self.register(prompts, workflow)

    prepare_batch = blocking(prepare_batch_async, before=Controller._copy_prompts)
    rollout_batch = blocking(rollout_batch_async, before=Controller._copy_prompts)
    evaluate = blocking(evaluate_async, before=Controller._copy_prompts)
    pause = blocking(pause_async)
    resume = blocking(resume_async)
    wait_for_weights = blocking(wait_for_weights_async)
    state = blocking(state_async)
    account = blocking(account_async)
