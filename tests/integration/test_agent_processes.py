"""Agents in real, killable processes: whatever they do, it is a cause with a name."""

from __future__ import annotations

import asyncio
import importlib
import itertools
import shutil
import socket
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from waiting import is_running, until

from areal_sc.agents.agent import NamedAgent, check_in_interpreter
from areal_sc.agents.command import AgentCommand
from areal_sc.agents.pool import AgentPool
from areal_sc.agents.server import AgentServer
from areal_sc.config.agent_settings import AgentsConfig
from areal_sc.errors import AgentError, ConfigError, NeverWorks, WorkflowError
from areal_sc.rejection import Rejection
from areal_sc.system.fork_server import ForkServer
from areal_sc.system.own_processes import OwnProcess, OwnProcesses
from areal_sc.workflows.base import AgentReturn

LIMIT_S = 60.0
"""Far above what anything here takes, for a machine that is busy with other work."""

MODULE = '''
import asyncio, json, os, random, subprocess, sys, threading, time

VARIABLES = ("OPENAI_BASE_URL", "OPENAI_API_KEY", "ANTHROPIC_BASE_URL", "ANTHROPIC_API_KEY")

def alone(row):
    print("alone", row["x"])
    print("and", [os.environ[name] for name in VARIABLES], file=sys.stderr)
    return row["x"]

def with_a_loop_of_its_own(row):
    return asyncio.run(alone_and_awaited(row))

async def alone_and_awaited(row):
    await asyncio.sleep(0)
    return len(os.environ["OPENAI_API_KEY"])

NUMBER = random.random()

def number_of_process(row):
    """When so many have begun."""
    with open(os.path.join(row["folder"], row["name"]), "w"):
        pass
    while len(os.listdir(row["folder"])) < row["least"]:
        time.sleep(0.001)
    return NUMBER

def sees(row):
    return float(os.path.exists(row["path"]))

waiting = []

async def beside(row, session):
    """Each waits for the other: they run at one time, in one process."""
    print("hears", session.api_key)
    waiting.append(row["x"])
    while len(waiting) < 2:
        await asyncio.sleep(0.001)
    print("goes", session.base_url)
    return {"a": row["x"], "b": 1}

def raises(row):
    print("so far")
    raise KeyError("no such thing")

def gives(row):
    return {"none": None, "nan": float("nan"), "text": "1.0", "list": [1.0]}[row["what"]]

async def never_awaited(row):
    return alone_and_awaited(row)

def forks(row):
    """Its child returns as it does."""
    child = os.fork()
    if child == 0:
        if row["exits"]:
            sys.exit(0)
        return 0.0
    os.waitpid(child, 0)
    return 1.0

async def forks_and_is_awaited(row):
    return forks(row)

def leaves(row):
    """Something that goes on, or nothing."""
    if row["what"] == "thread":
        threading.Thread(target=time.sleep, args=[600], daemon=True).start()
    if row["what"] == "child":
        left.append(subprocess.Popen(["sleep", "600"]))
    return NUMBER

left = []

async def leaves_and_is_awaited(row):
    if row["what"] == "task":
        left.append(asyncio.ensure_future(swallows(row, None)))
    if row["what"] == "nothing":
        left.append(asyncio.ensure_future(asyncio.sleep(600)))
        await asyncio.to_thread(time.sleep, 0)
    await asyncio.sleep(0)
    return leaves(row)

def hangs(row):
    with open(row["begun"], "w"):
        pass
    while True:
        time.sleep(60)

async def waits_for_ever(row, session):
    if row["x"] == 1:
        with open(row["begun"], "w"):
            pass
        await asyncio.Event().wait()
    return 0.5

async def holds_the_loop(row, session):
    if row["x"] == 1:
        hangs(row)
    await asyncio.sleep(0.05)
    return 0.5

def closes_its_sockets(row):
    with open(row["path"], "w") as file:
        file.write(str(os.getpid()))
    os.closerange(3, 256)
    while True:
        time.sleep(60)

async def swallows(row, session):
    """Goes on, whatever it is told."""
    while True:
        with open(row["path"], "a") as file:
            file.write("x")
        try:
            await asyncio.sleep(0.01)
        except asyncio.CancelledError:
            pass

def write_verdicts():
    texts = [["value", number, 1.0, "", False] for number in range(100)]
    lines = b"".join(json.dumps(text).encode() + b"\\n" for text in texts)
    for fd in range(3, 64):
        try:
            os.write(fd, lines)
        except OSError:
            pass

def writes_verdicts(row):
    """As code does that an agent runs, and that a model wrote."""
    write_verdicts()
    return 0.25

async def writes_verdicts_and_is_awaited(row):
    return writes_verdicts(row)

async def writes_verdicts_beside(row, session):
    waiting.append(row["x"])
    while len(waiting) < row["least"]:
        await asyncio.sleep(0.001)
    if row["x"] == 1:
        return writes_verdicts(row)
    await asyncio.sleep(600 if row["least"] > 1 else 0)
    return 0.5

async def ends_the_process(row, session):
    if row["x"] == 1:
        os._exit(3)
    return 0.5
'''


