"""What controllers, agents and workers tell each other about nodes and processes. No torch."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, Final

from msgspec import Meta, Struct, msgpack

from areal_sc.config.schema import Device, SchedulerConfig
from areal_sc.run.run_folder import RunFolder
from areal_sc.transport.rpc.method import Method
from areal_sc.transport.security.passes import CONTROLLER, Caller, WorkerKeys

CALLS_FORMAT: Final = 7
"""Counts up when agents or workers of one version of this package cannot be called by another one.
A start of the script ends those of another format that it finds."""

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
        key: public key of its server; "": it serves everyone, as in a simulation.
        shares_folder: it sees the run folder of the script.
        warnings: of the agent's log, until it listens.
    """

    host: str
    token: str
    num_devices: int
    memory_root: str
    address: str
    incarnation: str
    key: str = ""
    shares_folder: bool = True
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True)
class Joining:
    """What an agent on another node tells the script's scheduler, as soon as it knows.

    Attributes:
        job: SLURM's id of the job that has started the agent.
        node: SLURM's name of the node.
        restart: how often SLURM has started the agent's job again.
        step: number of the job's step that is the agent; each start of the job counts anew.
        pid: of the agent, on its node.
        facts: or why the node cannot be used.
        agent_key: public key of the agent, also if it cannot be used.
        secret: of the invitation.
    """

    job: str
    node: str
    pid: int
    facts: NodeFacts | str
    agent_key: str
    secret: str = field(default="", repr=False)
    restart: int = 0
    step: int = 0

    @property
    def shares_folder(self) -> bool:
        """Whether it sees the run folder, or is of no use."""
        return not isinstance(self.facts, NodeFacts) or self.facts.shares_folder


@dataclass(frozen=True)
class Welcome:
    """What an agent is told that has joined; again, by each further start of the script.

    Attributes:
        address: where it joins again, should it have to.
        files: where those of the script are served, for a node that does not see its run folder.
    """

    address: str
    files: str = ""


@dataclass(frozen=True)
class WorkerOrder:
    """A worker that a controller wants of an agent.

    Attributes:
        role: part of its name: `rollout`, or what its TrainController is called.
        index: number of the worker within its role.
        engine: name of the engine's handle; `module:Class` of a user's own.
        engine_config: the handle's config as a plain dict.
        device: `cuda` takes devices of the node for the worker.
        store_bytes: limit of the tensor store; 0: there is none.
        num_devices: how many it takes; on a CPU none, whatever is said here.
        incarnation: names this life of the worker; calls meant for an earlier one are refused.
        life: how often this start of the script has started the worker again.
        devices: numbers of the node's CUDA devices that it gets.
        port: of its control socket; 0: any free one. A new life of a worker takes the one of the
            life before, whose shards it has adopted: so these keep their address.
        code_folders: that it needs on `sys.path`, of an engine or optimizer of the user's own.
    """

    role: Role
    index: int
    engine: str
    engine_config: dict[str, Any]
    device: Device
    store_bytes: int
    num_devices: int = 1
    incarnation: str = ""
    life: int = 0
    devices: list[int] = field(default_factory=list)
    port: int = 0
    code_folders: list[str] = field(default_factory=list)

    @property
    def name(self) -> str:
        return f"{self.role}/{self.index}"

    @property
    def caller(self) -> Caller:
        """The role in which the worker calls others."""
        return Caller.rollout if self.role == ROLLOUT_ROLE else Caller.train

    def is_like(self, other: WorkerOrder) -> bool:
        """Whether a worker of the one order is one of the other, too: all but its place is the
        same."""
        return self._wanted() == other._wanted()

    def _wanted(self) -> bytes:
        """What decides; in the form in which it travels, which does not know tuples, say."""
        order = replace(self, incarnation="", life=0, devices=[], port=0)
        return msgpack.encode(order, order="deterministic")


ROLLOUT_ROLE = "rollout"
TRAIN_ROLE = "train"
"""What a TrainController is called unless it is given a role."""


def snapshot_name(role: str) -> str:
    """Name of a model within the folder of a snapshot, which holds the models of all roles."""
    return "engine" if role == TRAIN_ROLE else f"engine-{role}"


