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

import os
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

from areal_sc.config.schema import GenerationConfig, RolloutConfig
from areal_sc.config.slurm_settings import SchedulerType
from areal_sc.controller.background import Background
from areal_sc.controller.base import Controller, blocking
from areal_sc.controller.events import BatchFormed, RoomFreed, RowsLost, StepEvent
from areal_sc.controller.ledger.group import RolloutSource, check_fields, check_first_rows
from areal_sc.controller.ledger.journal import Journal
from areal_sc.controller.ledger.ledger_records import LedgerState, Split
from areal_sc.controller.rollout.evaluation import EvaluationOutcome, EvaluationSet, Keep, Known
from areal_sc.controller.rollout.groups import GroupTools, OutsideGroups, RegisteredSet
from areal_sc.controller.rollout.progress import ProgressWatch
from areal_sc.controller.rollout.rejections import INITIAL_STATE, Rejections, RolloutState
from areal_sc.controller.rollout.rollout_takeover import FoundRuns
from areal_sc.controller.rollout.rollout_workers import RolloutWorkers
from areal_sc.controller.rollout.run_address import RunAddress
from areal_sc.controller.rollout.scaling import Scaling
from areal_sc.controller.rollout.training_groups import TrainingGroups
from areal_sc.controller.shared_card import Side, common_of
from areal_sc.controller.step_life import StepLife
from areal_sc.engines.base import Completion, RequestOptions
from areal_sc.engines.handle_base import GeneratorHandle
from areal_sc.errors import RunFolderError, WorkerError
from areal_sc.fleet.runtime import Runtime
from areal_sc.fleet.worker_life import FleetEvent, RunFailed, UnitLost, UnitServes, UnitSilent
from areal_sc.hub import cached_model
from areal_sc.metadata import BatchMetadata, RowMetadata
from areal_sc.nodes.spec import ROLLOUT_ROLE
from areal_sc.run.run_folder import RunFolder
from areal_sc.run.run_status import RoleStatus, RunWishes
from areal_sc.schedulers.base import Scheduler
from areal_sc.sizing.pictures import engine_fields
from areal_sc.sources.row_file import PromptSource
from areal_sc.system.durable import os_errors_as, write_atomic
from areal_sc.system.sandbox.opening import check_sandbox
from areal_sc.token_fields import NO_FIELDS, FieldBytes
from areal_sc.weights.channel import YieldMemory
from areal_sc.weights.published import WeightsReference
from areal_sc.weights.tree import RPC_MARGIN_S
from areal_sc.weights.updates import WeightUpdates, update_timeout_s
from areal_sc.workers import calls
from areal_sc.workflows.base import Workflow


