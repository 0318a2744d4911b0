"""The ranks of one model through all their lives: met, snapshotted, started again, brought back.

    death ──► Recovery ──► new lives ──► meet ──► load ──► seal ──► repeat ──► calls go on
                                      a snapshot    the announced   the step
                                      of the version   weights      that goes on

consumes     calls of the controller, each as a body that may be repeated; deaths of ranks
waits for    the ranks; during a recovery all calls wait for its end
unblocked by the ranks' replies, and `Recovery`, which ends each attempt somehow

Snapshots and exports are written beside training, once each rank has copied its state. A write that
a death interrupts in the step that follows is begun again by the ranks that are started in place of
the dead; in a later step it fails.

A death ends every body that runs: part of it may have been done by the life before. What a body
asks of the ranks are operations, so a repeat does nothing twice.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Sequence, Set
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, TypeVar

from areal_sc.config.schema import ActorConfig
from areal_sc.controller.ledger.ledger_records import Split
from areal_sc.controller.shared_card import NeedsRun, SharedCard, Side
from areal_sc.controller.step_life import StepLife
from areal_sc.controller.train.rank_layout import FoundRanks, RankLayout, meet, try_loss
from areal_sc.controller.train.rank_state import Asked, MemorySnapshots, RankState, StartingPoint
from areal_sc.controller.worker_store import ComputedFields
from areal_sc.errors import (
    ROWS_GONE,
    ArealError,
    CheckpointError,
    StaleCall,
    StoreFull,
    TransportError,
    WaitTimeout,
    WorkerError,
    WorkerLost,
    WorkerStartError,
)
from areal_sc.fleet.recovery import Recovery
from areal_sc.fleet.worker_life import Progressed
from areal_sc.ids import random_id
from areal_sc.metadata import RowMetadata
from areal_sc.run.run_status import RoleStatus
from areal_sc.system.durable import commit_folder
from areal_sc.system.waiting import bounded, first_of
from areal_sc.weights.channel import Channel, WeightsReader
from areal_sc.workers import calls, rank_methods
from areal_sc.workers.calls import SLEEP
from areal_sc.workers.operations import Kind, Operation, digest
from areal_sc.workers.rank_methods import SnapshotPlace

logger = logging.getLogger(__name__)

T = TypeVar("T")
Finish = Callable[[], Coroutine[Any, Any, None]]

LOSS_NOTICE_S: Final = 2.0
"""Time that is given to notice the death of another rank, which would explain an error."""


HUNG_SETTING: Final = "transport.call_timeout_s, of writes transport.write_timeout_s"
"""How long a call of ranks may take."""

_OF_A_DEATH: Final = (WorkerError, TransportError, CheckpointError)
"""What a rank raises whose partner dies, among other reasons."""


class Ranks:
    """Calls the ranks of one model, and brings them back when some of them die.

    Args:
        channel: by which rollout workers get the weights.
        needs: what the rollout controllers say of rows.
        card: that the ranks may share with generation.

    Attributes:
        step: the training step that goes on.
        reader: whose workers get the weights; None: nobody's, so far.
        channel: as given.
        state: where the ranks stand.
        layout: which of them computes what.
        memory: their snapshots in memory.
    """

    def __init__(
        self,
        config: ActorConfig,
        recovery: Recovery,
        channel: Channel,
        needs: Set[NeedsRun],
        card: SharedCard,
    ) -> None:
        self.step = StepLife()
        self.reader: WeightsReader | None = None
        self.channel = channel
        self._recovery = recovery
        self.fleet = fleet = recovery.fleet
        self.state = RankState()
        self.layout = RankLayout((0,), (0,))
        self._fields = ComputedFields(fleet, needs)
        self.memory = MemorySnapshots(fleet, self.state, config.memory_snapshots)
        self._config = config
        self._bodies: dict[asyncio.Timeout, None] = {}  # in the order of their begin
        self._are_as_built = False
        self._on_card = RanksOnCard(card, recovery)

    async def start(self, lineage: int, loss: int | None) -> None:
        """The ranks meet, and build their engines; from then on they are started again.

        Args:
            loss: number of a loss that they try first.
        """
        members = self.fleet.members
        self._on_card.note_memory()
        if any(member.is_adopted for member in members):
            await self.fleet.kill(members)
            await self.fleet.restart(members)
        if loss is not None:  # the call, unlike the start of a process, fails by its own name
            await try_loss(self.fleet, loss)
        self.layout = await meet(self.fleet, lineage)
        self._begin(lineage, StartingPoint(0, SnapshotPlace.initial))
        self._recovery.begin(self._bring_back)

    def take_over(self, found: FoundRanks) -> None:
        """The ranks go on where an earlier start of the script has left them; as `start`."""
        self.layout = RankLayout.of(found.positions)
        self._on_card.note_memory()
        is_initial = found.version == 0 and not found.has_begun_step
        where = found.lineage, found.version, found.in_memory
        self.state.take_over(*where, is_initial=is_initial)
        self.step.go_back(found.version)
        if found.has_begun_step:
            self.step.begin_before()
        self._recovery.begin(self._bring_back)

    def note_reader(self, reader: WeightsReader) -> None:
        """Workers of this controller get the weights, now or from an earlier start."""
        self.reader = reader
        reader.follow(self.step, self.memory.yield_memory)

    def _begin(self, lineage: int, source: StartingPoint) -> None:
        self.state.begin(lineage, source)
        self.step.go_back(source.version)

    def end_calls(self) -> None:
        """A rank has died: what goes on ends, and is repeated once they are there again."""
        while self._bodies:  # each is ended once
            body, _ = self._bodies.popitem()
            body.reschedule(asyncio.get_running_loop().time())

    async def repeated(
        self,
        body: Callable[[], Awaitable[T]],
        *,
        is_load: bool = False,
        repeats_hangs: bool = True,
        needs_card: bool = True,
    ) -> T:
        """The result of a body that calls the ranks; it is repeated when some of them die.

        Ranks that give no reply in time are started again, too.

        Args:
            is_load: it brings them to another state.
            repeats_hangs: also after that.
            needs_card: the ranks compute, or read their state.
        Raises: WorkerError: the ranks were given up, or hang. StepsLost: they are not where they
            were, and nothing has been loaded since. What the body raises.
        """
        if needs_card:
            async with self._on_card.turn():
                return await self._repeated(body, is_load=is_load, repeats_hangs=repeats_hangs)
        return await self._repeated(body, is_load=is_load, repeats_hangs=repeats_hangs)

    async def _repeated(
        self, body: Callable[[], Awaitable[T]], *, is_load: bool, repeats_hangs: bool
    ) -> T:
        was_full = False
        while True:
            await self._recovery.wait_until_ready(self.fleet.members[0])
            if not is_load:
                self.step.check()
            num_restarts = self._recovery.num_restarts
            scope = asyncio.timeout(None)
            try:
                async with scope:
                    self._bodies[scope] = None
                    try:
                        result = await body()
                        if self._config.is_frozen:  # it makes no versions: this is its progress
                            self.fleet.tell(Progressed(self.fleet.members[0].life.unit))
                        return result
                    finally:
                        self._bodies.pop(scope, None)
            except StoreFull as error:
                if was_full or not await self.memory.yield_memory(error):
                    raise
                was_full = True
                continue
            except _OF_A_DEATH as error:  # first: a call that took too long is a TimeoutError, too
                members = self.fleet.members
                if hung := await self.fleet.lose_hung(error, members, HUNG_SETTING):
                    if not repeats_hangs:
                        raise hung from error
                elif isinstance(error, StaleCall) or not await self._has_died_since(num_restarts):
                    raise
            except TimeoutError:
                if not scope.expired():
                    raise
            logger.info("ranks have died: a call waits for them, and is repeated then")

    async def load(self, lineage: int, source: StartingPoint) -> None:
        """The ranks go to another state, from which a new lineage begins.

        Raises: CheckpointError: it cannot be read.
        """
        first, ends_them = self.fleet.members[0], False
        if source.place is SnapshotPlace.initial and not self._are_as_built:
            ends_them = True
            self.step.lose("the initial model is to be loaded")
            self.fleet.lose(first, first.worker.incarnation, "goes back to its first model")
        operation = Operation(lineage, source.version, Kind.load)

        async def load() -> None:
            self._are_as_built = False
            await self.fleet.call_all(
                rank_methods.LOAD_SNAPSHOT, rank_methods.Load(operation, source.place)
            )

        await self.repeated(load, is_load=True)
        if ends_them:  # on purpose: no sign that they do not work
            self.fleet.tell(Progressed(first.life.unit))
        self._begin(lineage, source)

    async def take_snapshot(self, version: int) -> None:
        """Before the ranks `advance` to a version, which they have made: it has a snapshot then.

        So the step before it need not be repeated. Without one the run goes on, too.
        """
        num_restarts = self._recovery.num_restarts
        try:
            await self.memory.take(version)
        except CheckpointError as error:
            if await self._has_died_since(num_restarts):
                raise
            self.memory.tell_failure(version, error)

    def advance(self, version: int) -> None:
        """The ranks have made a new version: something useful.

        Raises: BatchLost: they have lost it again; see `StepLife.publish`.
        """
        self.step.publish(version)
        self.state.advance(version)
        self.fleet.tell(Progressed(self.fleet.members[0].life.unit))

    def tell(self, status: RoleStatus) -> None:
        """Adds which history of weights this is."""
        status.lineage = self.state.lineage

    def operation(self, kind: Kind, which: str = "", content: Any = None) -> Operation:
        """An operation on the present policy."""
        lineage, version = self.state.lineage, self.state.version
        return Operation(lineage, version, kind, which, digest(content))

    async def ask(self, asked: Asked) -> list[Any]:
        """The reply of each model group's head; the call is repeated when ranks die."""
        return await self.repeated(lambda: self._ask_once(asked))

    async def _ask_once(self, asked: Asked) -> list[Any]:
        """The same by one call of each rank, which reads the rows where they are now."""
        shares = [share.on(self.state.current) for share in asked.shares]
        replies = await self.fleet.call_each(asked.method, self.layout.spread(shares))
        return self.layout.of_heads(replies)

    async def compute(self, asked: Asked) -> Asked:
        """The call with the shards of a field; it is noted, and so made again after a death.

        Fields of a published model go with each publication; those of another one with their rows.
        """

        async def compute() -> list[calls.SealedShard]:
            if self.reader is not None:
                return await self._ask_once(asked)
            await self._fields.sweep()
            batches = (batch for share in asked.shares for batch in share.batches)
            with self._fields.computing([row for it in batches for row in it.rows]) as sealed:
                sealed += await self._ask_once(asked)
            return sealed

        shards = [sealed.shard for sealed in await self.repeated(compute)]
        self.state.note(computed := replace(asked, shards=shards))
        return computed

    async def update(
        self,
        asked: Asked,
        number: int,
        trained: Sequence[RowMetadata],
        split: Split,
        advance: Callable[[], Awaitable[None]] | None,
    ) -> dict[str, float]:
        """Metrics of an update; it is noted, and so made again where it has to be.

        Args:
            number, trained, split: as in `StepLife.begin_update`.
            advance: is called when the ranks have made the next version; None: they do not.
        """

        async def update() -> dict[str, float]:
            self.step.begin_update(number, trained, split)
            self.state.note(asked)
            metrics = dict((await self._ask_once(asked))[0])
            if advance is not None:
                await self.take_snapshot(self.state.version + 1)
                await advance()
            return metrics

        try:
            return await self.repeated(update)
        except ROWS_GONE:
            raise
        except ArealError:  # unlike one that is given up, it does not go on in the workers
            self.state.drop(asked)
            if not self.state.is_updating:
                self.step.undo()
            raise

    async def begin_snapshot(self) -> Finish:
        """Returns when every rank has copied its state; the rest is written by what it returns."""
        _, finish = await self._begin_write(self.operation(Kind.snapshot))
        return finish

    async def begin_export(
        self, target: Path, adapter: int | None = None, *, with_optimizer: bool = False
    ) -> Finish:
        """The same of a model, or of the adapter of a place, which replaces `target`, maybe on
        another file system."""
        what = [str(target), *([] if adapter is None else [adapter, with_optimizer])]
        operation = self.operation(Kind.export, digest(what))
        exported, finish_write = await self._begin_write(operation, adapter, with_optimizer)

        async def finish() -> None:
            await finish_write()
            try:
                moved = asyncio.to_thread(commit_folder, Path(exported), target)
                limit_s = self.fleet.config.transport.write_timeout_s
                await bounded(moved, limit_s, f"the disk of {target}", "transport.write_timeout_s")
            except (OSError, WaitTimeout) as error:
                raise CheckpointError(f"cannot write {target}: {error}") from error

        return finish

    async def _begin_write(self, operation: Operation, *what: Any) -> tuple[str, Finish]:
        """The folder that is written to, and what waits for the end."""
        shares = [rank_methods.Write(operation, random_id(), *what)] * self.layout.num_shares
        self.state.note(write := Asked(rank_methods.BEGIN_WRITE, shares))
        try:
            written: str = (await self.ask(write))[0]
        except BaseException:
            self.state.drop(write)
            raise

        async def finish() -> None:
            wanted = rank_methods.Change(operation)
            try:
                # a write that hangs is not begun again: the disk does not answer
                await self.repeated(
                    lambda: self.fleet.call_all(rank_methods.FINISH_WRITE, wanted),
                    repeats_hangs=False,
                    needs_card=False,
                )
            except WorkerLost as error:
                raise CheckpointError(f"{operation}: {error}") from error
            except StaleCall as error:
                raise CheckpointError(
                    f"{operation}: train workers died while it was written, in a later step"
                ) from error
            finally:
                self.state.drop(write)

        return written, finish

    def undo_step(self) -> None:
        """The rows of the step that goes on are gone: the ranks are where it began, or go there.

        They go there by new lives: some ranks may have begun to change their weights.
        """
        is_updating = self.state.is_updating
        self.state.drop_step()
        if is_updating:
            self.begin_step_anew()

    def begin_step_anew(self) -> None:
        """New lives go to where the step began, whose rows are gone."""
        self.step.begin_anew("its ranks have begun it")
        first = self.fleet.members[0]
        cause = "has begun a step whose rows are gone, and goes back to its beginning"
        self.fleet.lose(first, first.worker.incarnation, cause)

    async def _has_died_since(self, num_restarts: int) -> bool:
        """Whether an error may be due to a death, which the others notice first."""
        recovery = self._recovery
        give_up_s = asyncio.get_running_loop().time() + LOSS_NOTICE_S
        while len(self.fleet.members) > 1 and recovery.num_restarts == num_restarts:
            if asyncio.get_running_loop().time() > give_up_s:
                break
            await asyncio.sleep(0.05)
        is_ready = self.fleet.members[0].life.is_ready
        return recovery.num_restarts != num_restarts or not is_ready

    async def _bring_back(self, _: str) -> None:
        """New lives of all ranks come to where the lives before were.

        Where that is not possible, further new lives stay as they are built.
        """
        self._on_card.note_left()  # the lives before are killed by now
        async with self._on_card.turn():
            self._on_card.note_memory()
            await self._bring_back_now()

    async def _bring_back_now(self) -> None:
        self.channel.note_new_ranks()
        self.layout = await meet(self.fleet, lineage=0)
        self._are_as_built = bool(self.step.why_lost)
        if self._are_as_built:
            return
        source = await self._load()
        await self._announce_again()
        await self._repeat_step()
        what = "ranks are back at version=%d, from its %s state"
        logger.warning(what, source.version, source.place)

    async def _repeat_step(self) -> None:
        """All that was asked for at the present version, in its order.

        If rows of it are gone, new lives begin the step anew.
        """
        try:
            for call in list(self.state.calls):
                replies = await self._ask_once(call)
                for shard, again in zip(call.shards, replies, strict=False):  # most seal none
                    self.state.move(shard.shard_id, again.shard)
        except ROWS_GONE as error:
            self.state.drop_step()
            if self._config.is_frozen:
                return  # fields alone were asked for, of rows that are not there any more
            self.step.undo()
            raise WorkerLost(f"the step cannot be made again as it was: {error}") from error

    async def _load(self) -> StartingPoint:
        tried = 0
        for source in self.state.sources:
            if tried and source.place is SnapshotPlace.initial:
                # a load that has failed may have changed some of it
                raise WorkerStartError("no snapshot could be read; the ranks begin anew")
            # named by its place: another rank may still be at the one that failed
            which = str(source.place)
            operation = Operation(self.state.lineage, source.version, Kind.load, which)
            try:
                await self.fleet.call_all(
                    rank_methods.LOAD_SNAPSHOT, rank_methods.Load(operation, source.place)
                )
                return source
            except CheckpointError as error:
                if len(self.fleet.members) > 1:  # another one's death may explain it, and end this
                    await asyncio.sleep(LOSS_NOTICE_S)
                tried += 1
                logger.error("a snapshot (%s) cannot be read: %s", source.place, error)
                self.state.note_unreadable(source)
        raise self._lose_steps(
            f"train workers died at version {self.state.version}, of which there is no snapshot "
            "that they could begin from"
        )

    def _lose_steps(self, why: str) -> WorkerLost:
        """The ranks begin once more, as they are built: some may be in the midst of a repeat."""
        self.step.lose(f"{why}: a snapshot has to be loaded")
        if self.reader is not None:
            self.reader.lose_steps()
        return WorkerLost(why)

    async def _announce_again(self) -> None:
        """Offers the weights of the new lives to whoever waits for the newest ones."""
        if self.step.are_weights_told and self.reader is not None:
            moved = await self.channel.seal_again(self.state.lineage, self.state.version)
            if moved is not None:
                self.reader.updates.renew(moved)


