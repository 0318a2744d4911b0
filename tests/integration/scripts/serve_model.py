"""serve_model.py MODEL PORT: a server of chat completions that knows nothing of a run."""

from __future__ import annotations

import sys
from typing import Any

from aiohttp import web

from areal_sc.agents.dialects.chat_completions import ChatCompletions
from areal_sc.agents.session import Session
from areal_sc.config.schema import GenerationConfig, RolloutConfig
from areal_sc.engines.local.engine import LocalEngine


class OneEngine:
    """The embedded engine, as a session asks it."""

    def __init__(self, model: str) -> None:
        self.engine = LocalEngine(RolloutConfig(path=model, max_context_tokens=128))
        self.tokenizer = self.engine.tokenizer
        self.max_context_tokens = self.engine.max_context_tokens
        self.end_token_ids = self.engine.end_token_ids

    async def generate(self, input_ids: Any, sampling: Any = None, **how: Any) -> Any:
        return await self.engine.generate(input_ids, sampling, **how)


def main(model: str, port: int) -> None:
    dialect, sampling, app = (
        ChatCompletions(),
        GenerationConfig(max_new_tokens=40),
        web.Application(),
    )
    asked = OneEngine(model)

    async def complete(request: web.Request) -> web.Response:
        call = dialect.read(await request.json())
        answer = await Session(asked, sampling).begin(call).answer()
        return web.json_response(dialect.write(call, answer))

    async def health(_: web.Request) -> web.Response:
        return web.Response()

    async def start(_: web.Application) -> None:
        await asked.engine.start()

    app.add_routes([web.post(dialect.path, complete), web.get("/health", health)])
    app.on_startup.append(start)
    web.run_app(app, host="127.0.0.1", port=port, print=None)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
