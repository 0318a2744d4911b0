"""What a program's end is called, and what a sandbox does when it, or its caller, goes away."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from waiting import until

from areal_sc.config.sandbox_settings import Isolation, SandboxConfig
from areal_sc.errors import ConfigError, SandboxError
from areal_sc.system.sandbox import local
from areal_sc.system.sandbox.local import LocalSandbox
from areal_sc.system.sandbox.opening import describe_sandbox, open_sandbox
from areal_sc.system.sandbox.program import End, Limits, Program
from areal_sc.system.sandbox.trees import descendants

LONG = Limits(time_s=60.0)


@pytest.fixture
async def sandbox() -> AsyncIterator[LocalSandbox]:
    found = LocalSandbox(2, environment={"PATH": os.environ["PATH"], "GIVEN": "yes"})
    try:
        await found.layer()
    except SandboxError as error:
        pytest.skip(f"no layer works here: {error}")
    yield found
    await found.close()


def server_pid(sandbox: LocalSandbox) -> int:
    assert sandbox._server is not None
    return sandbox._server._process.pid


async def wait_for_descendants(pid: int, least: int, most: int = 99) -> list[int]:
    """The processes under this one, once they are so many."""
    await until(lambda: least <= len(descendants(pid)) <= most)
    return descendants(pid)


@pytest.mark.parametrize(
    ("source", "limits", "end", "code", "says"),
    [
        ("print('a')", {}, End.exited, 0, "a\n"),
        ("import sys; print('b'); sys.exit(3)", {}, End.exited, 3, "b\n"),
        ("import sys; sys.exit('why')", {}, End.exited, 1, ""),
        ("1/0", {}, End.exited, 1, ""),
        ("print(len(str(10**5000)), int('7' * 5000) % 10)", {}, End.exited, 0, "5001 7\n"),
        (  # another Python that it starts
            "import subprocess, sys\npython = f'{sys.base_prefix}/bin/python3'\n"
            "subprocess.run([python, '-S', '-c', 'print(len(str(10**5000)))'])",
            {},
            End.exited,
            0,
            "5001\n",
        ),
        ("def f(:", {}, End.exited, 1, ""),
        ("x = '\ud800'", {}, End.exited, 1, ""),
        ("import os; os.abort()", {}, End.crashed, -signal.SIGABRT, ""),
        ("import os; print('c', flush=True); os.kill(os.getpid(), 9)", {}, End.crashed, -9, "c\n"),
        ("while True: pass", {"time_s": 0.3}, End.timeout, -9, ""),
        ("import time; time.sleep(99)", {"time_s": 0.3}, End.timeout, -9, ""),
        ("x = bytearray(1 << 30)", {}, End.memory, 1, ""),
        ("print('d' * 99)", {"output_bytes": 10}, End.output, None, "d" * 10),
        ("open('f', 'wb').write(bytes(1 << 20))", {"file_bytes": 1 << 16}, End.files, 1, ""),
        ("import atexit; atexit.register(print, 'e')", {}, End.exited, 0, "e\n"),
        (
            "import threading, time\n"
            "threading.Thread(target=lambda: (time.sleep(0.1), print('f'))).start()",
            {},
            End.exited,
            0,
            "f\n",
        ),
        ("print(open('in/x.txt').read(), input(), __name__)", {}, End.exited, 0, "x y __main__\n"),
        ("import helper; print(helper.value)", {}, End.exited, 0, "5\n"),
        (
            "import os; print(os.environ['GIVEN'], len(os.environ) < 8)",
            {},
            End.exited,
            0,
            "yes True\n",
        ),
        (  # its name is no text
            "import ctypes, time\n"
            "ctypes.CDLL(None).prctl(15, b'\\xff', 0, 0, 0); time.sleep(0.3); print('g')",
            {},
            End.exited,
            0,
            "g\n",
        ),
        ("import asyncio; print(asyncio.run(asyncio.sleep(0, 7)))", {}, End.exited, 0, "7\n"),
        (  # as fast readers of competitions have it
            "import io, os; input = io.BytesIO(os.read(0, os.fstat(0).st_size)).readline\n"
            "print(input())",
            {},
            End.exited,
            0,
            "b'y\\n'\n",
        ),
        (
            "import sys; a = sys.stdin.read(); sys.stdin.seek(0); print(a == sys.stdin.read())",
            {},
            End.exited,
            0,
            "True\n",
        ),
        (
            "open('/dev/stdout', 'w').write(open('/dev/stdin').read() + open(0).read())",
            {},
            End.exited,
            0,
            "y\ny\n",
        ),
        ("input(); input()", {}, End.exited, 1, ""),
        ("print('h', end=''); quit()", {}, End.exited, 0, "h"),
        ("kept = open(1, 'w'); kept.write('i')", {}, End.exited, 0, "i"),
        (
            "import sys\nclass N:\n    def __del__(self): sys.stdout.write('n')\nkept = N()",
            {},
            End.exited,
            0,
            "n",
        ),
        ("import sys; print('j'); sys.stdout.close()", {}, End.exited, 0, "j\n"),
        ("\ufeffprint('k')", {}, End.exited, 0, "k\n"),
        ("import program; print(program.value)", {}, End.exited, 0, "6\n"),
        (  # what it was given is not what it has written
            "open('f', 'wb').write(bytes(60_000)); import time; time.sleep(0.3); print('l')\n"
            f"# {'x' * 100_000}",
            {"file_bytes": 1 << 16},
            End.exited,
            0,
            "l\n",
        ),
        (
            "import inspect, tempfile\ndef f(): pass\n"
            "with tempfile.TemporaryFile() as file: print(inspect.getsource(f), end='')",
            {},
            End.exited,
            0,
            "def f(): pass\n",
        ),
    ],
)
async def test_an_end_has_its_name(
    sandbox: LocalSandbox, source: str, limits: dict[str, Any], end: End, code: int, says: str
) -> None:
    files = {"in/x.txt": b"x", "helper.py": b"value = 5", "program.py": b"value = 6"}
    program = Program(source=source, stdin=b"y\n", files=files)
    ended = await sandbox.run(program, Limits(**{"time_s": 60.0, **limits}))
    assert (ended.end, ended.stdout.decode()) == (end, says), ended
    assert code is None or ended.exit_code == code


async def test_a_given_file_is_never_replaced(sandbox: LocalSandbox) -> None:
    program = Program(source="print(open(__file__).read())", files={"__main__.py": b"given"})
    assert (await sandbox.run(program, LONG)).stdout == b"given\n"


async def test_a_command_runs_in_the_folder(sandbox: LocalSandbox) -> None:
    script = "cat x.txt; cat; echo no >&2; exit 4"
    program = Program(command=("sh", "-c", script), stdin=b"in", files={"x.txt": b"file "})
    ended = await sandbox.run(program, LONG)
    assert (ended.exit_code, ended.stdout, ended.stderr) == (4, b"file in", b"no\n")
    with pytest.raises(SandboxError, match="no-such-program"):
        await sandbox.run(Program(command=("no-such-program",)), LONG)


async def test_a_program_may_be_of_numpys_types(sandbox: LocalSandbox) -> None:
    program = Program(
        source=np.str_("print(input(), open('x').read())"),
        stdin=np.bytes_(b"y"),
        files={np.str_("x"): np.bytes_(b"z")},
    )
    limits: dict[str, Any] = {"time_s": np.float64(60), "file_bytes": np.int64(99_999)}
    ended = await sandbox.run(program, Limits(**limits))
    assert (ended.end, ended.stdout) == (End.exited, b"y z\n"), ended


async def test_a_traceback_is_the_programs_own(sandbox: LocalSandbox) -> None:
    ended = await sandbox.run(Program(source="def f():\n    raise KeyError(8)\nf()"), LONG)
    lines = ended.stderr.decode().splitlines()
    assert lines[0].startswith("Traceback")
    assert [line.strip() for line in lines if line.startswith("    ")][:2] == [
        "f()",
        "raise KeyError(8)",
    ]
    assert lines[-1] == "KeyError: 8"
    assert "areal_sc" not in ended.stderr.decode()


async def test_pages_of_the_server_are_not_the_programs(sandbox: LocalSandbox) -> None:
    """Each of its processes has them, which together are more than its limit."""
    source = (
        "import os, time\n"
        "for _ in range(30):\n"
        "    if os.fork() == 0: time.sleep(0.5); os._exit(0)\n"
        "time.sleep(0.5); print('m')"
    )
    ended = await sandbox.run(Program(source=source), Limits(time_s=60.0, memory_bytes=200 << 20))
    assert (ended.end, ended.stdout) == (End.exited, b"m\n"), ended


async def test_large_input_and_output_pass(sandbox: LocalSandbox) -> None:
    source = "import sys; data = sys.stdin.buffer.read(); sys.stdout.buffer.write(data[::-1])"
    content = os.urandom(1 << 20)
    limits = Limits(time_s=60.0, output_bytes=1 << 20)
    ended = await sandbox.run(Program(source=source, stdin=content), limits)
    assert ended.end is End.exited
    assert ended.stdout == content[::-1]


async def test_nobody_who_waits_ends_the_program(sandbox: LocalSandbox) -> None:
    pid = server_pid(sandbox)
    waiting = asyncio.create_task(sandbox.run(Program(source="import time; time.sleep(99)"), LONG))
    await wait_for_descendants(pid, 2)
    waiting.cancel()
    await asyncio.wait([waiting])
    await wait_for_descendants(pid, 0, 0)
    assert (await sandbox.run(Program(source="print(1)"), LONG)).stdout == b"1\n"


async def test_a_killed_keeper_and_a_killed_server_are_no_verdict(sandbox: LocalSandbox) -> None:
    """The program runs once more, on a new server if need be; then the error says so."""
    pid = server_pid(sandbox)
    program = Program(source="print('late')")
    slow = Program(source="import time; time.sleep(5.0); print('slow')")
    waiting = asyncio.create_task(sandbox.run(slow, LONG))
    [keeper, *_] = await wait_for_descendants(pid, 2)
    os.kill(keeper, signal.SIGKILL)
    assert (await waiting).stdout == b"slow\n"
    os.kill(pid, signal.SIGKILL)
    assert (await sandbox.run(program, LONG)).stdout == b"late\n"
    assert server_pid(sandbox) != pid


THIRD_FORK_FAILS = """
import os
fork, server, forks = os.fork, os.getpid(), []
def may_fork():
    forks.append(1)
    if os.getpid() == server and len(forks) == 3:
        raise BlockingIOError(11, "there are too many processes")
    return fork()