@pytest.fixture
def user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    (tmp_path / "user_agents.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield importlib.import_module("user_agents")
    del sys.modules["user_agents"]


@pytest.fixture
async def make_pool(tmp_path: Path) -> AsyncIterator[Callable[..., AgentPool]]:
    server = ForkServer("areal_sc.agents.process:run_own_process")
    pools, addresses = [], AgentServer("rollout/0")

    def make(isolation: str = "auto", **settings: Any) -> AgentPool:
        pool = AgentPool(
            server,
            addresses,
            AgentsConfig(**settings),
            log_path=tmp_path / "agent.log",
            sources=tmp_path / "run" / "sources",
            isolation=isolation,
            hides=[tmp_path / "run"],
        )
        pools.append(pool)
        return pool

    (tmp_path / "run" / "sources").mkdir(parents=True)
    yield make
    for pool in pools:
        await pool.close()
    await addresses.close()
    await server.close()


@pytest.fixture
def slow_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """May take their time to say where they are, and to end what is cancelled."""
    monkeypatch.setattr("areal_sc.system.stacks.WAIT_S", LIMIT_S)
    monkeypatch.setattr("areal_sc.agents.pool.CANCEL_GRACE_S", LIMIT_S)


def session(key: str = "key") -> Any:
    return SimpleNamespace(base_url="http://127.0.0.1:9/v1", api_key=key)


async def cause_of(pool: AgentPool, agent: Any, row: dict[str, Any], **how: Any) -> str:
    with pytest.raises(AgentError) as raised:
        await pool.run(agent, row, session(), **how)
    rejection = Rejection.of(raised.value)
    return f"{rejection.cause}: {rejection.message}"


async def test_an_agent_alone_finds_the_model_by_its_environment(
    make_pool: Callable[..., AgentPool], user: ModuleType
) -> None:
    pool = make_pool()
    end = await pool.run(user.alone, {"x": 0.25}, session())
    address = "http://127.0.0.1:9"
    told = [f"{address}/v1", "key", address, "key"]
    assert end == AgentReturn(0.25, f"alone 0.25\nand {told}\n")
    assert (await pool.run(user.alone_and_awaited, {}, session("longer"))).reward == 6
    assert (await pool.run(user.with_a_loop_of_its_own, {}, session("long"))).reward == 4


async def test_a_process_is_used_again_and_no_two_episodes_have_it_at_once(
    make_pool: Callable[..., AgentPool], user: ModuleType, tmp_path: Path
) -> None:
    pool, folder = make_pool(), tmp_path / "begun"
    folder.mkdir()

    async def number(name: str, least: int) -> Any:
        row = {"folder": str(folder), "name": name, "least": least}
        return (await pool.run(user.number_of_process, row, session())).reward

    first = await number("a", 1)
    two = await asyncio.gather(number("b", 3), number("c", 3))
    assert first in two
    assert two[0] != two[1]


async def test_the_run_is_hidden_from_an_agent(
    make_pool: Callable[..., AgentPool], user: ModuleType, tmp_path: Path
) -> None:
    (tmp_path / "run" / "keys.json").write_text("secret")
    for path, is_seen in (("run/keys.json", False), ("user_agents.py", True)):
        end = await make_pool().run(user.sees, {"path": str(tmp_path / path)}, session())
        assert end.reward == is_seen


async def test_agents_with_a_session_share_a_process(
    make_pool: Callable[..., AgentPool], user: ModuleType
) -> None:
    pool = make_pool()
    runs = (pool.run(user.beside, {"x": x}, session(f"key{x}")) for x in (2, 3))
    for x, end in zip((2, 3), await asyncio.gather(*runs), strict=True):
        assert end.reward == {"a": x, "b": 1}
        assert end.output == f"hears key{x}\ngoes http://127.0.0.1:9/v1\n"


async def test_what_an_agent_raises_or_returns_has_a_cause_and_a_line(
    make_pool: Callable[..., AgentPool], user: ModuleType
) -> None:
    pool = make_pool()
    line = MODULE.splitlines().index('    raise KeyError("no such thing")') + 1
    cause = await cause_of(pool, user.raises, {})
    assert cause.startswith(f"agent_error: KeyError at user_agents.py:{line}: agent raises: ")
    assert cause.endswith("KeyError: 'no such thing'; at last it wrote: so far\n")
    for what, told in {
        "none": "NoneType 'None'",
        "nan": "nan",
        "text": "str '1.0'",
        "list": "list '[1.0]'",
    }.items():
        cause = await cause_of(pool, user.gives, {"what": what})
        assert cause.startswith("bad_reward: user_agents.py:")
        assert f"the agent returned {told}: expected a finite number" in cause
    assert "the agent returned coroutine" in await cause_of(pool, user.never_awaited, {})


@pytest.mark.usefixtures("slow_processes")
async def test_one_that_hangs_is_killed(
    make_pool: Callable[..., AgentPool], user: ModuleType, tmp_path: Path
) -> None:
    pool, begun = make_pool(episode_timeout_s=0.3), tmp_path / "begun"
    pool._server.clock.stop()
    run = asyncio.create_task(pool.run(user.hangs, {"begun": str(begun)}, session()))
    await until(begun.exists)
    pool._server.clock.go_on()
    with pytest.raises(AgentError, match=r"agent hangs: took longer than 0.3 s") as raised:
        await run
    assert "in hangs" in raised.value.frames
    assert raised.value.kind == "agent_timeout"


@pytest.mark.usefixtures("slow_processes")
async def test_one_that_waits_for_ever_is_cancelled_and_the_others_go_on(
    make_pool: Callable[..., AgentPool], user: ModuleType, tmp_path: Path
) -> None:
    pool, begun = make_pool(episode_timeout_s=0.5), tmp_path / "begun"
    pool._server.clock.stop()
    rows = ({"x": x, "begun": str(begun)} for x in range(3))
    first, late, last = (
        asyncio.create_task(pool.run(user.waits_for_ever, row, session())) for row in rows
    )
    await until(begun.exists)
    assert [(await run).reward for run in (first, last)] == [0.5, 0.5]
    pool._server.clock.go_on()
    with pytest.raises(AgentError) as raised:
        await late
    line = MODULE.splitlines().index("        await asyncio.Event().wait()") + 1
    assert Rejection.of(raised.value).cause == f"agent_timeout: user_agents.py:{line}"


async def test_after_their_process_is_lost_those_beside_run_alone(
    make_pool: Callable[..., AgentPool],
    user: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("areal_sc.agents.pool.CANCEL_GRACE_S", 0.2)
    pool = make_pool(episode_timeout_s=0.3)
    clock = pool._server.clock
    bad, good = ({"x": x, "begun": str(tmp_path / "begun")} for x in (1, 0))
    for agent, kind, goes_on in (
        (user.holds_the_loop, "agent_timeout", clock.go_on),
        (user.ends_the_process, "agent_died", clock.stop),
    ):
        goes_on()
        ends = [pool.run(agent, row, session()) for row in (bad, good)]
        guilty, beside = await asyncio.gather(*ends, return_exceptions=True)
        assert isinstance(guilty, AgentError)
        assert guilty.kind == kind
        assert isinstance(beside, AgentError | AgentReturn)
        clock.stop()
        assert (await pool.run(agent, good, session(), is_alone=True)).reward == 0.5
        goes_on()
        assert (await cause_of(pool, agent, bad, is_alone=True)).startswith(kind)
        clock.stop()
        assert (await pool.run(agent, good, session())).reward == 0.5  # beside others again


async def test_a_program_gets_its_row_and_gives_a_number(
    make_pool: Callable[..., AgentPool],
) -> None:
    pool, shell = make_pool(), "cat; echo $OPENAI_API_KEY >&2; echo; echo 0.25; echo"
    end = await pool.run(AgentCommand(["sh", "-c", shell]), {"x": 1}, session())
    assert end.reward == 0.25
    assert sorted(end.output.split()) == sorted(['{"x":', "1}", "key", "0.25"])
    scored = AgentCommand(["sh", "-c", "echo four"], reward=says_four)
    assert (await pool.run(scored, {"answer": "four"}, session())).reward == 1.0


def says_four(row: dict[str, Any], output: str) -> float:
    return float(output.strip() == row["answer"])


async def test_a_program_that_fails_has_a_cause(make_pool: Callable[..., AgentPool]) -> None:
    pool = make_pool()
    for shell, cause in (
        ("echo why >&2; exit 4", "agent_error: CommandFailed: agent AgentCommand(sh -c "),
        ("echo done", "bad_reward: agent AgentCommand(sh -c echo done): the program's last line "),
        ("echo nan", "bad_reward: agent AgentCommand"),
        ("echo 1; kill -9 $$", "agent_error: CommandFailed: "),
    ):
        found = await cause_of(pool, AgentCommand(["sh", "-c", shell]), {})
        assert found.startswith(cause)
    assert "exit code 4: why" in await cause_of(
        pool, AgentCommand(["sh", "-c", "echo why >&2; exit 4"]), {}
    )


async def test_nothing_that_a_program_has_started_outlives_its_episode(
    make_pool: Callable[..., AgentPool], tmp_path: Path
) -> None:
    left = tmp_path / "left"
    shell = f"(setsid sh -c 'echo $$ > {left}; exec sleep 987654' >/dev/null 2>&1 &)"
    shell += f"; while [ ! -s {left} ]; do sleep 0.01; done; echo 1"
    end = await make_pool().run(AgentCommand(["sh", "-c", shell]), {}, session())
    assert end.reward == 1
    await until(lambda: not is_anyone_sleeping("987654"))


def is_anyone_sleeping(how_long: str) -> bool:
    for command in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):  # it has ended
            if command.read_bytes() == f"sleep\0{how_long}\0".encode():
                return True
    return False


async def test_an_agent_that_cannot_be_imported_never_works(
    make_pool: Callable[..., AgentPool], tmp_path: Path
) -> None:
    (tmp_path / "broken.py").write_text("import os\nKEY = os.environ['NO_SUCH']\n")
    agent = NamedAgent.find(f"{tmp_path}/broken.py:f")
    told = r"agent broken\.py:f cannot be imported: .* raised KeyError: 'NO_SUCH' at broken\.py:2$"
    with pytest.raises(NeverWorks, match=told):
        await make_pool().run(agent, {}, session())


async def test_an_agent_by_its_name_is_imported_in_its_own_process_alone(
    make_pool: Callable[..., AgentPool], user: ModuleType, tmp_path: Path
) -> None:
    pool = make_pool()
    for name in ("user_agents:alone", f"{tmp_path}/user_agents.py:alone"):
        assert (await pool.run(NamedAgent.find(name), {"x": 3}, session())).reward == 3
    for name in ("no_such_module:f", "no_such_file.py:f", "user_agents", ":f"):
        with pytest.raises(WorkflowError, match="agent '"):
            NamedAgent.find(name)


@pytest.fixture
def bare_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """An interpreter without areal_sc and what it needs; before the fork server is made."""
    monkeypatch.delenv("PYTHONPATH", raising=False)
    link = tmp_path / "bare" / "bin" / "python"
    link.parent.mkdir(parents=True)
    link.symlink_to(Path(sys.executable).resolve())
    (tmp_path / "bare" / "pyvenv.cfg").write_text(f"home = {Path(sys.executable).resolve().parent}")
    return str(link)


async def test_one_that_closes_its_connection_is_killed(
    make_pool: Callable[..., AgentPool],
    user: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("areal_sc.system.own_processes._EXIT_WAIT_S", 0.2)
    path = tmp_path / "pid"
    pool = make_pool(isolation="none")
    cause = await cause_of(pool, user.closes_its_sockets, {"path": str(path)})
    assert cause.startswith("agent_died")
    await until(lambda: not is_running(int(path.read_text())))


async def test_a_forked_child_does_not_answer_for_its_agent(
    make_pool: Callable[..., AgentPool], user: ModuleType
) -> None:
    pool = make_pool()
    for agent in (user.forks, user.forks_and_is_awaited):
        for exits in (True, False):
            assert (await pool.run(agent, {"exits": exits}, session())).reward == 1


async def test_a_reward_that_code_writes_to_a_descriptor_counts_for_nothing(
    make_pool: Callable[..., AgentPool], user: ModuleType, caplog: pytest.LogCaptureFixture
) -> None:
    pool = make_pool()
    for agent in (user.writes_verdicts, user.writes_verdicts_and_is_awaited):
        for _ in range(2):
            assert (await pool.run(agent, {}, session())).reward == 0.25
    bad, good = ({"x": x, "least": 2} for x in (1, 0))
    ends = [pool.run(user.writes_verdicts_beside, row, session()) for row in (bad, good)]
    guilty, beside = await asyncio.gather(*ends, return_exceptions=True)
    assert isinstance(guilty, AgentReturn)
    assert guilty.reward == 0.25
    assert isinstance(beside, AgentError)  # which may be run again alone
    assert beside.kind == "agent_died"
    again = await pool.run(user.writes_verdicts_beside, {"x": 0, "least": 1}, session())
    assert again.reward == 0.5
    assert {text for text in caplog.messages if "has written to its connection" in text}


async def test_where_an_agent_has_left_something_the_next_episode_has_another_process(
    make_pool: Callable[..., AgentPool], user: ModuleType, tmp_path: Path
) -> None:
    pool, path = make_pool(), str(tmp_path / "beats")
    for agent, kinds in (
        (user.leaves, ("thread", "child")),
        (user.leaves_and_is_awaited, ("thread", "task")),
    ):
        for what in kinds:
            numbers = [
                (await pool.run(agent, {"what": it, "path": path}, session())).reward
                for it in ("nothing", what, "nothing")
            ]
            assert numbers[0] == numbers[1] != numbers[2]


async def test_no_more_processes_exist_than_agents_may_have(
    make_pool: Callable[..., AgentPool], user: ModuleType
) -> None:
    pool = make_pool(num_processes=2)
    for agent in (user.leaves, user.alone, user.gives, user.leaves):
        with suppress(AgentError):
            row = {"x": 1, "what": "none"}
            await asyncio.gather(*(pool.run(agent, row, session()) for _ in range(3)))
        assert 1 <= len(pool._own._running) <= 2


async def test_no_network_of_its_own_is_a_matter_of_the_settings(
    make_pool: Callable[..., AgentPool], user: ModuleType
) -> None:
    pool = make_pool(network="session", isolation="none")
    pool._server.port = 1
    with pytest.raises(ConfigError, match=r"agents\.network=session: .* needs namespaces"):
        await pool.run(user.alone, {"x": 1}, session())


async def test_a_process_whose_network_cannot_be_served_is_ended(
    make_pool: Callable[..., AgentPool], user: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = make_pool(network="session")
    pool._server.port = 1024

    async def refuse(listener: socket.socket) -> None:
        raise WorkflowError("it is closed")

    monkeypatch.setattr(pool._server, "serve_on", refuse)
    with pytest.raises(WorkflowError, match="it is closed"):
        await pool.run(user.alone, {"x": 1}, session())
    assert not pool._own._running


async def test_a_program_that_leaves_one_which_holds_its_output_has_ended(
    make_pool: Callable[..., AgentPool],
) -> None:
    pool = make_pool(isolation="none")
    end = await pool.run(AgentCommand(["sh", "-c", "sleep 987655 & echo 1"]), {}, session())
    assert end.reward == 1
    await until(lambda: not is_anyone_sleeping("987655"))


async def test_a_cancelled_one_that_goes_on_is_killed(
    make_pool: Callable[..., AgentPool],
    user: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("areal_sc.agents.pool.CANCEL_GRACE_S", 0.2)
    path, pool = tmp_path / "beats", make_pool()
    run = asyncio.create_task(pool.run(user.swallows, {"path": str(path)}, session()))
    await until(path.exists)
    run.cancel()
    await asyncio.wait([run])
    async with asyncio.timeout(LIMIT_S):
        seen = -1
        while (size := path.stat().st_size) != seen:
            seen = size
            await asyncio.sleep(0.5)


async def test_a_process_that_begins_while_another_ends_is_heard(
    make_pool: Callable[..., AgentPool], user: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A closed socket's number is given again: nobody may still wait for it."""
    pool, pairs = make_pool(), list[tuple[socket.socket, socket.socket]]()
    end = OwnProcesses._end

    async def end_and_take_its_number(own: OwnProcesses, process: OwnProcess, **how: bool) -> None:
        fd = process.child.connection.fileno()
        await end(own, process, **how)
        while not (pairs and fd in (one.fileno() for one in pairs[-1])):
            pairs.append(socket.socketpair())
        same, other = sorted(pairs[-1], key=lambda one: one.fileno() != fd)
        same.setblocking(False)
        hears = asyncio.create_task(asyncio.get_running_loop().sock_recv(same, 9))
        await asyncio.sleep(0)  # it waits
        other.send(b"heard")
        assert await asyncio.wait_for(hears, LIMIT_S) == b"heard"

    monkeypatch.setattr(OwnProcesses, "_end", end_and_take_its_number)
    await pool.run(AgentCommand(["echo", "1"]), {}, session())
    assert pairs
    for one in itertools.chain(*pairs):
        one.close()


@pytest.mark.usefixtures("slow_processes")
async def test_another_interpreter_needs_no_areal_sc(
    bare_python: str, make_pool: Callable[..., AgentPool], user: ModuleType, tmp_path: Path
) -> None:
    source = """
import importlib.util, sys, time
def found(row):
    if row.get("begun"):
        open(row["begun"], "w").close()
        time.sleep(600)
    return sum(importlib.util.find_spec(name) is not None for name in ("areal_sc", "msgspec"))
async def beside(row, session):
    print(row["x"], session.api_key)
    return row["x"]["y"]
"""
    (tmp_path / "bare_agents.py").write_text(source)
    (tmp_path / "bare_forger.py").write_text(MODULE)
    pool = make_pool(python=bare_python, episode_timeout_s=0.3)
    pool._server.clock.stop()
    found = NamedAgent.find(f"{tmp_path}/bare_agents.py:found")
    check_in_interpreter(found, bare_python)
    assert (await pool.run(found, {}, session())).reward == 0
    beside = NamedAgent.find("bare_agents:beside")
    end = await pool.run(beside, {"x": {"y": 7}}, session())
    assert end == AgentReturn(7, "{'y': 7} key\n")
    assert (await pool.run(user.alone, {"x": 1}, session())).reward == 1
    forger = NamedAgent.find("bare_forger:writes_verdicts")
    assert (await pool.run(forger, {}, session())).reward == 0.25
    begun = tmp_path / "begun"
    run = asyncio.create_task(pool.run(found, {"begun": str(begun)}, session()))
    await until(begun.exists)
    pool._server.clock.go_on()
    with pytest.raises(AgentError) as raised:
        await run
    assert "in found" in raised.value.frames
    with pytest.raises(WorkflowError, match="its row as JSON, which cannot be"):
        await pool.run(found, {"x": b""}, session())


def test_what_another_interpreter_lacks_is_told_before(tmp_path: Path, bare_python: str) -> None:
    for name, source, told in (
        ("ours", "from areal_sc import Workflow\n", "No module named 'areal_sc' at ours.py:1"),
        ("lacks", "import msgspec\ndef f(row): pass\n", "No module named 'msgspec' at lacks.py:1"),
        ("broken", "def f(row) pass\n", "invalid syntax|expected ':'"),
        ("empty", "", "has no attribute 'f'"),
    ):
        (tmp_path / f"{name}.py").write_text(source)
        agent = NamedAgent.find(f"{tmp_path}/{name}.py:f")
        with pytest.raises(WorkflowError, match=told):
            check_in_interpreter(agent, bare_python)
    for python in (str(tmp_path / "no_python"), shutil.which("false") or ""):
        with pytest.raises(ConfigError, match=r"agents\.python"):
            check_in_interpreter(NamedAgent.find("json:loads"), python)
