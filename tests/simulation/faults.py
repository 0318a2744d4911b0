"""What goes wrong in a simulated run, and when: all of it follows from one seed."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable
from contextvars import Context
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING

from simulation.network import Direction, Network, Stage
from simulation.process import PROCESS, Killed, Process
from simulation.virtual_loop import VirtualTimeLoop

if TYPE_CHECKING:
    from simulation.disk import SimulatedDisk
    from simulation.faulty_cluster import FaultyCluster
    from simulation.network import Peer

KILLED = "signal 9 (SIGKILL)"


class FaultKind(StrEnum):
    kill_rollout = "kill rollout worker"
    kill_train = "kill train worker"
    hang_rollout = "hang rollout worker"
    hang_train = "hang train worker"
    kill_agent = "kill agent"
    hang_agent = "hang agent"
    lose_node = "lose a machine with its memory"
    partition = "partition, control"
    partition_one_way = "partition, control, one way"
    partition_data = "partition, data"
    reset = "reset connections"
    pause = "pause the controllers"
    slow_disk = "journal, slow disk"
    short_writes = "journal, short writes"
    full_disk = "journal, disk full"
    broken_sync = "journal, sync fails"
    slow_snapshot = "snapshots, slow"
    failing_snapshot = "snapshots, writes fail"
    unreadable_snapshot = "snapshots, unreadable"
    suspend = "suspend all machines"
    wall_clock = "wall clock jumps"
    kill_controllers = "kill the controllers"
    succeed_controllers = "another start while the controllers live"
    scale = "change the number of rollout workers"


NO_DEATH = frozenset(
    {
        FaultKind.reset,
        FaultKind.partition_data,
        FaultKind.pause,
        FaultKind.slow_disk,
        FaultKind.short_writes,
        FaultKind.full_disk,
        FaultKind.broken_sync,
        FaultKind.slow_snapshot,
        FaultKind.failing_snapshot,
        FaultKind.unreadable_snapshot,
        FaultKind.suspend,
        FaultKind.wall_clock,
        FaultKind.kill_controllers,
        FaultKind.succeed_controllers,
        FaultKind.scale,
    }
)
"""These are no reason to start a worker again."""

_WEIGHTS = {
    FaultKind.full_disk: 0.15,
    FaultKind.broken_sync: 0.15,
    FaultKind.kill_controllers: 5.0,
    FaultKind.succeed_controllers: 2.0,
}
"""How many there are of a kind, where it is not one of each; a full disk ends all others."""

SLOW_DISK_S = 3.0
SHORT_WRITE_BYTES = 7
SLOW_SNAPSHOT_S = 12.0
WALL_CLOCK_JUMP_S = 1e5


class Point(StrEnum):
    """Where else than at a message a fault can strike."""

    awaited = "after an await"
    file = "before a change of a file"


@dataclass(frozen=True)
class Fault:
    """One fault.

    Attributes:
        target: number of the worker or node, modulo how many there are.
        at_s: when it strikes; None: at a message, or another point.
        stage, method, count: of that message: the `count`-th one. Of a point, `method` is the role
            of the process, or the change.
        duration_s: of what ends by itself.
        direction: of a one-way partition.
    """

    kind: FaultKind
    target: int
    at_s: float | None
    stage: Stage | Point = Stage.sent
    method: str = ""
    count: int = 0
    duration_s: float = 0.0
    direction: Direction = Direction.to_worker


ROLLOUT_METHODS = (
    "run_group",
    "adopt_weights",
    "copy_weights",
    "initialize_engine",
    "sweep",
    "join_weight_group",
)
TRAIN_METHODS = (
    "compute",
    "update",
    "seal_weights",
    "broadcast_weights",
    "save_weights",
    "sweep",
    "initialize_rank",
    "keep_state",
    "begin_write",
    "finish_write",
    "load_snapshot",
)
AGENT_METHODS = ("launch", "watch", "stop")

_METHODS = {
    FaultKind.kill_rollout: (*ROLLOUT_METHODS, *ROLLOUT_METHODS, "launch"),
    FaultKind.hang_rollout: ROLLOUT_METHODS,
    FaultKind.kill_train: (*TRAIN_METHODS, *TRAIN_METHODS, "launch"),
    FaultKind.hang_train: TRAIN_METHODS,
}


_ROLES = {
    FaultKind.kill_rollout: "rollout",
    FaultKind.kill_train: "train",
    FaultKind.kill_agent: "agent",
    FaultKind.kill_controllers: "controllers",
    FaultKind.succeed_controllers: "controllers",
}
"""Of the processes that are struck after an await."""

FILE_CHANGES = ("create", "write", "write", "sync", "cut", "remove")


def draw_faults(rng: random.Random, kinds: tuple[FaultKind, ...], horizon_s: float) -> list[Fault]:
    """The faults of a run; half of them strike at a message, wherever it is then."""
    faults = []
    for _ in range(rng.choice((0, 1, 1, 2, 2, 3, 4, 6))):
        kind = rng.choices(kinds, [_WEIGHTS.get(kind, 1.0) for kind in kinds])[0]
        duration_s = rng.choice((0.3, 1.0, 4.0, 15.0, 40.0))
        if kind is FaultKind.partition_data:
            duration_s = min(duration_s, 15.0)  # a reader gives an owner up after 30 s
        target, direction = rng.randrange(6), rng.choice(list(Direction))
        if rng.random() < 0.4:
            at_s = rng.choice((0.25, 0.5, 1.0)) * horizon_s * rng.random()
            faults.append(Fault(kind, target, at_s, duration_s=duration_s, direction=direction))
            continue
        if (role := _ROLES.get(kind)) and rng.random() < 0.5:
            stage, method = Point.awaited, role
            count = int(10 ** rng.uniform(0.0, 3.5))
            if role == "controllers" and rng.random() < 0.4:
                stage, method = Point.file, rng.choice(FILE_CHANGES)
                count = rng.choice((1, 2, 3, 5, 8, 13, 30))
            faults.append(Fault(kind, target, None, stage, method, count, duration_s))
            continue
        methods = _METHODS.get(kind, (*ROLLOUT_METHODS, *TRAIN_METHODS, *AGENT_METHODS))
        faults.append(
            Fault(
                *(kind, target, None, rng.choice(list(Stage)), rng.choice(methods)),
                count=rng.choice((1, 1, 2, 3, 5, 8, 13)),
                duration_s=duration_s,
                direction=direction,
            )
        )
    return faults


def draw_faults_of_turns(rng: random.Random) -> list[Fault]:
    """Deaths and hangs when workers are asked to give the card's memory up."""
    kinds = (*_METHODS, FaultKind.kill_controllers)
    return [
        Fault(
            *(rng.choice(kinds), rng.randrange(6), None, rng.choice(list(Stage)), "sleep"),
            count=rng.choice((1, 2, 3, 5, 8)),
            duration_s=rng.choice((1.0, 15.0, 40.0)),
        )
        for _ in range(rng.choice((0, 1, 2)))
    ]