os.fork = may_fork
"""


async def test_a_fork_that_fails_ends_no_server(
    sandbox: LocalSandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local, "_BOOT", THIRD_FORK_FAILS + local._BOOT)
    os.kill(server_pid(sandbox), signal.SIGKILL)
    pids = set()
    for _ in range(3):
        assert (await sandbox.run(Program(source="print(1)"), LONG)).stdout == b"1\n"
        pids.add(server_pid(sandbox))
    assert len(pids) == 1


async def test_a_server_begins_anew_where_no_thread_can_be_started(
    sandbox: LocalSandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise RuntimeError("can't start new thread")

    def have_none(*_: object, **__: object) -> None:
        raise BlockingIOError(11, "there are too many processes")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    os.kill(server_pid(sandbox), signal.SIGKILL)
    assert (await sandbox.run(Program(source="print(1)"), LONG)).stdout == b"1\n"
    os.kill(server_pid(sandbox), signal.SIGKILL)
    monkeypatch.setattr(subprocess, "Popen", have_none)
    with pytest.raises(SandboxError, match="too many processes"):
        await sandbox.run(Program(source="print(1)"), LONG)


async def test_a_killed_server_leaves_no_folder(tmp_path: Path) -> None:
    sandbox = LocalSandbox(1, "landlock", environment={"TMPDIR": str(tmp_path)})
    try:
        await sandbox.layer()
    except SandboxError as error:
        pytest.skip(f"no Landlock here: {error}")
    assert os.listdir(tmp_path)
    os.kill(server_pid(sandbox), signal.SIGKILL)
    await sandbox.close()
    assert os.listdir(tmp_path) == []


async def test_a_closed_sandbox_runs_nothing_and_leaves_nothing(sandbox: LocalSandbox) -> None:
    pid = server_pid(sandbox)
    waiting = asyncio.create_task(sandbox.run(Program(source="import time; time.sleep(99)"), LONG))
    await wait_for_descendants(pid, 2)
    await sandbox.close()
    with pytest.raises(SandboxError, match="closed"):
        await waiting
    with pytest.raises(SandboxError, match="closed"):
        await sandbox.run(Program(source="print(1)"), LONG)
    assert descendants(pid) == []


@pytest.mark.parametrize(
    "program",
    [
        Program(),
        Program(source="1", command=("true",)),
        Program(source="1", files={"../x": b""}),
        Program(source="1", files={"/x": b""}),
        Program(source="1", files={"": b""}),
    ],
)
async def test_an_impossible_program_is_refused(program: Program) -> None:
    with pytest.raises(ValueError, match="program"):
        await LocalSandbox(1).run(program, LONG)


def test_impossible_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match="num_processes"):
        LocalSandbox(0)
    with pytest.raises(ValueError, match="walls"):
        LocalSandbox(1, "walls")


OWN = """
class Elsewhere:
    def __init__(self, settings):
        self.settings = settings
"""


async def test_settings_open_what_they_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert isinstance(open_sandbox(SandboxConfig()), LocalSandbox)
    (tmp_path / "own_sandbox.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    own = SandboxConfig(runner="own_sandbox:Elsewhere")
    opened: Any = open_sandbox(own)
    assert opened.settings is own
    assert await describe_sandbox(own) == own.runner
    with pytest.raises(ConfigError, match="no_such"):
        open_sandbox(SandboxConfig(runner="no_such_module:Thing"))
    nothing = SandboxConfig(isolation=Isolation.none)
    with pytest.raises(SandboxError, match="isolation is none"):
        open_sandbox(nothing)
    assert "refused" in await describe_sandbox(nothing)
