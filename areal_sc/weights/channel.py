"""A way of new weights from the ranks of a trainer to the workers that read them.

    pull         the ranks seal; rollout workers pull while training goes on
    collective   the ranks seal; rank 0 broadcasts to a process group of all generating ranks, and
                 whoever is not in it, or starts later, pulls. Training goes on after the broadcast
    disk         the ranks write a Hugging Face folder; training goes on when it is written

Consumes: calls of a `TrainStep`, one at a time. Waits for: the ranks, the group.
Unblocked by: the workers' replies, each bounded by its call's time limit.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Final, Protocol

from msgspec.structs import replace

from areal_sc.config.schema import ActorConfig, WeightUpdateMethod
from areal_sc.controller.ledger.ledger_records import Split
from areal_sc.controller.step_life import StepLife
from areal_sc.errors import EngineFailed, StoreFull, TransportError, WorkerError
from areal_sc.fleet.fleet import Fleet
from areal_sc.fleet.member import Member
from areal_sc.metadata import RowMetadata
from areal_sc.run.run_files import RunFiles
from areal_sc.transport.rpc.method import A, Method, R
from areal_sc.weights import methods
from areal_sc.weights.published import (
    BucketLayout,
    WeightBroadcast,
    WeightChanges,
    WeightsReference,
)
from areal_sc.weights.updates import WeightUpdates
from areal_sc.workers import calls
from areal_sc.workers.operations import Kind, Operation, digest

logger = logging.getLogger(__name__)

SENT_AFTER_S: Final = 10.0
"""Rank 0 notices within this time that all ranks have received, unless some of them pulled."""

JOIN_MARGIN_S: Final = 60.0
"""Joining a weight group may take this much longer than the engines' own time limit."""

MAX_MEETINGS: Final = 3
"""Attempts to form one weight group: servers may come and go meanwhile."""

MAX_BROADCASTS_IN_VAIN: Final = 3
"""Groups in a row of which nothing was received; then the ranks cannot reach each other at all, as
where their versions of NCCL differ, and each further try would cost its time limit."""

YieldMemory = Callable[[StoreFull], Awaitable[bool]]
"""Has what can be spared give its memory up, for rows; tells whether it has."""


class WeightsReader(Protocol):
    """A controller that brings each new policy version to its workers.

    Attributes:
        fleet: those workers.
        updates: which version each of them has, and its way to the newest one.
    """

    fleet: Fleet

    @property
    def updates(self) -> WeightUpdates: ...

    def follow(self, step: StepLife, yield_memory: YieldMemory) -> None:
        """Its workers get the weights of the model that makes this step."""

    async def record_version_async(
        self, version: int, trained_rows: Iterable[RowMetadata], splits: tuple[Split, ...]
    ) -> None:
        """Notes that a policy version exists; `adopt_weights` with it follows.

        Args:
            trained_rows: the rows whose training made it.
            splits: how the ranks shared these rows.
        Raises: RunFolderError: the journal cannot be written.
        """

    def adopt_weights(self, weights: WeightsReference) -> None:
        """Workers begin to adopt a policy version, and admission counts from it."""

    async def wait_for_weights_async(self) -> None:
        """Returns when every worker holds the newest version, but for those that are lost.

        These get it when they are started again, before anything else.
        """

    def has_taken_back(self, rows: Iterable[RowMetadata]) -> bool:
        """Whether some of these rows were in a batch that was formed anew."""

    def lose_steps(self) -> None:
        """Whoever waits for rows or evaluations gets StepsLost."""


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

    @contextmanager
    def adding_to(self, name: str) -> Iterator[None]:
        """The time within the context counts for this attribute."""
        began_s = time.perf_counter()
        try:
            yield
        finally:
            setattr(self, name, getattr(self, name) + time.perf_counter() - began_s)


