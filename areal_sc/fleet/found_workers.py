"""Workers that an earlier start of the script has left, and what becomes of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from areal_sc.nodes.spec import LivingWorker, WorkerOrder
from areal_sc.schedulers.base import Node


@dataclass(frozen=True)
class FoundWorkers:
    """The workers of a role that were found on a node.

    Attributes:
        adopted: those that are as they are wanted now.
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
