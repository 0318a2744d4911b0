"""The one interface between controllers and whatever lends machines: nodes, each with an agent.

scheduler ─► Node, Node, …        placed(orders, nodes) ─► which worker runs where
controller ── RPC ──► the node's agent, which starts, watches and ends the workers
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

from areal_sc.config.machine import resolved_device
from areal_sc.config.placement import DevicePlacement
from areal_sc.config.schema import Device, SchedulerConfig
from areal_sc.transport.security.keys import RunKeys
from areal_sc.workers.spec import NodeFacts, WorkerOrder


@dataclass(eq=False)
class Node:
    """A machine that workers can run on, and who uses what of it.

    Attributes:
        facts: what its agent tells of it.
        log_path: of its agent's log, if this machine sees it.
        placement: which workers use which of its CUDA devices.
    """

    facts: NodeFacts
    log_path: Path
    placement: DevicePlacement = field(init=False)

    def __post_init__(self) -> None:
        self.placement = DevicePlacement(self.facts.num_devices)

    @property
    def name(self) -> str:
        """Host name of the machine."""
        return self.facts.host


class Scheduler(Protocol):
    """Lends nodes to a run. Used from the event loops of its controllers.

    Attributes:
        keys: of the run; its agents and workers serve nobody without them.
    """

    config: SchedulerConfig
    keys: RunKeys

    async def nodes(self) -> Sequence[Node]:
        """All nodes of the run, once their agents serve; always the same objects.

        Raises: WorkerStartError: one did not come up. ConfigError: one cannot be used.
        """
        ...

    async def ended_nodes(self) -> dict[Node, str]:
        """How those ended that did, in words that follow "its agent ended with".

        Raises: ArealError: that is not known now. It does not mean that any has ended.
        """
        ...

    async def renew(self, node: Node, incarnation: str) -> None:
        """Starts a new agent on a node; returns when it serves: `node.facts` are its own then.

        The agent before, and what is left of its workers, is killed first. The new one takes over
        the keys and the shared memory of the run, as far as they are still there. Cancelled, the
        start goes on; whoever asks next joins it.

        Args:
            incarnation: of the agent to replace. Nothing happens if it has been replaced already:
                several controllers may find out that it is lost.
        Raises: WorkerStartError: the new one did not come up. ConfigError: the node cannot be used.
        """
        ...

    def close(self) -> None:
        """Gives the nodes back, with nothing left on them; the scheduler is of no use any more."""
        ...


def placed(orders: Sequence[WorkerOrder], nodes: Sequence[Node]) -> dict[Node, list[WorkerOrder]]:
    """The orders of each node, with CUDA devices chosen: evenly, neighbours together.

    Raises: ConfigError: a worker needs more devices than there are.
    """
    share = -(-len(orders) // len(nodes))
    chosen: dict[Node, list[WorkerOrder]] = {node: [] for node in nodes}
    for order in orders:
        roomy = [node for node in nodes if _num_devices(order, node) <= node.facts.num_devices]
        node = min(roomy or nodes, key=lambda node: max(0, len(chosen[node]) + 1 - share))
        count = _num_devices(order, node)
        devices = node.placement.place(order.role, order.index, count) if count else []
        chosen[node].append(replace(order, devices=devices))
    return chosen


def _num_devices(order: WorkerOrder, node: Node) -> int:
    is_on_cpu = resolved_device(order.device, node.facts.num_devices) == Device.cpu
    return 0 if is_on_cpu else order.num_devices
