"""How a policy version gets from the ranks of the trainer to the rollout workers.

    pull         the ranks seal; rollout workers pull while training goes on
    collective   the ranks seal; rank 0 broadcasts to a process group of all generating ranks, and
                 whoever is not in it, or starts later, pulls. Training goes on after the broadcast
    disk         the ranks write a Hugging Face folder; training goes on when it is written

Consumes: `publish`, one at a time. Waits for: updates of the version before, the ranks, the group.
Unblocked by: the workers' replies, each bounded by its call's time limit.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from msgspec.structs import replace

from areal_sc.config.schema import ActorConfig, WeightUpdateMethod
from areal_sc.controller.weights.weights_reader import WeightsReader
from areal_sc.errors import EngineFailed, TransportError, WorkerError
from areal_sc.fleet.fleet import Fleet
from areal_sc.fleet.member import Member
from areal_sc.run.run_files import RunFiles
from areal_sc.transport.rpc.method import A, Method, R
from areal_sc.weights import BucketLayout, WeightBroadcast, WeightChanges, WeightsReference
from areal_sc.workers import calls, rank_methods
from areal_sc.workers.operations import Operation

logger = logging.getLogger(__name__)

SENT_AFTER_S = 10.0
"""Rank 0 notices within this time that all ranks have received, unless some of them pulled."""

JOIN_MARGIN_S = 60.0
"""Joining a weight group may take this much longer than the engines' own time limit."""

MAX_MEETINGS = 3
"""Attempts to form one weight group: servers may come and go meanwhile."""

MAX_BROADCASTS_IN_VAIN = 3
"""Groups in a row of which nothing was received; then the ranks cannot reach each other at all, as
where their versions of NCCL differ, and each further try would cost its time limit."""

Announce = Callable[[WeightsReference], Awaitable[None]]
"""Called with a new version when rollout workers may get it."""


@dataclass
class PublicationTimes:
    """Where the trainer's time for publications went; sums since the start.

    Attributes:
        publish_hold_s: waiting for the updates of the version before.
        publish_meet_s: forming weight groups.
        publish_seal_s: copying into the stores, or writing the folder.
        publish_broadcast_s: broadcasting.
        published_bytes: that rank 0 broadcast, or that whoever pulls gets: what has changed, where
            that is published.
        failed_broadcasts: after which the weights were pulled.
    """

    publish_hold_s: float = 0.0
    publish_meet_s: float = 0.0
    publish_seal_s: float = 0.0
    publish_broadcast_s: float = 0.0
    published_bytes: float = 0.0
    failed_broadcasts: float = 0.0


