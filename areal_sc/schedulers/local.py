"""LocalScheduler: one node, this machine, with an agent that it starts itself.

    make_scheduler      the agent starts at once, and its fork server imports in the background
    nodes               the agent has told where it listens, and what this machine offers
    renew               the agent is killed if need be, and another one takes its place
    close               SIGTERM: the agent ends what is left, and cleans up

Where there are CUDA devices, the fork server imports nothing beforehand. Agent and workers outlive
this process by `orphan_timeout_s` at most. The keys of the run are made here, and lie in a file of
the run folder, for its owner alone, while the scheduler is open.
"""

from __future__ import annotations

import asyncio
import atexit
import os
import selectors
import subprocess
import sys
import sysconfig
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Final

from msgspec import json

from areal_sc import interrupts
from areal_sc.config.schema import SchedulerConfig
from areal_sc.errors import ConfigError, WorkerStartError
from areal_sc.ids import random_id
from areal_sc.log import log_tail
from areal_sc.process import allow_open_files, exit_text
from areal_sc.run_folder import RunFolder
from areal_sc.schedulers.base import Node
from areal_sc.transport.security.keys import RunKeys
from areal_sc.transport.shards.memory_folder import clean_leftovers, user_folder
from areal_sc.workers.spec import NodeFacts

AGENT: Final = (sys.executable, "-P", "-m", "areal_sc.workers.agent")
"""-P: the working directory must not shadow installed modules."""


class LocalScheduler:
    """Runs workers on this machine.

    Args:
        config: the `scheduler` section.
        folder: as in `make_scheduler`.
        command: starts an agent; its arguments follow.
    Raises: RunFolderError: another process runs in the folder, or it cannot be used.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        folder: RunFolder | None = None,
        *,
        command: Sequence[str] = AGENT,
    ) -> None:
        self.config = config
        self.keys = RunKeys.create()
        self._command = command
        self._node: Node | None = None
        self._run_id = random_id()
        self._one_waits = threading.Lock()  # for what an agent tells
        self._one_starts = threading.Lock()  # an agent, and none after the close
        self._is_closed = False
        allow_open_files()
        with interrupts.deferred(), ExitStack() as undo:
            if folder is None:
                folder = RunFolder(config.run_dir)
                folder.lock(resume=config.resume.value, overwrite=config.overwrite)
                undo.callback(folder.close)
            folder.remove_keys()  # of a run that was killed
            undo.callback(folder.remove_keys)
            self._folder = folder
            self._log_path = folder.log_path("agent/0")
            self._agent = self._start_agent()
            undo.callback(self._end_agent)
            self._undo = undo.pop_all()
        # A script that ends without `close` does not leave the agent to its orphan timeout.
        atexit.register(self._close_at_exit)

    async def nodes(self) -> list[Node]:
        return [await asyncio.to_thread(self._wait_for_node)]

    async def ended_nodes(self) -> dict[Node, str]:
        code = self._agent.poll()
        return {} if code is None or self._node is None else {self._node: exit_text(code)}

    async def renew(self, node: Node, incarnation: str) -> None:
        await asyncio.to_thread(self._replace_agent, node, incarnation)

    def close(self) -> None:
        """Ends the agent, and with it every worker that is left."""
        with interrupts.deferred():
            self._undo.close()
            atexit.unregister(self._close_at_exit)

    def _close_at_exit(self) -> None:
        with interrupts.deferred(are_dropped=True):
            self.close()

    def _start_agent(self) -> subprocess.Popen[bytes]:
        self.keys.write(self._folder.keys_path)  # an agent that nobody needs has deleted them
        transport = self.config.transport
        if self._node is not None and transport.shared_memory == "auto":
            # what an earlier agent chose, however much room is left there now
            transport = replace(transport, shared_memory=self._node.facts.memory_root)
        config = replace(self.config, run_dir=str(self._folder.path), transport=transport)
        defaults = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
        with self._log_path.open("ab") as log:
            return subprocess.Popen(
                [*self._command, self._run_id, json.encode(config).decode()],
                stdin=subprocess.PIPE,  # open as long as this process lives
                stdout=subprocess.PIPE,
                stderr=log,
                env=_with_package(defaults | os.environ),
                start_new_session=True,
            )

    def _wait_for_node(self) -> Node:
        with self._one_waits:
            if self._node is None:
                self._node = Node(self._wait_for_facts(), self._log_path)
            return self._node

    def _replace_agent(self, node: Node, incarnation: str) -> None:
        with self._one_waits:
            if node.facts.incarnation != incarnation:
                return
            with self._one_starts:
                if self._is_closed:
                    raise WorkerStartError("no agent is started: the scheduler is closed")
                self._agent.kill()  # and with it its fork server, and so every worker
                self._agent.wait()
                _close_pipes(self._agent)
                self._agent = self._start_agent()
            node.facts = self._wait_for_facts()

    def _wait_for_facts(self) -> NodeFacts:
        """What the agent tells when it listens. Blocks, but not for ever."""
        timeout_s, output = self.config.startup_timeout_s, self._agent.stdout
        assert output
        with selectors.DefaultSelector() as selector:
            selector.register(output, selectors.EVENT_READ)
            told = output.readline() if selector.select(timeout_s) else b""
        facts = json.decode(told or b"null", type=NodeFacts | str | None)
        if isinstance(facts, str):
            raise ConfigError(facts)
        if facts is None:
            code = self._agent.poll()
            what = "has ended" if code is None else f"ended with {exit_text(code)}"
            what = f"the agent of this machine {what}, or did not serve in {timeout_s:g} s"
            log = self._log_path
            raise WorkerStartError.with_log(what, log, log_tail(log))
        return facts

    def _end_agent(self) -> None:
        with self._one_starts:
            self._is_closed = True
        self._agent.terminate()
        try:
            self._agent.wait(self.config.shutdown_timeout_s)
        except subprocess.TimeoutExpired:
            self._agent.kill()  # and with it its fork server, and so every worker
            self._agent.wait()
        with self._one_waits:  # whoever reads what it tells has come to the end of it
            _close_pipes(self._agent)
        if self._node is not None and self._agent.returncode:
            self._clean_up_after(Path(self._node.facts.memory_root))

    def _clean_up_after(self, memory_root: Path) -> None:
        """Deletes what a killed agent leaves, once its workers have died, too."""
        give_up_s = time.monotonic() + self.config.shutdown_timeout_s
        while (user_folder(memory_root) / self._run_id).exists():
            clean_leftovers(memory_root)
            if time.monotonic() > give_up_s:
                return
            time.sleep(0.05)


def _close_pipes(agent: subprocess.Popen[bytes]) -> None:
    for pipe in (agent.stdin, agent.stdout):
        assert pipe
        pipe.close()


def _with_package(env: dict[str, str]) -> dict[str, str]:
    """The environment in which this very package is importable, also when it is not installed."""
    root = str(Path(__file__).resolve().parents[2])
    if root not in sysconfig.get_paths().values():
        paths = [root, env.get("PYTHONPATH", "")]
        env["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
    return env
