"""The asking side of the data plane: rows of many pulls, from many owners at once.

consumes     what pulls want of owners elsewhere
waits for    each owner's `OwnerLink` to have fetched it
unblocked by the link, or the pull's deadline
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Any, Final

from areal_sc.errors import RpcTimeout, ShardGone
from areal_sc.transport.bulk.buffer_pool import BufferPool
from areal_sc.transport.bulk.jobs import BulkOptions, Description, FetchJob
from areal_sc.transport.bulk.link import OwnerLink
from areal_sc.transport.bulk.turns import Turns
from areal_sc.transport.pull_plan import Owner, Segment, SegmentCursor
from areal_sc.transport.refusals import Refusals
from areal_sc.transport.rpc.transport import Transport
from areal_sc.transport.shard_layout import check_field_name

logger = logging.getLogger(__name__)

IDLE_BUFFER_BYTES: Final = 16 << 20
"""Memory kept for frames that cannot be received in place."""


class BulkClient:
    """Fetches from any number of owners; must be used on one running event loop.

    Args:
        transport: gives the control connections, which hand over the sessions.
        options: how to ask.
        turns: those of all bulk connections on the event loop.
    """

    def __init__(
        self, transport: Transport, options: BulkOptions, turns: Turns | None = None
    ) -> None:
        self._transport = transport
        self._options = options
        self._refused = Refusals(logger, "reply_refused", options.puller)
        self._ended_bytes = 0
        self._pool = BufferPool(IDLE_BUFFER_BYTES)
        self._turns = turns or Turns()
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
        cursor = SegmentCursor(segments, uncut_bytes=self._options.request_bytes // 2)
        job = FetchJob(shard_id, cursor, num_bytes, loop.create_future())
        link = self._link(owner)
        link.submit(job)
        try:
            await _by_deadline(job.done, deadline, shard_id, link)
        finally:
            link.abandon(job)
            del job  # with the traceback it would keep itself, and the pull's buffer

    async def describe(self, owner: Owner, shard_id: str, deadline: float) -> list[Any]:
        """[name, dtype name, row lengths] of each field of a shard; raises as `Puller.pull`."""
        loop = asyncio.get_running_loop()
        description = Description(shard_id, loop.create_future())
        link = self._link(owner)
        link.submit_description(description)
        await _by_deadline(description.fields, deadline, shard_id, link)
        return description.fields.result()

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
                turns=self._turns,
                refused=self._refused,
                on_ended=self._forget,
            )
        return link

    def _forget(self, link: OwnerLink) -> None:
        """A later pull from this owner tries anew."""
        if self._links.get(link.owner) is link:
            del self._links[link.owner]
            self._ended_bytes += link.received_bytes


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
