"""RolloutController: what a script sees of generation.

    prompts (references)                 publish_weights
         |                                     |
    TrainingGroups ---- GroupRunner ---- RolloutWorkers ---- Fleet ----> rollout workers
     admission, batches       |           load, weights,      calls,
         |                    |           stores              liveness
      batch             OutsideGroups
                         rollout_batch, evaluations

All of it runs on the one event loop of the `start` block. Generation goes on between two calls;
what fails meanwhile is raised by the next call that waits.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from msgspec import Struct

from areal_sc.config.plain import to_plain
from areal_sc.config.schema import RolloutConfig
from areal_sc.controller.background import Background
from areal_sc.controller.control_loop import Shell
from areal_sc.controller.evaluation import EvaluationOutcome
from areal_sc.controller.fleet import Fleet
from areal_sc.controller.group_runs import GroupRunner, Source
from areal_sc.controller.outside_groups import OutsideGroups
from areal_sc.controller.rejections import RejectionCounts, Rejections
from areal_sc.controller.rollout_workers import (
    RPC_MARGIN_S,
    RolloutWorkers,
    update_timeout_s,
)
from areal_sc.controller.runtime import Runtime
from areal_sc.controller.training_groups import TrainingGroups, TrainingState
from areal_sc.engines.handle_base import GeneratorHandle
from areal_sc.errors import WorkerLost
from areal_sc.metadata import BatchMetadata, RowMetadata
from areal_sc.schedulers.base import Scheduler
from areal_sc.weights import WeightGroup, WeightsReference
from areal_sc.workers import calls
from areal_sc.workers.spec import WorkerOrder
from areal_sc.workflows.base import Workflow
from areal_sc.workflows.sources import PromptSource, SourceRegistry


class RolloutState(Struct, frozen=True):
    """What a new controller needs to go on; a snapshot keeps it."""

    training: TrainingState
    rejections: RejectionCounts


class RolloutController(Shell):
    """Runs the user's workflow over prompts on any number of rollout workers.

    Methods block; each has an awaitable twin, named `..._async`: see TrainController.

    Attributes:
        groups: those of training: their ledger, the policy version, the position in the prompts.
        rejections: what was thrown away.
    """

    def __init__(
        self, engine: GeneratorHandle, scheduler: Scheduler, *, runtime: Runtime | None = None
    ) -> None:
        self.engine = engine
        self.config: RolloutConfig = engine.config
        self.scheduler = scheduler
        self._owns_transport = runtime is None
        self._runtime = runtime or Runtime.create(scheduler.keys)
        self._background = Background(
            RPC_MARGIN_S
            + max(self.config.group_timeout_s + RPC_MARGIN_S, update_timeout_s(engine)),
            lambda: f"groups: {self.groups.ledger.account()}",
        )
        self._fleet = Fleet(scheduler, self._runtime, on_lost=self._note_loss)
        self._workers = RolloutWorkers(engine, self._fleet, self._background)
        self._sources = SourceRegistry(Path(scheduler.config.run_dir))
        self.rejections = Rejections(self.config.rejection_window, self.config.max_rejection_rate)
        self._runner = GroupRunner(
            self.config.group_size, self._workers, self.rejections, self._background
        )
        self.groups = TrainingGroups(
            self.config,
            self._workers,
            self._runner,
            self.rejections,
            self._background,
            self._runtime.new_id,
        )
        self.groups.total_steps = self.config.total_steps or None
        self._outside = OutsideGroups(
            self.config, self._workers, self._runner, self.rejections, self._runtime.new_id
        )

    @property
    def version(self) -> int:
        """The policy version that admission and batch forming count from."""
        return self.groups.version

    @property
    def total_steps(self) -> int | None:
        """Training steps that the run will make; nothing is admitted beyond what they need.

        At first it is `rollout.total_steps`, which is that of the run unless it is given. None:
        groups are admitted without end.
        """
        return self.groups.total_steps

    @total_steps.setter
    def total_steps(self, total_steps: int | None) -> None:
        self.groups.total_steps = total_steps

    @property
    def batch_metrics(self) -> dict[str, float]:
        """Means of the workflow's own metrics over the newest batch."""
        return self.groups.batch_metrics

    @property
    def measures_free_memory(self) -> bool:
        """Whether its engines take a share of the GPU memory that is free when they start."""
        return self.engine.takes_free_memory

    async def start_async(self) -> None:
        """Starts the workers and builds the engine in each.

        Raises: WorkerStartError, ModelError: with the worker's own words.
        """
        device, num_devices = self.engine.devices
        await self._fleet.launch(
            [
                WorkerOrder(
                    role="rollout",
                    index=index,
                    engine=type(self.engine).__name__,
                    engine_config=to_plain(self.engine.of_worker(index)),
                    device=device,
                    store_bytes=self.config.store_bytes,
                    num_devices=num_devices,
                )
                for index in range(self.config.num_workers)
            ]
        )
        self._workers.track(self._fleet.members)
        self._workers.check_room()
        await self._workers.initialize()

    async def close_async(self) -> None:
        """Ends all running groups, then the workers."""
        await self.groups.close()
        await self._runner.close()
        await self._workers.close()
        await self._fleet.close()
        if self._owns_transport:
            await self._runtime.transport.close()

    @property
    def num_bytes(self) -> int:
        """Bytes on this controller's sockets so far."""
        return self._fleet.num_bytes

    async def prepare_batch_async(self, prompts: PromptSource, workflow: Workflow) -> BatchMetadata:
        """The batch to train the current policy version on, however often it is asked for.

        Its rows live until the next version is published. Generation goes on from here, also
        between two calls, and admits what the staleness bound allows. New prompts, or a new
        workflow, are for groups that are admitted from now on; groups that were admitted before
        keep theirs.

        Raises: WorkflowError: the workflow or dataset cannot be used. ConfigError: all of
            `total_steps` are trained. TooManyRejections: most episodes are rejected. WorkerLost: a
            worker died. WaitTimeout: no group ended for longer than a group may take.
        """
        self._check_loop()
        await self._sources.register_prompts_async(prompts)
        source = self.register(prompts, workflow)
        self._outside.forget()
        return await self.groups.next_batch(source)

    async def rollout_batch_async(
        self, prompts: PromptSource, workflow: Workflow, num_groups: int | None = None
    ) -> BatchMetadata:
        """Runs `num_groups` groups (None: the whole dataset), in order, and waits for all.

        They are outside of admission, staleness and the ledger, and so have negative group ids;
        rejected groups are missing from the batch. Its rows live until the next `rollout_batch` or
        `prepare_batch`.

        Raises: WorkflowError: every group was rejected. WorkerLost: a worker died. WaitTimeout:
            the stores have no room for so many groups.
        """
        self._check_loop()
        await self._sources.register_prompts_async(prompts)
        source = self.register(prompts, workflow)
        self._outside.forget()
        num_groups = source.num_prompts if num_groups is None else num_groups
        return await self._outside.run_batch(source, num_groups, self.version)

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
        with one worker, `versions` tells which versions took part. Training generation goes on.

        Args:
            prompts: the dataset; its first `num_prompts` rows are evaluated.
            workflow: the episode.
            num_prompts: None: all.
            temperature: replaces that of the run; 0 is greedy; None keeps it.
        """
        self._check_loop()
        await self._sources.register_prompts_async(prompts)
        source = self.register(prompts, workflow)
        num_prompts = min(num_prompts or source.num_prompts, source.num_prompts)
        return await self._outside.evaluate(source, num_prompts, temperature)

    def begin_evaluation(
        self,
        prompts: PromptSource,
        workflow: Workflow,
        *,
        num_prompts: int | None = None,
        temperature: float | None = None,
    ) -> Future[EvaluationOutcome]:
        """`evaluate` beside training: returns at once; the result is in the future."""
        self.register(prompts, workflow)
        return self._submit(
            self.evaluate_async(prompts, workflow, num_prompts=num_prompts, temperature=temperature)
        )

    async def state_async(self) -> RolloutState:
        """What a new controller needs to go on from here; see `restore`.

        On the event loop, as everything that reads the ledger: nothing changes meanwhile.
        """
        return RolloutState(self.groups.snapshot(), self.rejections.snapshot())

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
        await self._workers.call_all(calls.PAUSE, None)

    async def resume_async(self) -> None:
        """Goes on after `pause`."""
        await self._workers.call_all(calls.RESUME, None)
        self.groups.resume()

    async def drain_async(self) -> None:
        """Waits until every admitted group has ended, without stopping admission."""
        await self._background.wait_until(
            lambda: self.groups.num_open == 0, "running groups to end"
        )

    async def worker_stats_async(self) -> list[dict[str, float]]:
        """Counters of each worker's engine and store."""
        return [s.as_metrics() for s in await self._workers.call_all(calls.STATS, None)]

    def receive_weights(
        self, weights: WeightsReference, trained_rows: Iterable[RowMetadata] = ()
    ) -> None:
        """A new policy version exists: workers begin to pull it, admission counts from it.

        Args:
            weights: the sealed version.
            trained_rows: the rows whose training made it; those of admitted groups enter the
                account.
        """
        self.groups.begin_version(weights.version, trained_rows)
        self._workers.receive_weights(weights)
        self.groups.admit()
        self._background.notify()

    async def hold_updates_async(self) -> int:
        """Waits until no worker updates its weights; none begins before `receive_weights`.

        Between the two the trainer seals the next version and drops the one before.
        Returns: the oldest version that a worker holds.
        """
        return await self._workers.hold_updates()

    async def weight_ranks_async(self, group: str) -> list[calls.WeightRanks]:
        """What each worker needs in a weight group; see `WeightsReceiver`."""
        return await self._workers.call_all(calls.WEIGHT_RANKS, group)

    async def join_weight_group_async(self, group: WeightGroup, first_ranks: Sequence[int]) -> None:
        """All workers join a weight group at once, each from its first rank on."""
        await self._workers.join_weight_group(
            [calls.JoinWeightGroup(group, rank) for rank in first_ranks]
        )

    async def leave_weight_group_async(self, group: str) -> None:
        """Workers that are in a weight group leave it."""
        await self._workers.call_all(calls.LEAVE_WEIGHT_GROUP, group)

    async def wait_for_weights_async(self) -> None:
        """Waits until every worker holds the newest version."""
        await self._workers.wait_for_weights()

    def _note_loss(self, loss: WorkerLost) -> None:
        self.worker_lost = self.worker_lost or loss
        self._background.fail(loss)

    def register(self, prompts: PromptSource, workflow: Workflow) -> Source:
        """Names both for the workers; to be called beforehand only to see what is wrong early.

        Raises: WorkflowError: the dataset is empty, or a worker could not build one of them.
        """
        dataset = self._sources.register_prompts(prompts)
        return Source(
            dataset,
            self._sources.register_workflow(workflow),
            len(self._sources.prompts(dataset)),
        )

    # Datasets are copied in the calling thread, where Ctrl-C ends it.
    def prepare_batch(self, prompts: PromptSource, workflow: Workflow) -> BatchMetadata:
        self.register(prompts, workflow)
        return self._run(self.prepare_batch_async(prompts, workflow))

    def rollout_batch(
        self, prompts: PromptSource, workflow: Workflow, num_groups: int | None = None
    ) -> BatchMetadata:
        self.register(prompts, workflow)
        return self._run(self.rollout_batch_async(prompts, workflow, num_groups))

    def evaluate(
        self,
        prompts: PromptSource,
        workflow: Workflow,
        *,
        num_prompts: int | None = None,
        temperature: float | None = None,
    ) -> EvaluationOutcome:
        self.register(prompts, workflow)
        return self._run(
            self.evaluate_async(prompts, workflow, num_prompts=num_prompts, temperature=temperature)
        )

    def pause(self) -> None:
        self._run(self.pause_async())

    def resume(self) -> None:
        self._run(self.resume_async())

    def drain(self) -> None:
        self._run(self.drain_async())

    def wait_for_weights(self) -> None:
        self._run(self.wait_for_weights_async())

    def state(self) -> RolloutState:
        return self._run(self.state_async())

    def account(self) -> dict[str, Any]:
        return self._run(self.account_async())

    def worker_stats(self) -> list[dict[str, float]]:
        return self._run(self.worker_stats_async())
