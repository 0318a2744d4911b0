"""What a controller tells people who look from outside; see `StatusBoard`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable

from areal_sc.fleet.fleet import Fleet
from areal_sc.fleet.member import Member
from areal_sc.fleet.recovery import Recovery
from areal_sc.fleet.supervisor import UnitState
from areal_sc.run.run_status import AgentStatus, RoleStatus, Wait, WorkerStatus


def role_status(
    fleet: Fleet, recovery: Recovery | None, version: int, waits: Iterable[Wait]
) -> RoleStatus:
    """The status of the workers of one role; called on the event loop of their controller."""
    now, loop_s = time.time(), asyncio.get_running_loop().time()
    hosts: dict[str, str] = {}
    agents, coming = [], list[Wait]()
    for node in fleet.nodes:
        facts = node.facts
        hosts[facts.token] = facts.host
        if node.node.coming is not None:
            coming.append(node.node.coming)
            continue
        heard = now - (loop_s - node.heard_s)
        agents.append(AgentStatus(facts.host, facts.incarnation, heard))

    def status_of(member: Member) -> WorkerStatus:
        worker = member.worker
        return WorkerStatus(
            name=member.name,
            state=recovery.state(member) if recovery else UnitState.starting,
            pid=worker.pid,
            host=hosts.get(worker.node, worker.node),
            incarnation=worker.incarnation,
            heard=now - (loop_s - member.beat_s),
            restarts=recovery.num_restarts_with(member) if recovery else 0,
        )

    return RoleStatus(
        looked=now,
        version=version,
        waits=[*waits, *coming],
        agents=agents,
        workers=list(map(status_of, fleet.members)),
        restart=recovery.newest_outage if recovery else None,
    )
