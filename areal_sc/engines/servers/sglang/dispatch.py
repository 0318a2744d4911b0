"""Requests wait here, in order, until a server may take them.

consumes     requests, and what the servers tell: open, closed, one request less
waits for    a server that the router chooses
unblocked by `changed`, called by whatever makes room; `fail`, when no server is left
"""

from __future__ import annotations

import asyncio
from collections import deque
from contextlib import suppress
from dataclasses import dataclass

from areal_sc.engines.servers.sglang.routing import Router, ServerLoad, Work
from areal_sc.errors import ArealError


@dataclass(eq=False)
class _Waiting:
    work: Work
    placed: asyncio.Future[Place | None]

    def give_up(self, cancelled: asyncio.Future[None]) -> None:
        if not self.placed.done():
            self.placed.set_result(None)


@dataclass(frozen=True)
class Place:
    """A request's place on a server, to be given back with `Dispatcher.leave`."""

    server: ServerLoad
    cost: float


class Dispatcher:
    """First come, first served, over all servers.

    Attributes:
        failure: why no request can be placed any more, or None.
    """

    def __init__(self, router: Router) -> None:
        self.router = router
        self.failure: ArealError | None = None
        self._waiting: deque[_Waiting] = deque()
        self._awaiting_empty: dict[ServerLoad, list[asyncio.Future[None]]] = {}

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    async def enter(self, work: Work, cancelled: asyncio.Future[None]) -> Place | None:
        """Waits for a server and takes a place on it; None when `cancelled` was set before.

        Raises: what `fail` was given.
        """
        if self.failure is not None:
            raise self.failure
        waiting = _Waiting(work, asyncio.get_running_loop().create_future())
        self._waiting.append(waiting)
        self.changed()
        cancelled.add_done_callback(waiting.give_up)
        try:
            return await waiting.placed
        except asyncio.CancelledError:
            if waiting.placed.cancelled():
                with suppress(ValueError):  # left out already
                    self._waiting.remove(waiting)
            elif waiting.placed.exception() is None and (place := waiting.placed.result()):
                self.leave(place)  # it was placed in the same turn of the loop
            raise
        finally:
            cancelled.remove_done_callback(waiting.give_up)

    def leave(self, place: Place) -> None:
        self.router.finish(place.server, place.cost)
        if place.server.num_running == 0:
            for waiting in self._awaiting_empty.pop(place.server, []):
                if not waiting.done():
                    waiting.set_result(None)
        self.changed()

    async def until_empty(self, server: ServerLoad) -> None:
        """Returns when the server has no request; it should be closed, or more may come."""
        if server.num_running:
            waiting: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._awaiting_empty.setdefault(server, []).append(waiting)
            await waiting

    def changed(self) -> None:
        """Places those who wait, as far as there is room now."""
        still: deque[_Waiting] = deque()
        while self._waiting and self.router.has_room:
            waiting = self._waiting.popleft()
            if waiting.placed.done():
                continue
            place = self._try(waiting.work)
            if place is None:
                still.append(waiting)
            else:
                waiting.placed.set_result(place)
        still.extend(self._waiting)
        self._waiting = still

    def fail(self, error: ArealError) -> None:
        """Ends all waiting, and every later `enter`, with this error."""
        self.failure = error
        while self._waiting:
            waiting = self._waiting.popleft()
            if not waiting.placed.done():
                waiting.placed.set_exception(error)

    def _try(self, work: Work) -> Place | None:
        server = self.router.choose(work)
        return None if server is None else Place(server, self.router.start(server, work))
