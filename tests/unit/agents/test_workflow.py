"""Agents as episodes: what is asked of the worker, and what becomes of its answers."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from areal_sc.agents.agent import NamedAgent
from areal_sc.agents.command import AgentCommand
from areal_sc.agents.online import OnlineWorkflow
from areal_sc.agents.served import SessionAddress
from areal_sc.agents.workflow import AgentWorkflow
from areal_sc.config.agent_settings import AgentNetwork, AgentsConfig
from areal_sc.config.sandbox_settings import Isolation, SandboxConfig
from areal_sc.config.schema import RolloutConfig
from areal_sc.errors import AgentError, ConfigError, WorkflowError
from areal_sc.sources.reference import ObjectReference, reference_of, resolve
from areal_sc.workflows.base import AgentReturn, Trajectory
from areal_sc.workflows.task_mix import Task, TaskMix

ROW = {"question": "what?"}


async def agent(row: dict[str, Any], session: Any) -> float:
    return 0.0


def simple_agent(row: dict[str, Any]) -> float:
    return 0.0


def reward(row: Mapping[str, Any], output: str) -> float:
    return float(row["x"] == output)


def takes_nothing() -> float:
    return 0.0


def takes_more(row: dict[str, Any], session: Any, key: str) -> float:
    return 0.0


class Engine:
    """Gives these ends to agents, and one row a session unless it has none."""

    def __init__(self, *ends: AgentReturn | Exception, num_rows: int = 1) -> None:
        self.ends = list(ends)
        self.num_rows = num_rows
        self.runs: list[tuple[Any, dict[str, Any], str, bool]] = []
        self.opened: list[dict[str, Any]] = []
        self.asked: list[tuple[Any, float, Any]] = []

    @asynccontextmanager
    async def open_session(self, **settings: Any) -> AsyncIterator[Any]:
        self.opened.append(settings)
        self.api_key = f"key {len(self.opened)}"
        yield self

    async def run_agent(
        self, agent: Any, row: dict[str, Any], session: Any, *, is_alone: bool
    ) -> AgentReturn:
        self.runs.append((agent, row, session.api_key, is_alone))
        end = self.ends.pop(0)
        if isinstance(end, Exception):
            raise end
        return end

    async def await_agent(self, row: dict[str, Any], session: Any) -> float:
        self.runs.append((None, row, session.api_key, False))
        return 0.5

    def trajectories(self, reward: Any, *, discount: float, metrics: Any) -> list[Trajectory]:
        if isinstance(reward, dict) and "nobody" in reward:
            raise WorkflowError("rewards: expected names of models")
        self.asked.append((reward, discount, metrics))
        return [Trajectory([], [], [], [], [], 0.5)] * self.num_rows


async def play(workflow: AgentWorkflow, engine: Any) -> list[Trajectory] | None:
    return await workflow.run_episode(ROW, engine)


async def test_the_reward_of_an_agent_becomes_that_of_its_calls() -> None:
    engine = Engine(AgentReturn(1.0, "it said"), AgentReturn({"a": 1.0}, ""), num_rows=2)
    workflow = AgentWorkflow(agent, 0.9, rows="per_call")
    first, second = await play(workflow, engine) or []
    assert first.output == second.output == "it said"
    await play(workflow, engine)
    assert engine.asked == [(1.0, 0.9, {"accuracy": 1.0}), ({"a": 1.0}, 0.9, {})]
    assert engine.runs[0] == (agent, ROW, "key 1", False)
    assert engine.opened[0]["rows"] == "per_call"


async def test_an_agent_outside_gets_the_row_and_its_reward_is_that_of_its_calls() -> None:
    engine, workflow = Engine(), OnlineWorkflow(0.9, rows="per_call")
    assert await workflow.run_episode(ROW, engine)
    assert engine.runs == [(None, ROW, "key 1", False)]
    assert engine.asked == [(0.5, 0.9, {"accuracy": 0.0})]
    made = resolve(reference_of(workflow))
    assert (made.discount, made._session, made.waits_outside) == (0.9, workflow._session, True)
    with pytest.raises(WorkflowError, match="JSON"):
        workflow.check_row({"x": {1, 2}})


@pytest.mark.parametrize("kind", ["agent_timeout", "agent_died"])
async def test_one_that_may_have_been_disturbed_runs_again_alone(kind: str) -> None:
    failed = AgentError("it hung", kind=kind)
    engine = Engine(failed, AgentReturn(0.5, ""))
    assert await play(AgentWorkflow(agent), engine)
    assert [run[2:] for run in engine.runs] == [("key 1", False), ("key 2", True)]
    engine = Engine(failed, AgentError("again", kind=kind))
    with pytest.raises(AgentError, match="again"):
        await play(AgentWorkflow(agent), engine)


async def test_one_that_raised_does_not_run_again() -> None:
    engine = Engine(AgentError("it raised", kind="agent_error"))
    with pytest.raises(AgentError, match="it raised"):
        await play(AgentWorkflow(agent), engine)
    assert len(engine.runs) == 1


async def test_without_a_call_or_with_a_reward_of_none_there_is_a_cause() -> None:
    with pytest.raises(AgentError, match="agent agent: it ended without an answer") as raised:
        await play(AgentWorkflow(agent), Engine(AgentReturn(0.0, ""), num_rows=0))
    assert raised.value.kind == "agent_no_call"
    with pytest.raises(AgentError, match="agent agent: rewards: expected names") as raised:
        await play(AgentWorkflow(agent), Engine(AgentReturn({"nobody": 1.0}, "")))
    assert raised.value.kind == "bad_reward"


def test_a_worker_finds_the_agent_where_the_script_did(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "named_agent.py"
    file.write_text("def run(row): pass\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    for name, target in (
        ("named_agent:run", "named_agent:run"),
        ("named_agent.py:run", f"{file}:run"),
    ):
        workflow = AgentWorkflow(name, 0.5, history="keep")
        wire = reference_of(workflow).to_wire()
        monkeypatch.chdir("/")
        again = resolve(ObjectReference.from_wire(wire))
        monkeypatch.chdir(tmp_path)
        assert isinstance(again.agent, NamedAgent)
        assert again.agent.reference() == ObjectReference(target, search_path=str(tmp_path))
        assert again.discount == 0.5
        assert again.constructor_arguments()[1] == workflow.constructor_arguments()[1]
    command = AgentCommand(["node", "x.js"], reward)
    again = resolve(reference_of(AgentWorkflow(command)))
    assert (again.agent.command, again.agent.reward) == (["node", "x.js"], reward)


async def test_sessions_of_a_loop_share_a_client(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That of the httpx on which the newest clients are built."""
    for name in ("httpx", "httpx2"):
        (tmp_path / f"{name}.py").write_text(
            "class AsyncClient:\n    def __init__(self, **settings): self.settings = settings\n"
            "class Limits:\n    def __init__(self, **limits): self.limits = limits\n"
        )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(SessionAddress, "_clients", {})
    for name in ("httpx", "httpx2"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    first, second = (SessionAddress("http://here/v1", key) for key in "ab")
    assert first.http_client is second.http_client
    assert type(first.http_client).__module__ == "httpx2"
    assert first.http_client.settings["timeout"] is None
    del sys.modules["httpx2"]


async def test_all_sessions_may_wait_for_the_model_at_once_and_by_any_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """More of them than httpx has connections if nobody says otherwise."""
    monkeypatch.setattr(SessionAddress, "_clients", {})
    num_calls, num_waiting, all_wait = 120, 0, asyncio.Event()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal num_waiting
        await reader.readuntil(b"\r\n\r\n")
        num_waiting += 1
        if num_waiting == num_calls:
            all_wait.set()
        await all_wait.wait()
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    session = SessionAddress(f"http://127.0.0.1:{port}", "key")

    async def call(num_calls: int) -> list[int]:
        calls = (session.http_client.get(session.base_url) for _ in range(num_calls))
        codes = [one.status_code for one in await asyncio.gather(*calls)]
        await session.http_client.aclose()
        return codes

    async with server, asyncio.timeout(120):
        assert await call(num_calls) == [200] * num_calls
        for _ in range(2):
            assert await asyncio.to_thread(asyncio.run, call(1)) == [200]
    assert len(SessionAddress._clients) == 2, "that of a past loop is gone"


def test_what_is_no_agent_is_told_at_once() -> None:
    for wrong, told in (
        (takes_nothing, "agent takes_nothing too many positional arguments: expected a function"),
        (takes_more, "agent takes_more missing a required argument: 'key': expected a function"),
        (3, "agent: expected a function .* got 3"),
        ("no_colon", "agent 'no_colon': expected"),
    ):
        with pytest.raises(WorkflowError, match=told):
            AgentWorkflow(wrong)  # type: ignore[arg-type]
    for settings in ({"discount": 1.1}, {"rows": "some"}, {"history": "none"}):
        with pytest.raises(WorkflowError, match=next(iter(settings))):
            AgentWorkflow(agent, **settings)  # type: ignore[arg-type]


def test_what_is_no_command_is_told_at_once() -> None:
    async def later(row: Any, output: str) -> float:
        return 0.0

    for command in ("node agent.js", [], ["node", 3]):
        with pytest.raises(WorkflowError, match="the words of a command"):
            AgentCommand(command)  # type: ignore[arg-type]
    with pytest.raises(WorkflowError, match="and not async"):
        AgentCommand(["node"], later)
    with pytest.raises(WorkflowError, match="there is no program 'no-such-program' to run"):
        AgentWorkflow(AgentCommand(["no-such-program"])).check()
    AgentWorkflow(AgentCommand(["sh", "-c", "echo 1"])).check()
    with pytest.raises(WorkflowError, match="its row as JSON, which cannot be"):
        AgentWorkflow(AgentCommand(["sh"])).check_row({"x": b""})


def test_another_interpreter_is_tried_before_the_run(tmp_path: Path) -> None:
    config = RolloutConfig(path="m", agents=AgentsConfig(python=str(tmp_path / "python")))
    mix = TaskMix({"a": Task([ROW], AgentWorkflow(simple_agent))})
    for workflow in (AgentWorkflow(agent), mix.workflow):
        with pytest.raises(ConfigError, match=r"agents\.python: '.*python' cannot be run"):
            workflow.check_settings(config)
    AgentWorkflow(AgentCommand(["sh"])).check_settings(config)  # it is no Python's
    AgentWorkflow(agent).check_settings(RolloutConfig(path="m"))


def test_settings_that_no_agent_can_have_are_told_before_the_run() -> None:
    late = RolloutConfig(path="m", group_timeout_s=900.0)
    with pytest.raises(
        ConfigError, match=r"agents\.episode_timeout_s: .* less than .*=900, .* 900"
    ):
        AgentWorkflow(agent).check_settings(late)
    for isolation in ("none", "landlock"):
        config = RolloutConfig(
            path="m",
            agents=AgentsConfig(network=AgentNetwork.session),
            sandbox=SandboxConfig(isolation=Isolation(isolation)),
        )
        with pytest.raises(ConfigError, match=rf"isolation={isolation} does not give"):
            AgentWorkflow(agent).check_settings(config)
    config.sandbox.isolation = Isolation.auto
    AgentWorkflow(agent).check_settings(config)


def test_a_name_is_found_without_an_import_of_its_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "unimported_package"
    package.mkdir()
    (package / "__init__.py").write_text("raise SystemExit(3)")
    (package / "agents.py").write_text("def run(row): ...")
    monkeypatch.syspath_prepend(tmp_path)
    found = NamedAgent.find("unimported_package.agents:run")
    assert found.search_path == tmp_path
    for name in ("unimported_package.none:run", ".agents:run", "__main__.x:run"):
        with pytest.raises(WorkflowError, match="there is no module"):
            NamedAgent.find(name)
