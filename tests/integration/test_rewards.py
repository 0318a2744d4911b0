"""Rewards in real, killable processes: whatever the user's function does, the pool goes on."""

from __future__ import annotations

import asyncio
import dataclasses
import importlib
import importlib.util
import os
import select
import signal
import sys
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from waiting import is_running, until, wait_until

from areal_sc.config.sandbox_settings import SandboxConfig
from areal_sc.errors import RewardError, WorkerError, WorkerLost, WorkerStartError, WorkflowError
from areal_sc.rewards.base import DECLARATION
from areal_sc.rewards.pool import RewardPool
from areal_sc.rewards.running import CodeRunner
from areal_sc.sources.reference import Referable
from areal_sc.system.fork_server import ForkServer
from areal_sc.workflows.math_reward import numeric_match

USER_MODULE = '''
import asyncio, ctypes, json, os, pathlib, re, signal, socket, stat, subprocess, sys, threading
import msgpack, time

def same(prompt, completion):
    return float(completion == prompt["answer"])

def echo(prompt, completion, **extra):
    return prompt["x"] + len(completion) + extra.get("bonus", 0)

def process_id(prompt, completion):
    return os.getpid()

NUMBER = int.from_bytes(os.urandom(4), "big")

def number_of_process(prompt, completion):
    """It tells processes apart that have a namespace, and so one number, each."""
    return NUMBER

def raises(prompt, completion):
    return same({}, completion)

def gives(prompt, completion):
    return {"nan": float("nan"), "inf": -float("inf"), "none": None, "text": "1.0",
            "list": [1.0], "true": True}[completion]

def ends_itself(prompt, completion):
    sys.exit(3)

class Outcome(BaseException):
    pass

class Nameless(Exception):
    def __str__(self):
        raise SystemExit

def raises_base(prompt, completion):
    raise {"own": Outcome("wrong"), "cancelled": asyncio.CancelledError(), "ctrl-c":
        KeyboardInterrupt(), "nameless": Nameless(), "close": GeneratorExit(),
        "group": BaseExceptionGroup("several", [Outcome("inner")])}[completion]

async def raises_base_later(prompt, completion):
    await asyncio.sleep(0)
    raises_base(prompt, completion)

async def cancels_itself(prompt, completion):
    asyncio.current_task().cancel()
    await asyncio.sleep(60)

def coroutine(prompt, completion):
    return asyncio.sleep(0)

def hangs_in_regex(prompt, completion):
    return 1.0 if re.match(r"(a+)+$", "a" * 40 + "b") else 0.0

def hangs_with_the_lock_held(prompt, completion):
    while True:  # a signal ends a sleep
        ctypes.PyDLL(None).sleep(600)  # PyDLL keeps the interpreter's lock

def hangs_with_a_child(prompt, completion):
    child = subprocess.Popen(["sleep", "600"], start_new_session=True)
    pathlib.Path(prompt["pid_file"]).write_text(str(child.pid))
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    child.wait()

def aborts(prompt, completion):
    os.abort()

def leaves(prompt, completion):
    os._exit(7)

def kills_itself(prompt, completion):
    os.kill(os.getpid(), signal.SIGKILL)

def waits_for(prompt, completion):
    gate = pathlib.Path(prompt["gate"])
    gate.with_suffix(f".{os.getpid()}").touch()
    while not gate.exists():
        time.sleep(0.01)
    return 0.5

def is_killed_once(prompt, completion):
    """As when the kernel is out of memory."""
    marker = pathlib.Path(prompt["marker"])
    if not marker.exists():
        marker.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return 0.75

def prints(prompt, completion):
    print("said by the reward", completion)
    import logging
    logging.getLogger("task").warning("no answer in %s", completion)
    return 1.0

def sleeps(prompt, completion):
    time.sleep(prompt["s"])
    return 1.0

def votes(prompt, completion):
    return 1.0

votes.vote = lambda completion: {
    "hangs": lambda: re.match(r"(a+)+$", "a" * 40 + "b"), "raises": lambda: 1 / 0,
    "none": lambda: None, "leaves": lambda: os._exit(7)}.get(completion, lambda: 12)()

def forged():
    """Verdicts in the forms of now and of earlier, of all calls that there may be."""
    for number in range(100):
        for text in (["value", number, 1.0], ["value", number, "1"], ["value", 1.0]):
            yield json.dumps(text).encode() + b"\\n"
            yield msgpack.packb(text)

def write_to_all(*texts):
    for fd in range(3, 64):
        try:
            os.write(fd, b"".join(texts))
        except OSError:
            pass

def writes_verdicts(prompt, completion):
    """As code does that a reward runs, and that a model wrote."""
    write_to_all(*forged())
    return prompt["worth"]

def leaves_a_writer(prompt, completion):
    """It goes on to write when the reward has returned."""
    def write():
        while not os.path.exists(prompt["gate"]):
            time.sleep(0.001)
        write_to_all(*forged())
        pathlib.Path(prompt["gate"] + ".written").touch()
    threading.Thread(target=write, daemon=True).start()
    return prompt["worth"]

def sockets():
    return [fd for fd in range(3, 64) if is_socket(fd)]

def is_socket(fd):
    try:
        return stat.S_ISSOCK(os.fstat(fd).st_mode)
    except OSError:
        return False

def stands_between(prompt, completion):
    """What the process says from now on is said otherwise, then as it was, and again."""
    [fd] = sockets()
    real, (ours, theirs) = os.dup(fd), socket.socketpair()
    os.dup2(theirs.fileno(), fd)
    def pass_on():
        told = ours.recv(1 << 16)
        os.write(real, told.replace(b"0.25", b"1.00") + told + told)
    threading.Thread(target=pass_on, daemon=True).start()
    return 0.25

def counts_sockets_of_others(prompt, completion):
    """Those of a fork, and of a program that inherits what can be."""
    pid = os.fork()
    if pid == 0:
        os._exit(len(sockets()))
    forked = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    count = "import user_rewards, sys; sys.exit(len(user_rewards.sockets()))"
    started = subprocess.run(
        [sys.executable, "-c", count], close_fds=False, cwd=os.path.dirname(__file__)
    )
    return 100.0 * len(sockets()) + 10 * forked + started.returncode

def forks_and_returns(prompt, completion):
    """Its child returns as it does."""
    pid = os.fork()
    if pid:
        os.waitpid(pid, 0)
    return 0.25 if pid else 1.0

def votes_writing(prompt, completion):
    return 0.0

votes_writing.vote = lambda completion: write_to_all(*forged()) or "4"

async def asynchronous(prompt, completion):
    await asyncio.sleep(0)
    return same(prompt, completion)

def judges_types(prompt, completion, by):
    prompt["seen"].append(1)  # which no other call sees
    return float(repr((prompt, by)) == "({'span': (1, {2: 7.0}), 'raw': b'\\\\xff', 'value': "
        "1180591620717411303424, 'n': np.int64(3), 'seen': [1]}, {3: (4,)})")

async def judges_types_asynchronously(prompt, completion, by):
    return judges_types(prompt, completion, by)

async def asynchronous_hang(prompt, completion):
    await asyncio.sleep(600)

async def asynchronous_raise(prompt, completion):
    raise TimeoutError("of the judge, not of the pool")

async def asynchronous_nan(prompt, completion):
    return float("nan")
'''


