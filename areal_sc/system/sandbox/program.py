"""What a sandbox runs, under which limits, and what came of it. No torch, no workers.

Who judges a program compares what it printed, outside: no expected output, and no verdict, is ever
in the hands of what is judged.
"""

from __future__ import annotations

import marshal
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final, Protocol

CLOCK_FACTOR: Final = 3
"""Seconds by the clock that a program may take, for one of `Limits.time_s`."""

LENGTH: Final = struct.Struct("!Q")
"""Of the message that follows, in bytes."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What one program may use, all that it starts included.

    Attributes:
        time_s: CPU seconds of all of it; by the clock `CLOCK_FACTOR` times as many, since on a busy
            machine anything takes long.
        memory_bytes: of address space a process.
        num_processes: processes and threads beside each other.
        output_bytes: of standard output and standard error together.
        file_bytes: of all that it writes into its private folder.
    """

    time_s: float = 10.0
    memory_bytes: int = 512 << 20
    num_processes: int = 32
    output_bytes: int = 1 << 20
    file_bytes: int = 16 << 20


@dataclass(frozen=True, kw_only=True)
class Program:
    """A program and what it reads.

    Attributes:
        source: Python, run as `__main__` by a warm interpreter; "" where `command` is given.
        command: program and arguments of any other language, run in the private folder.
        stdin: all of its standard input.
        files: what lies in its private folder at the start, by relative path.
    """

    source: str = ""
    command: tuple[str, ...] = ()
    stdin: bytes = b""
    files: Mapping[str, bytes] = field(default_factory=dict)


class End(StrEnum):
    """How a program ended; all of it is its own doing.

    exited: by itself, with `Ended.exit_code`.
    timeout: it was killed at `Limits.time_s`.
    memory: it was killed, or failed to allocate, at a limit of memory.
    output: it was killed at `Limits.output_bytes`.
    files: it was killed, or failed to write, at `Limits.file_bytes`.
    crashed: a signal ended it.
    """

    exited = "exited"
    timeout = "timeout"
    memory = "memory"
    output = "output"
    files = "files"
    crashed = "crashed"


@dataclass(frozen=True, kw_only=True)
class Ended:
    """What came of a program.

    Attributes:
        exit_code: as `subprocess` gives it; below 0: a signal's number.
        stdout, stderr: cut at `Limits.output_bytes`.
        seconds: from its start to its end.
    """

    end: End
    exit_code: int
    stdout: bytes
    stderr: bytes
    seconds: float


class Sandbox(Protocol):
    """Runs programs; ours, or one given by import path (a container, a service)."""

    async def run(self, program: Program, limits: Limits) -> Ended:
        """Runs a program to its end; waits for a free place first.

        Raises: SandboxError: it could not be run, which says nothing about the program.
        """
        ...

    async def close(self) -> None:
        """Ends all that runs. Bounded."""
        ...


def packed(message: dict[str, Any]) -> bytes:
    """A message between a sandbox and its server: its length, and `marshal`'s bytes of it.

    Both ends are the same Python, and a program holds neither.
    """
    body = marshal.dumps(message)
    return LENGTH.pack(len(body)) + body
