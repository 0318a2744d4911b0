"""What pulls want of one owner, and how it may be asked for."""

from __future__ import annotations

import asyncio
import operator
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from areal_sc.errors import ArealError
from areal_sc.transport.bulk.wire import MAX_REPLY_BYTES
from areal_sc.transport.pull_plan import Part, SegmentCursor


@dataclass(frozen=True, slots=True)
class BulkOptions:
    """How a puller asks.

    Attributes:
        puller: name of this side, for the owners' messages.
        chunk_bytes: payload under one tag; no frame is larger.
        max_inflight_chunks: asked for and not yet here, of one owner, over all pulls.
        is_encrypted: as the owners are configured; another one is refused.
        stalled_timeout_s: how long an owner that gives no sign of life may take to answer its
            control socket.
    """

    puller: str
    chunk_bytes: int = 1 << 20
    max_inflight_chunks: int = 16
    is_encrypted: bool = False
    stalled_timeout_s: float = 30.0

    @property
    def inflight_bytes(self) -> int:
        """Payload asked for and not yet here, at most."""
        return self.chunk_bytes * self.max_inflight_chunks

    @property
    def request_bytes(self) -> int:
        """Of one request: a few are outstanding, so that the owner never waits for the next."""
        share = self.chunk_bytes * max(1, self.max_inflight_chunks // 4)
        return min(share, MAX_REPLY_BYTES)


@dataclass(eq=False, slots=True)
class FetchJob:
    """What one pull wants of one owner.

    Attributes:
        returned: parts asked for before, whose request failed for another part's sake.
        missing_bytes: not yet arrived.
    """

    shard_id: str
    cursor: SegmentCursor
    missing_bytes: int
    done: asyncio.Future[None]
    returned: deque[Part] = field(default_factory=deque)

    @property
    def has_more(self) -> bool:
        return bool(self.returned) or not self.cursor.is_done

    def take(self, max_bytes: int, max_rows: int, max_fields: int) -> list[Part]:
        """The next parts to ask for, within all limits."""
        if not self.returned:
            return self.cursor.take(max_bytes, max_rows, max_fields)
        part = self.returned[0]
        size = part.num_bytes, part.num_rows, len(part.fields)
        if any(map(operator.gt, size, (max_bytes, max_rows, max_fields))):
            return []
        return [self.returned.popleft()]

    def fail(self, error: ArealError) -> None:
        if not self.done.done():
            self.done.set_exception(error)

    def arrived(self, num_bytes: int) -> None:
        self.missing_bytes -= num_bytes
        if self.missing_bytes == 0 and not self.done.done():
            self.done.set_result(None)


@dataclass(eq=False, slots=True)
class Description:
    """A shard's fields that somebody waits for."""

    shard_id: str
    fields: asyncio.Future[list[Any]]