class Publisher:
    """Publishes the weights of one trainer."""

    def __init__(self, config: ActorConfig, fleet: Fleet, new_id: Callable[[], str]) -> None:
        self.times = PublicationTimes()
        self._config = config
        self._fleet = fleet
        self._new_id = new_id
        self._group = ""
        self._world_size = 0  # of that group
        self._layouts: tuple[BucketLayout, ...] = ()
        self._may_have_adopted = False
        self._num_in_vain = 0

    async def publish(
        self,
        operation: Operation,
        version: int,
        rollout: WeightsReader,
        take_snapshot: Callable[[], Awaitable[None]],
        announce: Announce,
    ) -> None:
        """Returns once the weights are sealed, broadcast or written; generation goes on.

        Args:
            operation: what the ranks are asked to do; a repeat does not publish again.
            take_snapshot: is called when the ranks are at the version, and before they broadcast,
                as they do nothing else meanwhile.
            announce: tells the new version.
        """
        started = time.perf_counter()
        oldest = await rollout.updates.hold()
        self.times.publish_hold_s += time.perf_counter() - started
        if self._may_have_adopted:
            await self.sweep_adopted()
        method = self._config.weight_update.method
        broadcasts = method is WeightUpdateMethod.collective and await self._can_broadcast(rollout)
        if method is WeightUpdateMethod.disk:
            weights = await self._save(operation, version, oldest)
        else:
            weights = await self.seal(operation, version)
        await take_snapshot()
        if broadcasts:
            await self._broadcast(weights, rollout, announce)
        else:
            await announce(weights)

    def note_new_ranks(self) -> None:
        """They are in no weight group, and have adopted what the lives before them had sealed."""
        self._group, self._may_have_adopted = "", True

    async def sweep_adopted(self) -> None:
        """The ranks forget what earlier lives have sealed: stores have room for two versions."""
        await self._sweep([calls.Sweep(0, adopted_live=()) for _ in self._fleet.members])
        self._may_have_adopted = False

    async def _save(self, operation: Operation, version: int, oldest: int) -> WeightsReference:
        started = time.perf_counter()
        run = str(RunFiles(self._fleet.config.run_dir).path)
        replies = await self._fleet.call_all(
            rank_methods.SAVE_WEIGHTS, rank_methods.SaveWeights(operation, version, oldest, run)
        )
        await self._sweep([calls.Sweep(r.last_sequence, adopted_live=()) for r in replies])
        self.times.publish_seal_s += time.perf_counter() - started
        return WeightsReference(version, folder=replies[0].folder, lineage=operation.lineage)

    async def seal(
        self, operation: Operation, version: int, *, keeps_adopted: bool = False
    ) -> WeightsReference:
        """The weights of the ranks, which forget all else that they have sealed.

        Args:
            keeps_adopted: but for what earlier lives have sealed, which may still be read.
        """
        started = time.perf_counter()
        replies = await self._fleet.call_all(
            rank_methods.SEAL_WEIGHTS, rank_methods.SealWeights(operation, version)
        )
        adopted_live = None if keeps_adopted else ()
        await self._sweep(
            [calls.Sweep(r.last_sequence, r.live, adopted_live=adopted_live) for r in replies]
        )
        self.times.publish_seal_s += time.perf_counter() - started
        changes = _joined([reply.changes for reply in replies])
        if self._config.weight_update.method is WeightUpdateMethod.pull:
            whole_bytes = sum(reply.num_bytes for reply in replies)
            self.times.published_bytes += changes.num_bytes if changes else whole_bytes
        shards = tuple(reply.shard for reply in replies)
        nodes = tuple(sorted({member.worker.node for member in self._fleet.members}))
        return WeightsReference(
            version, shards, lineage=operation.lineage, nodes=nodes, changes=changes
        )

    async def _sweep(self, sweeps: Sequence[calls.Sweep]) -> None:
        """The ranks forget all else: between two training steps nothing of it is still read."""
        await self._fleet.call_each(calls.SWEEP, sweeps)

    async def _can_broadcast(self, rollout: WeightsReader) -> bool:
        """Whether there is a group that weights reach somebody in."""
        if not rollout.updates.current_members or self._num_in_vain == MAX_BROADCASTS_IN_VAIN:
            return False
        started = time.perf_counter()
        await self._ensure_group(rollout)
        self.times.publish_meet_s += time.perf_counter() - started
        return True

    async def _broadcast(
        self, sealed: WeightsReference, rollout: WeightsReader, announce: Announce
    ) -> None:
        started = time.perf_counter()
        sending = asyncio.create_task(
            self._fleet.call_all(
                rank_methods.BROADCAST_WEIGHTS,
                None,
                timeout_s=(len(self._layouts) + 1) * self._config.weight_update.step_timeout_s,
            )
        )
        sent = WeightBroadcast(self._group, sealed.shards[0], self._layouts)
        tasks: list[asyncio.Task[Any]] = [sending]
        try:
            await announce(replace(sealed, broadcast=sent))
            received = asyncio.create_task(rollout.wait_for_weights_async())
            tasks.append(received)
            await asyncio.wait({sending, received}, return_when=asyncio.FIRST_COMPLETED)
            if received.done() and received.exception() is None:
                await asyncio.wait({sending}, timeout=SENT_AFTER_S)
            if not sending.done():  # nobody is left who would receive it
                await self._call_root(rank_methods.CANCEL_BROADCAST, self._group)
            result = (await sending)[0]
        finally:
            for task in tasks:  # the ranks may have died meanwhile
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)  # failures are the rollout's own
        self.times.publish_broadcast_s += time.perf_counter() - started
        self.times.published_bytes += result.num_bytes
        if result.failure:
            logger.warning("version=%d broadcast failed: %s", sealed.version, result.failure)
            self.times.failed_broadcasts += 1
            self._group = ""
        self._note_outcome(result)

    def _note_outcome(self, result: rank_methods.SentWeights) -> None:
        """Counts broadcasts of which not even the first part has arrived."""
        self._num_in_vain = self._num_in_vain + 1 if result.failure and not result.num_bytes else 0
        if self._num_in_vain == MAX_BROADCASTS_IN_VAIN:
            logger.warning(
                "weight_update.method=collective acts as pull from here on: %d weight groups in a "
                "row could not broadcast anything; the last one: %s",
                self._num_in_vain,
                result.failure,
            )

    async def _ensure_group(self, rollout: WeightsReader) -> None:
        """The generating ranks, all of them, are in a group with rank 0.

        Raises: EngineFailed: repeated attempts to form one have failed.
        """
        if not self._layouts:
            self._layouts = await self._call_root(rank_methods.WEIGHT_LAYOUTS, None)
        for attempt in range(MAX_MEETINGS):
            workers = rollout.updates.current_members
            ranks = await rollout.fleet.call_living(calls.WEIGHT_RANKS, self._group, workers)
            num_ranks = 1 + sum(worker.num_ranks for worker in ranks.values())
            is_whole = all(worker.is_member for worker in ranks.values())
            if self._group and is_whole and num_ranks == self._world_size:  # else one has left
                return
            if self._group:
                await rollout.fleet.call_living(calls.LEAVE_WEIGHT_GROUP, self._group, workers)
            try:
                self._group = await self._form_group(rollout, ranks)
                return
            except (WorkerError, TransportError) as error:
                self._group = ""
                if attempt == MAX_MEETINGS - 1:
                    raise EngineFailed(
                        f"no weight group could be formed in {MAX_MEETINGS} attempts: {error}. "
                        "weight_update.method: pull or disk need none"
                    ) from error
                logger.warning("weight group not formed, attempt %d: %s", attempt + 1, error)

    async def _form_group(
        self, rollout: WeightsReader, workers: Mapping[Member, calls.WeightRanks]
    ) -> str:
        ranks = list(workers.values())
        *first_ranks, world_size = accumulate((worker.num_ranks for worker in ranks), initial=1)
        name = f"weights-{self._new_id()}"
        group = await self._call_root(
            rank_methods.OPEN_WEIGHT_GROUP,
            rank_methods.OpenWeightGroup(
                name,
                world_size,
                is_cuda=all(worker.is_cuda for worker in ranks),
                devices=tuple(device for worker in ranks for device in worker.devices),
            ),
        )
        meetings = await asyncio.gather(
            self._call_root(rank_methods.MEET_WEIGHT_GROUP, world_size),
            rollout.fleet.call_each(
                calls.JOIN_WEIGHT_GROUP,
                [calls.JoinWeightGroup(group, rank) for rank in first_ranks],
                members=list(workers),
                timeout_s=self._config.weight_update.step_timeout_s + JOIN_MARGIN_S,
            ),
            return_exceptions=True,
        )
        for meeting in meetings:
            if isinstance(meeting, BaseException):
                raise meeting
        self._world_size = world_size
        logger.info("weight_group=%s world_size=%d backend=%s", name, world_size, group.backend)
        return name

    async def _call_root(self, method: Method[A, R], args: A) -> R:
        return await self._fleet.call(self._fleet.members[0], method, args)


def _joined(parts: Sequence[WeightChanges | None]) -> WeightChanges | None:
    """The changes of all ranks; None: one has none, or of another version, as it is new."""
    known = [part for part in parts if part is not None]
    if len(known) < len(parts) or len({part.base for part in known}) != 1:
        return None
    shards = tuple(shard for part in known for shard in part.shards)
    return WeightChanges(known[0].base, shards, sum(part.num_bytes for part in known))
