"""The ranks of one model through all their lives: met, snapshotted, started again, brought back.

    death ──► Recovery ──► new lives ──► meet ──► load ──► repeat ──► seal ──► calls go on
                                      the newest    the calls since,   the announced
                                      snapshot      from the history   weights

consumes     calls of the controller, each as a body that may be repeated; deaths of ranks
waits for    the ranks; during a recovery all calls wait for its end
unblocked by the ranks' replies, and `Recovery`, which ends each attempt somehow

A death ends every body that runs: part of it may have been done by the life before. What a body
asks of the ranks are operations, so a repeat does nothing twice.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final, NamedTuple, TypeVar

from msgspec import structs

from areal_sc.config.schema import ActorConfig, WeightUpdateMethod
from areal_sc.controller.fleet import Fleet
from areal_sc.controller.memory_snapshots import MemorySnapshots
from areal_sc.controller.node_workers import Member
from areal_sc.controller.publication import Publisher
from areal_sc.controller.rank_layout import RankLayout
from areal_sc.controller.recovery import Recovery
from areal_sc.controller.train_history import (
    BegunWrite,
    Call,
    ComputedLogprobs,
    PPOUpdated,
    SFTUpdated,
    Source,
    TrainHistory,
    Updated,
)
from areal_sc.errors import (
    BatchLost,
    CheckpointError,
    ShardGone,
    StaleCall,
    StepsLost,
    TransportError,
    WorkerError,
    WorkerLost,
    WorkerStartError,
)
from areal_sc.metadata import BatchMetadata
from areal_sc.weights import ShardReference, WeightsReference
from areal_sc.workers import calls
from areal_sc.workers.calls import SnapshotPlace
from areal_sc.workers.operations import Operation, digest

logger = logging.getLogger(__name__)

T = TypeVar("T")

LOSS_NOTICE_S: Final = 2.0
"""So long after an error of a rank the death of another one, which explains it, may be noticed."""


class RowsNeeded(NamedTuple):
    """Which rows of earlier steps stay.

    Attributes:
        first_step: they are those of this step and later ones.
        is_being_covered: fewer will be needed soon, when a snapshot is written or ranks are back.
    """

    first_step: int
    is_being_covered: bool


_OF_A_DEATH: Final = (WorkerError, TransportError, CheckpointError)
"""What a rank raises whose partner dies, among other reasons."""


class Ranks:
    """Calls the ranks of one model, and brings them back when some of them die.

    Args:
        on_rows_needed: is told from which step on rows may be asked for again.
        on_given_up: is told why the run cannot go on.

    Attributes:
        history: where the ranks stand.
        layout: which rank computes what.
        memory: their snapshots in memory.
    """

    def __init__(
        self,
        config: ActorConfig,
        fleet: Fleet,
        publisher: Publisher,
        on_rows_needed: Callable[[RowsNeeded], None],
        on_given_up: Callable[[WorkerError], None],
    ) -> None:
        every_steps = config.memory_every_steps
        self.history = TrainHistory(
            has_memory_snapshots=every_steps > 0, max_steps=config.keep_rows_steps
        )
        self.layout = RankLayout((0,), (0,))
        self.memory = MemorySnapshots(fleet, self.history, every_steps, self._tell_rows)
        self._config = config
        self._fleet = fleet
        self._publisher = publisher
        self._on_rows_needed = on_rows_needed
        self._on_given_up = on_given_up
        self._recovery: Recovery | None = None
        self._bodies: dict[asyncio.Timeout, None] = {}  # in the order of their begin
        self._announced = -1
        self._renew: Callable[[WeightsReference], None] = lambda _: None

    async def start(self, lineage: int) -> Recovery:
        """The ranks meet, and build their engines; returns what restarts them from then on."""
        await self._meet(lineage)
        if len({member.worker.node for member in self._fleet.members}) > 1:
            self.memory.turn_off()
        self.history.begin(lineage, Source(0, SnapshotPlace.initial))
        members = self._fleet.members
        self._recovery = Recovery(
            self._fleet,
            {members[0].order.role: members},
            self._fleet.config.max_deaths,
            self._bring_back,
            self._on_given_up,
            self._tell_rows,
        )
        return self._recovery

    def note_loss(self) -> None:
        """A rank has died, and will be started again: what goes on ends."""
        while self._bodies:  # each is ended once
            body, _ = self._bodies.popitem()
            body.reschedule(asyncio.get_running_loop().time())

    async def repeated(self, body: Callable[[], Awaitable[T]]) -> T:
        """The result of a body that calls the ranks; it is repeated when some of them die.

        Raises: WorkerError: the ranks were given up. What the body raises.
        """
        while True:
            if self._recovery is not None:
                await self._recovery.wait_until_ready(self._fleet.members[0])
            num_restarts = self._num_restarts
            scope = asyncio.timeout(None)
            try:
                async with scope:
                    self._bodies[scope] = None
                    try:
                        # what follows must come after it on every rank, writes among them
                        await self.memory.wait_until_taken()
                        return await body()
                    finally:
                        self._bodies.pop(scope, None)
            except TimeoutError:
                if not scope.expired():
                    raise
            except _OF_A_DEATH as error:
                is_final = isinstance(error, StaleCall | BatchLost)
                if is_final or not await self._has_died_since(num_restarts):
                    raise
            logger.info("ranks have died: a call waits for them, and is repeated then")

    def note_published(self, version: int, renew: Callable[[WeightsReference], None]) -> None:
        """Workers are told of the weights of a version.

        Args:
            renew: tells them that the same weights are to be had elsewhere.
        """
        self._announced, self._renew = version, renew

    def advance(self, version: int) -> None:
        """The ranks have made a new version: something useful."""
        self.history.advance(version)
        if self._recovery is not None:
            self._recovery.note_progress(self._fleet.members[0])
        self.memory.begin_when_due()
        self._tell_rows()

    def note_durable(self, version: int) -> None:
        """The snapshot of a version is whole, on the disk."""
        self.history.note_durable(version)
        self._tell_rows()

    def operation(self, name: str, content: Any = None) -> Operation:
        """An operation on the present policy."""
        return Operation(self.history.lineage, self.history.version, name, digest(content))

    async def compute_logprobs(self, parts: Sequence[BatchMetadata]) -> list[ShardReference]:
        """The shard that the head of each share has sealed."""
        current = [self.history.current(part) for part in parts]
        replies = await self._fleet.call_each(calls.COMPUTE_LOGPROBS, self.layout.spread(current))
        return [reply.shard for reply in self.layout.of_heads(replies)]

    async def update(self, update: Updated) -> dict[str, float]:
        """Metrics of an update; it is noted, and so made again where it has to be."""
        self.history.note_update(update)
        self._tell_rows()
        return await self._update(update)

    def undo_step(self) -> None:
        """The rows of the step that goes on are gone: the ranks are where it began, or go there.

        They go there by new lives: some ranks may have begun to change their weights.
        """
        has_updates = self.history.has_updates
        self.history.drop_step()
        first = self._fleet.members[0]
        if has_updates:
            cause = "has begun a step whose rows are gone, and goes back to its beginning"
            self._fleet.lose(first, first.worker.incarnation, cause)

    async def begin_write(self, change: calls.Change) -> str:
        """The ranks take what they write; returns where they write an export."""
        if isinstance(change, calls.Snapshot):
            await self._fleet.call_all(calls.BEGIN_SNAPSHOT, change)
            return ""
        return (await self._fleet.call_all(calls.BEGIN_SAVE_HF, change))[0]

    def _tell_rows(self) -> None:
        """Those of steps that are being repeated stay, however short room is."""
        is_being_repeated = not (self._recovery and self._recovery.is_ready(self._fleet.members[0]))
        is_covered_soon = self.memory.is_writing or self.memory.is_due_soon or is_being_repeated
        self._on_rows_needed(RowsNeeded(self.history.rows_from, is_covered_soon))

    @property
    def _num_restarts(self) -> int:
        return 0 if self._recovery is None else self._recovery.num_restarts

    async def _has_died_since(self, num_restarts: int) -> bool:
        """Whether an error may be due to a death, which the others notice first."""
        if self._recovery is None:
            return False
        give_up_s = asyncio.get_running_loop().time() + LOSS_NOTICE_S
        while len(self._fleet.members) > 1 and self._num_restarts == num_restarts:
            if asyncio.get_running_loop().time() > give_up_s:
                break
            await asyncio.sleep(0.05)
        first = self._fleet.members[0]
        return self._num_restarts != num_restarts or not self._recovery.is_ready(first)

    async def _meet(self, lineage: int) -> None:
        world_size = len(self._fleet.members)
        init_method = ""
        if world_size > 1:  # one rank alone opens no port for it
            rank_0 = self._fleet.members[0]
            init_method = await self._fleet.call(rank_0, calls.CREATE_RENDEZVOUS, None)
        places = await self._fleet.call_each(
            calls.INITIALIZE_RANK,
            [
                calls.InitializeRank(rank, world_size, init_method, lineage)
                for rank in range(world_size)
            ],
        )
        self.layout = RankLayout.of(places)

    async def _bring_back(self, _: Sequence[Member]) -> None:
        """New lives of all ranks come to where the lives before were."""
        self._publisher.forget_group()
        await self._meet(lineage=0)
        source = await self._load_newest()
        history, weights = self.history, None
        try:
            for version in range(source.version, history.version):
                for call in history.calls_at(version):
                    await self._repeat(call)
                weights = await self._advance_again(version)
            await self._announce_again(weights)
            if source.version < history.version:
                self.memory.begin_when_due()
                await self.memory.wait_until_taken()
        except ShardGone as error:
            raise StepsLost(
                f"train workers were started again from the {source.place} state of version "
                f"{source.version}, and the steps since cannot be repeated: {error}; run the same "
                "command again: it goes on from the newest snapshot on the disk"
            ) from error
        await self._repeat_step()
        logger.warning(
            "ranks are back at version=%d, from version=%d (%s)",
            *(history.version, source.version, source.place),
        )

    async def _repeat_step(self) -> None:
        """The step that goes on; if its rows are gone, new lives begin it anew, with a new batch.

        Raises: WorkerLost: they are.
        """
        try:
            for call in self.history.calls_at(self.history.version):
                await self._repeat(call)
        except ShardGone as error:
            self.history.drop_step()
            raise WorkerLost(f"the step cannot be made again as it was: {error}") from error

    async def _load_newest(self) -> Source:
        tried = 0
        for source in self.history.sources:
            if tried and source.place is SnapshotPlace.initial:
                # a load that has failed may have changed some of it
                raise WorkerStartError("no snapshot could be read; the ranks begin anew")
            # named by its place: another rank may still be at the one that failed
            name = f"load_snapshot/{source.place}"
            operation = Operation(self.history.lineage, source.version, name)
            try:
                await self._fleet.call_all(
                    calls.LOAD_SNAPSHOT, calls.Snapshot(operation, source.place)
                )
                return source
            except CheckpointError as error:
                tried += 1
                logger.error("a snapshot (%s) cannot be read: %s", source.place, error)
                self.history.note_unreadable(source)
        raise StepsLost(
            f"train workers died at version {self.history.version}, and no state is left that "
            "they could begin from; run the same command again: it goes on from the newest "
            "snapshot on the disk that can be read"
        )

    async def _repeat(self, call: Call) -> None:
        match call:
            case ComputedLogprobs(parts, shards):
                sealed = await self.compute_logprobs(parts)
                for shard, again in zip(shards, sealed, strict=True):
                    self.history.move(shard.shard_id, again)
            case PPOUpdated() | SFTUpdated():
                await self._update(call)
            case BegunWrite(change):
                await self.begin_write(change)

    async def _update(self, update: Updated) -> dict[str, float]:
        replies: list[calls.Numbers]
        if isinstance(update, PPOUpdated):
            shares = [
                structs.replace(
                    share, minibatches=tuple(map(self.history.current, share.minibatches))
                )
                for share in update.shares
            ]
            replies = await self._fleet.call_each(calls.PPO_UPDATE, self.layout.spread(shares))
        else:
            replies = await self._fleet.call_each(
                calls.SFT_UPDATE, self.layout.spread(update.shares)
            )
        return dict(self.layout.of_heads(replies)[0])

    async def _advance_again(self, version: int) -> WeightsReference | None:
        """The ranks go to the next version; returns its weights, if it is one that has some."""
        if any(isinstance(call, SFTUpdated) for call in self.history.calls_at(version)):
            return None
        return await self._seal(version, version + 1)

    async def _announce_again(self, weights: WeightsReference | None) -> None:
        """Those who wait for the newest weights get them from the new lives."""
        version = self.history.version
        is_sealed = self._config.weight_update.method is not WeightUpdateMethod.disk
        if version == self._announced and is_sealed:
            self._renew(weights or await self._seal(version, version))

    async def _seal(self, version: int, sealed: int) -> WeightsReference:
        operation = Operation(
            self.history.lineage, version, f"publish_weights/{sealed}", digest(None)
        )
        return await self._publisher.seal(operation, sealed, keeps_adopted=True)
