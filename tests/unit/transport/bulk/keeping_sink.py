"""A `FrameSink` that keeps what comes, for tests."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from areal_sc.errors import ProtocolError

LARGE = 300_000


class Sink:
    """Keeps frames; the memory of each is cut into places of `place_bytes`."""

    def __init__(self, place_bytes: int = 1 << 30, max_bytes: int = 1 << 24) -> None:
        self.messages: list[list[bytes]] = [[]]
        self.lost: list[str] = []
        self._place_bytes = place_bytes
        self._max_bytes = max_bytes
        self._frame = bytearray()

    def places(self, num_bytes: int) -> list[memoryview]:
        if num_bytes > self._max_bytes:
            raise ProtocolError(f"a frame of {num_bytes} bytes")
        self._frame = bytearray(num_bytes)
        view, size = memoryview(self._frame), self._place_bytes
        return [view[start : start + size] for start in range(0, num_bytes, size)]

    def on_frame(self, *, has_more: bool) -> None:
        self.messages[-1].append(bytes(self._frame))
        if not has_more:
            self.messages.append([])

    def on_lost(self, reason: str) -> None:
        self.lost.append(reason)


async def until(condition: Callable[[], Any]) -> None:
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110 - counters have no event
            await asyncio.sleep(0.001)
