"""What both controllers are made of: workers, and methods that block.

Controllers are asyncio inside; their blocking methods run the awaitable ones on the loop of the
`start` block (see `starting`).
"""

from __future__ import annotations

import functools
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

from areal_sc.config.loading.plain import to_plain
from areal_sc.config.schema import ActorConfig, RolloutConfig
from areal_sc.controller.background import Standstill
from areal_sc.controller.control_loop import ControlLoop
from areal_sc.controller.role_status import WorkerCounters, role_status
from areal_sc.engines.handle_base import GeneratorHandle, TrainHandle
from areal_sc.engines.handle_names import own_code
from areal_sc.errors import RunFolderError, StaleTerm, WorkerError
from areal_sc.fleet.member import Member
from areal_sc.fleet.recovery import Recovery
from areal_sc.fleet.runtime import Runtime
from areal_sc.fleet.worker_life import FleetEvent, PauseWished
from areal_sc.log import tell_warning
from areal_sc.nodes.spec import WorkerOrder
from areal_sc.run.run_status import SCRIPT, RoleStatus, RunWishes, Wait, told_pause, told_pause_end
from areal_sc.schedulers.base import Scheduler
from areal_sc.sources.row_file import PromptSource
from areal_sc.workers.calls import STATS
from areal_sc.workflows.registry import SourceRegistry

C = TypeVar("C", bound="Controller")
P = ParamSpec("P")
T = TypeVar("T")


def blocking(
    method: Callable[Concatenate[C, P], Coroutine[Any, Any, T]],
    before: Callable[..., object] = lambda *args, **kwargs: None,
) -> Callable[Concatenate[C, P], T]:
    """The method for callers outside of the event loop: it blocks until the coroutine is done.

    Args:
        before: gets the same arguments first, in the thread of the caller, where Ctrl-C ends it.
    """

    @functools.wraps(method)
    def call(self: C, /, *args: P.args, **kwargs: P.kwargs) -> T:
        before(self, *args, **kwargs)
        return self._run(method(self, *args, **kwargs))

    call.__name__ = method.__name__.removesuffix("_async")
    return call