class Threshold(Referable):
    """A reward with settings, as a callable object of this very file."""

    def __init__(self, least: float) -> None:
        self.least = least

    def __call__(self, prompt: dict[str, Any], completion: str) -> float:
        return float(len(completion) >= self.least)


@pytest.fixture
def user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    (tmp_path / "user_rewards.py").write_text(USER_MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield importlib.import_module("user_rewards")
    del sys.modules["user_rewards"]


@pytest.fixture
async def server() -> AsyncIterator[ForkServer]:
    """Whatever a test does, no process is left of it."""
    server = ForkServer("areal_sc.rewards.process:run_reward_process")
    yield server
    await server.close()
    assert not is_running(server.pid)


def end_of(server: ForkServer, pid: int) -> asyncio.Future[int]:
    return server._ends[pid]


def make_pool(server: ForkServer, tmp_path: Path, **settings: Any) -> RewardPool:
    run_code = CodeRunner(SandboxConfig())  # no reward here runs code
    settings = {"num_processes": 1, "timeout_s": 30.0, "run_code": run_code} | settings
    return RewardPool(server, log_path=tmp_path / "reward.log", sources=tmp_path, **settings)


def wait_until_ended(pid: int) -> None:
    wait_until(lambda: not is_running(pid))


def wait_until_begun(folder: Path) -> int:
    """The process that runs `waits_for` now."""
    begun, *_ = wait_until(lambda: list(folder.glob("gate.*")))
    begun.unlink()
    return int(begun.suffix[1:])


def children_of(pid: int) -> list[int]:
    """Of a fork server: all its reward processes."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    return [int(child) for child in children.split()]


async def test_numbers_come_back(server: ForkServer, user: ModuleType, tmp_path: Path) -> None:
    pool = make_pool(server, tmp_path)
    assert await pool.score(user.same, {"answer": "abc"}, "abc") == 1.0
    assert await pool.score(user.same, {"answer": "abc"}, "ab") == 0.0
    assert await pool.score(user.echo, {"x": 0.5}, "four", bonus=2) == 6.5
    assert await pool.score(user.gives, {}, "true") == 1.0
    assert await pool.score(user.echo, {"x": 1}, "a" * 5_000_000) == 5_000_001  # in many pieces
    assert await pool.score(user.same, {"answer": "\ud83d"}, "\ud83d") == 1.0  # half a character
    assert await pool.score(Threshold(3), {}, "abc") == 1.0
    assert await pool.score(Threshold(4), {}, "abc") == 0.0
    assert await pool.score(user.asynchronous, {"answer": "abc"}, "abc") == 1.0
    await pool.close()


async def test_one_hundred_calls_at_a_time(
    server: ForkServer, user: ModuleType, tmp_path: Path
) -> None:
    pool = make_pool(server, tmp_path, num_processes=2)
    scores = await asyncio.gather(*(pool.score(user.echo, {"x": i}, "a" * i) for i in range(100)))
    assert scores == [2 * i for i in range(100)]
    pids = await asyncio.gather(*(pool.score(user.process_id, {}, "") for _ in range(100)))
    server_pid = server.pid
    children = children_of(server_pid)
    await pool.close()
    # on a busy machine the first process may be done with all calls before the second one is up
    assert set(map(int, pids)) <= set(children)
    assert len(children) <= 2
    assert children_of(server_pid) == []


@pytest.mark.parametrize(
    ("name", "completion", "message"),
    [
        ("raises", "", r"reward raises: KeyError: 'answer'$"),
        ("gives", "nan", "reward gives: the reward function returned nan: expected a finite"),
        ("gives", "inf", "returned -inf: expected a finite"),
        ("gives", "none", "returned NoneType 'None': expected a finite number"),
        ("gives", "text", r"returned str '1\.0'"),
        ("gives", "list", "returned list"),
        ("ends_itself", "", "reward ends_itself: SystemExit: 3"),
        ("coroutine", "", "returned an awaitable: declare it with `async def`"),
        ("asynchronous_raise", "", "reward asynchronous_raise: TimeoutError: of the judge"),
        ("asynchronous_nan", "", "returned nan"),
        ("raises_base", "own", "reward raises_base: Outcome: wrong"),
        ("raises_base", "cancelled", "reward raises_base: CancelledError"),
        ("raises_base", "ctrl-c", "reward raises_base: KeyboardInterrupt"),
        ("raises_base", "nameless", "reward raises_base: Nameless: .its text cannot be had"),
        ("raises_base", "close", "reward raises_base: GeneratorExit"),
        ("raises_base", "group", "reward raises_base: Outcome: inner"),
        ("raises_base_later", "own", "reward raises_base_later: Outcome: wrong"),
        ("raises_base_later", "cancelled", "reward raises_base_later: CancelledError"),
        ("raises_base_later", "nameless", "Nameless: .its text cannot be had"),
        ("cancels_itself", "", "reward cancels_itself: CancelledError"),
    ],
)
async def test_a_bad_verdict_is_told_and_its_process_goes_on(
    server: ForkServer,
    user: ModuleType,
    tmp_path: Path,
    name: str,
    completion: str,
    message: str,
) -> None:
    pool = make_pool(server, tmp_path)
    before = await pool.score(user.process_id, {}, "")
    with pytest.raises(RewardError, match=f"(?s){message}"):
        await pool.score(getattr(user, name), {}, completion)
    assert await pool.score(user.process_id, {}, "") == before
    await pool.close()


@pytest.mark.parametrize("name", ["hangs_in_regex", "hangs_with_the_lock_held"])
async def test_a_reward_that_hangs_in_c_code_is_killed(
    server: ForkServer, user: ModuleType, tmp_path: Path, name: str
) -> None:
    pool = make_pool(server, tmp_path)
    before = int(await pool.score(user.process_id, {}, ""))
    ended = end_of(server, before)
    pool._timeout_s = 1.5  # of the calls that begin from now on
    hung = asyncio.create_task(pool.score(getattr(user, name), {}, ""))
    waiting = asyncio.create_task(pool.score(user.same, {"answer": "x"}, "x"))
    with pytest.raises(RewardError, match=rf"reward {name}: took longer than 1\.5 s") as caught:
        await hung
    pool._timeout_s = 30.0
    assert f"in {name}" in caught.value.frames
    assert await waiting == 1.0
    assert await ended == -signal.SIGKILL
    await pool.close()


async def test_a_declared_limit_is_a_verdict_on_cpu_seconds(
    server: ForkServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Completions over which sympy hangs get 0; that of a call that waits says nothing."""
    monkeypatch.setattr(
        numeric_match,
        DECLARATION,
        dataclasses.replace(getattr(numeric_match, DECLARATION), late_after_s=1.0),
    )
    pool = make_pool(server, tmp_path, timeout_s=100.0)  # of a machine that is busy
    for answer, completion in (
        ("x+1", r"\binom{1000000}{500000}"),
        (r"\pi", r"\sum_{n=1}^{10000000} \sin(n)"),
    ):
        assert await pool.score(numeric_match, {"answer": answer}, completion) == 0.0
        assert await pool.score(numeric_match, {"answer": "x+1"}, "1+x") == 1.0
    assert pool.num_late == 2
    [pid] = children_of(server.pid)
    (tmp_path / "user_declared.py").write_text(
        "import time\n"
        "from areal_sc.workflows.base import declare_reward\n"
        "@declare_reward(late_reward=0.0, late_after_s=0.1, prepare=list)\n"
        "def waits(prompt, completion):\n    time.sleep(600)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    waits = importlib.import_module("user_declared").waits
    ended = end_of(server, pid)
    await pool.close()
    await ended
    pool = make_pool(server, tmp_path, timeout_s=1.0)
    with pytest.raises(RewardError, match=r"reward waits: took longer than 1 s"):
        await pool.score(waits, {}, "")
    await pool.close()


async def test_a_killed_reward_takes_its_own_processes_along(
    server: ForkServer, user: ModuleType, tmp_path: Path
) -> None:
    pool, loop = make_pool(server, tmp_path), asyncio.get_running_loop()
    pid_file = tmp_path / "pid"
    hung = asyncio.create_task(pool.score(user.hangs_with_a_child, {"pid_file": str(pid_file)}, ""))
    await until(lambda: pid_file.exists() and pid_file.read_text())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "time", lambda: time.monotonic() + 1000.0)
        with pytest.raises(RewardError, match="took longer than 30 s"):
            await hung
    await pool.close()
    wait_until_ended(int(pid_file.read_text()))


async def test_an_async_reward_has_the_same_limit(
    server: ForkServer, user: ModuleType, tmp_path: Path
) -> None:
    pool = make_pool(server, tmp_path, timeout_s=0.2)
    with pytest.raises(RewardError, match=r"asynchronous_hang: took longer than 0\.2 s"):
        await pool.score(user.asynchronous_hang, {}, "")
    assert children_of(server.pid) == []  # nothing was started for it
    await pool.close()


async def test_waiting_for_a_process_is_no_part_of_a_calls_time(
    server: ForkServer, user: ModuleType, tmp_path: Path
) -> None:
    """Forty calls of 0.1 s on one process: the last begins long after 3 s."""
    pool = make_pool(server, tmp_path, timeout_s=3.0)
    calls = [pool.score(user.sleeps, {"s": 0.1}, "") for _ in range(40)]
    assert await asyncio.gather(*calls) == [1.0] * 40
    await pool.close()


async def test_a_reply_that_is_there_counts_though_the_loop_has_stood_still(
    server: ForkServer, user: ModuleType, tmp_path: Path
) -> None:
    """As in a machine that was suspended."""
    gate, loop = tmp_path / "gate", asyncio.get_running_loop()
    pool = make_pool(server, tmp_path, timeout_s=100.0)
    asking = asyncio.create_task(pool.score(user.waits_for, {"gate": str(gate)}, ""))
    await asyncio.to_thread(wait_until_begun, tmp_path)
    [own] = pool._processes.values()
    (process,) = own._running
    gate.touch()
    assert select.select([process.child.connection], [], [], 30.0)[0]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "time", lambda: time.monotonic() + 1000.0)
        assert await asking == 0.5
    await pool.close()


