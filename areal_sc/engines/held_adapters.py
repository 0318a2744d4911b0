"""Which adapters an engine has at hand: those that are in use, and the newest of the others.

consumes     requests that name an adapter, in their order
waits for    room, where the adapters that are in use take all of it
unblocked by the end of a request that uses one
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Generic, TypeVar

from areal_sc.errors import ModelError

T = TypeVar("T")


@dataclass(eq=False)
class _Held(Generic[T]):
    adapter: T
    size: int
    num_users: int = 0


class HeldAdapters(Generic[T]):
    """Loads adapters at their first use, and forgets the least recently used ones.

    Args:
        room: for the sizes of all that are held.
        size_of: an adapter by the path of its folder. Raises: ModelError: it cannot be served.
        load: gives the engine an adapter. Raises: ModelError: it cannot be served.
        unload: takes it from the engine, which has no use for it.

    Attributes:
        num_loads: since the start.
    """

    def __init__(
        self,
        room: int,
        size_of: Callable[[str], Awaitable[int]],
        load: Callable[[str], Awaitable[T]],
        unload: Callable[[T], Awaitable[None]],
    ) -> None:
        self.num_loads = 0
        self._room = room
        self._size_of = size_of
        self._load = load
        self._unload = unload
        self._held: dict[str, _Held[T]] = {}  # the least recently used one first
        # One request at a time gets its adapter, also one that is held: else one that waits for
        # room might wait for ever.
        self._turn = asyncio.Lock()
        self._is_released = asyncio.Event()

    @asynccontextmanager
    async def using(self, folder: str) -> AsyncIterator[T]:
        """The adapter, which is held until the block ends.

        Raises: ModelError: it cannot be served.
        """
        async with self._turn:
            held = self._held.pop(folder, None)
            if held is None:
                size = await self._size_of(folder)
                await self._make_room(folder, size)
                held = _Held(await self._load(folder), size)
                self.num_loads += 1
            self._held[folder] = held
            held.num_users += 1
        try:
            yield held.adapter
        finally:
            held.num_users -= 1
            self._is_released.set()

    async def _make_room(self, folder: str, size: int) -> None:
        if size > self._room:
            raise ModelError(
                f"adapter {folder}: it has a size of {size}, and there is room for {self._room}"
            )
        while sum(it.size for it in self._held.values()) + size > self._room:
            idle = [name for name, it in self._held.items() if not it.num_users]
            if idle:
                await self._unload(self._held.pop(idle[0]).adapter)
            else:
                self._is_released.clear()
                await self._is_released.wait()
