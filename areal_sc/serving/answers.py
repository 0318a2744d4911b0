"""Answers of requests, by their ids: a repeated request gets the answer of the first one.

consumes     requests, each with an id that its client makes again when it asks again
waits for    the work of each; a client that asks for the answer, for as long as it likes
unblocked by the end of the work, whoever asks for it by then
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Final

from msgspec.structs import replace

from areal_sc.errors import ArealError, RunFolderError
from areal_sc.serving.journal import ApiAnswer, ServeJournal
from areal_sc.serving.wire import RequestRefused, failure_of

logger = logging.getLogger(__name__)

MAX_KEPT: Final = 20_000
"""Requests whose answers are kept; the oldest answers go first."""
MAX_KEPT_BYTES: Final = 1 << 30
MAX_OPEN: Final = 8192
"""Requests of a tenant that are not answered."""


Work = Callable[[ApiAnswer | None], Awaitable[ApiAnswer]]
"""What a request asks for. It gets the answer that an earlier server has given, if there is one,
and then only does what this server has to know."""


class Answers:
    """The work of requests, and what came of it.

    Args:
        journal: gets each answer.
        known: answers of an earlier server, by the ids of the requests.
        ended_by: of an error, whether the server cannot go on: then by what.

    Attributes:
        failed: by what the server has ended. Requests that met that stay unanswered: the next
            server does them.
        num_answered: requests by tenant, since the start.
    """

    def __init__(
        self,
        journal: ServeJournal,
        known: dict[str, ApiAnswer],
        ended_by: Callable[[ArealError], ArealError | None],
    ) -> None:
        self.failed: asyncio.Future[BaseException] = asyncio.get_running_loop().create_future()
        self._ended_by = ended_by
        self._journal = journal
        self._known = known
        self._tasks: dict[str, asyncio.Task[ApiAnswer]] = {}
        self._num_open: Counter[str] = Counter()  # requests by tenant
        self._num_bytes = 0
        self.num_answered: Counter[str] = Counter()

    def begin(self, request_id: str, work: Work, tenant: str) -> None:
        """Begins the work, unless a request of this id has begun it.

        Raises: RequestRefused: 429: too many of the tenant's are not answered yet.
        """
        if request_id in self._tasks:
            return
        if self._num_open[tenant] >= MAX_OPEN:
            raise RequestRefused(f"{MAX_OPEN} requests of this key are not answered yet", 429)
        self._num_open[tenant] += 1
        known = self._known.get(request_id)
        done = self._done(request_id, work, known, tenant)
        self._tasks[request_id] = asyncio.create_task(done, name=request_id)
        self._forget_oldest()

    def knows(self, request_id: str) -> bool:
        """Whether it was begun, or an earlier server has answered it."""
        return request_id in self._tasks or request_id in self._known

    def newest(self, max_bytes: int) -> list[ApiAnswer]:
        """The newest answers, in their order."""
        found = list[ApiAnswer]()
        for task in reversed(self._tasks.values()):
            if not task.done() or task.cancelled():
                continue
            max_bytes -= len(task.result().body)
            if max_bytes < 0:
                break
            found.append(task.result())
        return found[::-1]

    async def wait_for(self, request_id: str, limit_s: float) -> ApiAnswer | None:
        """The answer; None: it is not there yet.

        Raises: RequestRefused: 404: nobody has asked for it, or that is long ago.
        """
        if (task := self._tasks.get(request_id)) is None:
            if (known := self._known.get(request_id)) is not None:
                return known
            raise RequestRefused(
                f"request {request_id:.200} is not known, or was answered long ago", 404
            )
        done, _ = await asyncio.wait([task], timeout=limit_s)
        return task.result() if done else None

    async def close(self) -> None:
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    async def _done(
        self, request_id: str, work: Work, known: ApiAnswer | None, tenant: str
    ) -> ApiAnswer:
        try:
            answer = await work(known)
        except RequestRefused as refused:
            answer = failure_of(str(refused), is_users=True)
        except ArealError as error:
            logger.exception("a request has failed")
            if (end := self._ended_by(error)) is not None:
                await self._end(end)
            answer = failure_of(f"{type(error).__name__}: {error}", is_users=False)
        if known is None:
            known = replace(answer, request_id=request_id)
            try:
                self._journal.write(known)
            except RunFolderError as error:
                await self._end(error)
        self._num_bytes += len(known.body)
        self.num_answered[tenant] += 1
        self._num_open[tenant] -= 1
        return known

    async def _end(self, error: ArealError) -> None:
        """The server ends; the request stays unanswered."""
        if not self.failed.done():
            self.failed.set_result(error)
        await asyncio.Event().wait()

    def _forget_oldest(self) -> None:
        while len(self._tasks) > MAX_KEPT or self._num_bytes > MAX_KEPT_BYTES:
            oldest = next((name for name, task in self._tasks.items() if task.done()), None)
            if oldest is None:
                return
            self._num_bytes -= len(self._tasks.pop(oldest).result().body)