async def test_importing_the_users_module_is_no_part_of_a_calls_time(
    server: ForkServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "slow_rewards.py").write_text(
        "import os, time\n"
        f"if os.getpid() != {os.getpid()}:\n    time.sleep(2.5)\n"
        "def one(prompt, completion):\n    return 1.0\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    reward = importlib.import_module("slow_rewards").one
    pool = make_pool(server, tmp_path, timeout_s=2.0)
    assert await pool.score(reward, {}, "") == 1.0
    await pool.close()


async def test_a_killed_process_is_no_verdict(
    server: ForkServer, user: ModuleType, tmp_path: Path
) -> None:
    pool = make_pool(server, tmp_path)
    marker = tmp_path / "marker"
    assert await pool.score(user.is_killed_once, {"marker": str(marker)}, "") == 0.75
    assert marker.exists()
    idle = int(await pool.score(user.process_id, {}, ""))
    ended = end_of(server, idle)
    os.kill(idle, signal.SIGKILL)
    assert await ended == -signal.SIGKILL
    assert await pool.score(user.process_id, {}, "") != idle
    await pool.close()


async def test_a_process_that_others_kill_is_not_blamed_on_its_call(
    server: ForkServer, user: ModuleType, tmp_path: Path
) -> None:
    pool = make_pool(server, tmp_path)
    gate = tmp_path / "gate"
    call = asyncio.create_task(pool.score(user.waits_for, {"gate": str(gate)}, ""))
    for _ in range(3):
        pid = await asyncio.to_thread(wait_until_begun, tmp_path)
        os.kill(pid, signal.SIGKILL)
        wait_until_ended(pid)
    gate.touch()
    assert await call == 0.5
    with pytest.raises(RewardError, match=r"ended 5 times .*signal 9 \(SIGKILL\)"):
        await pool.score(user.kills_itself, {}, "")
    await pool.close()


SPAWNING = """
import multiprocessing, sys
from concurrent.futures import ProcessPoolExecutor

def double(number):
    return 2.0 * number

def reward(prompt, completion):
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        spawned = pool.map(double, [1])[0]
    with ProcessPoolExecutor(1, multiprocessing.get_context("forkserver")) as pool:
        return spawned + pool.submit(double, 10).result()
"""


async def test_a_reward_in_a_script_spawns_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The script's module has no name that it could be imported by."""
    path = tmp_path / "a script.py"
    path.write_text(SPAWNING)
    spec = importlib.util.spec_from_file_location("made_up", path)
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "made_up", script)
    spec.loader.exec_module(script)
    agent = ModuleType("__main__")
    agent.__spec__ = importlib.util.find_spec("areal_sc.nodes.agent")
    monkeypatch.setitem(sys.modules, "__main__", agent)  # as in a reward process of a run
    server = ForkServer("areal_sc.rewards.process:run_reward_process")
    pool = make_pool(server, tmp_path, timeout_s=60.0)
    assert await pool.score(script.reward, {}, "") == 22.0
    await pool.close()
    await server.close()


