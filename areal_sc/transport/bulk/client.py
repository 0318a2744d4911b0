"""The asking side of the data plane: rows of many pulls, from many owners at once.

consumes     what pulls want of owners elsewhere
waits for    each owner's `OwnerLink` to have fetched it
unblocked by the link, or the pull's deadline
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, Final

from areal_sc.errors import RpcTimeout, ShardGone
from areal_sc.transport.bulk.buffer_pool import BufferPool
from areal_sc.transport.bulk.grant import BulkOptions
from areal_sc.transport.bulk.link import OwnerLink
from areal_sc.transport.bulk.request_queue import DescribeJob, FetchJob
from areal_sc.transport.bulk.wire import DescribedField
from areal_sc.transport.pull_plan import Owner, Segment, SegmentCursor
from areal_sc.transport.rpc.transport import Transport
from areal_sc.transport.shards.layout import check_field_name
from areal_sc.transport.sockets.refusals import Refusals

logger = logging.getLogger(__name__)

IDLE_BUFFER_BYTES: Final = 16 << 20
"""Memory kept for encrypted payload that has several destinations."""

SLOW_PULL_S: Final = 5.0
SLOW_BYTES_PER_S: Final = 20e6
"""A pull that takes longer than both together allow is logged, with the phase that took longest."""


@dataclass(slots=True)
class PullSeconds:
    """Where the time of pulls went; of a pull from an owner elsewhere they are all of its time.

    Attributes:
        connecting: there was no connection to the owner.
        queueing: until the first request was sent, for want of credit.
        wire: from then on until all replies were here, without the rest.
        copying: checking replies; mapping and copying what lies on this node.
    """

    connecting: float = 0.0
    queueing: float = 0.0
    wire: float = 0.0
    copying: float = 0.0

    def add(self, other: PullSeconds) -> None:
        for phase in fields(self):
            setattr(self, phase.name, getattr(self, phase.name) + getattr(other, phase.name))


class BulkClient:
    """Fetches from any number of owners; must be used on one running event loop.

    Args:
        transport: gives the control connections, which hand over the sessions.
        options: how to ask.

    Attributes:
        seconds: of all fetches that have ended.
    """

    def __init__(self, transport: Transport, options: BulkOptions) -> None:
        self.seconds = PullSeconds()
        self._transport = transport
        self._options = options
        self._refused = Refusals(logger, "reply_refused", options.puller)
        self._ended_bytes = 0
        self._pool = BufferPool(IDLE_BUFFER_BYTES)
        self._links: dict[Owner, OwnerLink] = {}
        self._is_closed = False

    @property
    def num_refused(self) -> int:
        """Replies dropped because no owner sent them so."""
        return self._refused.num

    @property
    def received_bytes(self) -> int:
        """Bytes of all reply frames."""
        return self._ended_bytes + sum(link.received_bytes for link in self._links.values())

    async def fetch(self, owner: Owner, segments: Sequence[Segment], deadline: float) -> None:
        """Fills the destinations of all segments.

        Args:
            deadline: on the clock of the event loop.

        Raises: as `Puller.pull`.
        """
        num_bytes = sum(segment.num_bytes for segment in segments)
        if not num_bytes:
            return
        for name in {name for segment in segments for name in segment.piece.fields}:
            check_field_name(name)
        loop = asyncio.get_running_loop()
        shard_id = segments[0].piece.shard_id
        # a request ends early rather than cut what would be asked for in parts of parts
        cursor = SegmentCursor(segments, uncut_bytes=self._options.chunk_bytes // 2)
        job = FetchJob(shard_id, cursor, num_bytes, loop.create_future(), begun_s=loop.time())
        link = self._link(owner)
        connected_before_s = link.connecting_s
        link.submit(job)
        try:
            await _by_deadline(job.done, deadline, shard_id, link)
        finally:
            link.abandon(job)
            self._count(job, link, link.connecting_s - connected_before_s, num_bytes)
            del job  # with the traceback it would keep itself, and the pull's buffer

    async def describe(self, owner: Owner, shard_id: str, deadline: float) -> list[DescribedField]:
        """The fields of a shard; raises as `Puller.pull`."""
        job = DescribeJob(shard_id, asyncio.get_running_loop().create_future())
        link = self._link(owner)
        link.submit_description(job)
        await _by_deadline(job.done, deadline, shard_id, link)
        return job.done.result()

    async def close(self) -> None:
        """Ends all connections; pulls that wait, and later ones, raise ShardGone."""
        self._is_closed = True
        for link in list(self._links.values()):
            await link.close()

    def _link(self, owner: Owner) -> OwnerLink:
        if self._is_closed:
            raise ShardGone(f"nothing is pulled from {owner.node_id} any more: this side is closed")
        link = self._links.get(owner)
        if link is None:
            link = self._links[owner] = OwnerLink(
                owner,
                self._options,
                self._transport,
                pool=self._pool,
                refused=self._refused,
                on_ended=self._forget,
            )
        return link

    def _forget(self, link: OwnerLink) -> None:
        """A later pull from this owner tries anew."""
        if self._links.get(link.owner) is link:
            del self._links[link.owner]
            self._ended_bytes += link.received_bytes

    def _count(self, job: FetchJob, link: OwnerLink, connecting_s: float, num_bytes: int) -> None:
        now_s = asyncio.get_running_loop().time()
        total_s = now_s - job.begun_s
        queueing_s = max(0.0, (job.sent_s or now_s) - job.begun_s - connecting_s)
        wire_s = max(0.0, total_s - connecting_s - queueing_s - job.copying_s)
        seconds = PullSeconds(connecting_s, queueing_s, wire_s, job.copying_s)
        self.seconds.add(seconds)
        if total_s > SLOW_PULL_S + num_bytes / SLOW_BYTES_PER_S:
            phase, longest_s = max(asdict(seconds).items(), key=lambda entry: entry[1])
            logger.warning(
                "pull_slow owner=%s bytes=%d missing_bytes=%d seconds=%.1f slowest=%s "
                "slowest_seconds=%.1f",
                *(link.owner.node_id, num_bytes, job.missing_bytes, total_s, phase, longest_s),
            )


async def _by_deadline(
    done: asyncio.Future[Any], deadline: float, shard_id: str, link: OwnerLink
) -> None:
    """Waits for the future; past the deadline it fails with RpcTimeout."""
    loop = asyncio.get_running_loop()
    timer = loop.call_at(deadline, _expire, done, shard_id, link)
    try:
        await done
    finally:
        timer.cancel()
        if done.done() and not done.cancelled():
            done.exception()  # it failed in the very turn in which its pull was cancelled
        del done  # as above


def _expire(done: asyncio.Future[Any], shard_id: str, link: OwnerLink) -> None:
    if not done.done():
        what = f"shard {shard_id} on {link.owner.node_id}"
        done.set_exception(RpcTimeout(f"{what}: not pulled by its deadline{link.trouble}"))
