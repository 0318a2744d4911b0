"""The processes beside the script: how one is started, and that of an agent on this machine."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import sysconfig
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue
from typing import Final

from areal_sc.errors import WorkerStartError
from areal_sc.log import log_tail
from areal_sc.system.durable import own_file
from areal_sc.system.process import (
    END_SIGNAL,
    OtherProcess,
    environment_of_workers,
    exit_text,
    heard_from,
)

AGENT: Final = (sys.executable, "-P", "-m", "areal_sc.nodes.agent")
"""-P: the working directory must not shadow installed modules."""


def agent_environment(around: Mapping[str, str]) -> dict[str, str]:
    """Variables that an agent needs beside those around it, or in place of them.

    This very package is importable with them, also when it is not installed.
    """
    defaults = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    found = {name: around.get(name, value) for name, value in defaults.items()}
    found |= environment_of_workers()
    root = str(Path(__file__).resolve().parents[2])
    if root not in sysconfig.get_paths().values():
        paths = [root, around.get("PYTHONPATH", "")]
        found["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
    return found


def start_beside(
    command: Sequence[str], log_path: Path, env: Mapping[str, str], stdout: int | None = None
) -> subprocess.Popen[bytes]:
    """A process in a session of its own, whose standard input is open as long as this one lives.

    Args:
        log_path: gets its errors, and its output unless `stdout` does.
    """
    with open(log_path, "ab", opener=own_file) as log:
        return subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=log if stdout is None else stdout,
            stderr=log,
            env=env,
            start_new_session=True,
        )


def wait_or_kill(process: subprocess.Popen[bytes], limit_s: float) -> None:
    """Returns when a child has ended, by SIGKILL if it takes longer."""
    try:
        process.wait(limit_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


class ProcessBeside:
    """A process of this package that serves beside the script; used from several threads.

    It gets lines, tells one by `tell_starter` when it serves, and ends with its standard input. One
    thread alone writes to that: whoever has a line does not wait for the process.

    Args:
        module: that it runs, with arguments.

    Attributes:
        child: it, as Python has it.
    """

    def __init__(self, log_path: Path, module: str, *arguments: str) -> None:
        command = [sys.executable, "-P", "-m", module, *arguments]
        env = os.environ | agent_environment(os.environ)
        self._log_path = log_path
        log_path.touch(0o600)  # for its owner alone, as what it serves
        self.child = start_beside(command, log_path, env, subprocess.PIPE)
        self._lines = SimpleQueue[bytes | None]()
        threading.Thread(target=self._write, name=f"lines to {module}", daemon=True).start()

    def tell(self, line: bytes) -> None:
        """It reads this next; nothing happens if it has ended."""
        self._lines.put(line)

    def heard(self, what: str, limit_s: float) -> bytes:
        """What it tells. Blocks. Raises: WorkerStartError: nothing in time; `what` names it."""
        assert self.child.stdout is not None
        if told := heard_from(self.child.stdout, limit_s):
            return told
        self.end(0.0)
        why = f"{what} did not come up within {limit_s:g} s"
        raise WorkerStartError.with_log(why, self._log_path, log_tail(self._log_path))

    def how_it_ended(self) -> str:
        """In words that follow "ended with". Blocks until it has."""
        return exit_text(self.child.wait())

    def end(self, grace_s: float) -> None:
        """Returns when it has ended, by SIGKILL if it takes longer."""
        self._lines.put(None)
        wait_or_kill(self.child, grace_s)
        assert self.child.stdout is not None
        self.child.stdout.close()

    def _write(self) -> None:
        assert self.child.stdin is not None
        with suppress(BrokenPipeError), self.child.stdin as pipe:
            while (line := self._lines.get()) is not None:
                pipe.write(line + b"\n")
                pipe.flush()


class StartedAgent:
    """An agent that is a child of this process.

    Args:
        introduction: first line of its standard input.

    Attributes:
        output: one line, when it listens.
        pid: of the process.
    """

    def __init__(
        self, command: Sequence[str], log_path: Path, env: dict[str, str], introduction: bytes
    ) -> None:
        self._process = start_beside(command, log_path, env, subprocess.PIPE)
        assert self._process.stdin
        assert self._process.stdout
        with suppress(BrokenPipeError):  # it has ended: who waits for its output learns how
            self._process.stdin.write(introduction + b"\n")
            self._process.stdin.flush()
        self.output = self._process.stdout
        self.pid = self._process.pid

    def how_it_ended(self) -> str | None:
        """In words that follow "ended with"; None: it lives."""
        code = self._process.poll()
        return None if code is None else exit_text(code)

    def end(self, grace_s: float) -> None:
        """It ends its workers and cleans up. SIGKILL if that takes longer."""
        self._process.send_signal(END_SIGNAL)
        wait_or_kill(self._process, grace_s)

    def kill(self) -> None:
        """With it die its fork server and all workers. It has ended when this returns."""
        self._process.kill()
        self._process.wait()

    def close(self) -> None:
        """Gives up what belongs to it here, whether it lives or not; nothing else is called."""
        if self._process.poll() is None:
            self._process.returncode = 0  # else Popen complains of a child that is left
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe
            with suppress(BrokenPipeError):  # it has ended before it read what was written
                pipe.close()


class LocalAgent:
    """An agent that an earlier start of the script has left; with the methods of `StartedAgent`."""

    def __init__(self, process: OtherProcess) -> None:
        self.pid = process.pid
        self._process = process

    def how_it_ended(self) -> str | None:
        # who did not start a process is not told how it ended
        return "an unknown exit status" if self._process.has_ended else None

    def end(self, grace_s: float) -> None:
        self._process.end(grace_s)

    def kill(self) -> None:
        self._process.send(signal.SIGKILL)
        self._process.wait()

    def close(self) -> None: ...