async def test_a_reward_that_ends_two_processes_is_to_blame(
    server: ForkServer, user: ModuleType, tmp_path: Path
) -> None:
    pool = make_pool(server, tmp_path)
    with pytest.raises(RewardError, match=r"ended 2 times .*exit code 7: the code ended it, as os"):
        await pool.score(user.leaves, {}, "")
    with pytest.raises(RewardError, match=r"ended 2 times .*signal 6 \(SIGABRT\).*reward\.log"):
        await pool.score(user.aborts, {}, "")
    log_text = (tmp_path / "reward.log").read_text()
    assert log_text.count("Fatal Python error: Aborted") == 2
    assert "in aborts" in log_text
    assert await pool.score(user.same, {"answer": "x"}, "x") == 1.0
    await pool.close()


async def test_a_cancelled_call_leaves_the_process_usable(
    server: ForkServer, user: ModuleType, tmp_path: Path
) -> None:
    pool = make_pool(server, tmp_path)
    before = await pool.score(user.process_id, {}, "")
    running = asyncio.create_task(pool.score(user.sleeps, {"s": 0.3}, ""))
    queued = asyncio.create_task(pool.score(user.aborts, {}, ""))
    await asyncio.sleep(0)
    running.cancel()
    queued.cancel()
    assert await pool.score(user.process_id, {}, "") == before
    await pool.close()


