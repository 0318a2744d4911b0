"""Every request must show the server's key.

vLLM asks for its key on some paths alone, and those that pause a server, replace its weights or
call its workers are not among them.
"""

from __future__ import annotations

import secrets
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from starlette.responses import JSONResponse

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]


class DemandKey:
    """ASGI middleware; the keys are those of vLLM's argument `--api-key`."""

    def __init__(self, app: Callable[[Scope, Receive, Send], Awaitable[None]]) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" or _shows_a_key(scope):
            await self._app(scope, receive, send)
        else:
            answer = JSONResponse({"error": "the server's key is missing"}, status_code=401)
            await answer(scope, receive, send)


def _shows_a_key(scope: Scope) -> bool:
    shown = dict(scope["headers"]).get(b"authorization", b"")
    keys: list[str] = scope["app"].state.args.api_key
    found = [secrets.compare_digest(shown, f"Bearer {key}".encode()) for key in keys]
    return any(found)
