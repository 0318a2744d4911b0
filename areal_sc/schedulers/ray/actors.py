"""What a run has in a Ray cluster: an actor a node, which has one agent, and a keeper of them all.

    placement group   one bundle a node, each on a node of its own
    AgentActor        one in each bundle, detached and named; its child is the agent, which dies
                      with it, and so with Ray's node
    Keeper            one, detached and named, anywhere: Ray starts it again if it is lost. When it
                      hears no script any more, and no agent is left, it gives all that back

Nothing secret passes through Ray, whose arguments, objects and logs others can read: an agent makes
a key pair, whose public half is told, and gets its invitation sealed for that. What comes through
Ray is unpickled by Ray: so it is asked by a process of its own (`bridge`), never by the script.
"""

from __future__ import annotations

import asyncio
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import ray
from ray.util import get_placement_group, list_named_actors, remove_placement_group
from ray.util.placement_group import placement_group_table

from areal_sc.log import log_tail
from areal_sc.nodes.joining import STARTER_VARIABLE
from areal_sc.schedulers.agent_process import start_beside
from areal_sc.system.process import END_SIGNAL, exit_text, heard_from
from areal_sc.system.waiting import polled
from areal_sc.transport.shards.memory_folder import folder_on_node

KEY_LIMIT_S: Final = 60.0
"""In so long an agent's process has imported what it needs, and tells its key."""
LINGER_S: Final = 5.0
"""An actor whose agent has ended is there for so long to say how."""
KILL_LIMIT_S: Final = 5.0
"""Ray has taken note of a killed actor in milliseconds."""
SILENT_S: Final = 10.0
"""The script's process that asks Ray calls far more often, and is started again in less."""
_LOOK_S: Final = 0.1
_OWNER_ONLY: Final = 0o700


class AgentActor:
    """One agent, as a child of this actor's process. All calls are answered by one event loop."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._log_path = Path()
        self._shares_log = False

    async def start(
        self,
        arguments: Sequence[str],
        variables: Mapping[str, str],
        log_path: str,
        node_folder: str,
    ) -> bytes:
        """Starts the agent with this actor's interpreter.

        Returns: the public key that the agent has made; b"": it has ended, or tells none in time.
        """
        around = os.environ.get("PYTHONPATH", "")
        paths = [path for path in (variables.get("PYTHONPATH", ""), around) if path]
        environment = {**os.environ, **variables, STARTER_VARIABLE: str(os.getpid())}
        if paths:
            environment["PYTHONPATH"] = os.pathsep.join(paths)
        self._log_path = self._place_of_log(Path(log_path), node_folder)
        # it dies with the thread that has started it, which is that of the event loop
        command = [sys.executable, *arguments]
        self._process = start_beside(command, self._log_path, environment, subprocess.PIPE)
        assert self._process.stdout is not None
        return await asyncio.to_thread(heard_from, self._process.stdout, KEY_LIMIT_S)

    async def introduce(self, sealed: bytes) -> None:
        """The agent's invitation, as only it can read it."""
        assert self._process is not None
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # it has ended, and so it never joins
            self._process.stdin.write(sealed + b"\n")
            self._process.stdin.flush()

    async def wait(self) -> tuple[str, str]:
        """How the agent ended, in words that follow "ended with"; and the last lines of its log.

        Those are left out where the script sees the log.
        """
        assert self._process is not None
        while (code := self._process.poll()) is None:  # noqa: ASYNC110
            await asyncio.sleep(_LOOK_S)
        threading.Timer(LINGER_S, _end_this_actor).start()
        tail = "" if self._shares_log else "\n".join(log_tail(self._log_path))
        return exit_text(code), tail

    async def end(self, grace_s: float) -> None:
        """Returns when the agent has ended, with its workers; killed, if that takes longer."""
        process = self._process
        if process is None:
            return
        process.send_signal(END_SIGNAL)
        give_up_s = time.monotonic() + grace_s
        while process.poll() is None:
            if time.monotonic() >= give_up_s:
                process.kill()
            await asyncio.sleep(_LOOK_S)

    def _place_of_log(self, log_path: Path, node_folder: str) -> Path:
        """In the run folder, if this node sees that."""
        self._shares_log = os.access(log_path.parent, os.W_OK)
        if self._shares_log:
            return log_path
        own = folder_on_node(node_folder)
        own.mkdir(_OWNER_ONLY, parents=True, exist_ok=True)
        (own / "logs").mkdir(_OWNER_ONLY, exist_ok=True)
        return own / "logs" / log_path.name


class Keeper:
    """Gives back what the run has in the cluster, when its script is gone and its agents, too.

    Agents know whether their script lives, and end without it; the keeper counts them.

    Args:
        prefix: what the names of all that the run has begin with.
    """

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        self._heard_s = time.monotonic()
        threading.Thread(target=self._watch, name="keeper", daemon=True).start()

    def hear(self) -> None:
        """The script lives."""
        self._heard_s = time.monotonic()

    def _watch(self) -> None:
        while time.monotonic() < self._heard_s + SILENT_S or agents_of(self._prefix):
            time.sleep(1.0)
        release(self._prefix)


def keeper_of(prefix: str) -> str:
    """Name of the run's keeper."""
    return f"{prefix}keeper"


def agents_of(prefix: str) -> list[str]:
    """Names of the run's actors that have, or had, an agent."""
    keeper = keeper_of(prefix)
    return [name for name in list_named_actors() if name.startswith(prefix) and name != keeper]


def groups_of(prefix: str) -> dict[str, dict[str, Any]]:
    """The run's placement groups, as Ray tells of them, by name."""
    table: dict[str, dict[str, Any]] = placement_group_table()
    groups = (it for it in table.values() if it["state"] != "REMOVED")
    return {it["name"]: it for it in groups if it["name"].startswith(prefix)}


def kill(name: str) -> None:
    """The actor of that name, if there is one, is dead for Ray when this returns.

    `ray.kill` does not wait for an answer: its message is lost where this process ends at once.
    """
    with suppress(ValueError):
        ray.kill(ray.get_actor(name), no_restart=True)
        if not polled(lambda: name not in list_named_actors(), KILL_LIMIT_S, _LOOK_S):
            logging.warning("Ray still names %s, %g s after it was killed", name, KILL_LIMIT_S)


def release(prefix: str) -> None:
    """Deletes all that the run has in the cluster; the keeper comes last."""
    for name in agents_of(prefix):
        kill(name)
    for name in groups_of(prefix):
        with suppress(ValueError):
            remove_placement_group(get_placement_group(name))
    kill(keeper_of(prefix))


def _end_this_actor() -> None:
    ray.kill(ray.get_runtime_context().current_actor, no_restart=True)
