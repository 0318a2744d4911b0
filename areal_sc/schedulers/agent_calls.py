"""Calls of a scheduler to agents, and what an earlier start of the script has left of them."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Coroutine, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from operator import not_
from typing import Any, Final, Self, TypeVar

from msgspec import MsgspecError, json

from areal_sc.errors import ArealError, RunFolderError, StaleTerm, WaitTimeout
from areal_sc.nodes.spec import DESCRIBE, END, Joining, NodeDescription, NodeFacts
from areal_sc.run.agent_files import AgentFile, living_agents
from areal_sc.run.run_folder import RunFolder
from areal_sc.run.run_owner import RunTerm
from areal_sc.system.waiting import polled
from areal_sc.transport.rpc.method import Method
from areal_sc.transport.rpc.transport import ZmqTransport
from areal_sc.transport.security.curve import CurveClient
from areal_sc.transport.security.keys import RunKeys

REACH_LIMIT_S: Final = 5.0
"""An agent that lives answers in milliseconds; a machine that is gone does not even refuse."""

A = TypeVar("A")
R = TypeVar("R")

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class AgentAddress:
    """Where one life of an agent is reached."""

    address: str
    incarnation: str
    key: str

    @classmethod
    def of(cls, told: NodeFacts | AgentFile) -> Self:
        return cls(told.address, told.incarnation, told.key)


def call_agents(
    method: Method[A, R],
    args: A,
    agents: Iterable[AgentAddress],
    keys: RunKeys,
    term: RunTerm | None,
) -> dict[AgentAddress, R]:
    """Calls all agents at one time. Blocks for `REACH_LIMIT_S` at most.

    Returns: what those replied that can be reached.
    Raises: StaleTerm: one knows a later term.
    """

    async def call_all() -> list[R | ArealError]:
        number = 0 if term is None else term.number
        transport = ZmqTransport(client=CurveClient.of_controller(keys), term=number)
        try:
            calls = [
                (transport.connect(it.address, "agent", it.incarnation, server_key=it.key), args)
                for it in asked
            ]
            return await transport.call_all(calls, method, timeout_s=REACH_LIMIT_S)
        finally:
            await transport.close()

    asked = list(dict.fromkeys(agents))
    replied: dict[AgentAddress, R] = {}
    for agent, reply in zip(asked, _run_apart(call_all()) if asked else (), strict=True):
        if isinstance(reply, StaleTerm):
            raise reply
        if isinstance(reply, ArealError):
            logger.info("agent=%s method=%s: %s", agent.address, method.name, reply)
        else:
            replied[agent] = reply
    return replied


def _run_apart(work: Coroutine[Any, Any, R]) -> R:
    """In a thread of its own, since the caller's may have a loop that runs.

    It is of no pool: there is none any more when the interpreter ends.
    """
    done: Future[R] = Future()

    def run() -> None:
        try:
            done.set_result(asyncio.run(work))
        except BaseException as error:
            done.set_exception(error)

    thread = threading.Thread(target=run, name="calls of agents")
    thread.start()
    thread.join()  # each call has its limit
    return done.result()


@dataclass(frozen=True)
class FoundAgent:
    """One that lives.

    Attributes:
        joining: as it would join.
        described: what it tells of itself.
    """

    joining: Joining
    described: NodeDescription

    @property
    def address(self) -> AgentAddress:
        return AgentAddress.of(self.described.facts)

    @property
    def place(self) -> tuple[str, str]:
        return self.joining.job, self.joining.node


def note_unseen(folder: RunFolder, joined: Iterable[Joining]) -> None:
    """The folder tells of agents that do not see it, and so cannot do that themselves. Blocks.

    Raises: RunFolderError: it cannot be written. StaleTerm.
    """
    unseen = [it for it in joined if not it.shares_folder]
    if unseen:
        folder.write_atomic(folder.joined_path, json.encode(unseen))
    else:
        folder.joined_path.unlink(missing_ok=True)


def _unseen(folder: RunFolder) -> list[Joining]:
    """The agents that `note_unseen` noted. Raises: RunFolderError: the file is damaged."""
    path = folder.joined_path
    try:
        return json.decode(path.read_bytes(), type=list[Joining])
    except FileNotFoundError:
        return []
    except (OSError, MsgspecError) as error:
        raise RunFolderError(
            f"{path} cannot be read, which says where agents of the run may live: {error}; delete "
            "it: they end by themselves after scheduler.orphan_timeout_s"
        ) from error


def find_agents(folder: RunFolder, keys: RunKeys, lent: Sequence[Joining] = ()) -> list[FoundAgent]:
    """The agents of the run's folder that answer. Blocks, but not for long.

    A lock may be unknown to other machines than its own, and some agents do not see the folder: so
    those are asked, too, that have joined.

    Args:
        lent: others that are known.
    Raises: StaleTerm: one knows a later term. RunFolderError: what is noted of one is damaged.
    """
    # one that is there twice counts once
    files = [file for file in living_agents(folder.path) if file.job]
    left: list[AgentFile | Joining] = [*files, *lent, *_unseen(folder)]
    places: dict[AgentAddress, AgentFile | Joining] = {}
    for it in left:
        facts = it if isinstance(it, AgentFile) else it.facts
        if not isinstance(facts, str):
            places.setdefault(AgentAddress.of(facts), it)
    answered = call_agents(DESCRIBE, None, places, keys, folder.term)
    found = []
    for address, place in places.items():
        if (told := answered.get(address)) is not None:
            what = place.job, place.node, place.pid, told.facts, told.facts.key
            joining = Joining(*what, restart=place.restart, step=place.step)
            found.append(FoundAgent(joining, told))
    return found


class UnseenAgents:
    """Agents that do not see the folder of a run whose script is gone, as that has noted them.

    Args:
        folder: held before they are to end.

    Attributes:
        silent: nodes of those that did not answer when they were to end; they may live.
    Raises: RunFolderError: the file is damaged. TransportError: the keys cannot be read.
    """

    def __init__(self, folder: RunFolder) -> None:
        self.silent: list[str] = []
        self._folder = folder
        self._noted = _unseen(folder)
        self._keys = RunKeys.read(folder.keys_path) if self._noted else None

    def end(self, limit_s: float) -> list[str]:
        """Returns when they have ended, with their workers: on which nodes, of those that answered.

        Whoever was silent can still be found by the next start, or asked again.

        Raises: WaitTimeout: they do not end in time. StaleTerm: they are those of another script.
        """
        if self._keys is None:
            return []
        living = self._living(self._keys)
        answered = {it.place for it in living}
        self.silent = [it.node for it in self._noted if (it.job, it.node) not in answered]
        tell_to_end(living, self._keys, self._folder.term)
        keys = self._keys
        if left := polled(lambda: self._living(keys), limit_s, until=not_):
            where = ", ".join(f"process {it.joining.pid} on {it.joining.node}" for it in left)
            raise WaitTimeout(f"agents of the run in {self._folder.path} do not end: {where}")
        self._folder.check_term()
        if not self.silent:
            for path in (self._folder.joined_path, self._folder.join_path):
                path.unlink(missing_ok=True)
            self._folder.remove_keys()
        return [it.joining.node for it in living]

    def _living(self, keys: RunKeys) -> list[FoundAgent]:
        return [it for it in find_agents(self._folder, keys) if not it.joining.shares_folder]


def tell_to_end(agents: Iterable[FoundAgent], keys: RunKeys, term: RunTerm | None) -> None:
    """They end soon, with their workers. Raises: StaleTerm: one knows a later term."""
    call_agents(END, None, [it.address for it in agents], keys, term)


def end_found(
    agents: Sequence[FoundAgent], keys: RunKeys, folder: RunFolder, limit_s: float
) -> None:
    """Returns when they have ended, with their workers.

    Raises: RunFolderError: that takes longer than the limit. StaleTerm: one knows a later term.
    """
    if not agents:
        return
    logger.warning("agents=%d of an earlier start end", len(agents))
    tell_to_end(agents, keys, folder.term)
    ended = {(agent.joining.node, agent.joining.pid) for agent in agents}
    if left := polled(
        lambda: [it for it in living_agents(folder.path) if (it.node, it.pid) in ended],
        limit_s,
        until=not_,
    ):
        where = ", ".join(f"process {agent.pid} on {agent.host}" for agent in left)
        raise RunFolderError(
            f"run folder {folder.path}: agents of an earlier start do not end ({where}); end "
            "them by `kill`, then start the run again"
        )