class RolloutController(Controller):
    """Runs the user's workflow over prompts on any number of rollout workers.

    Methods block, and have awaitable twins: see TrainController.

    Attributes:
        groups: those of training, and their ledger.
        rejections: what was thrown away.
    """

    engine: GeneratorHandle

    def __init__(
        self, engine: GeneratorHandle, scheduler: Scheduler, *, runtime: Runtime | None = None
    ) -> None:
        engine = engine.with_context()
        super().__init__(engine, scheduler, ROLLOUT_ROLE, runtime)
        self.config: RolloutConfig = engine.config
        card = common_of(scheduler).card
        self._background = Background(
            RPC_MARGIN_S
            + max(self.config.group_timeout_s + RPC_MARGIN_S, update_timeout_s(engine)),
            lambda: f"groups: {self.groups.ledger.account()}",
            lambda: self.fleet.awaits_machines or card.is_away_from(Side.generation),
            self.standstill,
        )
        self._folder = RunFolder(scheduler.config.run_dir)
        limit_s = scheduler.config.transport.write_timeout_s
        self._journal = Journal(self._folder.ledger, self._runtime.disk, self._hear, limit_s)
        needs, durable = self._needs, self._journal.durable
        own = engine, self.fleet, self._background, needs, durable, self._hear, card
        self._workers = RolloutWorkers(*own)
        self.rejections = Rejections(self.config)
        tools = GroupTools(
            self._workers, self.rejections, self._sources.make_readable, self._runtime.new_id
        )
        self.groups = TrainingGroups(tools)
        self._outside = OutsideGroups(tools)
        self._address = RunAddress(scheduler, self._workers)
        self._waits_outside = False  # some workflow that was named does
        self._field_bytes = NO_FIELDS  # of those that workflows add
        self._checked: set[RolloutSource] = set()
        if self.is_dry_run:
            from areal_sc.controller.dry_run import TaskLook

            self._task_look = TaskLook(self.config, self._folder.path)
        self._tell_more = self._tell
        self._scaling = Scaling(
            self._recovery,
            self._workers,
            self.groups,
            self._runtime.disk,
            engine.check_scaling,
            scheduler.status.answer,
            self._folder.rollout_workers_path,
            lambda index: self._order(index, engine.of_worker(index)),
            lambda member: self._count([member]),
        )
        self._watch = ProgressWatch(
            self._workers,
            self.rejections,
            (self.groups, self._outside),
            self.standstill,
        )

    @property
    def version(self) -> int:
        """The policy version that admission and batch forming count from."""
        return self.groups.version

    @property
    def batch_metrics(self) -> dict[str, float]:
        """Means of the workflow's own metrics over the newest batch."""
        return self.groups.batch_metrics

    async def measures_free_memory(self) -> bool:
        if not self.engine.takes_free_memory or self._workers.card.is_shared:
            return False  # or it finds what it had in the turn before
        nodes = [it for it in await self.scheduler.nodes() if it.purpose.takes(self.role)]
        return any(node.facts.num_devices for node in nodes)

    async def start_async(self) -> None:
        """Starts the workers and builds the engine in each.

        Raises: WorkerStartError, ModelError: with the worker's own words. RunFolderError: the
            tokenizer cannot be written to the run folder.
        """
        common_of(self.scheduler).needs.add(self._needs)
        if self._adopts:
            self._workers.is_tracked.clear()
        await self._launch(await self._scaling.first_orders(adopts=self._adopts))
        self._workers.track(self.fleet.members)
        self._scaling.see_surplus_off()
        await self._workers.initialize()
        self._recovery.begin(self._workers.bring_up)
        await self._runtime.disk.run(partial(_keep_tokenizer, self._folder, self.config))
        self._background.start(self._watch.run(), "progress")

    async def close_async(self) -> None:
        """Ends all running groups, then the workers."""
        common_of(self.scheduler).needs.discard(self._needs)
        self.groups.end()
        await self._workers.card.close()
        await self._recovery.close()
        await self._background.close()
        await self._address.close()
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
            than a group may take. RunFolderError: the journal cannot be written. StepsLost: trained
            steps are lost, see `TrainController.load_snapshot`.
        """
        source = await self._register_async(prompts, workflow)
        self._outside.forget()
        if self.groups.ledger.journal is None:
            self._begin_journal(INITIAL_STATE.training)
        self._scaling.follow_wish()
        await self._scaling.wait_for_room()
        return await self.groups.next_batch(source)

    async def rollout_batch_async(
        self, prompts: PromptSource, workflow: Workflow, num_groups: int | None = None
    ) -> BatchMetadata:
        """Runs `num_groups` groups (None: the whole dataset), in order, and waits for all.

        They are outside of admission, staleness and the ledger, and so have negative group ids;
        rejected groups are missing from the batch. Its rows live until the next `rollout_batch` or
        `prepare_batch`.

        Raises: WorkflowError: every group was rejected, or a stream ended. WorkerLost: a worker
            died too often. WaitTimeout: the stores have no room for so many groups. StepsLost: as
            of `prepare_batch`.
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
        num_samples: int = 1,
        temperature: float | None = None,
        cut_is_wrong: bool = True,
    ) -> EvaluationOutcome:
        """Runs episodes and averages rewards and metrics; trains on nothing.

        With several workers it runs on one, which keeps its weights until the evaluation is done;
        with one worker, or where that one is lost meanwhile, `versions` tells which versions took
        part. Training generation goes on.

        Args:
            prompts: the dataset; its first `num_prompts` rows are evaluated.
            workflow: the episode.
            num_prompts: None: all; a stream has no such number, so it has to be given.
            num_samples: episodes a prompt, >= 1.
            temperature: replaces that of the run; 0 is greedy; None keeps it.
            cut_is_wrong: see `EvaluationOutcome.of`.
        Raises: WorkflowError: every answer was rejected, or a stream ended. WorkerLost: a worker
            died too often. StepsLost: see `prepare_batch`. ValueError: a number is below 1.
        """
        wanted = EvaluationSet(prompts, workflow, num_prompts, num_samples, temperature)
        (outcome,) = await self.evaluate_sets_async(
            [wanted], ["evaluation"], cut_is_wrong=cut_is_wrong
        )
        return outcome

    async def evaluate_sets_async(
        self,
        sets: Sequence[EvaluationSet],
        names: Sequence[str] = (),
        *,
        cut_is_wrong: bool = True,
        keep: Keep | None = None,
        known: Known = MappingProxyType({}),
    ) -> list[EvaluationOutcome]:
        """`evaluate` for several sets beside each other, all of them on one worker.

        Args:
            sets: each has a workflow; without `num_samples` it has one answer a prompt.
            names: of each set, by which its answers are recorded; none: they are not recorded.
            keep: gets each reply with its text, as soon as it is there.
            known: answers that are not generated.
        Raises: the errors of `evaluate`.
        """
        self._check_loop()
        registered = [
            await self._register_set(one, name)
            for one, name in zip(sets, names or [""] * len(sets), strict=True)
        ]
        with self._workers.card.wanted_when_idle():
            of_sets = await self._outside.evaluate(registered, keep=keep, known=known)
        return [
            EvaluationOutcome.of(replies, it.num_samples, cut_is_wrong=cut_is_wrong)
            for it, replies in zip(registered, of_sets, strict=True)
        ]

    def begin_evaluation(
        self, sets: Sequence[EvaluationSet], names: Sequence[str], *, cut_is_wrong: bool = True
    ) -> Future[list[EvaluationOutcome]]:
        """`evaluate_sets` beside training: returns at once; the results are in the future."""
        self._register_sets(sets)
        return self._submit(self.evaluate_sets_async(sets, names, cut_is_wrong=cut_is_wrong))

    async def take_over_async(self, *, goes_on: bool) -> FoundRuns:
        """Finds out what workers of an earlier start do and hold; to be called after `start_async`.

        Args:
            goes_on: the run goes on where the journal ends; else nothing of theirs is needed.
        Raises: RunFolderError: the journal cannot be read, or not be written.
        """
        if goes_on and self._journal.exists():
            self.groups.take_over(self._journal.take_up(self.groups.ledger))
        found = await self._workers.take_over(self.groups.ledger, goes_on=goes_on)
        self.groups.go_on(found)
        await self._journal.durable()
        if goes_on:  # else once `go_back` has said so
            self._workers.begin_sweeps()
        return found

    async def state_async(self) -> RolloutState:
        """What is needed to go on from here; see `go_back`."""
        return RolloutState(self.groups.ledger.snapshot(), self.rejections.snapshot())

    async def account_async(self) -> dict[str, Any]:
        """Where every group ever admitted is; see `Ledger.account`."""
        return self.groups.ledger.account()

    async def go_back_async(self, state: RolloutState) -> None:
        """Leaves the present, and goes on from a snapshot's state, or from `INITIAL_STATE`.

        Groups that run are given up; prompts that are not trained in `state` come again, once
        workers get weights. So `TrainController.load_snapshot` comes before, and `share_weights`
        after. Rejections stay; before the first batch they become those of `state`.
        """
        if self.groups.ledger.journal is None:
            self.rejections.restore(state.rejections)
            self._begin_journal(state.training)
        self.groups.go_back(self._folder.newest_lineage(), state.training)
        await self._journal.durable()

    def follow(self, step: StepLife, yield_memory: YieldMemory) -> None:
        """The workers get the weights of the model that makes this step."""
        step.take_in(self.groups.step)
        self.groups.step = self._outside.step = step
        self._workers.yield_memory = yield_memory

    def adopt_weights(self, weights: WeightsReference) -> None:
        """Workers begin to adopt a policy version, and admission counts from it."""
        self.groups.adopt_version(weights.version)
        self.updates.adopt(weights)
        self.groups.admit()
        self._background.notify()

    async def record_version_async(
        self, version: int, trained_rows: Iterable[RowMetadata], splits: tuple[Split, ...]
    ) -> None:
        """Notes that a policy version exists: see `WeightsReader`.

        Raises: RunFolderError: the journal cannot be written.
        """
        self.groups.record_version(version, trained_rows, splits)
        await self._journal.durable()

    def has_taken_back(self, rows: Iterable[RowMetadata]) -> bool:
        """Whether some of these rows were in a batch that was formed anew."""
        return any(map(self.groups.ledger.was_taken_back, rows))

    def lose_steps(self) -> None:
        """Whoever waits for rows or evaluations gets StepsLost."""
        self._outside.lose_steps()
        self._background.notify()

    @property
    def updates(self) -> WeightUpdates:
        """Updates of the workers' weights."""
        return self._workers.updates

    async def wait_for_weights_async(self) -> None:
        """Waits until every worker holds the newest version, but for those that are lost.

        These get it when they are started again, before anything else.
        """
        with self._workers.card.wanted(Side.generation):
            await self.updates.wait_until_newest()

    @property
    def num_workers(self) -> int:
        """Number of the workers that stay, or are to come."""
        return len(self._workers.set.staying)

    async def scale_async(self, num_workers: int) -> None:
        """Changes the number of workers while the run goes on; returns when that is certain.

        New ones start beside training, on further nodes if need be, with the present weights. Those
        that are too many get no new groups, and end when all of theirs is done with. An earlier
        start's number holds for one that finds its workers.

        Raises: ConfigError: there are not enough devices, too little room in the stores of those
            that stay, or servers whose number is fixed. SchedulerSilent: no node can be asked for.
            RunFolderError: the journal cannot be written.
        """
        self._check_loop()
        await self._scaling.scale(num_workers, "as the script has asked for")

    def begin_generate(
        self,
        input_ids: Sequence[int],
        sampling: GenerationConfig,
        *,
        prefix_group: str = "",
        adapter: str | Path = "",
        prompt_logprobs: bool = False,
        top_k_logprobs: int = 0,
    ) -> Future[Completion]:
        """One completion of the present policy version, which belongs to no episode.

        Args:
            sampling: how; temperature 0 is greedy.
            prefix_group: calls of one group, and of one adapter, share their prompt's prefill.
            adapter: to compute with beside the weights: a folder of peft's format in the run
                folder, whose content never changes. "": the weights alone.
            prompt_logprobs: the log-probabilities of the prompt are told, too, which costs its
                prefill.
            top_k_logprobs: so many of the most probable tokens are told at each place that was
                sampled, and with `prompt_logprobs` at each of the prompt; 0: none.
        Returns: a future, which fails with WorkerLost where several workers died of it, with
            WorkflowError where the engine does not take the prompt, with ModelError where it cannot
            serve the adapter, and with ConfigError where it has not what is asked for.
        """
        run = self._folder.path
        options = RequestOptions(
            prefix_group,
            os.path.relpath(run / adapter, run) if adapter else "",
            prompt_logprobs,
            top_k_logprobs,
        )
        wanted = calls.Generate(list(input_ids), sampling, options)
        return self._submit(self._workers.generate(wanted, self.version))

    async def pause_async(self) -> None:
        """Stops admission and generation; running groups keep their state."""
        self.groups.pause()
        await self._workers.pause(True)

    async def resume_async(self) -> None:
        """Goes on after `pause`."""
        await self._workers.pause(False)
        self.groups.resume()

    def _begin_journal(self, state: LedgerState) -> None:
        """Goes back to `state` from what earlier starts have left; a new journal begins with it."""
        lineage = self._folder.newest_lineage()
        self.groups.ledger.go_back(lineage, state)
        self.groups.ledger = self._journal.take_up(self.groups.ledger)
        self.groups.ledger.go_back(lineage, state)

    def _tell(self, status: RoleStatus) -> None:
        self.groups.tell(status)
        status.agents_url = self._address.url
        status.waits_outside = self._waits_outside

    def _hear(self, event: FleetEvent | StepEvent) -> None:
        self._address.note_event(event)
        match event:
            case UnitLost(unit):
                self._workers.leave_out(unit)
                self._workers.set.recount_soon()
            case UnitSilent() | UnitServes():
                self._workers.set.recount_soon()
            case RunFailed(cause):
                self._give_up(cause)
            case RoomFreed():
                self.groups.admit()
            case RowsLost(runs):
                self._outside.lose_rows(runs)
                self.groups.lose_rows(runs)
            case BatchFormed():
                self._scaling.note_batch()

    def _hear_wishes(self, wishes: RunWishes) -> None:
        super()._hear_wishes(wishes)
        self._scaling.hear(wishes.scale)
        self.groups.admit()
        self._background.notify()

    def _give_up(self, cause: WorkerError | RunFolderError) -> None:
        super()._give_up(cause)
        self._background.fail(self.worker_lost or cause)

    def _needs(self, run: calls.GroupAttempt) -> bool:
        owner = self._outside if run.group_id < 0 else self.groups
        return owner.needs(run)

    def register(self, prompts: PromptSource, workflow: Workflow) -> RolloutSource:
        """Names both for the workers; to be called beforehand only to see what is wrong early.

        Raises: WorkflowError: the dataset is empty, or a worker could not build one of them.
            SandboxError: the workflow runs code, and this machine, whose workers would, has no
            sandbox.
        """
        dataset = self._sources.register_prompts(prompts)
        number = self._sources.register_workflow(workflow)
        num_rows = self._sources.num_rows(dataset)
        source = RolloutSource(dataset, number, num_rows, workflow.waits_outside)
        if source not in self._checked:
            check_first_rows(prompts, workflow)
            added = check_fields(workflow, engine_fields(self.config))
            self._field_bytes = FieldBytes(*map(max, self._field_bytes, added))
            workflow.check_settings(self.config)
            if workflow.runs_code() and self.scheduler.config.type == SchedulerType.local:
                check_sandbox(self.config.sandbox)
            self._checked.add(source)
            if self.is_dry_run:
                self._task_look.look(source, self._sources.make_readable)
        return source

    def _register(self, prompts: PromptSource, workflow: Workflow, *_: Any, **__: Any) -> None:
        self.register(prompts, workflow)

    def _register_sets(self, sets: Sequence[EvaluationSet], *_: Any, **__: Any) -> None:
        for one in sets:
            assert one.workflow is not None
            self.register(one.prompts, one.workflow)

    async def _register_async(self, prompts: PromptSource, workflow: Workflow) -> RolloutSource:
        """Names both, which are to be used now: agents outside find the address of the run."""
        self._check_loop()
        await self._sources.register_prompts_async(prompts)
        source = self.register(prompts, workflow)
        self._workers.set.reserve(self._field_bytes)
        self._waits_outside |= workflow.waits_outside
        if workflow.waits_outside or self.config.agents.bind:
            await self._address.open()
        return source

    async def _register_set(self, one: EvaluationSet, evaluation: str) -> RegisteredSet:
        """Names a set, which has a workflow, to be evaluated now by this name.

        Raises: ValueError: a number is below 1. And what `register` raises.
        """
        num_samples = 1 if one.num_samples is None else one.num_samples
        if num_samples < 1:
            raise ValueError(f"num_samples={num_samples}: expected >= 1")
        assert one.workflow is not None
        source = await self._register_async(one.prompts, one.workflow)
        num_wanted = source.num_wanted(one.num_prompts, "num_prompts")
        num_prompts = min(num_wanted, source.num_prompts or num_wanted)
        return RegisteredSet(
            source, num_prompts, num_samples, one.temperature, evaluation, self.version
        )

    prepare_batch = blocking(prepare_batch_async, before=_register)
    rollout_batch = blocking(rollout_batch_async, before=_register)
    evaluate = blocking(evaluate_async, before=_register)
    evaluate_sets = blocking(evaluate_sets_async, before=_register_sets)
    scale = blocking(scale_async)
    pause = blocking(pause_async)
    resume = blocking(resume_async)
    state = blocking(state_async)
    go_back = blocking(go_back_async)
    account = blocking(account_async)
    wait_for_weights = blocking(wait_for_weights_async)


def _keep_tokenizer(folder: RunFolder, config: RolloutConfig) -> None:
    """Copies the model's tokenizer to the run folder, where who reads the records finds it. Blocks.

    Raises: RunFolderError: it cannot be written.
    """
    try:
        model = cached_model(config.path)
        content = None if model is None else (model / folder.tokenizer_path.name).read_bytes()
    except (OSError, ValueError):  # the workers say what is wrong with the model, if anything is
        return
    if content is not None:
        with os_errors_as(RunFolderError, f"cannot write {folder.tokenizer_path}"):
            write_atomic(folder.tokenizer_path, content)