class Channel:
    """The way of the weights of one trainer. Each is a subclass.

    Args:
        new_id: gives names that nothing else has.

    Attributes:
        times: sums over publications.
    """

    def __init__(self, config: ActorConfig, fleet: Fleet, new_id: Callable[[], str]) -> None:
        self.times = PublicationTimes()
        self._config = config
        self._fleet = fleet
        self._new_id = new_id
        self._has_earlier = False  # the ranks may hold what the lives before them have sealed

    async def seal(
        self, operation: Operation, version: int, reader: WeightsReader, oldest: int
    ) -> WeightsReference:
        """The weights of the ranks as a version, which nothing changes any more.

        Args:
            operation: what the ranks are asked to do; a repeat does not publish again.
            oldest: version that a worker still holds.
        """
        raise NotImplementedError

    async def seal_again(self, lineage: int, version: int) -> WeightsReference | None:
        """The same of ranks that were started again; None: the weights are where they were."""
        return None

    async def send(self, weights: WeightsReference, reader: WeightsReader) -> None:
        """Tells the reader, at once; returns when training may go on."""
        reader.adopt_weights(weights)

    def note_new_ranks(self) -> None:
        """The ranks are new lives, which have adopted what those before them had sealed."""
        self._has_earlier = True

    async def _forget_earlier(self) -> None:
        """The ranks forget what earlier lives have sealed: stores have room for two versions."""
        if self._has_earlier:
            await self._sweep([calls.Sweep(0, adopted_live=()) for _ in self._fleet.members])
            self._has_earlier = False

    async def _sweep(self, sweeps: Sequence[calls.Sweep]) -> None:
        """The ranks forget all else: between two training steps nothing of it is still read."""
        await self._fleet.call_each(calls.SWEEP, sweeps)


class PullChannel(Channel):
    """`weight_update.method: pull`: rollout workers pull what the ranks seal; see `tree`."""

    async def seal(
        self, operation: Operation, version: int, reader: WeightsReader, oldest: int
    ) -> WeightsReference:
        await self._forget_earlier()
        return await self._seal(operation, version)

    async def seal_again(self, lineage: int, version: int) -> WeightsReference | None:
        operation = Operation(lineage, version, Kind.publish, str(version), digest(None))
        await self._forget_earlier()  # who reads these copies asks for the new ones
        return await self._seal(operation, version)

    async def _seal(self, operation: Operation, version: int) -> WeightsReference:
        """The weights of the ranks, which forget all else that they have sealed."""
        with self.times.adding_to("publish_seal_s"):
            replies = await self._fleet.call_all(
                methods.SEAL_WEIGHTS, methods.SealWeights(operation, version)
            )
            await self._sweep(
                [calls.Sweep(r.last_sequence, r.live, adopted_live=()) for r in replies]
            )
        changes = _joined([reply.changes for reply in replies])
        if self._config.weight_update.method is WeightUpdateMethod.pull:
            whole_bytes = sum(reply.num_bytes for reply in replies)
            self.times.published_bytes += changes.num_bytes if changes else whole_bytes
        shards = tuple(reply.shard for reply in replies)
        nodes = tuple(sorted({member.worker.node for member in self._fleet.members}))
        return WeightsReference(
            version, shards, lineage=operation.lineage, nodes=nodes, changes=changes
        )


