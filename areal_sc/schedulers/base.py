"""The one interface between controllers and whatever lends machines: nodes, each with an agent.

scheduler ─► Node, Node, …        placed(requests, nodes) ─► which worker runs where
controller ── RPC ──► the node's agent, which starts, watches and ends the workers
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from areal_sc.config.machine import resolved_device
from areal_sc.config.placement import DevicePlacement
from areal_sc.config.schema import Device, SchedulerConfig
from areal_sc.transport.security.keys import RunKeys
from areal_sc.workers.spec import NodeFacts


@dataclass(frozen=True)
class LaunchRequest:
    """A worker that a controller wants.

    Attributes:
        role: `rollout`, or what its TrainController is called.
        index: number of the worker within its role.
        engine: name of the engine's handle.
        engine_config: the handle's config as a plain dict.
        device: `cuda` takes devices of the node for the worker.
        store_bytes: limit of the worker's tensor store.
        num_devices: how many it takes; on a CPU none, whatever is said here.
    """

    role: str
    index: int
    engine: str
    engine_config: dict[str, Any]
    device: Device
    store_bytes: int
    num_devices: int = 1

    @property
    def name(self) -> str:
        return f"{self.role}/{self.index}"


@dataclass(eq=False)
class Node:
    """A machine that workers can run on, and who uses what of it.

    Attributes:
        facts: what its agent tells of it.
        address, incarnation: of its agent.
        log_path: of its agent's log, if this machine sees it.
        placement: which workers use which of its CUDA devices.
    """

    facts: NodeFacts
    address: str
    incarnation: str
    log_path: Path
    placement: DevicePlacement = field(init=False)

    def __post_init__(self) -> None:
        self.placement = DevicePlacement(self.facts.num_devices)

    @property
    def name(self) -> str:
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

    def close(self) -> None:
        """Gives the nodes back, with nothing left on them; the scheduler is of no use any more."""
        ...


def placed(
    requests: Sequence[LaunchRequest], nodes: Sequence[Node]
) -> dict[Node, list[tuple[LaunchRequest, list[int]]]]:
    """Which node runs each worker, and on which of its CUDA devices: evenly, neighbours together.

    Raises: ConfigError: a worker needs more devices than there are.
    """
    share = -(-len(requests) // len(nodes))
    chosen: dict[Node, list[tuple[LaunchRequest, list[int]]]] = {node: [] for node in nodes}
    for request in requests:
        roomy = [node for node in nodes if _num_devices(request, node) <= node.facts.num_devices]
        node = min(roomy or nodes, key=lambda node: max(0, len(chosen[node]) + 1 - share))
        count = _num_devices(request, node)
        devices = node.placement.place(request.role, request.index, count) if count else []
        chosen[node].append((request, devices))
    return chosen


def _num_devices(request: LaunchRequest, node: Node) -> int:
    is_on_cpu = resolved_device(request.device, node.facts.num_devices) == Device.cpu
    return 0 if is_on_cpu else request.num_devices
