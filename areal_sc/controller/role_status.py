"""What a controller tells people who look from outside; see `StatusBoard`.

Counters of a worker go on through all of its lives. A new life counts from 0 again. What the lives
before have counted, as far as they were asked, is added, so that no counter ever falls, and what a
step takes for its own is the difference of two.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Mapping
from typing import Final

from areal_sc.fleet.fleet import Fleet
from areal_sc.fleet.member import Member
from areal_sc.fleet.worker_life import Life, LifeState
from areal_sc.run.run_status import AgentStatus, Restart, RoleStatus, Wait, WorkerStatus

OF_NOW: Final = (
    *("store_bytes", "store_shards", "mapped_retired_bytes"),
    *("running_requests", "waiting_requests", "occupied_places"),
)
"""What a worker has now, and loses with its life; all else are counts."""


class WorkerCounters:
    """The counters of one worker through all its lives.

    Attributes:
        newest: those of its newest life, when it was asked last.
    """

    def __init__(self) -> None:
        self._incarnation = ""
        self.newest: Mapping[str, float] = {}
        self._past: dict[str, float] = {}

    def add(self, incarnation: str, counters: Mapping[str, float]) -> None:
        """What a life of the worker says."""
        if incarnation != self._incarnation:
            self._past = self.total(is_alive=False)
            self._incarnation = incarnation
        self.newest = counters

    def total(self, *, is_alive: bool) -> dict[str, float]:
        """The counters of all lives together.

        Args:
            is_alive: the newest one goes on, and has what it had.
        """
        newest = {k: v for k, v in self.newest.items() if is_alive or k not in OF_NOW}
        return {**self._past, **{k: self._past.get(k, 0) + v for k, v in newest.items()}}


_WORDS: Final = {
    LifeState.serving: "ready",
    LifeState.silent: "suspect",
    LifeState.given_up: "given up",
}
"""What people read of a state; see `WorkerStatus`."""


def role_status(
    fleet: Fleet,
    restart: Restart | None,
    version: int,
    waits: Iterable[Wait],
    counters: Mapping[str, WorkerCounters],
) -> RoleStatus:
    """The status of the workers of one role; called on the event loop of their controller."""
    now, loop_s = time.time(), asyncio.get_running_loop().time()
    hosts: dict[str, str] = {}
    agents, coming = [], list[Wait]()
    for node in fleet.nodes:
        facts = node.node.facts
        hosts[facts.token] = facts.host
        if node.node.coming is not None:
            coming.append(node.node.coming)
            continue
        heard = now - (loop_s - node.heard_s)
        agents.append(AgentStatus(facts.host, facts.incarnation, heard))

    def status_of(member: Member) -> WorkerStatus:
        worker, counted = member.worker, counters.get(member.name)
        return WorkerStatus(
            name=member.name,
            state=_word(member.life),
            pid=worker.pid,
            host=hosts.get(worker.node, worker.node),
            incarnation=worker.incarnation,
            heard=now - (loop_s - member.beat_s),
            restarts=member.life.num_restarts,
            held_bytes=None if counted is None else int(counted.newest.get("store_bytes", 0)),
            store_bytes=member.order.store_bytes,
            node_bytes=worker.store_room_bytes,
        )

    return RoleStatus(
        looked=now,
        version=version,
        waits=[*waits, *coming],
        agents=agents,
        workers=list(map(status_of, fleet.members)),
        restart=restart,
    )


def _word(life: Life) -> str:
    if life.is_leaving:
        return "leaving"
    is_again = life.is_down and life.state in (LifeState.lost, LifeState.launching)
    return "restarting" if is_again else _WORDS.get(life.state, "starting")
