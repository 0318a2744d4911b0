"""A model learns to call a tool of an MCP server before it answers, on two CPU cores.

    make real-model    # writes the model to .venv-models/SmolLM2-135M-Instruct
    python examples/recipes/mcp_tool.py --config configs/mcp_tool.yaml

The model of 135 million parameters cannot multiply two numbers of two digits. It writes a call
between `<tool>` tags, as `{"name": "multiply", "arguments": {...}}`, gets what the server says
between `<result>` tags, and answers between `<answer>` tags. Each worker talks to a server of its
own over the server's standard streams; the server ends with the worker.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from tagged_turns import TaggedTurns

from areal_sc import GRPOConfig, PPOTrainer, load_config, run_script

SERVER = (sys.executable, str(Path(__file__).with_name("calculator_server.py")))
NUM_HELD_OUT = 64
REPLY_TIMEOUT_S = 30.0

INSTRUCTION = """\
Call a tool between <tool> and </tool>. What it says comes between <result> and </result>. Then \
answer with one number between <answer> and </answer>.

Tools: {tools}

Question: What is 12 times 31?
<tool>{{"name": "multiply", "arguments": {{"a": 12, "b": 31}}}}</tool>
<result>372</result>
<answer>372</answer>

Question: {question}
"""


def questions() -> list[dict[str, Any]]:
    """Products of two numbers of two digits, in an order that is always the same."""
    rows = [
        {"prompt": f"What is {a} times {b}?", "answer": str(a * b)}
        for a in range(11, 100, 3)
        for b in range(11, 100, 3)
    ]
    return random.Random(0).sample(rows, len(rows))


class StdioServer:
    """A server of the Model Context Protocol, as a process that is spoken to over its streams.

    Args:
        command: that starts it.
    """

    def __init__(self, command: Sequence[str]) -> None:
        self.command = command
        self.tools: list[dict[str, Any]] = []
        self._number = 0
        self._alone = asyncio.Lock()
        self.process: asyncio.subprocess.Process | None = None

    async def call(self, name: str, arguments: dict[str, Any]) -> str:
        """The text of a tool's result, also of one that says what was wrong with the call."""
        async with self._alone:
            await self._start()
            result = await self._ask("tools/call", {"name": name, "arguments": arguments})
        return "".join(part.get("text", "") for part in result.get("content", ()))

    async def list_tools(self) -> list[dict[str, Any]]:
        """Its tools, each with name, description and the schema of its arguments."""
        async with self._alone:
            await self._start()
        return self.tools

    async def _start(self) -> None:
        """One that has ended is started again, and so is one whose start was cut short."""
        if self.process is not None and self.process.returncode is None:
            if self.tools:
                return
            self.process.kill()
        self.tools = []
        pipe = asyncio.subprocess.PIPE
        self.process = await asyncio.create_subprocess_exec(*self.command, stdin=pipe, stdout=pipe)
        me = {"name": "areal_sc", "version": "1"}
        hello = {"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": me}
        await self._ask("initialize", hello)
        self._send({"method": "notifications/initialized"})
        self.tools = (await self._ask("tools/list", {}))["tools"]

    async def _ask(self, method: str, params: dict[str, Any]) -> dict[str, Any]:
        assert self.process is not None
        assert self.process.stdout is not None
        self._number += 1
        self._send({"id": self._number, "method": method, "params": params})
        while True:  # what is no reply to this is a notification
            line = await asyncio.wait_for(self.process.stdout.readline(), REPLY_TIMEOUT_S)
            if not line:
                raise RuntimeError(f"the MCP server {self.command[0]} has ended")
            reply = json.loads(line)
            if reply.get("id") == self._number:
                break
        if "error" in reply:
            return {"content": [{"type": "text", "text": reply["error"]["message"]}]}
        return dict(reply["result"])

    def _send(self, message: dict[str, Any]) -> None:
        assert self.process is not None
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"jsonrpc": "2.0", **message}).encode() + b"\n")


class ToolUse(TaggedTurns):
    """Questions that are answered with the tools of a server.

    Args:
        command: that starts the server.
    """

    def __init__(self, command: Sequence[str] = SERVER, max_uses: int = 2) -> None:
        super().__init__(max_uses)
        self.command = command

    @cached_property
    def server(self) -> StdioServer:
        return StdioServer(self.command)

    async def text_of(self, question: str) -> str:
        known = await self.server.list_tools()
        tools = "; ".join(f"{tool['name']}: {tool['description']}" for tool in known)
        return INSTRUCTION.format(tools=tools, question=question)

    async def use(self, asked: str) -> str:
        try:
            call = json.loads(asked)
            return await self.server.call(str(call["name"]), dict(call["arguments"]))
        except (KeyError, TypeError, ValueError):
            return "this is no call of a tool"


def main(argv: list[str]) -> None:
    config = load_config(argv, GRPOConfig)
    rows = questions()
    PPOTrainer(config).fit(ToolUse(), rows[NUM_HELD_OUT:], evaluation_prompts=rows[:NUM_HELD_OUT])


if __name__ == "__main__":
    sys.exit(run_script(main))