class RanksOnCard:
    """Has the ranks give up the card's memory when generation wants it (`placement: turns`).

    consumes     the turns of a `SharedCard`
    waits for    the ranks to give the memory up
    unblocked by their replies, or by their death; ranks that are given up end it with an error
    """

    def __init__(self, card: SharedCard, recovery: Recovery) -> None:
        self._has_memory = False  # on the card, as far as is known
        self._has_left = asyncio.Event()
        self._card = card
        self._recovery = recovery
        self._fleet = recovery.fleet
        card.join(Side.training, enter=self._enter, leave=self._leave)

    def turn(self) -> AbstractAsyncContextManager[None]:
        """Within it the ranks may use the card; raises as `SharedCard.held`."""
        return self._card.held(Side.training)

    def note_memory(self) -> None:
        """The ranks have memory on the card, or soon will."""
        self._has_memory = True

    def note_left(self) -> None:
        """The ranks have no memory on the card any more."""
        self._has_memory = False
        self._has_left.set()
        self._has_left = asyncio.Event()

    def _enter(self) -> None:
        self._has_memory = bool(self._fleet.members)

    async def _leave(self) -> None:
        """The ranks give up the card's memory. Those that cannot are started again.

        Returns: when the memory is free.
        """
        while self._has_memory:
            first, left = self._fleet.members[0], self._has_left
            incarnation = first.worker.incarnation
            try:
                await self._fleet.call_all(SLEEP, None)
            except ArealError as error:
                members = self._fleet.members
                if not await self._fleet.lose_hung(error, members, HUNG_SETTING):
                    self._fleet.lose(first, incarnation, f"has kept the card's memory: {error}")
                # they are up again, or without memory; raises that they were given up
                await first_of(self._recovery.wait_until_ready(first), left.wait())
            else:
                self.note_left()
