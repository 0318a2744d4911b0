"""Answers that are asked of servers: of pretended ones, and of real HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from aiohttp import web
from builders import NumberTokenizer

from areal_sc.config.schema import GenerationConfig
from areal_sc.engines.base import Completion, OnTokens
from areal_sc.engines.partial_answers import hand_over
from areal_sc.engines.servers.client import ServerClient
from areal_sc.engines.servers.completion import Completer
from areal_sc.engines.servers.places import Places
from areal_sc.engines.servers.process import free_port
from areal_sc.engines.servers.requests import CompletionRequest
from areal_sc.engines.stop_strings import StopStrings

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
Kind = TypeVar("Kind", bound=ServerClient)


@asynccontextmanager
async def serving(kind: type[Kind], handler: Handler, **limits: float) -> AsyncIterator[Kind]:
    """A client of a server whose every path is answered by `handler`."""
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", handler)
    runner = web.AppRunner(app)
    await runner.setup()
    port = free_port()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    client = kind(f"http://127.0.0.1:{port}/", "secret", **limits)
    try:
        async with asyncio.timeout(60):
            yield client
    finally:
        await client.close()
        await runner.cleanup()


class PretendedServer:
    """Takes the place of a `ServerLife` and of its client.

    Attributes:
        before: called with the number of each question, or part of an answer, before it is given.
        asked: how many tokens it was asked for, each time.
    """

    name, version = "server", 4
    is_paused, num_pauses = False, 0

    def __init__(self, before: Callable[[int], None] = lambda number: None) -> None:
        self.places = Places(9)
        self.places.set_open(True)
        self.before = before
        self.asked: list[int] = []

    @asynccontextmanager
    async def asking(self) -> AsyncIterator[Any]:
        yield self

    async def abort(self, request_id: str) -> None: ...


class Asked:
    """One answer, on one server.

    Attributes:
        told: its tokens, as they are sampled, where they are asked for so.
    """

    def __init__(
        self,
        server: Any,
        max_new_tokens: int,
        *stops: str,
        min_new_tokens: int = 0,
        is_told: bool = False,
    ) -> None:
        self.server = server
        self.told: list[int] = []
        self._is_told = is_told
        tokenizer: Any = NumberTokenizer()
        self.request = CompletionRequest(
            prompt=[7],
            sampling=GenerationConfig(min_new_tokens=min_new_tokens),
            max_new_tokens=max_new_tokens,
            length_reason="length",
            stop_token_ids=(),
            is_truncated=False,
            stops=StopStrings(tokenizer, stops) if stops else None,
        )
        self.completer = Completer(server, 999)

    async def answer(self) -> Completion:
        async def complete(take: OnTokens) -> Completion:
            self.request.on_tokens = take
            return await self.completer.complete(self.request)

        async with asyncio.timeout(30):
            if self._is_told:
                return await hand_over(self.told.extend, complete)
            return await self.completer.complete(self.request)