class Controller(ABC):
    """Steers the workers of one role.

    Attributes:
        role: names its workers, logs and snapshots.
        fleet: its workers.
        worker_lost: why the run cannot go on, once one of its workers was given up, or its journal
            has failed.
        standstill: whether a person has paused the run.
        is_dry_run: nothing is started, and calls that would wait for workers end the process.
    """

    is_dry_run = False
    worker_lost: WorkerError | RunFolderError | None = None
    _control_loop: ControlLoop | None = None
    _call: Wait | None = None  # of the script, that goes on

    def __init__(
        self,
        engine: TrainHandle | GeneratorHandle,
        scheduler: Scheduler,
        role: str,
        runtime: Runtime | None,
        unit: str = "",
    ) -> None:
        """Args: unit: as of `Lives`."""
        self.engine = engine
        self.scheduler = scheduler
        self.is_dry_run = scheduler.config.dry_run
        self.role = role
        self._owns_transport = runtime is None
        self._runtime = runtime or Runtime.create(scheduler.keys, scheduler.term)
        self._recovery = Recovery(scheduler, self._runtime, self._hear, unit)
        self.fleet = self._recovery.fleet
        self._tell_more: Callable[[RoleStatus], None] = lambda status: None
        self._counters: dict[str, WorkerCounters] = {}
        self._sources = SourceRegistry(Path(scheduler.config.run_dir), role)
        self.standstill = Standstill()

    @property
    @abstractmethod
    def version(self) -> int: ...

    @abstractmethod
    async def start_async(self) -> None: ...

    async def measures_free_memory(self) -> bool:
        """Whether its engines take a share of the GPU memory that is free when they start.

        Raises: as `Scheduler.nodes`: nodes tell whether they have GPUs.
        """
        return False

    def _order(self, index: int, config: ActorConfig | RolloutConfig) -> WorkerOrder:
        """A worker with this configuration of the engine."""
        device, num_devices = self.engine.devices
        name, folders = own_code(self.engine)
        return WorkerOrder(
            role=self.role,
            index=index,
            engine=name,
            engine_config=to_plain(_with_absolute_path(config)),
            device=device,
            store_bytes=config.store_bytes,
            num_devices=num_devices,
            code_folders=folders,
        )

    @property
    def _adopts(self) -> bool:
        """Whether workers that an earlier start has left are taken over: in a `start` block with a
        model."""
        return self._control_loop is not None and self._control_loop.takes_over

    async def _launch(self, orders: Sequence[WorkerOrder]) -> None:
        """Starts these workers, or takes them over, as `Fleet.launch`."""
        self.scheduler.status.follow(self.role, self._status, self._hear_wishes)
        self._name_files(orders)
        await self.fleet.launch(orders, adopts=self._adopts)

    def _name_files(self, orders: Sequence[WorkerOrder]) -> None:
        """What workers begin with may be brought to nodes that do not see it."""
        for path in {str(order.engine_config["path"]) for order in orders}:
            if _is_folder(path):
                self._sources.name_model(path)
        for path in {path for order in orders for path in order.code_folders}:
            self._sources.name_code(path)

    async def close_async(self) -> None:
        """Ends the workers."""
        self.scheduler.status.leave(self.role)
        await self._recovery.close()
        try:
            await self.fleet.close()
        finally:
            self._sources.close()
        if self._owns_transport:
            await self._runtime.transport.close()

    @property
    def num_restarts(self) -> int:
        """Restarts of its workers that were decided on so far."""
        return self.fleet.lives.num_restarts

    @property
    def num_bytes(self) -> int:
        """Bytes on this controller's sockets so far."""
        return self.fleet.num_bytes

    async def worker_stats_async(self) -> list[dict[str, float]]:
        """Counters of each worker's engine, store and data plane, over all its lives."""
        alive = await self._count(self.fleet.members)
        return [c.total(is_alive=name in alive) for name, c in self._counters.items()]

    async def _count(self, members: Sequence[Member]) -> set[str]:
        """Asks workers for their counters; returns the names of those that have answered."""
        stats = await self.fleet.call_living(STATS, None, members)
        told: dict[str, list[str]] = {}
        for member, its in stats.items():
            counters = self._counters.setdefault(member.name, WorkerCounters())
            counters.add(member.worker.incarnation, its.as_metrics())
            for text in its.warnings:
                told.setdefault(text, []).append(member.name)
        for text, names in told.items():
            others = f" and {len(names) - 1} others" if len(names) > 1 else ""
            tell_warning(text, f"{names[0]}{others}")
        return {member.name for member in stats}

    def begin_worker_stats(self) -> Future[list[dict[str, float]]]:
        """`worker_stats` beside what comes next."""
        return self._submit(self.worker_stats_async())

    def attach(self, control_loop: ControlLoop | None) -> None:
        """The loop of the `start` block, until it ends."""
        self._control_loop = control_loop
        if control_loop is not None:
            self.worker_lost = None  # that of an earlier start

    @abstractmethod
    def _hear(self, event: FleetEvent) -> None:
        """Has the parts of the controller act on what becomes of its workers."""

    @contextmanager
    def heard_by(self, listener: Callable[[FleetEvent], None]) -> Iterator[None]:
        """Within the context a listener is told what becomes of the workers, on the thread of the
        event loop."""
        self._recovery.listeners.append(listener)
        try:
            yield
        finally:
            self._recovery.listeners.remove(listener)

    def _hear_wishes(self, wishes: RunWishes) -> None:
        before, pause = self.standstill.wish, wishes.pause
        if pause == before:
            return
        self.standstill.wish = pause
        if not self._recovery.listeners:  # else it is told by a `Run`; two controllers hear of it
            run_dir = Path(self.scheduler.config.run_dir)
            tell = self.scheduler.status.tell_once
            if pause is not None:
                tell(f"the run is {told_pause(pause, run_dir)}")
            elif before is not None:
                tell(told_pause_end(before))
        self._recovery.announce(PauseWished(pause))

    def _give_up(self, cause: WorkerError | RunFolderError) -> None:
        """The run cannot go on: every call that waits ends with the cause."""
        if isinstance(cause.__cause__, StaleTerm):
            term = self.scheduler.term
            cause = cause.__cause__ if term is None else term.stale()
        self.worker_lost = self.worker_lost or cause

    def copy_prompts(self, prompts: PromptSource, *others: Any, **named: Any) -> None:
        """Gives a dataset its number; a script that is started again has to keep their order."""
        self._sources.register_prompts(prompts)

    def note_end(self, error: BaseException) -> None:
        """An error ends the `start` block."""
        self.scheduler.status.note_end(error)

    def _status(self) -> RoleStatus:
        """For people who look from outside."""
        calls = [] if self._call is None else [self._call]
        outage = self._recovery.newest_outage
        status = role_status(self.fleet, outage, self.version, calls, self._counters)
        status.is_held = self.standstill.is_held
        self._tell_more(status)
        return status

    def look(self) -> None:  # noqa: B027  # not every role has something to say
        """`--dry-run`: shows what can be said without the task.

        Raises: ArealError: it cannot be used.
        """

    def _run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        if self.is_dry_run:
            from areal_sc.controller.dry_run import end

            coroutine.close()
            raise end()
        control_loop = self._started(coroutine)
        method = getattr(coroutine, "__name__", "call").removesuffix("_async")
        self._call = Wait(SCRIPT, f"{self.role}.{method}", time.time())
        try:
            return control_loop.run(coroutine, needs_all_workers=True)
        finally:
            self._call = None

    def _submit(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        if self.is_dry_run:
            coroutine.close()
            return Future()  # whoever waits for it asks for a batch before
        return self._started(coroutine).submit(coroutine)

    def _started(self, coroutine: Coroutine[Any, Any, Any]) -> ControlLoop:
        if self._control_loop is None:
            coroutine.close()
            raise RuntimeError(
                f"{type(self).__name__} is not started: call it inside "
                "`with areal_sc.start(actor, rollout):`"
            )
        return self._control_loop

    def _check_loop(self) -> None:
        """Raises: RuntimeError: a coroutine of a started controller is awaited on another loop."""
        if self._control_loop is not None and not self._control_loop.is_running_here():
            raise RuntimeError(
                f"{type(self).__name__} runs on the loop of its `with areal_sc.start(...)` block, "
                "so other coroutines cannot await it: call its blocking methods, or, in place of "
                "the block, await start_async() and close_async() of each controller"
            )

    worker_stats = blocking(worker_stats_async)


def _is_folder(path: str) -> bool:
    """Else it is a name of the hub, or the engine has no model."""
    return bool(path) and Path(path).expanduser().is_dir()


def _with_absolute_path(config: ActorConfig | RolloutConfig) -> ActorConfig | RolloutConfig:
    """Nodes have other working directories."""
    if not _is_folder(config.path):
        return config
    return replace(config, path=str(Path(config.path).expanduser().absolute()))
