"""What controllers, agents and workers tell each other about nodes and processes. No torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from types import NoneType
from typing import Annotated, Any

from msgspec import Meta, Struct

from areal_sc.config.schema import Device, SchedulerConfig
from areal_sc.run_folder import RunFolder
from areal_sc.transport.rpc.method import Method

Role = Annotated[str, Meta(pattern="^[a-z][a-z0-9_-]{0,31}$")]
"""Such as `train` or `rollout`. It is part of file names, so nothing else comes over a socket."""


@dataclass(frozen=True)
class NodeFacts:
    """What an agent tells when it listens: as JSON, in one line on its standard output.

    Attributes:
        host: the node's name, for messages.
        token: random, kept in the node's shared memory. Agents with the same token share it.
        num_devices: CUDA devices that workers can use.
        memory_root: folder below which shared memory is kept.
        address, incarnation: of the agent.
    """

    host: str
    token: str
    num_devices: int
    memory_root: str
    address: str
    incarnation: str


@dataclass(frozen=True)
class WorkerOrder:
    """A worker that a controller wants of an agent.

    Attributes:
        role: part of its name: `rollout`, or what its TrainController is called.
        index: number of the worker within its role.
        engine: name of the engine's handle.
        engine_config: the handle's config as a plain dict.
        device: `cuda` takes devices of the node for the worker.
        store_bytes: limit of the tensor store.
        num_devices: how many it takes; on a CPU none, whatever is said here.
        incarnation: names this life of the worker; calls meant for an earlier one are refused.
        devices: numbers of the node's CUDA devices that it gets.
        port: of its control socket; 0: any free one. A new life of a worker takes the one of the
            life before, whose shards it has adopted: so these keep their address.
        search_path: folder of what its engine's settings name, such as a loss beside the user's
            script; "": none.
    """

    role: Role
    index: int
    engine: str
    engine_config: dict[str, Any]
    device: Device
    store_bytes: int
    num_devices: int = 1
    incarnation: str = ""
    devices: list[int] = field(default_factory=list)
    port: int = 0
    search_path: str = ""

    @property
    def name(self) -> str:
        return f"{self.role}/{self.index}"


ROLLOUT_ROLE = "rollout"
TRAIN_ROLE = "train"
"""What a TrainController is called unless it is given a role."""


@dataclass(frozen=True)
class WorkerSpec:
    """Everything a worker process needs to know before its first call; nothing of it is secret.

    Attributes:
        run: settings, as its agent got them; `run_dir` is absolute, and has the run's keys in it
            if they are not in the environment.
        run_id: names this start of the script, and the run's folder in shared memory.
        memory_root: folder below which the node keeps shared memory.
        visible_devices: the value of CUDA_VISIBLE_DEVICES.
    """

    order: WorkerOrder
    run: SchedulerConfig
    run_id: str
    memory_root: str
    visible_devices: str

    @property
    def name(self) -> str:
        return self.order.name

    @property
    def log_path(self) -> Path:
        return RunFolder(self.run.run_dir).log_path(self.name)


@dataclass(frozen=True)
class WorkerReport:
    """A worker that serves, as it tells its agent, and the agent the controller.

    Attributes:
        address: of its control socket.
        node: token of its node.
        store_room_bytes: what the stores of its node may hold together; 0: not known.
    """

    name: str
    incarnation: str
    address: str
    pid: int
    node: str
    store_room_bytes: int = 0


class Beat(Struct, frozen=True, array_like=True):
    """When a worker last gave a sign of life.

    Attributes:
        beat_age_s: since its process was last seen alive.
        turn_age_s: since its main event loop was last seen turning.
    """

    name: str
    incarnation: str
    beat_age_s: float
    turn_age_s: float


@dataclass(frozen=True)
class EndedWorker:
    """A worker whose process has ended.

    Attributes:
        how: `exit code 1` or `signal 9 (SIGKILL)`.
        log_path: of its log, on its node.
        log_tail: the last lines of its log.
    """

    name: str
    incarnation: str
    how: str
    log_path: str
    log_tail: list[str]


@dataclass(frozen=True)
class Launch:
    """All workers of a role that a node gets.

    Attributes:
        timeout_s: after which those that do not serve are given up.
    """

    orders: list[WorkerOrder]
    timeout_s: float


@dataclass(frozen=True)
class Launched:
    """The workers, in the order of the orders; or, where one did not come up, why."""

    workers: list[WorkerReport]
    failure: str = ""
    log_path: str = ""
    log_tail: list[str] = field(default_factory=list)


class Watch(Struct, frozen=True, array_like=True):
    """A question for news.

    Attributes:
        role: whose workers are meant.
        num_ended: of the last answer; 0 at first.
        hold_s: the answer waits so long for the end of a worker, and then comes without one.
    """

    role: str
    num_ended: int
    hold_s: float


class News(Struct, frozen=True, array_like=True):
    """What an agent knows of the workers of a role.

    Attributes:
        beats: of the living.
        ended: those that ended since the last answer.
        num_ended: workers of all roles that ever ended.
    """

    beats: list[Beat]
    ended: list[EndedWorker]
    num_ended: int


@dataclass(frozen=True)
class Stop:
    """Workers that were asked to end.

    Attributes:
        incarnations: of the workers; unknown ones are left out.
        grace_s: after which they are killed.
    """

    incarnations: list[str]
    grace_s: float


LAUNCH = Method("launch", Launch, Launched)
WATCH = Method("watch", Watch, News)
STOP = Method("stop", Stop, NoneType)
LOG_TAIL = Method("log_tail", str, list[str])
