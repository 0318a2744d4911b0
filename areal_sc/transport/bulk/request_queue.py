"""Pulls that wait for their turn at one owner, and the requests that are cut from them.

Pulls take turns, a request each, so a small pull does not wait for the end of a large one. What is
small shares a request: requests are cut when a credit is free, not when a pull begins.

    pulls        [ A A A A ... ]   [ b ]   [ c ]
    requests     [ A ] [ b c A ] [ A ] ...
"""

from __future__ import annotations

import asyncio
import operator
from collections import deque
from dataclasses import dataclass, field
from typing import Final, TypeAlias

from areal_sc.errors import ArealError
from areal_sc.transport.bulk.wire import MAX_REQUEST_ROWS, DescribedField
from areal_sc.transport.pull_plan import Part, SegmentCursor

MAX_REQUEST_FIELDS: Final = 256
"""With names of at most `MAX_NAME_BYTES` a request stays below `wire.MAX_REQUEST_BYTES`."""


@dataclass(eq=False, slots=True)
class FetchJob:
    """What one pull wants of one owner.

    Attributes:
        begun_s: when it began; times are on the clock of the event loop.
        sent_s: when the first of it was asked for; 0: not yet.
        copying_s: spent on checking what arrived and putting it in its place.
        returned: parts asked for before, whose request failed for another part's sake.
        missing_bytes: not yet arrived.
    """

    shard_id: str
    cursor: SegmentCursor
    missing_bytes: int
    done: asyncio.Future[None]
    begun_s: float = 0.0
    sent_s: float = 0.0
    copying_s: float = 0.0
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
class DescribeJob:
    """A shard's fields that somebody waits for."""

    shard_id: str
    done: asyncio.Future[list[DescribedField]]

    def fail(self, error: ArealError) -> None:
        if not self.done.done():
            self.done.set_exception(error)


Asked: TypeAlias = list[tuple[FetchJob, Part]]
"""What one request asks for, and for which pull."""


class RequestQueue:
    """The pulls whose parts were not all asked for yet.

    Args:
        request_bytes: payload of one request, at most.
    """

    def __init__(self, request_bytes: int) -> None:
        self._request_bytes = request_bytes
        self._jobs: deque[FetchJob] = deque()

    def __bool__(self) -> bool:
        return bool(self._jobs)

    def add(self, job: FetchJob) -> None:
        """It waits for its turn."""
        self._jobs.append(job)

    def forget(self, job: FetchJob) -> None:
        """Nobody waits for the job any more; what it still wants is not asked for."""
        job.returned.clear()
        job.cursor.clear()
        if job in self._jobs:
            self._jobs.remove(job)

    def put_back(self, asked: Asked) -> None:
        """Parts that were asked for in vain are asked for again, if their pulls still wait."""
        for job, part in asked:
            if not job.done.done():
                job.returned.append(part)
                if job not in self._jobs:
                    self._jobs.append(job)

    def next_request(self) -> Asked:
        """Parts of the pulls whose turn it is, up to the size of a request; maybe none."""
        asked: Asked = []
        room, rows, fields = self._request_bytes, MAX_REQUEST_ROWS, MAX_REQUEST_FIELDS
        while room and rows and fields and self._jobs:
            job = self._jobs.popleft()
            if job.done.done():  # it failed, or nobody waits for it any more
                continue
            parts = job.take(room, rows, fields)
            asked += [(job, part) for part in parts]
            room -= sum(part.num_bytes for part in parts)
            rows -= sum(part.num_rows for part in parts)
            fields -= sum(len(part.fields) for part in parts)
            if job.has_more:
                self._jobs.append(job)
                if not parts:
                    break
        return asked

    def drain(self) -> list[FetchJob]:
        """Takes all of them out."""
        jobs = list(self._jobs)
        self._jobs.clear()
        return jobs