async def test_what_a_reward_prints_is_in_its_log_and_what_it_warns_of_is_told(
    server: ForkServer, user: ModuleType, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pool = make_pool(server, tmp_path)
    for _ in range(2):
        await pool.score(user.prints, {}, "xyz")
    lines = (tmp_path / "reward.log").read_text().splitlines()
    assert lines[0] == "said by the reward xyz"
    assert lines[1].endswith("WARNING reward task: no answer in xyz")
    assert caplog.messages == ["a reward process: no answer in xyz"]
    await pool.close()


async def test_a_verdict_that_code_writes_to_a_descriptor_counts_for_nothing(
    server: ForkServer, user: ModuleType, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Neither for its own call nor for the next ones; and its process ends."""
    pool = make_pool(server, tmp_path, isolation="auto")
    gate, written = tmp_path / "gate", tmp_path / "gate.written"
    for reward in (user.writes_verdicts, user.leaves_a_writer, user.stands_between):
        before = await pool.score(user.number_of_process, {}, "")
        prompt = {"worth": 0.25, "gate": str(gate)}
        assert await pool.score(reward, prompt, "") == 0.25
        if reward is user.leaves_a_writer:
            gate.touch()
            await until(written.exists)
        assert await pool.score(user.same, {"answer": "x"}, "y") == 0.0
        assert await pool.score(user.same, {"answer": "x"}, "x") == 1.0
        assert await pool.score(user.number_of_process, {}, "") != before
    assert await pool.vote(user.votes_writing, "") == "4"
    assert await pool.vote(user.votes, "any") == "12"
    assert {text for text in caplog.messages if "has written to its connection" in text}
    await pool.close()


async def test_what_a_reward_starts_has_no_connection(
    server: ForkServer, user: ModuleType, tmp_path: Path
) -> None:
    pool = make_pool(server, tmp_path, isolation="auto")
    before = await pool.score(user.number_of_process, {}, "")
    assert await pool.score(user.counts_sockets_of_others, {}, "") == 100.0
    assert await pool.score(user.forks_and_returns, {}, "") == 0.25
    assert await pool.score(user.number_of_process, {}, "") == before
    await pool.close()


async def test_what_cannot_be_sent_is_refused(
    server: ForkServer, user: ModuleType, tmp_path: Path
) -> None:
    pool = make_pool(server, tmp_path)
    with pytest.raises(WorkflowError, match="make it a function with a name"):
        await pool.score(lambda prompt, completion: 1.0, {}, "")
    for reward in (user.same, user.asynchronous):
        with pytest.raises(
            WorkflowError, match=r"reward .*: argument \[0\]\['answer'\] is <object"
        ):
            await pool.score(reward, {"answer": object()}, "")
    await pool.close()


async def test_sync_and_async_rewards_see_the_row_as_it_is_and_each_its_own(
    server: ForkServer, user: ModuleType, tmp_path: Path
) -> None:
    pool = make_pool(server, tmp_path)
    row = {"span": (1, {2: 7.0}), "raw": b"\xff", "value": 2**70, "n": np.int64(3), "seen": []}
    for reward in (user.judges_types, user.judges_types_asynchronously):
        for _ in range(2):
            assert await pool.score(reward, row, "", by={3: (4,)}) == 1.0
    assert row["seen"] == []
    await pool.close()


async def test_closing_ends_running_and_later_calls(
    server: ForkServer, user: ModuleType, tmp_path: Path
) -> None:
    pool = make_pool(server, tmp_path)
    await pool.score(user.same, {"answer": ""}, "")
    calls = [asyncio.create_task(pool.score(user.sleeps, {"s": 600}, "")) for _ in range(2)]
    await asyncio.sleep(0)
    await pool.close()
    for call in calls:
        with pytest.raises(WorkerLost, match="the reward pool was closed"):
            await call
    with pytest.raises(WorkerLost, match="the reward pool was closed"):
        await pool.score(user.same, {"answer": ""}, "")
    assert children_of(server.pid) == []


async def test_closing_while_processes_start_leaves_none(
    server: ForkServer, user: ModuleType, tmp_path: Path
) -> None:
    pool = make_pool(server, tmp_path, num_processes=3)
    calls = [asyncio.create_task(pool.score(user.same, {"answer": ""}, "")) for _ in range(3)]
    await asyncio.sleep(0)
    await pool.close()
    for call in calls:
        with pytest.raises(WorkerLost, match="the reward pool was closed"):
            await call
    assert children_of(server.pid) == []


async def test_without_a_fork_server_there_is_no_verdict(
    server: ForkServer, user: ModuleType, tmp_path: Path
) -> None:
    pool = make_pool(server, tmp_path)
    assert await pool.score(user.same, {"answer": ""}, "") == 1.0
    process = int(await pool.score(user.process_id, {}, ""))
    os.kill(server.pid, signal.SIGKILL)
    wait_until_ended(process)  # with its server
    with pytest.raises(WorkerLost, match="the fork server is gone"):
        await pool.score(user.same, {"answer": ""}, "")
    await pool.close()


async def test_processes_that_cannot_start_are_given_up(user: ModuleType, tmp_path: Path) -> None:
    server = ForkServer("no_such_module_anywhere:f")
    pool = make_pool(server, tmp_path)
    with pytest.raises(
        WorkerStartError, match=r"a reward process ended at once; see .*reward\.log"
    ):
        await pool.score(user.same, {"answer": ""}, "")
    with pytest.raises(WorkerError):
        await pool.score(user.same, {"answer": ""}, "")
    assert "no_such_module_anywhere" in (tmp_path / "reward.log").read_text()
    await pool.close()
    await server.close()


async def test_a_vote_is_told_by_a_process_that_can_be_killed(
    server: ForkServer, user: ModuleType, tmp_path: Path
) -> None:
    pool = make_pool(server, tmp_path)
    try:
        assert await pool.vote(user.votes, "any") == "12"
        assert await pool.vote(user.votes, "none") is None
        assert await pool.score(user.votes, {}, "hangs") == 1.0
        pool._timeout_s = 1.0  # of the calls that begin from now on
        with pytest.raises(RewardError, match=r"votes.vote: took longer than 1 s"):
            await pool.vote(user.votes, "hangs")
        pool._timeout_s = 30.0
        with pytest.raises(RewardError, match=r"votes.vote: ZeroDivisionError"):
            await pool.vote(user.votes, "raises")
        with pytest.raises(RewardError, match=r"votes.vote: its process ended 2 times"):
            await pool.vote(user.votes, "leaves")
        assert await pool.vote(user.votes, "any") == "12"
    finally:
        await pool.close()
