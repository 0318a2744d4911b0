"""LocalScheduler: one node, this machine, with an agent that it starts itself.

    make_scheduler      the agent that an earlier start of the script has left is taken over, with
                        its workers; else one starts at once, and its fork server imports in the
                        background
    nodes               the agent has told where it listens, and what this machine offers
    renew               the agent is killed if need be, and another one takes its place
    close               the agent ends what is left, and cleans up

Where there are CUDA devices, the fork server imports nothing beforehand. Agent and workers outlive
this process by `orphan_timeout_s` at most. The keys of the run are made here, and lie in a file of
the run folder, for its owner alone, as long as any of them may live: a script that is started again
needs them. `close` deletes them, and so does the last agent of a script that was killed.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from msgspec import json

from areal_sc.config.schema import SchedulerConfig
from areal_sc.errors import ConfigError, WorkerStartError
from areal_sc.log import log_tail
from areal_sc.nodes.spec import DESCRIBE, NodeDescription, NodeFacts
from areal_sc.run.agent_files import delete_files_of_dead_agents, end_agents, living_agents
from areal_sc.run.run_folder import RunFolder
from areal_sc.schedulers.agent_calls import AgentAddress, call_agents
from areal_sc.schedulers.agent_process import AGENT, LocalAgent, StartedAgent, agent_environment
from areal_sc.schedulers.base import Node
from areal_sc.schedulers.open_run import OpenRun, settings_of_agents
from areal_sc.system.process import heard_from
from areal_sc.system.waiting import polled
from areal_sc.transport.shards.memory_folder import clean_leftovers, user_folder

logger = logging.getLogger(__name__)


class LocalScheduler(OpenRun):
    """Runs workers on this machine.

    Args:
        config: the `scheduler` section.
        folder: see `make_scheduler`.
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
        self._command = command
        self._node: Node | None = None
        self._one_waits = threading.Lock()  # for what an agent tells
        self._one_starts = threading.Lock()  # an agent, and none after the close
        self._is_closed = False
        with self._opened(config, folder) as (folder, undo):
            self._log_path = folder.log_path("agent/0")
            self._run_id = self.keys.run_id
            agent = self._found_agent()
            undo.callback(folder.remove_keys)
            self._agent: StartedAgent | LocalAgent = agent or self._start_agent()
            undo.callback(self._end_agent)

    async def nodes(self) -> list[Node]:
        """See `Scheduler`: this machine."""
        return [await asyncio.to_thread(self._wait_for_node)]

    async def ended_nodes(self) -> dict[Node, str]:
        """See `Scheduler`."""
        how = self._agent.how_it_ended()
        return {} if how is None or self._node is None else {self._node: how}

    async def renew(self, node: Node, incarnation: str) -> None:
        """See `Scheduler`: on this machine."""
        await asyncio.to_thread(self._replace_agent, node, incarnation)

    def _found_agent(self) -> LocalAgent | None:
        """The agent that an earlier start of the script has left, if it is of use; others end.

        Raises: RunFolderError: there is one, on another machine; or it knows a later term.
        """
        used = None
        for file in living_agents(self.folder.path):
            process = file.process()
            if process is None:
                continue  # it has just ended, or `end_agents` says where it is
            agent, address = LocalAgent(process), AgentAddress.of(file)
            asked = [] if used else [address]
            found = call_agents(DESCRIBE, None, asked, self.keys, self.term).get(address)
            if found is None:
                logger.warning("agent=%d does not answer; it is killed", agent.pid)
                agent.kill()  # not asked: it would delete what its successor can use
            elif not self._is_like(found):
                logger.warning(
                    "agent=%d has other settings, or another version of areal_sc; it ends",
                    agent.pid,
                )
                agent.end(self.config.shutdown_timeout_s)
            else:
                logger.info("agent=%d workers=%d are taken over", agent.pid, len(found.workers))
                self._node = Node(found.facts, self._log_path, found.workers)
                used = agent
                continue
            agent.close()
        if used is None:
            end_agents(self.folder.path, self.config.shutdown_timeout_s)
        delete_files_of_dead_agents(self.folder.path)
        return used

    def _is_like(self, found: NodeDescription) -> bool:
        """Whether an agent, and its workers, were started with the same settings.

        The first one of a run chose the folder of shared memory, which a later one is told.
        """
        wanted = (self._agent_config(facts) for facts in (None, found.facts))
        own = settings_of_agents(found.config, found.calls_format)
        return own in map(settings_of_agents, wanted)

    def _agent_config(self, facts: NodeFacts | None) -> SchedulerConfig:
        """Settings of an agent; of one that succeeds another, what that has told."""
        transport = self.config.transport
        if facts is not None and transport.shared_memory == "auto":
            # what the earlier one chose, however much room is left there now
            transport = replace(transport, shared_memory=facts.memory_root)
        return replace(self.config, run_dir=str(self.folder.path), transport=transport)

    def _start_agent(self) -> StartedAgent:
        self.keys.write(self.folder.keys_path)  # an agent that nobody needs has deleted them
        config = self._agent_config(None if self._node is None else self._node.facts)
        return StartedAgent(
            [*self._command, self._run_id, json.encode(config).decode()],
            self._log_path,
            os.environ | agent_environment(os.environ),
            self.keys.controller.public,
        )

    def _wait_for_node(self) -> Node:
        with self._one_waits:
            if self._node is None:
                self._node = Node(self._wait_for_facts(self._agent), self._log_path)
            return self._node

    def _replace_agent(self, node: Node, incarnation: str) -> None:
        with self._one_waits:
            if node.facts.incarnation != incarnation:
                return
            with self._one_starts:
                self.term.check()
                if self._is_closed:
                    raise WorkerStartError("no agent is started: the scheduler is closed")
                past = self._agent
                past.kill()
                self._agent = self._start_agent()
                past.close()  # now that `ended_nodes`, in another thread, asks its successor
            node.facts, node.found = self._wait_for_facts(self._agent), []

    def _wait_for_facts(self, agent: StartedAgent | LocalAgent) -> NodeFacts:
        """What a new agent tells when it listens. Blocks, but not for ever."""
        assert isinstance(agent, StartedAgent), "one that was found has told already"
        timeout_s, output = self.config.startup_timeout_s, agent.output
        told = heard_from(output, timeout_s)
        facts = json.decode(told or b"null", type=NodeFacts | str | None)
        if isinstance(facts, str):
            raise ConfigError(facts)
        if facts is None:
            how = agent.how_it_ended()
            what = "has ended" if how is None else f"ended with {how}"
            what = f"the agent of this machine {what}, or did not serve in {timeout_s:g} s"
            log = self._log_path
            raise WorkerStartError.with_log(what, log, log_tail(log))
        return facts

    def _end_agent(self) -> None:
        with self._one_starts:
            self._is_closed = True
        is_ours = not self.term.is_over
        if is_ours:
            self._agent.end(self.config.shutdown_timeout_s)
        with self._one_waits:  # whoever reads what it tells has come to the end of it
            self._agent.close()
        if is_ours and self._node is not None:
            self._clean_up_after(Path(self._node.facts.memory_root))

    def _clean_up_after(self, memory_root: Path) -> None:
        """Deletes what a killed agent leaves, once its workers have died, too."""
        left = user_folder(memory_root) / self._run_id

        def is_gone() -> bool:
            if left.exists():
                clean_leftovers(memory_root)
            return not left.exists()

        polled(is_gone, self.config.shutdown_timeout_s, 0.05)
