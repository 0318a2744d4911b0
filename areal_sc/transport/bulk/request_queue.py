"""Pulls that wait for their turn at one owner, and the requests that are cut from them.

Pulls take turns, a request each, so a small pull does not wait for the end of a large one. What is
small shares a request: requests are cut when a credit is free, not when a pull begins.

    pulls        [ A A A A ... ]   [ b ]   [ c ]
    requests     [ A ] [ b c A ] [ A ] ...
"""

from __future__ import annotations

from collections import deque
from typing import Final, TypeAlias

from areal_sc.transport.bulk.jobs import FetchJob
from areal_sc.transport.bulk.wire import MAX_REQUEST_ROWS
from areal_sc.transport.pull_plan import Part

MAX_REQUEST_FIELDS: Final = 256
"""With names of at most `MAX_NAME_BYTES` a request stays below `wire.MAX_REQUEST_BYTES`."""

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
