"""Calls of a scheduler to agents on other machines, before and after its controllers' own."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Coroutine, Iterable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Final, Self, TypeVar

from areal_sc.errors import ArealError, StaleTerm
from areal_sc.nodes.spec import NodeFacts
from areal_sc.run.agent_files import AgentFile
from areal_sc.run.run_owner import RunTerm
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