@dataclass(frozen=True)
class Shipped:
    """What a worker needs to know of files that its node does not share.

    Where they are served is not told once: that changes with each start of the script. The agent
    keeps it in `.files` of what stands in for the run folder.

    Attributes:
        run_dir: on the script's machine.
        places: from paths of the script's machine to those of the node, as far as they were brought
            before the worker began.
    """

    run_dir: str
    places: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class WorkerSpec:
    """Everything a worker process needs to know before its first call, but its keys.

    Attributes:
        run: settings, as its agent got them; `run_dir` is absolute.
        run_id: names this start of the script, and the run's folder in shared memory.
        memory_root: folder below which the node keeps shared memory.
        visible_devices: the value of CUDA_VISIBLE_DEVICES.
        replaced: workers whose earlier passes are void; see `Passes`.
        term: that of the controller which wants the worker.
        shipped: files of the script; None: the node shares its run folder.
    """

    order: WorkerOrder
    run: SchedulerConfig
    run_id: str
    memory_root: str
    visible_devices: str
    replaced: dict[str, int]
    term: int = 0
    shipped: Shipped | None = None

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


@dataclass(frozen=True)
class LivingWorker:
    """A worker that runs.

    Attributes:
        report: None: it does not serve yet.
    """

    order: WorkerOrder
    report: WorkerReport | None


@dataclass(frozen=True)
class NodeDescription:
    """What an agent is, and what runs there: for a script that finds it.

    Attributes:
        config: the agent was started with it.
        calls_format: of the agent and its workers; the first one that there was did not tell.
    """

    facts: NodeFacts
    config: SchedulerConfig
    workers: list[LivingWorker]
    calls_format: int = 1


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
        keys: of each of them.
        timeout_s: after which those that do not serve are given up.
        replaced: see `Watch`; all of them.
    """

    orders: list[WorkerOrder]
    keys: list[WorkerKeys]
    timeout_s: float
    replaced: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Launched:
    """The workers, in the order of the orders; or, where one did not come up, why."""

    workers: list[WorkerReport]
    failure: str = ""
    log_path: str = ""
    log_tail: list[str] = field(default_factory=list)


class Wish(StrEnum):
    """What an agent was asked for by others than its script.

    stop: the run is to end; the command `stop` asks for it.
    leave: the node is taken away soon: SIGTERM, of a preemption or `scancel`.
    snapshot: what is done is to be saved: SIGUSR1, say, some time before the job's time is over.
    """

    stop = "stop"
    leave = "leave"
    snapshot = "snapshot"


class Watch(Struct, frozen=True, array_like=True):
    """A question for news.

    Attributes:
        role: whose workers are meant.
        num_ended, num_wishes: of the last answer; 0 at first.
        hold_s: the answer waits so long for the end of a worker, and then comes without one.
        replaced: workers of the whole run that have been started again, and the number of each
            one's newest pass; all of them when there are new ones, else none.
    """

    role: str
    num_ended: int
    hold_s: float
    num_wishes: int = 0
    replaced: dict[str, int] = {}


class News(Struct, frozen=True, array_like=True):
    """What an agent knows of the workers of a role.

    Attributes:
        beats: of the living.
        ended: those that ended since the last answer.
        num_ended: workers of all roles that ever ended.
        wishes: what the agent was asked for since the last answer.
        num_wishes: that there were since its start.
        warnings: of its log, since it told some last.
    """

    beats: list[Beat]
    ended: list[EndedWorker]
    num_ended: int
    wishes: list[Wish] = []
    num_wishes: int = 0
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True)
class Stop:
    """Workers that were asked to end.

    Attributes:
        incarnations: of the workers; unknown ones are left out.
        grace_s: after which they are killed.
    """

    incarnations: list[str]
    grace_s: float


@dataclass(frozen=True)
class WorkerStacks:
    """Where a worker that does not get on is.

    Attributes:
        state: what its process does, in words that follow "its process".
        lines: stacks of its threads; if it writes none, the last lines of its log.
    """

    name: str
    state: str
    lines: list[str]


DESCRIBE = Method("describe", NoneType, NodeDescription)
JOIN = Method("join", Joining, Welcome, callers=CONTROLLER | {Caller.newcomer})
WELCOME = Method("welcome", Welcome, NoneType)
"""Makes the agent one of the script that calls, as if it had joined that."""
LAUNCH = Method("launch", Launch, Launched)
WATCH = Method("watch", Watch, News)
STOP = Method("stop", Stop, NoneType)
STACKS = Method("stacks", list[str], list[WorkerStacks])
"""Asks for the stacks of the workers with these names, as far as they live."""
STOP_RUN = Method("stop_run", NoneType, bool)
END = Method("end", NoneType, NoneType)
