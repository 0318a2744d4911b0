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
        self._engine = LocalEngine(RolloutConfig(path=model, max_context_tokens=128))
        self.tokenizer, self.max_context_tokens = self._engine.tokenizer, 128
        self.end_token_ids = self._engine.end_token_ids

    async def generate(self, input_ids: Any, sampling: Any = None, **how: Any) -> Any:
        return await self._engine.generate(input_ids, sampling, **how)


def main(model: str, port: int) -> None:
    dialect, engine = ChatCompletions(), OneEngine(model)
    sampling = GenerationConfig(max_new_tokens=40)

    async def complete(request: web.Request) -> web.Response:
        call = dialect.read(await request.json())
        answer = await Session(engine, sampling).answer(call)
        return web.json_response(dialect.write(call, answer))

    async def health(_: web.Request) -> web.Response:
        return web.Response()

    app = web.Application()
    app.add_routes([web.post(dialect.path, complete), web.get("/health", health)])
    web.run_app(app, host="127.0.0.1", port=port, print=None)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
