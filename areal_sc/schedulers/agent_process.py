"""The process of an agent: how it is started, and that of one on this machine, or found there."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final, Protocol

from areal_sc.errors import TransportError
from areal_sc.nodes.spec import DESCRIBE, NodeDescription
from areal_sc.run.agent_files import AgentFile
from areal_sc.run.run_owner import RunTerm
from areal_sc.schedulers.agent_calls import run_apart
from areal_sc.system.durable import own_file
from areal_sc.system.process import END_SIGNAL, OtherProcess, environment_of_workers, exit_text
from areal_sc.transport.rpc.transport import ZmqTransport
from areal_sc.transport.security.curve import CurveClient
from areal_sc.transport.security.keys import RunKeys

AGENT: Final = (sys.executable, "-P", "-m", "areal_sc.nodes.agent")
"""-P: the working directory must not shadow installed modules."""
REACH_LIMIT_S: Final = 5.0
"""An agent that lives answers in milliseconds; one that does not in so long is of no use."""
_LOOK_S: Final = 0.05


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


class AgentProcess(Protocol):
    """What a scheduler does with its agent.

    Attributes:
        pid: of the process.
    """

    pid: int

    def how_it_ended(self) -> str | None:
        """In words that follow "ended with"; None: it lives."""
        ...

    def end(self, grace_s: float) -> None:
        """It ends its workers and cleans up. SIGKILL if that takes longer."""
        ...

    def kill(self) -> None:
        """With it die its fork server and all workers. It has ended when this returns."""
        ...

    def close(self) -> None:
        """Gives up what belongs to it here, whether it lives or not; nothing else is called."""
        ...


class StartedAgent:
    """A child of this process.

    Args:
        introduction: first line of its standard input.

    Attributes:
        output: one line, when it listens.
    """

    def __init__(
        self, command: Sequence[str], log_path: Path, env: dict[str, str], introduction: bytes
    ) -> None:
        with open(log_path, "ab", opener=own_file) as log:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,  # open as long as this process lives
                stdout=subprocess.PIPE,
                stderr=log,
                env=env,
                start_new_session=True,
            )
        assert self._process.stdin
        assert self._process.stdout
        with suppress(BrokenPipeError):  # it has ended: who waits for its output learns how
            self._process.stdin.write(introduction + b"\n")
            self._process.stdin.flush()
        self.output = self._process.stdout
        self.pid = self._process.pid

    def how_it_ended(self) -> str | None:
        code = self._process.poll()
        return None if code is None else exit_text(code)

    def end(self, grace_s: float) -> None:
        self._process.send_signal(END_SIGNAL)
        try:
            self._process.wait(grace_s)
        except subprocess.TimeoutExpired:
            self.kill()

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def close(self) -> None:
        if self._process.poll() is None:
            self._process.returncode = 0  # else Popen complains of a child that is left
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe
            pipe.close()


class LocalAgent:
    """One that an earlier start of the script has left.

    Args:
        file: what it tells of itself.
        process: its own.
    """

    def __init__(self, file: AgentFile, process: OtherProcess) -> None:
        self.pid = file.pid
        self._file = file
        self._process = process
        self._is_killed = False

    def how_it_ended(self) -> str | None:
        # who did not start a process is not told how it ended
        has_ended = self._is_killed or self._process.has_ended
        return "an unknown exit status" if has_ended else None

    def end(self, grace_s: float) -> None:
        self._process.end(grace_s)

    def kill(self) -> None:
        self._process.send(signal.SIGKILL)
        self._process.wait()
        self._is_killed = True

    def close(self) -> None: ...

    def describe(self, keys: RunKeys, term: RunTerm | None) -> NodeDescription | None:
        """What it says of its node; None: it does not answer, or has ended. Blocks.

        Raises: StaleTerm: it knows a later term.
        """
        # in a thread of its own, since the caller's may have a loop that runs
        return run_apart(self._describe(keys, term))

    async def _describe(self, keys: RunKeys, term: RunTerm | None) -> NodeDescription | None:
        file, number = self._file, 0 if term is None else term.number
        transport = ZmqTransport(client=CurveClient.of_controller(keys), term=number)
        agent = transport.connect(
            *(file.address, "agent", file.incarnation), keeps_trying=True, server_key=file.key
        )
        asking = asyncio.ensure_future(agent.call(DESCRIBE, None, timeout_s=REACH_LIMIT_S))
        try:
            while not (asking.done() or self._process.has_ended):
                await asyncio.wait([asking], timeout=_LOOK_S)
            asking.cancel()  # nothing happens to an answer
            with suppress(TransportError, asyncio.CancelledError):
                return await asking
            return None
        finally:
            await transport.close()
