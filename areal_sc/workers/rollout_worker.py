"""A generation engine as a process: runs workflows, seals trajectories, follows the weights.

run_group    `group_size` episodes of one prompt, concurrently -> one sealed shard; the reply
             is its metadata. A row whose workflow or reward fails is rejected with its cause;
             an engine that fails is no result of any row and fails the call.
             `give_up_group` ends the episodes; the reply then says that nothing was sealed
weights      pulled beside generation, then applied by the engine between two decode steps
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from areal_sc.batch_wire import batch_to_wire
from areal_sc.config.schema import GenerationConfig, RolloutConfig
from areal_sc.engines.base import Completion, GenerationEngine
from areal_sc.engines.handles import SGLangEngine
from areal_sc.engines.weight_group import BucketLayout, WeightGroup
from areal_sc.errors import (
    EngineFailed,
    RewardError,
    TransportError,
    WorkerError,
    WorkflowError,
)
from areal_sc.metadata import (
    TRAJECTORY_FIELDS,
    BatchMetadata,
    RowMetadata,
    ShardMetadata,
    TensorMetadata,
    WeightBroadcast,
    WeightsReference,
)
from areal_sc.workers.base import Method, Worker
from areal_sc.workers.fork_client import ForkServer
from areal_sc.workers.spec import WorkerSpec
from areal_sc.workers.trajectory_checks import Rejection, check_trajectory
from areal_sc.workers.weight_publication import own_devices
from areal_sc.workflows.base import RewardFunction, Trajectory, Workflow
from areal_sc.workflows.rewards import RewardPool

logger = logging.getLogger(__name__)

CANCEL_TIMEOUT_S = 30.0


class RolloutWorker(Worker):
    """Serves a `GenerationEngine` to workflows."""

    def __init__(self, spec: WorkerSpec, agent: int) -> None:
        super().__init__(spec, agent)
        config = self.handle.config
        # Forked before any thread exists in this process.
        self._reward_server = ForkServer()
        self._rewards = RewardPool(
            self._reward_server,
            num_processes=config.num_reward_processes,
            timeout_s=config.reward_timeout_s,
            log_path=spec.log_path.with_name(f"reward-{spec.order.index}.log"),
        )
        self._engine: GenerationEngine | None = None
        self._group_episodes: dict[tuple[int, int], asyncio.Task[list[Trajectory | Rejection]]] = {}

    @property
    def engine(self) -> GenerationEngine:
        assert self._engine, "the controller calls initialize first"
        return self._engine

    def methods(self) -> dict[str, Method]:
        return super().methods() | {
            "initialize": self.initialize,
            "run_group": self.run_group,
            "give_up_group": self.give_up_group,
            "run_evaluation": self.run_evaluation,
            "update_weights": self.update_weights,
            "weight_ranks": self.weight_ranks,
            "join_weight_group": self.join_weight_group,
            "leave_weight_group": self.leave_weight_group,
            "pause": self.pause,
            "resume": self.resume,
        }

    async def close(self) -> None:
        if self._engine:
            await self._engine.close()
        await self._rewards.close()
        await self._reward_server.close()

    async def initialize(self, args: dict[str, Any]) -> None:
        """Loads the model and begins to serve requests."""
        torch.set_num_threads(self.handle.config.num_threads)
        engine: GenerationEngine = await self.compute(self._build)
        await engine.start()
        self._engine = engine

    def _build(self) -> GenerationEngine:
        if isinstance(self.handle, SGLangEngine):
            logs = self.spec.log_path
            return self.handle.build(log_folder=logs.parent, name=logs.stem)
        return self.handle.build()  # type: ignore[no-any-return]

    async def run_group(self, args: dict[str, Any]) -> dict[str, Any]:
        """Episodes of one prompt; `batch` of the reply is None when nothing was sealed.

        That is so when every row was rejected, or the group was given up meanwhile.
        """
        key = (int(args["group_id"]), int(args["attempt"]))
        episodes = asyncio.create_task(self._episodes(args, int(args["group_size"])))
        self._group_episodes[key] = episodes
        try:
            rows = await episodes
        except asyncio.CancelledError:
            if key in self._group_episodes:  # the call itself is cancelled
                raise
            rows = []
        finally:
            self._group_episodes.pop(key, None)
        trajectories = [row for row in rows if isinstance(row, Trajectory)]
        rejected: dict[str, list[Any]] = {}
        for row in rows:
            if isinstance(row, Rejection):
                entry = rejected.setdefault(row.cause, [0, row.message])
                entry[0] += 1
        metrics: dict[str, list[float]] = {}
        for trajectory in trajectories:
            for name, value in trajectory.metrics.items():
                entry = metrics.setdefault(name, [0.0, 0])
                entry[0] += float(value)
                entry[1] += 1
        batch = self._seal(args, trajectories) if trajectories else None
        return {
            "batch": None if batch is None else batch_to_wire(batch),
            "rejected": rejected,
            "metrics": metrics,
        }

    async def give_up_group(self, args: dict[str, Any]) -> None:
        """Ends the episodes of a group, if they go on; the reply of its `run_group` follows."""
        key = (int(args["group_id"]), int(args["attempt"]))
        if key in self._group_episodes:
            self._group_episodes.pop(key).cancel()

    async def run_evaluation(self, args: dict[str, Any]) -> dict[str, Any]:
        """One episode, reward and metrics only; nothing is stored."""
        (row,) = await self._episodes(args, 1)
        if isinstance(row, Rejection):
            return {"reward": None, "metrics": {}, "versions": [], "rejected": row.message}
        sampled = sorted(
            {v for v, trained in zip(row.versions, row.loss_mask, strict=True) if trained}
        )
        return {
            "reward": float(row.reward),
            "metrics": {name: float(value) for name, value in row.metrics.items()},
            "versions": [sampled[0], sampled[-1]],
            "num_tokens": sum(map(bool, row.loss_mask)),
        }

    async def update_weights(self, args: dict[str, Any]) -> None:
        """Gives the engine the weights of a version, in the way that the trainers publish them."""
        weights = WeightsReference.from_wire(args)

        async def pull() -> list[tuple[str, torch.Tensor]]:
            return [
                (name, parts[0] if len(parts) == 1 else torch.cat(parts))
                async for name, parts in self.plane.puller.pull_weights(weights)
            ]

        if weights.folder:
            await self.engine.update_weights_from_disk(weights.version, Path(weights.folder))
        elif weights.broadcast:
            sent = weights.broadcast
            await self.engine.update_weights_from_group(
                weights.version,
                sent.group,
                [BucketLayout.from_wire(bucket) for bucket in sent.buckets],
                again=pull,
                give_up=lambda: self._cancel_broadcast(sent),
            )
        else:
            await self.engine.update_weights(weights.version, pull)
        logger.info("policy_version=%d", weights.version)

    async def weight_ranks(self, args: dict[str, Any]) -> dict[str, Any]:
        """What the engine needs in a weight group, and whether it is in that of this name."""
        return {
            "num_ranks": self.engine.count_ranks(),
            "is_cuda": self.engine.is_cuda,
            "devices": own_devices(self.node) if self.engine.is_cuda else [],
            "is_member": self.engine.has_whole_group(str(args["group"])),
        }

    async def join_weight_group(self, args: dict[str, Any]) -> None:
        group = WeightGroup.from_wire(args["group"])
        await self.engine.join_group(group, int(args["first_rank"]))

    async def leave_weight_group(self, args: dict[str, Any]) -> None:
        await self.engine.leave_group(str(args["group"]))

    async def pause(self, args: dict[str, Any]) -> None:
        await self.engine.pause()

    async def resume(self, args: dict[str, Any]) -> None:
        await self.engine.resume()

    async def stats(self, args: dict[str, Any]) -> dict[str, float]:
        return {**await super().stats(args), **self.engine.stats()}

    async def _cancel_broadcast(self, sent: WeightBroadcast) -> None:
        """Tells the worker that broadcasts that some ranks will not take part."""
        node_id, address, incarnation = sent.root
        connection = self.transport.connect(address, node_id, incarnation)
        try:
            await connection.call(
                "cancel_broadcast", {"group": sent.group}, timeout_s=CANCEL_TIMEOUT_S
            )
        except TransportError as error:
            # it gives up by itself, later
            logger.warning("group=%s broadcast not cancelled: %s", sent.group, error)
        finally:
            await connection.close()

    async def _episodes(self, args: dict[str, Any], num_rows: int) -> list[Trajectory | Rejection]:
        workflow = self.sources.workflow(int(args["workflow"]))
        dataset = self.sources.prompts(int(args["dataset"]))
        try:
            prompt = dataset[int(args["index"])]
        except Exception as error:  # the user's code may raise anything
            cause = Rejection("dataset_error", f"row {args['index']} of the dataset: {error!r}")
            return [cause] * num_rows
        group = f"{args.get('group_id', 'evaluation')}.{args.get('attempt', 0)}.{args['index']}"
        evaluation = args.get("evaluation")
        try:
            async with asyncio.TaskGroup() as tasks:
                episodes = [
                    tasks.create_task(self._episode(workflow, dict(prompt), group, evaluation))
                    for _ in range(num_rows)
                ]
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from None  # by its own name, for the controller
        return [episode.result() for episode in episodes]

    async def _episode(
        self,
        workflow: Workflow,
        prompt: dict[str, Any],
        group: str,
        evaluation: dict[str, Any] | None,
    ) -> Trajectory | Rejection:
        config: RolloutConfig = self.handle.config
        engine = WorkerEpisodeEngine(
            self.engine,
            self._rewards,
            group,
            config.generation,
            None if evaluation is None else evaluation["temperature"],
        )
        limit_s = config.group_timeout_s
        try:
            async with asyncio.timeout(limit_s) as limit:
                trajectory = await workflow.run_episode(prompt, engine)
            rejection = check_trajectory(
                trajectory, config.max_context_tokens, is_trained=evaluation is None
            )
        except RewardError as error:
            rejection = Rejection("reward_error", str(error))
        except WorkflowError as error:
            rejection = Rejection("prompt_error", str(error))
        except TimeoutError as error:
            if limit.expired():
                rejection = Rejection(
                    "timeout", f"the episode took longer than group_timeout_s={limit_s:g} s"
                )
            else:  # of the user's own code
                rejection = Rejection("workflow_error", f"{type(error).__name__}: {error}")
        except Exception as error:  # the user's code may raise anything
            rejection = Rejection("workflow_error", f"{type(error).__name__}: {error}")
        if engine.failure:
            raise EngineFailed(f"generation failed: {engine.failure!r}") from engine.failure
        if rejection:
            logger.warning("rejected cause=%s message=%s", rejection.cause, rejection.message)
            return rejection
        assert trajectory is not None
        return trajectory

    def _seal(self, args: dict[str, Any], trajectories: Sequence[Trajectory]) -> BatchMetadata:
        lengths = [len(trajectory.input_ids) for trajectory in trajectories]
        fields = {
            name: torch.tensor(
                list(itertools.chain.from_iterable(getattr(t, name) for t in trajectories)),
                dtype=getattr(torch, dtype),
            )
            for name, dtype in TRAJECTORY_FIELDS.items()
        }
        shard = ShardMetadata(
            node_id=self.spec.name,
            node_addr=self.address,
            shard_id=self.plane.store.put(fields, lengths),
            batch_size=len(lengths),
            offset=0,
            fields={
                name: TensorMetadata((sum(lengths),), dtype)
                for name, dtype in TRAJECTORY_FIELDS.items()
            },
            shard_rows=tuple(range(len(lengths))),
        )
        rows = tuple(
            RowMetadata(
                group_id=int(args["group_id"]),
                attempt=int(args["attempt"]),
                sequence_length=length,
                reward=float(trajectory.reward),
                admitted_version=int(args["admitted_version"]),
                version_spans=_version_spans(trajectory),
            )
            for trajectory, length in zip(trajectories, lengths, strict=True)
        )
        return BatchMetadata(
            f"g{args['group_id']}.{args['attempt']}",
            int(args["admitted_version"]),
            len(rows),
            (shard,),
            rows,
        )


class WorkerEpisodeEngine:
    """What one episode sees of its worker.

    Attributes:
        failure: the engine's own failure during the episode, whatever the user's code made of it.
    """

    def __init__(
        self,
        engine: GenerationEngine,
        rewards: RewardPool,
        group: str,
        sampling: GenerationConfig,
        temperature: float | None,
    ) -> None:
        self.tokenizer = engine.tokenizer
        self.max_context_tokens = engine.max_context_tokens
        self.failure: BaseException | None = None
        self._engine = engine
        self._rewards = rewards
        self._group = group
        self._sampling = sampling
        self._temperature = temperature

    async def generate(
        self, input_ids: Sequence[int], sampling: GenerationConfig | None = None
    ) -> Completion:
        sampling = sampling or self._sampling
        if self._temperature is not None:
            sampling = replace(sampling, temperature=self._temperature)
        try:
            return await self._engine.generate(input_ids, sampling, prefix_group=self._group)
        except WorkflowError:
            raise
        except Exception as error:  # the user's code may catch it; it is no result of the row
            self.failure = error
            raise

    async def score(
        self, reward: RewardFunction, prompt: Mapping[str, Any], completion: str
    ) -> float:
        try:
            return await self._rewards.score(reward, dict(prompt), completion)
        except WorkerError as error:
            self.failure = error
            raise


def _version_spans(trajectory: Trajectory) -> tuple[tuple[int, int], ...]:
    counts: dict[int, int] = {}
    for version, trained in zip(trajectory.versions, trajectory.loss_mask, strict=True):
        if trained:
            counts[version] = counts.get(version, 0) + 1
    return tuple(sorted(counts.items()))
