"""A worker of a fleet, through all its lives, as its controller sees it.

The first of them may be one that an earlier start of the script has left: see `take_found`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from areal_sc.errors import ArealError, PeerLost, WorkerLost
from areal_sc.fleet.worker_life import Life
from areal_sc.nodes.spec import LivingWorker, WorkerOrder, WorkerReport
from areal_sc.schedulers.base import Node
from areal_sc.transport.rpc.method import A, Method, R
from areal_sc.transport.rpc.transport import Connection


class NoConnection:
    """Stands for that of a worker, or an agent, that has had no life yet."""

    def __init__(self, name: str) -> None:
        self.node_id = name

    async def call(self, method: Method[A, R], args: A, *, timeout_s: float) -> R:
        raise PeerLost(f"{self.node_id} has not been started yet")

    def fail_pending(self, error: ArealError) -> None:
        """Nothing is pending."""

    async def close(self) -> None:
        """Nothing is open."""


@dataclass(eq=False)
class Member:
    """One worker of the fleet, through all its lives.

    Attributes:
        order: for its newest life.
        worker: its newest life, as it told of itself.
        life: where its unit stands.
        beat_s: loop time at which its process was last seen alive.
        is_blocked: its event loop had not turned for long at that time.
        is_adopted: an earlier start of the script has started this life of it.
        failure: why nothing is sent to its newest life any more, or not yet; calls raise it.
    """

    order: WorkerOrder
    worker: WorkerReport
    connection: Connection
    life: Life
    beat_s: float = 0.0
    is_blocked: bool = False
    is_adopted: bool = False
    failure: WorkerLost | None = None

    @property
    def name(self) -> str:
        return self.worker.name

    @property
    def is_silent(self) -> bool:
        """Whether it gives no signs of life, or is blocked, and is not lost yet."""
        return self.worker.incarnation in self.life.silent

    @property
    def has_lived(self) -> bool:
        """Whether it was ever started."""
        return bool(self.worker.incarnation)

    @property
    def index(self) -> int:
        """Its number within its role."""
        return self.order.index

    @property
    def node(self) -> tuple[str, str]:
        """(node_id, node_addr), as shards name their owner."""
        return self.worker.name, self.worker.address


@dataclass(frozen=True)
class FoundWorkers:
    """The workers of a role that were found on a node.

    Attributes:
        adopted: those whose orders are still the same.
        unwanted: the others.
    """

    adopted: list[LivingWorker] = field(default_factory=list)
    unwanted: list[LivingWorker] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.adopted or self.unwanted)


def take_found(node: Node, orders: Sequence[WorkerOrder], *, adopts: bool) -> FoundWorkers:
    """What was found on a node of the role of the orders; nobody else gets it from now on.

    Args:
        adopts: whether any of them are wanted.
    """
    role = orders[0].role
    ours = [worker for worker in node.found if worker.order.role == role]
    node.found = [worker for worker in node.found if worker.order.role != role]
    taken = FoundWorkers()
    for worker in ours:
        is_wanted = adopts and any(
            order.name == worker.order.name and order.is_like(worker.order) for order in orders
        )
        can_be_used = is_wanted and worker.report is not None
        (taken.adopted if can_be_used else taken.unwanted).append(worker)
    return taken