class CollectiveChannel(PullChannel):
    """`weight_update.method: collective`. Whoever is not in the group pulls."""

    _group = ""
    _world_size = 0  # of that group
    _layouts: tuple[BucketLayout, ...] = ()
    _num_in_vain = 0

    async def seal(
        self, operation: Operation, version: int, reader: WeightsReader, oldest: int
    ) -> WeightsReference:
        """Forms the group first: whom the weights reach is known then."""
        await self._forget_earlier()
        has_members = reader.updates.current_members
        if not has_members or self._num_in_vain == MAX_BROADCASTS_IN_VAIN:
            return await self._seal(operation, version)
        with self.times.adding_to("publish_meet_s"):
            await self._ensure_group(reader)
        sealed = await self._seal(operation, version)
        sent = WeightBroadcast(self._group, sealed.shards[0], self._layouts)
        return replace(sealed, broadcast=sent)

    async def send(self, weights: WeightsReference, reader: WeightsReader) -> None:
        """Returns when rank 0 has sent the weights, or has given that up."""
        if weights.broadcast is None:
            return await super().send(weights, reader)
        with self.times.adding_to("publish_broadcast_s"):
            result = await self._broadcast(weights, reader)
        self.times.published_bytes += result.num_bytes
        if result.failure:
            logger.warning("version=%d broadcast failed: %s", weights.version, result.failure)
            self.times.failed_broadcasts += 1
            self._group = ""
        self._note_outcome(result)

    def note_new_ranks(self) -> None:
        """They are in no weight group either."""
        super().note_new_ranks()
        self._group = ""

    async def _broadcast(
        self, weights: WeightsReference, reader: WeightsReader
    ) -> methods.SentWeights:
        reader.adopt_weights(weights)  # first, and at once: see `Channel.send`
        sending = asyncio.create_task(
            self._fleet.call_all(
                methods.BROADCAST_WEIGHTS,
                None,
                timeout_s=(len(self._layouts) + 1) * self._config.weight_update.step_timeout_s,
            )
        )
        received = asyncio.create_task(reader.wait_for_weights_async())
        tasks: list[asyncio.Task[Any]] = [sending, received]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if received.done() and received.exception() is None:
                await asyncio.wait({sending}, timeout=SENT_AFTER_S)
            if not sending.done():  # nobody is left who would receive it
                await self._call_root(methods.CANCEL_BROADCAST, self._group)
            return (await sending)[0]
        finally:
            for task in tasks:  # the ranks may have died meanwhile
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)  # failures are the reader's own

    def _note_outcome(self, result: methods.SentWeights) -> None:
        """Counts broadcasts of which not even the first part has arrived."""
        self._num_in_vain = self._num_in_vain + 1 if result.failure and not result.num_bytes else 0
        if self._num_in_vain == MAX_BROADCASTS_IN_VAIN:
            logger.warning(
                "weight_update.method=collective acts as pull from here on: %d weight groups in a "
                "row could not broadcast anything; the last one: %s",
                self._num_in_vain,
                result.failure,
            )

    async def _ensure_group(self, reader: WeightsReader) -> None:
        """The generating ranks, all of them, are in a group with rank 0.

        Raises: EngineFailed: repeated attempts to form one have failed.
        """
        if not self._layouts:
            self._layouts = await self._call_root(methods.WEIGHT_LAYOUTS, None)
        for attempt in range(MAX_MEETINGS):
            workers = reader.updates.current_members
            ranks = await reader.fleet.call_living(methods.WEIGHT_RANKS, self._group, workers)
            num_ranks = 1 + sum(worker.num_ranks for worker in ranks.values())
            is_whole = all(worker.is_member for worker in ranks.values())
            if self._group and is_whole and num_ranks == self._world_size:  # else one has left
                return
            if self._group:
                await reader.fleet.call_living(methods.LEAVE_WEIGHT_GROUP, self._group, workers)
            try:
                self._group = await self._form_group(reader, ranks)
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
        self, reader: WeightsReader, workers: Mapping[Member, methods.WeightRanks]
    ) -> str:
        ranks = list(workers.values())
        *first_ranks, world_size = accumulate((worker.num_ranks for worker in ranks), initial=1)
        name = f"weights-{self._new_id()}"
        group = await self._call_root(
            methods.OPEN_WEIGHT_GROUP,
            methods.OpenWeightGroup(
                name,
                world_size,
                is_cuda=all(worker.is_cuda for worker in ranks),
                devices=tuple(device for worker in ranks for device in worker.devices),
            ),
        )
        meetings = await asyncio.gather(
            self._call_root(methods.MEET_WEIGHT_GROUP, world_size),
            reader.fleet.call_each(
                methods.JOIN_WEIGHT_GROUP,
                [methods.JoinWeightGroup(group, rank) for rank in first_ranks],
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


class DiskChannel(Channel):
    """`weight_update.method: disk`: a folder that trainers and generation see."""

    async def seal(
        self, operation: Operation, version: int, reader: WeightsReader, oldest: int
    ) -> WeightsReference:
        await self._forget_earlier()
        run = str(RunFiles(self._fleet.config.run_dir).path)
        with self.times.adding_to("publish_seal_s"):
            replies = await self._fleet.call_all(
                methods.SAVE_WEIGHTS, methods.SaveWeights(operation, version, oldest, run)
            )
            await self._sweep([calls.Sweep(r.last_sequence, adopted_live=()) for r in replies])
        return WeightsReference(version, folder=replies[0].folder, lineage=operation.lineage)


CHANNELS: Final[Mapping[WeightUpdateMethod, type[Channel]]] = {
    WeightUpdateMethod.pull: PullChannel,
    WeightUpdateMethod.collective: CollectiveChannel,
    WeightUpdateMethod.disk: DiskChannel,
}


def _joined(parts: Sequence[WeightChanges | None]) -> WeightChanges | None:
    """The changes of all ranks; None: one has none, or of another version, as it is new."""
    known = [part for part in parts if part is not None]
    if len(known) < len(parts) or len({part.base for part in known}) != 1:
        return None
    shards = tuple(shard for part in known for shard in part.shards)
    return WeightChanges(known[0].base, shards, sum(part.num_bytes for part in known))
