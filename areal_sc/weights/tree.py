"""Decides who pulls new weights from whom, so that trainers send them a few times, not once a node.

    trainers ──► node ──► node ──► ...     a node that has a copy serves one other at a time
        └──────► node ──► ...              one worker of a node pulls it, the others map it

consumes     workers that are to have new weights; losses of workers
waits for    a source that is free, or the copy that another worker of the node makes
unblocked by the end of a pull, however it ends. One that takes long counts as ended: its source
             serves the next one beside it

Where versions are published as what has changed, too, each node keeps a copy: the next one is made
of it. A copy is handed on with the changes that it was made by.

A source is given when it is free, so there is no fixed tree, and whoever is slow or dead holds up
only those who pull from it. A pull that fails is repeated from another source, in the end from the
trainers. A copy is one sealed shard of one policy, so nothing is ever mixed.

Whatever is on the trainers' node maps their memory, and takes no part in this.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Final

from msgspec.structs import replace

from areal_sc.config.schema import RolloutConfig
from areal_sc.errors import StoreFull, TransportError
from areal_sc.fleet.fleet import Fleet
from areal_sc.fleet.member import Member
from areal_sc.sizing.store_room import live_row_bytes
from areal_sc.transport.shards.memory_folder import OFF
from areal_sc.weights.methods import COPY_WEIGHTS, CopyWeights
from areal_sc.weights.published import ShardReference, WeightsReference

logger = logging.getLogger(__name__)

TRAINER_PULLS: Final = 2
"""Pulls of a version that the trainers serve while a copy is there or on its way."""

MAX_REFUSED: Final = 2
"""After so many copies that it could not read, a worker reads from the trainers."""

MIN_LATE_S: Final = 30.0
LATE_RATIO: Final = 3
"""A pull is late after this time, or after this many times what the last one took."""

RPC_MARGIN_S: Final = 60.0
"""A call may take this much longer than what it asks for, whose time limit the worker keeps."""


@dataclass(eq=False)
class WeightHolder:
    """A holder of weights that workers may pull.

    Attributes:
        keeper: the worker that keeps them; None: the trainers.
    """

    weights: WeightsReference
    keeper: Member | None = None


@dataclass(eq=False)
class Pull:
    """A worker's turn at a source.

    Attributes:
        makes_copy: others may pull from that one.
        began_s: loop time.
        late: ends the turn of a pull that takes long.
    """

    source: WeightHolder
    makes_copy: bool
    began_s: float
    late: asyncio.TimerHandle | None = None


Refused = set[WeightHolder]
"""Copies that a worker could not read."""


@dataclass(eq=False)
class _Waiter:
    """A worker that waits for a source; its `pull` is None where there are newer weights by now."""

    refused: Refused
    makes_copy: bool
    pull: asyncio.Future[Pull | None]


class WeightTree:
    """Gives each rollout worker a source of the newest weights.

    Args:
        late_members: the workers that do not hold these weights.
    """

    def __init__(
        self, config: RolloutConfig, fleet: Fleet, late_members: Callable[[], Iterable[Member]]
    ) -> None:
        self._config = config
        self._fleet = fleet
        self._late_members = late_members
        self._trainers = WeightHolder(WeightsReference(0))
        self._num_from_trainers = 0
        self._copies: dict[str, WeightHolder] = {}  # by place
        self._bases: dict[str, WeightHolder] = {}  # by place, of the version before
        self._idle: dict[
            WeightHolder, None
        ] = {}  # copies that nobody pulls from, or late ones alone
        self._copying: dict[str, asyncio.Event] = {}  # by place, until it has a copy, or has failed
        self._full: set[str] = set()  # places without room for a copy
        self._pulls: set[Pull] = set()  # but for late ones
        self._line: dict[_Waiter, None] = {}
        self._num_stores: Counter[str] = Counter()  # by node
        self._last_pull_s = 0.0

    def adopt(self, weights: WeightsReference) -> None:
        """There is a new version, or the trainers serve from elsewhere."""
        if weights.policy != self._trainers.weights.policy:
            self._bases, self._copies = self._copies, {}
            self._idle, self._pulls, self._num_from_trainers = {}, set(), 0
            for waiter in self._line:
                if not waiter.pull.done():
                    waiter.pull.set_result(None)
            self._line.clear()
            self._num_stores = Counter(m.worker.node for m in self._fleet.members)
        self._trainers = WeightHolder(weights)

    def forget(self, keeper: Member) -> None:
        """The worker is lost: nobody begins to read from it."""
        for holders in (self._copies, self._bases):
            for place, source in list(holders.items()):
                if source.keeper is keeper:
                    del holders[place]
                    self._idle.pop(source, None)
        self._serve()

    def wants_copy(self, member: Member, weights: WeightsReference) -> bool:
        """Whether `bring_near` has something to do."""
        place = self._place(member)
        is_known = place in self._copies or place in self._full
        if is_known or not (self._is_far(member, weights) and self._is_current(weights)):
            return False
        if self._config.weight_update.has_changes:
            return True  # of the next version it gets what has changed
        others: set[str] = set()
        for late in self._late_members():
            if late is not member and self._is_far(late, weights):
                others.add(self._place(late))
            if place in others or len(others) >= TRAINER_PULLS:
                return True
        return False  # the trainers serve as many

    async def bring_near(self, member: Member, weights: WeightsReference, refused: Refused) -> None:
        """The worker's node has a copy when this returns, if the worker is not alone in need of it.

        Raises: the errors of `Fleet.call`.
        """
        place = self._place(member)
        while self.wants_copy(member, weights):
            if place in self._copying:
                await self._copying[place].wait()
                continue
            ended = self._copying[place] = asyncio.Event()
            try:
                async with self._pulling(refused, makes_copy=True) as source:
                    if source is not None:
                        await self._copy(member, source)
            except StoreFull as error:
                self._full.add(place)
                logger.warning(
                    "worker=%s its node keeps no copy of the weights, so that each of its workers "
                    "pulls them for itself: %s",
                    member.name,
                    error,
                )
            finally:
                del self._copying[place]
                ended.set()

    @asynccontextmanager
    async def reading(
        self, member: Member, weights: WeightsReference, refused: Refused
    ) -> AsyncIterator[WeightsReference]:
        """Where the worker reads these weights; within the context it does.

        What its node has costs others nothing. Else a source is taken.
        """
        near = self._copies.get(self._place(member))
        if not self._is_far(member, weights) or not self._is_current(weights):
            yield weights
        elif near is not None and near not in refused:
            with _blaming(near, refused):
                yield near.weights
        else:
            async with self._pulling(refused, makes_copy=False) as source:
                yield weights if source is None else source.weights

    def _place(self, member: Member) -> str:
        """Workers of one place map each other's memory."""
        shares = self._fleet.config.transport.shared_memory != OFF
        return member.worker.node if shares else member.name

    def _is_far(self, member: Member, weights: WeightsReference) -> bool:
        """Whether the worker gets over the network what the trainers hold."""
        is_pulled = bool(weights.shards) and weights.broadcast is None
        return is_pulled and set(weights.nodes) != {member.worker.node}

    def _is_current(self, weights: WeightsReference) -> bool:
        return weights.policy == self._trainers.weights.policy

    async def _copy(self, member: Member, source: WeightHolder) -> None:
        weights, place = source.weights, self._place(member)
        shard, *of_changes = await self._fleet.call(
            member,
            COPY_WEIGHTS,
            CopyWeights(weights, self._row_bytes(member), self._base(place, weights)),
            timeout_s=self._fleet.config.transport.pull_timeout_s + RPC_MARGIN_S,
        )
        if self._is_current(weights):
            changes = weights.changes
            if changes is not None:
                changes = replace(changes, shards=tuple(of_changes)) if of_changes else None
            nodes = (member.worker.node,)
            held = replace(weights, shards=(shard,), nodes=nodes, changes=changes)
            self._copies[place] = copy = WeightHolder(held, member)
            self._idle[copy] = None
            self._serve()

    def _base(self, place: str, weights: WeightsReference) -> ShardReference | None:
        """The copy there of the version that the changes in these weights are of."""
        base, changes = self._bases.get(place), weights.changes
        if base is None or changes is None or base.weights.policy != changes.base:
            return None
        return base.weights.shards[0]

    def _row_bytes(self, member: Member) -> int:
        """Most bytes of rows on the worker's node, by what `store_room` goes by.

        Where stores have no limit, these are the rows that are in use.
        """
        worker, config = member.worker, self._config
        of_store = config.store_bytes or live_row_bytes(config)
        of_stores = max(1, self._num_stores[worker.node]) * of_store
        return min(of_stores, worker.store_room_bytes or of_stores)  # 0: it is not known

    @asynccontextmanager
    async def _pulling(
        self, refused: Refused, *, makes_copy: bool
    ) -> AsyncIterator[WeightHolder | None]:
        """A turn at a source, as soon as there is one; None: there are newer weights by now."""
        waiter = _Waiter(refused, makes_copy, asyncio.get_running_loop().create_future())
        self._line[waiter] = None
        self._serve()
        try:
            await asyncio.wait([waiter.pull])
            pull = waiter.pull.result()
            if pull is None:
                yield None
                return
            with _blaming(pull.source, refused):
                yield pull.source
            self._last_pull_s = asyncio.get_running_loop().time() - pull.began_s
        finally:
            self._line.pop(waiter, None)
            if waiter.pull.done() and (pull := waiter.pull.result()) is not None:
                self._end(pull)

    def _serve(self) -> None:
        """Whoever waits gets a source, in turn, as far as there are any."""
        is_any_free = True  # for those who refuse none
        for waiter in list(self._line):
            if not (is_any_free or waiter.refused):
                continue
            source = self._free_source(waiter.refused)
            if source is None:
                is_any_free = is_any_free and bool(waiter.refused)
            else:
                del self._line[waiter]
                waiter.pull.set_result(self._begin(source, waiter.makes_copy))

    def _free_source(self, refused: Refused) -> WeightHolder | None:
        """For a worker with these experiences."""
        if len(refused) >= MAX_REFUSED:
            return self._trainers
        for source in self._idle:
            if source not in refused:
                return source
        is_any_left = any(copy not in refused for copy in self._copies.values())
        is_copying = any(pull.makes_copy for pull in self._pulls)
        is_asked_often = self._num_from_trainers >= TRAINER_PULLS
        return None if is_asked_often and (is_any_left or is_copying) else self._trainers

    def _begin(self, source: WeightHolder, makes_copy: bool) -> Pull:
        loop = asyncio.get_running_loop()
        late_s = max(MIN_LATE_S, LATE_RATIO * self._last_pull_s)
        pull = Pull(source, makes_copy, loop.time())
        pull.late = loop.call_later(late_s, self._end, pull)
        self._pulls.add(pull)
        self._idle.pop(source, None)
        self._num_from_trainers += source.keeper is None
        return pull

    def _end(self, pull: Pull) -> None:
        """The pull has ended, or is late: its source serves the next one."""
        if pull.late is not None:
            pull.late.cancel()
        if pull in self._pulls:
            self._pulls.remove(pull)
            if pull.source in self._copies.values():
                self._idle[pull.source] = None
            self._serve()


@contextmanager
def _blaming(source: WeightHolder, refused: Refused) -> Iterator[None]:
    """Notes a copy that could not be read. Of the trainers there are no others."""
    try:
        yield
    except StoreFull:
        raise
    except TransportError:
        if source.keeper is not None:
            refused.add(source)
        raise
