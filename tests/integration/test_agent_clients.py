"""The clients that agents use, as they are: a question, a call of a tool, and the answer."""

from __future__ import annotations

import asyncio
import json
import subprocess
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import chat_templates as templates
import pytest
import pytest_asyncio
from integration.router_process import SECRET, RouterProcess, router_process
from scripted_engine import ScriptedEngine, check_trained

from areal_sc import AgentWorkflow
from areal_sc.agents.server import AgentServer
from areal_sc.agents.session import SessionSettings
from areal_sc.config.schema import GenerationConfig
from areal_sc.engines.base import Completion
from areal_sc.transport.sockets.interface import LOOPBACK

REPOSITORY = Path(__file__).resolve().parents[2]
CLIENTS = REPOSITORY / "tests" / "agent_clients"
FOLDER = REPOSITORY / ".venv-clients"

INSTALL_TIMEOUT_S = 900.0
PROGRAM_TIMEOUT_S = 240.0
"""Far above what any of them takes, for a machine that is busy with other work."""

CALL = '<tool_call>\n{"name": "look_up", "arguments": {"key": "c"}}\n</tool_call>'
ANSWERS = (
    f"<think>\nI do not know.\n</think>\n\nLet me look.\n{CALL}<|im_end|>",
    "<think>\nThat is it.\n</think>\n\nIt is 7.<|im_end|>",
)


class BreakingEngine(ScriptedEngine):
    """Breaks off in the middle of an answer that it was not told."""

    async def generate(self, *asked: Any, **how: Any) -> Completion:
        if self.answers:
            return await super().generate(*asked, **how)
        how["on_tokens"](self.tokenizer.encode("Let me look.", add_special_tokens=False))
        raise OSError("the server is gone")


@pytest.fixture(scope="module")
def programs() -> Path:
    """The folder of the clients' interpreters; installed if they are not there."""
    subprocess.run([str(CLIENTS / "install.sh")], check=True, timeout=INSTALL_TIMEOUT_S)
    return FOLDER / "bin"


@pytest.fixture(scope="module")
def router() -> Iterator[RouterProcess]:
    with router_process() as process:
        yield process


@pytest_asyncio.fixture
async def server() -> AsyncIterator[AgentServer]:
    server = AgentServer("rollout/0", "a1", SECRET)
    yield server
    await server.close()


async def output_of(*command: str | Path) -> dict[str, Any]:
    process = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    try:
        output, errors = await asyncio.wait_for(process.communicate(), PROGRAM_TIMEOUT_S)
    finally:
        if process.returncode is None:
            process.kill()
    assert process.returncode == 0, errors.decode()
    return dict(json.loads(output))


@pytest.mark.parametrize(
    ("interpreter", "program", "is_outside"),
    [
        ("python", "openai_chat.py", False),
        ("python", "openai_responses.py", False),
        ("python", "openai_agents.py", False),
        ("python", "langgraph_agent.py", False),
        ("python", "anthropic_messages.py", False),
        ("node", "fetch.mjs", False),
        ("python", "openai_chat.py", True),
        ("python", "anthropic_messages.py", True),
    ],
)
async def test_a_client_as_it_is(
    programs: Path,
    server: AgentServer,
    router: RouterProcess,
    interpreter: str,
    program: str,
    is_outside: bool,
) -> None:
    """Whole and streamed, and its errors; its two conversations are a row each.

    At the address of a worker, and at that of a run.
    """
    router.tell({"rollout/0": await server.reachable(LOOPBACK)})
    engine = BreakingEngine(templates.tokenizer_for(templates.QWEN_THINKING))
    engine.will_say(*ANSWERS, *ANSWERS)
    sampling = GenerationConfig(max_new_tokens=200)
    failure = ""
    try:
        async with server.open(engine.episode, sampling, SessionSettings()) as session:
            url, key = session.base_url.removesuffix("/v1"), session.api_key
            url = router.url if is_outside else url
            output = await output_of(programs / interpreter, CLIENTS / program, url, key)
            rows = session.trajectories(1.0)
    except OSError as error:  # what broke an answer is raised, though the client has caught it
        failure = str(error)
    assert failure == ("the server is gone" if "broken" in output else "")

    whole, streamed = output["runs"]
    assert whole["text"] == streamed["text"] == "It is 7."
    for run, last in ((whole, 1), (streamed, 3)):
        assert run["usage"] == [len(engine.sent[last]), len(engine.sampled[last])]
    assert "".join(streamed["texts"]).startswith("Let me look.")
    assert "".join(streamed["texts"]).endswith("It is 7.")

    check_trained(engine, rows)
    assert [row.input_ids for row in rows] == [
        engine.sent[last] + engine.sampled[last] for last in (1, 3)
    ]
    counts = rows[0].metrics
    assert {counts[f"agent/{name}"] for name in ("rewritten_history", "retries")} == {0.0}
    for (kind, status, message), expected in zip(
        output.get("refused", ()),
        (("BadRequestError", 400, "image"), ("AuthenticationError", 401, "key")),
        strict="refused" in output,
    ):
        assert (kind, status) == expected[:2]
        assert expected[2] in message
    if "broken" in output:
        kind, message, texts = output["broken"]
        assert kind in ("APIError", "APIStatusError"), kind
        assert "the server is gone" in message
        assert "".join(texts) == "Let me look."


async def test_clients_know_a_conversation_that_is_too_long(
    programs: Path, server: AgentServer, router: RouterProcess
) -> None:
    """By their own exceptions and words, at the address of a worker and at that of a run."""
    router.tell({"rollout/0": await server.reachable(LOOPBACK)})
    tokenizer = templates.tokenizer_for(templates.QWEN)
    engine = ScriptedEngine(tokenizer, max_context_tokens=50)
    async with server.open(engine.episode, GenerationConfig(), SessionSettings()) as session:
        for url in (session.base_url.removesuffix("/v1"), router.url):
            program = programs / "python", CLIENTS / "overflow.py", url, session.api_key
            told = await output_of(*program)
            refused = ["NotFoundError", False, "unknown_path", "invalid_request_error"]
            assert told.pop("count")[:4] == refused
            for name, (kind, is_known, code, error_type, message) in told.items():
                assert is_known == name.startswith("langchain"), (name, kind)
                assert error_type == "invalid_request_error"
                if name in ("messages", "streamed"):
                    assert (kind, code) == ("BadRequestError", None)
                    assert message.startswith("prompt is too long: ")
                else:
                    assert code == "context_length_exceeded"
                    assert "This model's maximum context length is 50 tokens" in message


def test_clients_run_without_areal_sc_in_an_interpreter_of_their_own(
    programs: Path, start_rollout: Callable[..., Any], chat_model: Path
) -> None:
    rows = [{"prompt": "ab", "client": name} for name in ("agents", "anthropic", "langgraph")]
    workflow = AgentWorkflow(f"{CLIENTS / 'any_client.py'}:ask")
    agents = f"agents.python={programs / 'python'}", "agents.num_processes=1"
    with start_rollout(f"actor.path={chat_model}", *agents, "rollout.group_size=2") as rollout:
        batch = rollout.rollout_batch(rows, workflow)
        assert [row.reward for row in batch.rows] == [0.5] * 6, rollout.rejections.by_cause()
