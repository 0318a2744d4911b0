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
from areal_sc.nodes.spec import DESCRIBE, END, WELCOME, NodeDescription, NodeFacts, Welcome
from areal_sc.run.run_owner import RunTerm
from areal_sc.transport.rpc.client import RpcClient
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
    def of(cls, facts: NodeFacts) -> Self:
        return cls(facts.address, facts.incarnation, facts.key)


def describe(
    agents: Iterable[AgentAddress], keys: RunKeys, term: RunTerm | None
) -> dict[AgentAddress, NodeDescription]:
    """What those say of their nodes that live. Blocks for `REACH_LIMIT_S` at most.

    Raises: StaleTerm: one knows a later term.
    """
    return _call_all(DESCRIBE, None, agents, keys, term)


def welcome(
    what: Welcome, agents: Iterable[AgentAddress], keys: RunKeys, term: RunTerm | None
) -> set[AgentAddress]:
    """Tells all agents that can be reached of this script. Blocks for `REACH_LIMIT_S` at most.

    Returns: whom that was told.
    Raises: StaleTerm: one knows a later term.
    """
    return set(_call_all(WELCOME, what, agents, keys, term))


def end(agents: Iterable[AgentAddress], keys: RunKeys, term: RunTerm | None) -> set[AgentAddress]:
    """Ends all agents that can be reached, with their workers. Blocks for `REACH_LIMIT_S` at most.

    Returns: whom that was told.
    Raises: StaleTerm: one knows a later term.
    """
    return set(_call_all(END, None, agents, keys, term))


def _call_all(
    method: Method[A, R],
    args: A,
    agents: Iterable[AgentAddress],
    keys: RunKeys,
    term: RunTerm | None,
) -> dict[AgentAddress, R]:
    async def call_all() -> dict[AgentAddress, R]:
        number = 0 if term is None else term.number
        transport = ZmqTransport(client=CurveClient.of_controller(keys), term=number)
        try:
            calls = [(_connect(transport, agent), args) for agent in asked]
            replies = await transport.call_all(calls, method, timeout_s=REACH_LIMIT_S)
        finally:
            await transport.close()
        answered: dict[AgentAddress, R] = {}
        for agent, reply in zip(asked, replies, strict=True):
            if isinstance(reply, StaleTerm):
                raise reply
            if isinstance(reply, ArealError):
                logger.info("agent=%s method=%s: %s", agent.address, method.name, reply)
            else:
                answered[agent] = reply
        return answered

    asked = list(dict.fromkeys(agents))
    if not asked:
        return {}
    return run_apart(call_all())


def run_apart(work: Coroutine[Any, Any, R]) -> R:
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


def _connect(transport: ZmqTransport, agent: AgentAddress) -> RpcClient:
    return transport.connect(agent.address, "agent", agent.incarnation, server_key=agent.key)
