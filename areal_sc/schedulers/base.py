"""The one interface between controllers and whatever lends machines: nodes, each with an agent.

scheduler ─► Node, Node, …        placed(orders, nodes) ─► which worker runs where
controller ── RPC ──► the node's agent, which starts, watches and ends the workers
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Protocol, runtime_checkable

from areal_sc.config.placement import DevicePlacement, Purpose
from areal_sc.config.schema import Device, SchedulerConfig
from areal_sc.log import tell_warning
from areal_sc.nodes.spec import LivingWorker, NodeFacts, WorkerOrder
from areal_sc.run.run_owner import RunTerm
from areal_sc.run.run_status import Wait
from areal_sc.run.status_board import StatusBoard
from areal_sc.sizing.machine import resolved_device
from areal_sc.transport.security.keys import RunKeys
from areal_sc.transport.security.passes import Passes


@dataclass(eq=False)
class Node:
    """A machine that workers can run on, and who uses what of it.

    Attributes:
        facts: what its agent tells of it; of one that is on its way, what was asked for.
        log_path: of its agent's log, if this machine sees it.
        found: workers that an earlier start of the script has left there, and that nobody has
            taken over or stopped yet.
        placement: which workers use which of its CUDA devices.
        purpose: which workers may be placed on it.
        coming: what it is waited for, while it is on its way; None: it is there, or lost without
            anybody's knowledge.
        max_workers: most that run on it, if they take no CUDA devices; 0: no limit.
        roles: of the workers that were placed on it.
    """

    facts: NodeFacts
    log_path: Path
    found: list[LivingWorker] = field(default_factory=list)
    purpose: Purpose = Purpose.any
    coming: Wait | None = None
    max_workers: int = 0
    placement: DevicePlacement = field(init=False)
    roles: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.placement = DevicePlacement(self.facts.num_devices, self.name)
        for text in self.facts.warnings:
            tell_warning(text, f"node {self.name}")

    @property
    def name(self) -> str:
        """Host name of the machine."""
        return self.facts.host

    @property
    def is_there(self) -> bool:
        """Else an agent on it is waited for, by `renew`."""
        return self.coming is None


class Scheduler(Protocol):
    """Lends nodes to a run. Used from the event loops of its controllers.

    Attributes:
        keys: of the run; its agents and workers serve nobody without them.
        passes: those that workers get.
        status: what the run says of itself.
    """

    config: SchedulerConfig
    keys: RunKeys
    passes: Passes
    status: StatusBoard

    @property
    def term(self) -> RunTerm | None:
        """The term of this process in the run; None: it has none."""

    async def nodes(self) -> Sequence[Node]:
        """All nodes of the run, once their agents serve; always the same objects.

        Of those for rollout workers alone one has to serve; the others may be on their way.

        Raises: WorkerStartError: one did not come up. ConfigError: one cannot be used.
        """

    async def ended_nodes(self) -> dict[Node, str]:
        """How those ended that did, in words that follow "its agent ended with".

        Raises: ArealError: that is not known now. It does not mean that any has ended.
        """

    async def renew(self, node: Node, incarnation: str) -> None:
        """Starts a new agent on that machine, or on another in its place; returns when it serves.

        Of a node that is on its way this waits for the first one.

        `node.facts` are its own then, and with them the node's name. On the same machine, the agent
        before, and what is left of its workers, is killed first, and the new one takes over the
        shared memory of the run, as far as it is still there. Of a machine that is lost nothing is
        left, but its processes may run on for a while, where nobody can reach them.

        The time in which another machine is waited for has no limit. Each start has: it ends within
        `startup_timeout_s`. Cancelled, the start is kept; whoever asks next goes on with it.

        Args:
            incarnation: of the agent to replace. Nothing happens if it has been replaced already:
                several controllers may find out that it is lost.
        Raises: WorkerStartError: the new one did not come up. ConfigError: the node cannot be used,
            and no other one is to be had.
        """

    def close(self) -> None:
        """Gives the nodes back, with nothing left on them; the scheduler is of no use any more."""


@runtime_checkable
class AsksForNodes(Protocol):
    """What a scheduler may have beside, so that a run that scales has more nodes, or fewer."""

    async def ask_node(self) -> Node:
        """A further node, for rollout workers alone: one of `nodes()` from then on.

        It is on its way, which has no limit; this call has one. Cancelled, it may have been asked
        for all the same, and be one of `nodes()`.

        Raises: ConfigError: it is not to be had. SchedulerSilent: that is not known now.
        """

    async def give_back(self, node: Node) -> None:
        """Nobody works on a node, or waits for it: it is none of `nodes()` from the call on.

        Returns when nothing of the run is left there, or is waited for any more; within a limit. A
        node that cannot be given back alone stays.
        """


def placed(
    orders: Sequence[WorkerOrder],
    nodes: Sequence[Node],
    adopted: Mapping[Node, Sequence[LivingWorker]] = MappingProxyType({}),
) -> dict[Node, list[WorkerOrder]]:
    """The orders of each node, with CUDA devices chosen: evenly, neighbours together.

    Nodes without workers of another role come first, then those that are there; nodes that are for
    other roles get none. Where some nodes have CUDA devices, workers that take what there is are on
    these.

    Args:
        adopted: workers of the role that run already; their devices are taken.
    Raises: ConfigError: a worker needs more devices than there are.
    """
    num_adopted = {node: len(adopted.get(node, ())) for node in nodes}
    usable = [node for node in nodes if not orders or node.purpose.takes(orders[0].role)]
    most = max((node.facts.num_devices for node in usable), default=0)
    share = -(-(len(orders) + sum(num_adopted.values())) // max(1, len(usable)))
    chosen: dict[Node, list[WorkerOrder]] = {node: [] for node in nodes}
    for node, workers in adopted.items():
        for worker in workers:
            node.placement.take_devices(worker.order.name, worker.order.devices)
            node.roles.add(worker.order.role)

    def excess(node: Node) -> int:
        return max(0, num_adopted[node] + len(chosen[node]) + 1 - share)

    for order in orders:
        is_on_cpu = resolved_device(order.device, most) == Device.cpu
        count = 0 if is_on_cpu else order.num_devices
        roomy = [node for node in usable if count <= node.facts.num_devices]
        node = min(
            roomy or usable,
            key=lambda node: (excess(node), len(node.roles - {order.role}), not node.is_there),
        )
        node.roles.add(order.role)
        devices = node.placement.place(order.role, order.index, count) if count else []
        chosen[node].append(replace(order, devices=devices))
    return chosen


def lack_of_places(orders: Sequence[WorkerOrder], nodes: Sequence[Node]) -> str:
    """Why workers of one role have too little room on these nodes; "": they have enough.

    Each needs CUDA devices of its own; without devices, a place on a node that is for so many.
    """
    order, usable = orders[0], [node for node in nodes if node.purpose.takes(orders[0].role)]
    counts = [node.facts.num_devices for node in usable]
    if resolved_device(order.device, max(counts, default=0)) == Device.cpu:
        need, num_places = "a place", sum(node.max_workers or math.inf for node in usable)
    else:
        need = f"{order.num_devices} CUDA devices"
        num_places = sum(count // order.num_devices for count in counts)
    if len(orders) <= num_places:
        return ""
    return (
        f"{len(orders)} {order.role} workers need {need} each, and the machines of the run have "
        f"room for {num_places:g} of them"
    )
