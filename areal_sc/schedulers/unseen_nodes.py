"""What a script does for agents that do not see its run folder; `JoinServer` has one of these.

They are noted in the folder, as they cannot do that themselves: so the next start finds them. They
get the script's files (`FilesBeside`), and are told where these are.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Final

from areal_sc.errors import StaleTerm
from areal_sc.nodes.spec import WELCOME, Joining, NodeFacts, Welcome
from areal_sc.run.run_folder import RunFolder
from areal_sc.schedulers.agent_calls import AgentAddress, call_agents
from areal_sc.schedulers.files_beside import FilesBeside
from areal_sc.schedulers.found_agents import FoundAgent, note_unseen
from areal_sc.transport.security.keys import RunKeys
from areal_sc.transport.security.passes import Passes
from areal_sc.transport.sockets.interface import Interface

_NONCE: Final = b"areal_sc nonce 1\0"

logger = logging.getLogger(__name__)


class UnseenNodes:
    """Used by the thread of a JoinServer, and by those of its scheduler.

    Args:
        passes: of the run's workers.
        agents: all that have joined.

    Attributes:
        nonce: whoever reads it in the run folder sees that.
        join_address: where agents join; set before one is welcomed.
        files: the process that serves them, once there is a node that needs it.
    Raises: RunFolderError: the folder cannot be written.
    """

    def __init__(
        self,
        keys: RunKeys,
        passes: Passes,
        interface: Interface,
        folder: RunFolder,
        agents: Callable[[], list[Joining]],
    ) -> None:
        # as secret as the invitations, and the same for every start of the script
        self.nonce = hmac.digest(keys.controller.secret, _NONCE, "sha256").hex()
        folder.write_atomic(folder.nonce_path, self.nonce.encode())
        self.join_address = ""
        self.files = FilesBeside(folder, interface, passes, self._tell_of_files)
        self._keys = keys
        self._folder = folder
        self._agents = agents
        self._one_notes = asyncio.Lock()
        self._noted: list[Joining] = []

    def adopt(self, found: Sequence[FoundAgent]) -> list[FoundAgent]:
        """The agents of an earlier start that see the folder, or have heard of this start. Blocks.

        Raises: WorkerStartError: files cannot be served. StaleTerm.
        """
        unseen = {it.address for it in found if not it.joining.shares_folder}
        silent = unseen - self._tell(unseen, self.files.address()) if unseen else unseen
        return [it for it in found if it.address not in silent]

    def note(self) -> None:
        """Notes those that have joined. Raises: RunFolderError: it cannot be written. StaleTerm."""
        agents = self._agents()
        note_unseen(self._folder, agents)
        self._noted = agents

    async def welcome(self, joining: Joining) -> Welcome:
        """The answer to an agent that has joined.

        Raises: WorkerStartError: files cannot be served. RunFolderError: it cannot be written.
            StaleTerm.
        """
        if joining.shares_folder:
            return Welcome(self.join_address)
        async with self._one_notes:  # those that come at one time are noted together
            # one that asks whether the script lives is noted already
            if replace(joining, secret="") not in self._noted:
                await asyncio.to_thread(self.note)
        logger.info("node=%s does not see the run folder: it gets the script's files", joining.node)
        return Welcome(self.join_address, await asyncio.to_thread(self.files.address))

    def _tell_of_files(self, address: str) -> None:
        """Agents know where files were served before. Blocks, but not for long."""
        unseen = {
            AgentAddress.of(it.facts): it.node
            for it in self._agents()
            if isinstance(it.facts, NodeFacts) and not it.shares_folder
        }
        try:
            told = self._tell(unseen, address)
        except StaleTerm as error:
            logger.error("no node is told where files are served: %s", error)
            return
        if silent := [node for agent, node in unseen.items() if agent not in told]:
            what = "nodes=%s do not hear where files are served until their agents join again"
            logger.warning(what, ",".join(silent))

    def _tell(self, agents: Collection[AgentAddress], files: str) -> set[AgentAddress]:
        """Which of these have heard where this start of the script is. Raises: StaleTerm."""
        welcome = Welcome(self.join_address, files)
        return set(call_agents(WELCOME, welcome, agents, self._keys, self._folder.term))
