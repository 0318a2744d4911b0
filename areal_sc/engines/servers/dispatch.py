"""Which server a request goes to, and who waits for one. No I/O.

A request counts as many tokens as it has and may still get. It goes to the server with the fewest
tokens outstanding. Requests of one group have their prompt in common: they go to the server whose
cache has it, their home, unless that is further behind than about one group.

consumes     requests, and what the servers tell: open, closed, one request less
waits for    a server with room
unblocked by `changed`, called by whatever makes room; `fail`, when no server is left
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from areal_sc.engines.busy_time import BusyTime
from areal_sc.engines.servers.requests import CompletionRequest
from areal_sc.errors import ArealError

HOME_LEAD_REQUESTS = 8
"""Requests of work that a group's home may have more than the least loaded server."""

MAX_REMEMBERED_HOMES = 4096


@dataclass(eq=False)
class ServerLoad:
    """What the dispatcher knows of one server.

    Attributes:
        name: for messages.
        max_running: requests that it may have at one time; more would queue inside it.
        is_open: it takes requests now.
        version: policy version of its weights.
        num_running: requests that it has.
        outstanding_tokens: of these requests.
        is_empty: set while it has none.
        busy: how long it had requests, and how many.
    """

    name: str
    max_running: int
    is_open: bool = False
    version: int = 0
    num_running: int = 0
    outstanding_tokens: int = 0
    is_empty: asyncio.Event = field(default_factory=asyncio.Event)
    busy: BusyTime = field(default_factory=BusyTime)

    def __post_init__(self) -> None:
        self.is_empty.set()

    @property
    def has_room(self) -> bool:
        return self.is_open and self.num_running < self.max_running


L = TypeVar("L", bound=ServerLoad)


class Dispatcher(Generic[L]):
    """First come, first served, over all servers.

    Args:
        servers: in a fixed order; the first of equals is taken.

    Attributes:
        failure: why no request can be placed any more, or None.
        newest_version: of the weights that were published last; they may be of an earlier version
            than those before. None: it is not known.
    """

    def __init__(self, servers: Sequence[L]) -> None:
        self.failure: ArealError | None = None
        self.newest_version: int | None = None
        self._servers = servers
        self._homes: OrderedDict[str, L] = OrderedDict()
        self._waiting: deque[tuple[CompletionRequest, asyncio.Future[L]]] = deque()

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    async def enter(self, request: CompletionRequest) -> L:
        """Waits for a server and takes a place on it, to be given back with `leave`.

        Raises: what `fail` was given.
        """
        if self.failure is not None:
            raise self.failure
        placed: asyncio.Future[L] = asyncio.get_running_loop().create_future()
        self._waiting.append((request, placed))
        self.changed()
        try:
            return await placed
        except asyncio.CancelledError:
            if placed.cancelled():
                with suppress(ValueError):  # left out already
                    self._waiting.remove((request, placed))
            elif placed.exception() is None:
                self.leave(placed.result(), request)  # placed in the same turn of the loop
            raise

    def leave(self, server: L, request: CompletionRequest) -> None:
        """Takes a request off its server, however it ended."""
        server.num_running -= 1
        server.busy.note(server.num_running)
        server.outstanding_tokens -= request.max_tokens
        if server.num_running == 0:
            server.is_empty.set()
        self.changed()

    def changed(self) -> None:
        """Places those who wait, as far as there is room now."""
        still: deque[tuple[CompletionRequest, asyncio.Future[L]]] = deque()
        while self._waiting and any(server.has_room for server in self._servers):
            request, placed = self._waiting.popleft()
            if placed.done():
                continue
            server = self.choose(request)
            if server is None:
                still.append((request, placed))
            else:
                self._place(server, request)
                placed.set_result(server)
        still.extend(self._waiting)
        self._waiting = still

    def fail(self, error: ArealError) -> None:
        """Ends all waiting, and every later `enter`, with this error."""
        self.failure = error
        while self._waiting:
            _, placed = self._waiting.popleft()
            if not placed.done():
                placed.set_exception(error)

    def forget_homes(self, server: L) -> None:
        """The server starts anew: its cache is empty."""
        for group in [group for group, home in self._homes.items() if home is server]:
            del self._homes[group]

    def choose(self, request: CompletionRequest) -> L | None:
        """The server for a request, or None: every one that may take it is full or closed."""
        oldest = request.min_version
        if self.newest_version is not None:
            oldest = min(oldest, self.newest_version)
        free = [s for s in self._servers if s.has_room and s.version >= oldest]
        if not free:
            return None
        best = min(free, key=lambda server: server.outstanding_tokens)
        home = self._homes.get(request.prefix_group or "")
        if home is None or home not in free:
            return best
        lead = home.outstanding_tokens - best.outstanding_tokens
        return home if lead <= HOME_LEAD_REQUESTS * request.max_tokens else best

    def _place(self, server: L, request: CompletionRequest) -> None:
        server.num_running += 1
        server.busy.note(server.num_running)
        server.is_empty.clear()
        server.outstanding_tokens += request.max_tokens
        if request.prefix_group is not None:
            self._homes[request.prefix_group] = server
            self._homes.move_to_end(request.prefix_group)
            if len(self._homes) > MAX_REMEMBERED_HOMES:
                self._homes.popitem(last=False)
