"""Answers that are streamed from SGLang servers, and how long their streams were silent.

Consumes: tokens of the servers, one event each. Waits for: those, without limit, as an update holds
them. Unblocked by: the servers, or the end of the block.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from itertools import pairwise

import aiohttp

from areal_sc.engines.servers.replica import Replica

_POLL_S = 0.002


class TokenStream:
    """One answer after the other on one server.

    Attributes:
        arrivals: of each answer, when its tokens came, `time.perf_counter`.
    """

    def __init__(self, server: Replica, number: int, num_tokens: int) -> None:
        self.arrivals: list[list[float]] = []
        self._server = server
        self._number = number
        self._num_tokens = num_tokens

    async def run(self) -> None:
        """Until cancelled."""
        assert self._server.server is not None
        key = {"Authorization": f"Bearer {self._server.server.api_key}"}
        timeout = aiohttp.ClientTimeout(total=None)
        async with aiohttp.ClientSession(headers=key, timeout=timeout) as session:
            while True:
                await self._answer(session)

    def silence_s(self, since: float, until: float) -> float | None:
        """Longest time between two tokens of one answer that lies in this period, in parts."""
        gaps = [
            end - start
            for answer in self.arrivals
            for start, end in pairwise(answer)
            if end > since and start < until
        ]
        return max(gaps, default=None)

    async def _answer(self, session: aiohttp.ClientSession) -> None:
        times: list[float] = []
        self.arrivals.append(times)
        body = {
            "input_ids": [3 + self._number, 5, 7, 11 + len(self.arrivals) % 400],
            "sampling_params": {"max_new_tokens": self._num_tokens, "ignore_eos": True},
            "stream": True,
        }
        async with session.post(self._server.url + "/generate", json=body) as response:
            response.raise_for_status()
            async for line in response.content:
                if line.startswith(b"data: {"):
                    times.append(time.perf_counter())


class TokenStreams:
    """Several streams a server."""

    def __init__(self, streams: Sequence[TokenStream]) -> None:
        self._streams = streams
        self._failure: BaseException | None = None

    async def until_flowing(self, timeout_s: float = 60.0) -> None:
        """Returns when each stream has brought some tokens from now on.

        Raises: TimeoutError: one has not. What a stream raised.
        """
        since = time.perf_counter()
        async with asyncio.timeout(timeout_s):
            while not all(self._has_flowed(stream, since) for stream in self._streams):
                if self._failure is not None:
                    raise self._failure
                await asyncio.sleep(_POLL_S)

    def silence_s(self, since: float, until: float) -> list[float]:
        """Of each stream that ran then; see `TokenStream.silence_s`."""
        found = (stream.silence_s(since, until) for stream in self._streams)
        return [seconds for seconds in found if seconds is not None]

    def note_end(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (failure := task.exception()):
            self._failure = failure

    @staticmethod
    def _has_flowed(stream: TokenStream, since: float) -> bool:
        times = stream.arrivals[-1] if stream.arrivals else []
        return len(times) > 3 and times[-4] > since


@asynccontextmanager
async def token_streams(
    servers: Sequence[Replica], num_streams: int, num_tokens: int
) -> AsyncIterator[TokenStreams]:
    """Runs `num_streams` answers on each server, new ones of `num_tokens` tokens when they end."""
    streams = [
        TokenStream(server, number, num_tokens)
        for server in servers
        for number in range(num_streams)
    ]
    together = TokenStreams(streams)
    tasks = [asyncio.create_task(stream.run()) for stream in streams]
    for task in tasks:
        task.add_done_callback(together.note_end)
    try:
        yield together
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
