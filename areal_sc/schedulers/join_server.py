"""Where agents on other nodes tell that they serve, and the command `stop` that the run is to end.

consumes     `Joining` calls of agents that were invited; calls of the command `stop`
waits for    their calls, until it is closed; the scheduler, until it knows whom it has invited
unblocked by agents; `open`

An invitation is a secret that the scheduler hands to the agents of a job, or of a step in one. It
is made of the run's keys and a name, so that the next start of the script knows it. It is good for
so many nodes, and for one agent on each of them, also when it is shown again: an agent that has
joined may call again, as long as its key is the same, and nobody else in its place. It is refused
once it was replaced.

Agents that do not see the run folder are noted in it, as they cannot do that themselves: so the
next start finds them. They get the script's files (`FilesBeside`), and are told where these are.

The server has a thread and an event loop of its own: the scheduler is used from several.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import logging
import threading
from collections.abc import Collection, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Final

from areal_sc.errors import NotPermitted
from areal_sc.ids import random_id
from areal_sc.nodes.joining import read_address
from areal_sc.nodes.spec import JOIN, STOP_RUN, WELCOME, Joining, NodeFacts, Welcome
from areal_sc.run.run_folder import RunFolder
from areal_sc.schedulers.agent_calls import AgentAddress, FoundAgent, call_agents, note_unseen
from areal_sc.schedulers.files_beside import FilesBeside
from areal_sc.system import interrupts
from areal_sc.transport.rpc.server import RpcServer
from areal_sc.transport.security.curve import CurveServer
from areal_sc.transport.security.keys import RunKeys
from areal_sc.transport.security.passes import KnownCallers, Passes
from areal_sc.transport.sockets.interface import Interface
from areal_sc.transport.sockets.refusals import Refusals

_CLOSE_LIMIT_S: Final = 10.0
_PURPOSE: Final = b"areal_sc invitation 1\0"
"""Before the name, in what a secret is made of: it is none of anything else."""
_NONCE: Final = b"areal_sc nonce 1\0"

logger = logging.getLogger(__name__)


@dataclass
class _Invited:
    """The agents that may come with one secret.

    Attributes:
        job: of the agent that has joined first; all are of one.
        num_nodes: in each of the job's starts.
        num_restarts: of the job by SLURM.
        agents: key of the agent that has joined, by node and restart.
    """

    num_nodes: int
    num_restarts: int
    job: str | None = None
    agents: dict[tuple[str, int], str] = field(default_factory=dict)

    def admit(self, joining: Joining) -> None:
        """Raises: NotPermitted: its place is taken, or there is none."""
        place = joining.node, joining.restart
        key = self.agents.get(place)
        num_there = sum(restart == joining.restart for _, restart in self.agents)
        if key not in (None, joining.agent_key):
            raise NotPermitted(f"another agent of node {joining.node} has joined with this secret")
        has_place = num_there < self.num_nodes and 0 <= joining.restart <= self.num_restarts
        if self.job not in (None, joining.job) or (key is None and not has_place):
            raise NotPermitted(
                f"node {joining.node} of job {joining.job}, restart {joining.restart}: the secret "
                f"is one of {self.num_nodes} nodes and {self.num_restarts} restarts of one job, "
                "and they have joined"
            )
        self.job = joining.job
        self.agents[place] = joining.agent_key


class JoinServer:
    """Listens from its making on; `open` lets agents in.

    Args:
        passes: of the run's workers.
        folder: of the run.

    Attributes:
        address: where agents join.
        refused: agents that were not invited, or came a second time.
        files: the process that serves those of the script, once there is a node that needs it.
    Raises: TransportError: the interface cannot be bound. RunFolderError: the folder cannot be
        written.
    """

    def __init__(
        self, keys: RunKeys, passes: Passes, interface: Interface, folder: RunFolder
    ) -> None:
        # whoever reads it in the folder sees that; as secret as the invitations, and as lasting
        self._nonce = hmac.digest(keys.controller.secret, _NONCE, "sha256").hex()
        folder.write_atomic(folder.nonce_path, self._nonce.encode())
        self.files = FilesBeside(folder, interface, passes)
        self._one_notes = asyncio.Lock()
        self._noted: list[Joining] = []
        self._folder = folder
        self._joined: dict[tuple[str, str], Joining] = {}
        self._replaced: set[str] = set()
        self._one_changes = threading.Lock()
        self._keys = keys
        self._invited: dict[bytes, _Invited] = {}  # by the digest of the secret
        self.refused = Refusals(logger, "joining_refused", "scheduler")
        self._interface = interface
        self._loop = asyncio.new_event_loop()
        self._is_open, self._done = asyncio.Event(), asyncio.Event()
        self.address = ""
        started: Future[str] = Future()
        self._thread = threading.Thread(
            target=self._run, args=(started,), name="joining agents", daemon=True
        )
        self._thread.start()
        self.address = started.result()

    def invite(self, name: str, num_nodes: int, num_restarts: int = 0) -> str:
        """The first line of its agents' standard input, which nobody else may see.

        Args:
            name: of the job or step, the same for no other one of the run.
            num_nodes: of the job or step.
            num_restarts: how often SLURM may start the job again, with all its nodes.
        """
        made = hmac.digest(self._keys.controller.secret, _PURPOSE + name.encode(), "sha256")
        secret = base64.urlsafe_b64encode(made).decode("ascii")
        with self._one_changes:
            self._invited.setdefault(_digest(secret), _Invited(num_nodes, num_restarts))
        return f"{self._keys.controller.public.decode()} {secret} {self._nonce}"

    def open(self, found: Sequence[FoundAgent] = ()) -> list[FoundAgent]:
        """Agents can join from now on; those of an earlier start of the script have. Blocks.

        Whoever was invited to that one, and comes before, waits: if it was refused, it would end.

        Returns: those of `found` that know where this start is, as far as they cannot read that.
        Raises: WorkerStartError: files cannot be served. RunFolderError: it cannot be written.
            StaleTerm.
        """
        unseen = {it.address for it in found if not it.joining.shares_folder}
        silent = unseen - self._tell(unseen, self.files.address()) if unseen else unseen
        adopted = [it for it in found if it.address not in silent]
        with self._one_changes:
            self._joined |= {it.place: it.joining for it in adopted}
        self._note()
        self._loop.call_soon_threadsafe(self._is_open.set)
        return adopted

    def agents(self) -> list[Joining]:
        """The newest one of each node."""
        with self._one_changes:
            return list(self._joined.values())

    def joined(self, job: str) -> dict[str, Joining]:
        """The newest agent of each node of a job, by SLURM's name of the node."""
        with self._one_changes:
            return {it.node: it for it in self._joined.values() if it.job == job}

    def refuse(self, incarnation: str) -> None:
        """This agent is replaced. It may live, cut off: it ends when it finds its way back."""
        with self._one_changes:
            self._replaced.add(incarnation)

    def forget(self, agent: Joining) -> None:
        """It ends, and is none of the agents any more; if it lives on, it is refused."""
        with self._one_changes:
            self._joined.pop((agent.job, agent.node), None)
            if isinstance(agent.facts, NodeFacts):
                self._replaced.add(agent.facts.incarnation)

    def close(self) -> None:
        """Nobody joins any more, or gets files. Closing again does nothing."""
        self.files.close()
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._done.set)
            self._thread.join(_CLOSE_LIMIT_S)

    def _run(self, started: Future[str]) -> None:
        try:
            self._loop.run_until_complete(self._serve(started))
        finally:
            self._loop.close()

    async def _serve(self, started: Future[str]) -> None:
        # agents of jobs that wait know where an earlier start was, if they do not see the folder
        earlier = read_address(self._folder.join_path).rpartition(":")[2]
        callers = KnownCallers(self._keys.controller.public, takes_newcomers=True)
        server = RpcServer(
            [JOIN.served_by(self._welcome), STOP_RUN.served_by(_stop_run)],
            node_id="scheduler",
            incarnation="scheduler",
            bind=f"{self._interface.bind}:{earlier or 0}",
            security=CurveServer(self._keys.controller, callers, "scheduler"),
        )
        try:
            self.address = self._interface.reachable(await server.start(at_any_port=True))
            started.set_result(self.address)
        except Exception as error:
            started.set_exception(error)
            return
        await self._done.wait()
        await server.close()

    async def _welcome(self, joining: Joining) -> Welcome:
        """Raises: NotPermitted: see `_join`. WorkerStartError: files cannot be served.
        RunFolderError: the folder cannot be written. StaleTerm.
        """
        await self._is_open.wait()
        try:
            self._join(joining)
        except NotPermitted as error:
            self.refused.add(error)
            raise
        if joining.shares_folder:
            return Welcome(self.address)
        async with self._one_notes:  # those that come at one time are noted together
            # one that asks whether the script lives is noted already
            if replace(joining, secret="") not in self._noted:
                await asyncio.to_thread(self._note)
        logger.info("node=%s does not see the run folder: it gets the script's files", joining.node)
        return Welcome(self.address, await asyncio.to_thread(self.files.address))

    def _note(self) -> None:
        """Notes those that have joined. Raises: RunFolderError: it cannot be written. StaleTerm."""
        agents = self.agents()
        note_unseen(self._folder, agents)
        self._noted = agents

    def _tell(self, agents: Collection[AgentAddress], files: str) -> set[AgentAddress]:
        """Which of these have heard where this start of the script is. Raises: StaleTerm."""
        welcome = Welcome(self.address, files)
        return set(call_agents(WELCOME, welcome, agents, self._keys, self._folder.term))

    def _join(self, joining: Joining) -> None:
        """Raises: NotPermitted: the agent is not the one that was invited."""
        with self._one_changes:
            place, told = (joining.job, joining.node), replace(joining, secret="")
            # who joined an earlier start of the script has a secret that this one may not know
            facts, known = joining.facts, self._joined.get(place)
            if isinstance(facts, NodeFacts) and facts.incarnation in self._replaced:
                raise NotPermitted("another agent has taken the place of this one")
            if known != told:
                invited = self._invited.get(_digest(joining.secret))
                if invited is None:
                    raise NotPermitted("the secret is that of no invitation")
                invited.admit(joining)
            self._joined[place] = told


def _stop_run(_: None) -> bool:
    """Asks this process to stop, also while no agent has joined it: it waits for its nodes, say."""
    interrupts.ask_to_stop(random_id())
    return True


def _digest(secret: str) -> bytes:
    """To look it up by, in a time that tells nothing of the secret."""
    return hashlib.sha256(secret.encode()).digest()
