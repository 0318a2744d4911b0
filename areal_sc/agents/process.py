"""The start of an agent's process, by a fork server; `served` is what it goes on with. No torch."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Any, Final

from areal_sc.agents import served
from areal_sc.rewards.process import run_reward_process
from areal_sc.sources.reference import ObjectReference, resolve
from areal_sc.sources.values import from_wire
from areal_sc.system import replies
from areal_sc.system.replies import Replies
from areal_sc.system.sandbox.own_code import begin_apart
from areal_sc.system.stacks import STACKS_SIGNAL

AGENT: Final = "agent"
"""The role of these processes, and of what they run."""


def run_own_process(spec: dict[str, Any]) -> int:
    """Entry point of a worker's fork server: a process of an agent, or of rewards."""
    return run_agent_process(spec) if spec["role"] == AGENT else run_reward_process(spec)


def run_agent_process(spec: dict[str, Any]) -> int:
    """Returns at the end of file of the socket to the pool.

    Args:
        spec: see `begin_apart`; `python`: the interpreter that goes on, "": this one.
    """
    connection = begin_apart(spec)
    if connection is None:
        return 0
    if python := spec["python"]:
        connection.set_inheritable(True)
        numbers = map(str, (connection.fileno(), int(STACKS_SIGNAL)))
        os.execv(python, [python, "-u", served.__file__, *numbers, replies.__file__])
    load = partial(_loaded, sources=Path(spec["sources"]))
    served.serve(connection, Replies(connection), load, from_wire)
    return 0


def _loaded(reference: Any, sources: Path) -> Any:
    return resolve(ObjectReference.from_wire(reference), sources)
