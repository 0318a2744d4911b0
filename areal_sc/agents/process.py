"""The start of an agent's process, by a fork server; `served` is what it goes on with. No torch."""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, Final

from areal_sc.agents import served
from areal_sc.rewards.process import run_reward_process
from areal_sc.sources.reference import ObjectReference, resolve
from areal_sc.sources.values import from_json, from_wire, to_json
from areal_sc.system.sandbox.own_code import begin_apart
from areal_sc.system.stacks import STACKS_SIGNAL

AGENT: Final = "agent"
"""The role of these processes, and of what they run."""

MAX_MESSAGE_BYTES: Final = 256 << 20


def run_own_process(spec: dict[str, Any]) -> int:
    """Entry point of a worker's fork server: a process of an agent, or of rewards."""
    return run_agent_process(spec) if spec["role"] == AGENT else run_reward_process(spec)


def run_agent_process(spec: dict[str, Any]) -> int:
    """Returns at the end of file of the socket to the pool.

    Args:
        spec: as of `begin_apart`; `python`: the interpreter that goes on, "": this one.
    """
    connection = begin_apart(spec, pack)
    if connection is None:
        return 0
    if python := spec["python"]:
        connection.set_inheritable(True)
        numbers = map(str, (connection.fileno(), int(STACKS_SIGNAL)))
        os.execv(python, [python, "-u", str(Path(served.__file__)), *numbers])
    sources = Path(spec["sources"])
    served.serve(connection, partial(_loaded, sources=sources), from_wire)
    return 0


def _loaded(reference: Any, sources: Path) -> Any:
    return resolve(ObjectReference.from_wire(reference), sources)


def pack(message: list[Any]) -> bytes:
    """A message as `served` reads it."""
    return to_json(message) + b"\n"


class Unpacker:
    """The messages of an agent's process, as `OwnProcess` reads them."""

    def __init__(self) -> None:
        self._received = bytearray()

    def feed(self, received: bytes) -> None:
        """Raises: ConnectionResetError: the message has no end, and is no message."""
        self._received += received
        if len(self._received) > MAX_MESSAGE_BYTES:
            raise ConnectionResetError

    def __iter__(self) -> Iterator[list[Any]]:
        while (end := self._received.find(b"\n")) >= 0:
            line = bytes(self._received[:end])
            del self._received[: end + 1]
            yield from_json(line)
