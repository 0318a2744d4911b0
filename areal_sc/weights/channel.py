"""A way of new weights from the ranks of a trainer to the workers that read them.

    pull         the ranks seal; rollout workers pull while training goes on
    collective   the ranks seal; rank 0 broadcasts to a process group of all generating ranks, and
                 whoever is not in it, or starts later, pulls. Training goes on after the broadcast
    disk         the ranks write a Hugging Face folder; training goes on when it is written

Consumes: calls of a `Publisher`, one at a time. Waits for: the ranks, the group.
Unblocked by: the workers' replies, each bounded by its call's time limit.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

from areal_sc.config.schema import ActorConfig, WeightUpdateMethod
from areal_sc.controller.ledger.ledger_records import Split
from areal_sc.controller.step_life import StepLife
from areal_sc.errors import StoreFull
from areal_sc.fleet.fleet import Fleet
from areal_sc.metadata import RowMetadata
from areal_sc.run.run_files import RunFiles
from areal_sc.weights import methods
from areal_sc.weights.published import WeightChanges, WeightsReference
from areal_sc.weights.updates import WeightUpdates
from areal_sc.workers import calls
from areal_sc.workers.operations import Kind, Operation, digest

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


def _joined(parts: Sequence[WeightChanges | None]) -> WeightChanges | None:
    """The changes of all ranks; None: one has none, or of another version, as it is new."""
    known = [part for part in parts if part is not None]
    if len(known) < len(parts) or len({part.base for part in known}) != 1:
        return None
    shards = tuple(shard for part in known for shard in part.shards)
    return WeightChanges(known[0].base, shards, sum(part.num_bytes for part in known))