MAX_ROLLOUT_WORKERS = 4


def draw_scalings(rng: random.Random, horizon_s: float) -> list[Fault]:
    """Changes of the number of workers, to `target`, at some times and messages; or none."""
    scalings = []
    for _ in range(rng.choice((0, 1, 2, 3, 5))):
        target = rng.randint(1, MAX_ROLLOUT_WORKERS)
        if rng.random() < 0.6:
            at_s = rng.choice((0.25, 0.5, 1.0)) * horizon_s * rng.random()
            scalings.append(Fault(FaultKind.scale, target, at_s))
            continue
        method = rng.choice((*ROLLOUT_METHODS, *TRAIN_METHODS, "launch", "shutdown", "stop"))
        scaling = Fault(FaultKind.scale, target, None, rng.choice(list(Stage)), method)
        scalings.append(replace(scaling, count=rng.choice((1, 2, 3, 5, 8))))
    return scalings


class FaultInjector:
    """Makes the faults of a list happen.

    Args:
        state: what the controllers are at, for the account.
        end_controllers: kills them; or, with a duration, stops them for so long while another
            start of the script begins.
        scale: changes the number of workers; tells whether it does.

    Attributes:
        struck: (kind, state) -> number of faults that struck then.
        last_s: loop time at which the last effect of one ended.
        is_over: nothing strikes before `begin`, nor after this is set.
        controllers: their process.
        wall_clock_s: what the wall clock is wrong by.
    """

    controllers: Process

    def __init__(
        self,
        cluster: FaultyCluster,
        network: Network,
        disk: SimulatedDisk,
        faults: list[Fault],
        state: Callable[[], str],
        end_controllers: Callable[[float | None], None],
        scale: Callable[[int], bool],
    ) -> None:
        self.struck: Counter[tuple[str, str]] = Counter()
        self.last_s = 0.0
        self.is_over = True
        self._has_begun = False
        self._cluster = cluster
        self._network = network
        self._disk = disk
        self._timed = [fault for fault in faults if fault.at_s is not None]
        self._waiting = [fault for fault in faults if fault.at_s is None]
        self._counts: Counter[tuple[Stage | Point, str]] = Counter()
        self._state = state
        self._end_controllers = end_controllers
        self._scale = scale
        self.wall_clock_s = 0.0
        network.on_message = self._on_message
        disk.before = self._before_change
        cluster.on_await = lambda peer: self._pass(Point.awaited, peer.role, peer)

    def begin(self) -> None:
        """The run is up: times and messages are counted from now on."""
        if self._has_begun:
            return
        self.is_over, self._has_begun = False, True
        loop = asyncio.get_running_loop()
        for fault in self._timed:
            assert fault.at_s is not None
            loop.call_later(fault.at_s, self._strike, fault, None, context=Context())

    def after_await(self) -> None:
        """Of the controllers."""
        self._pass(Point.awaited, "controllers", None)

    def _on_message(self, stage: Stage, method: str, peer: Peer) -> None:
        self._cluster.trace(stage, method, peer.name)
        self._pass(stage, method, peer)

    def _before_change(self, change: str, path: Path) -> None:
        self._pass(Point.file, change, None)
        process = PROCESS.get()
        if process is not None and process.is_dead:
            raise Killed
        if self._cluster.term is not None:
            self._cluster.term.check()

    def _pass(self, stage: Stage | Point, method: str, peer: Peer | None) -> None:
        if self.is_over:
            return
        self._counts[stage, method] += 1
        now = (stage, method, self._counts[stage, method])
        for fault in list(self._waiting):
            if (fault.stage, fault.method, fault.count) == now:
                self._waiting.remove(fault)
                self._strike(fault, peer)

    def _strike(self, fault: Fault, peer: Peer | None) -> None:
        if self.is_over:
            return
        state = self._state()
        if self._do(fault, peer):
            self.struck[fault.kind.value, state] += 1
            self._cluster.trace("fault", fault.kind.value, fault.target)
            self.last_s = max(self.last_s, self._cluster.now_s + fault.duration_s)

    def _do(self, fault: Fault, peer: Peer | None) -> bool:
        kind, cluster = fault.kind, self._cluster
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualTimeLoop)

        def later(act: Callable[..., object], *args: object) -> None:
            loop.call_later(fault.duration_s, act, *args, context=Context())

        if kind in (FaultKind.kill_rollout, FaultKind.hang_rollout):
            workers: list[Peer] = list(cluster.rollout_workers)
        elif kind in (FaultKind.kill_train, FaultKind.hang_train):
            workers = list(cluster.train_workers)
        else:
            workers = list(cluster.agents.values())
        living = [worker for worker in workers if worker.exit_status is None]
        if not living:
            return False
        victim = peer if peer and peer in living else living[fault.target % len(living)]
        match kind:
            case FaultKind.kill_rollout | FaultKind.kill_train | FaultKind.kill_agent:
                victim.end(KILLED)
            case FaultKind.hang_rollout | FaultKind.hang_train | FaultKind.hang_agent:
                victim.is_hung = True
                later(self._wake, victim)
            case FaultKind.lose_node:
                cluster.lose_machine(victim.node)
            case FaultKind.partition | FaultKind.partition_one_way:
                both = kind is FaultKind.partition
                for direction in list(Direction) if both else [fault.direction]:
                    until_s = cluster.now_s + fault.duration_s
                    self._network.cuts[victim.node, direction] = until_s
                    later(self._network.reset, victim.node)
            case FaultKind.partition_data:
                cluster.data_cuts[victim.node] = cluster.now_s + fault.duration_s
            case FaultKind.reset:
                self._network.reset(victim.node)
            case FaultKind.pause:
                loop.pause(self.controllers, fault.duration_s)
            case FaultKind.slow_disk:
                later(setattr, self._disk, "latency_s", self._disk.latency_s)
                self._disk.latency_s = SLOW_DISK_S
            case FaultKind.short_writes:
                self._disk.max_write_bytes = SHORT_WRITE_BYTES
            case FaultKind.full_disk:
                self._disk.room_bytes = 50 * fault.target
            case FaultKind.broken_sync:
                self._disk.is_broken = True
            case FaultKind.slow_snapshot:
                cluster.snapshot_write_s = SLOW_SNAPSHOT_S
                later(setattr, cluster, "snapshot_write_s", 0.0)
            case FaultKind.failing_snapshot:
                cluster.fails_snapshots = True
                later(setattr, cluster, "fails_snapshots", False)
            case FaultKind.unreadable_snapshot:
                return cluster.damage_snapshots(fault.target)
            case FaultKind.suspend:
                loop.pause(self.controllers, fault.duration_s)
                until_s = max(cluster.asleep_until_s, cluster.now_s + fault.duration_s)
                cluster.asleep_until_s = until_s
                for process in [*cluster.agents.values(), *cluster.workers.values()]:
                    if process.exit_status is None and not process.is_hung:
                        process.is_hung = True
                        later(self._wake, process)
            case FaultKind.wall_clock:
                self.wall_clock_s += random.Random(fault.target).choice((-1, 1)) * WALL_CLOCK_JUMP_S
            case FaultKind.kill_controllers:
                self._end_controllers(None)
            case FaultKind.scale:
                return self._scale(fault.target)
            case FaultKind.succeed_controllers:
                self._end_controllers(fault.duration_s if fault.target else 0.0)
        return True

    def _wake(self, peer: Peer) -> None:
        """It goes on, unless its machine is suspended."""
        asleep_s = self._cluster.asleep_until_s - self._cluster.now_s
        if asleep_s > 0.0:
            asyncio.get_running_loop().call_later(asleep_s, self._wake, peer, context=Context())
        elif peer.exit_status is None:
            peer.is_hung = False
