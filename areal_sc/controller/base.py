"""What both controllers are made of: workers, and methods that block.

Controllers are asyncio inside; their blocking methods run the awaitable ones on the loop of the
`start` block (see `control_loop`).
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

from areal_sc.config.plain import to_plain
from areal_sc.config.schema import ActorConfig, RolloutConfig
from areal_sc.controller.fleet import Fleet
from areal_sc.controller.node_workers import Member
from areal_sc.controller.recovery import OnOutage, Recovery
from areal_sc.controller.runtime import Runtime
from areal_sc.controller.worker_counters import WorkerCounters
from areal_sc.engines.handle_base import GeneratorHandle, TrainHandle
from areal_sc.errors import RunFolderError, WorkerError, WorkerLost
from areal_sc.schedulers.base import Scheduler
from areal_sc.workers.calls import STATS
from areal_sc.workers.spec import WorkerOrder
from areal_sc.workflows.row_file import PromptSource
from areal_sc.workflows.sources import SourceRegistry

if TYPE_CHECKING:
    from areal_sc.controller.control_loop import ControlLoop

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
        on_outage: told when workers are lost, and when they do their work again; called on the
            thread of the event loop.
        measures_free_memory: whether its engines take a share of the GPU memory that is free when
            they start.
    """

    worker_lost: WorkerError | RunFolderError | None = None
    measures_free_memory: bool = False
    _control_loop: ControlLoop | None = None
    _recovery: Recovery | None = None  # from when the workers do their work

    def __init__(
        self,
        engine: TrainHandle | GeneratorHandle,
        scheduler: Scheduler,
        role: str,
        runtime: Runtime | None,
    ) -> None:
        self.engine = engine
        self.scheduler = scheduler
        self.role = role
        self._owns_transport = runtime is None
        self._runtime = runtime or Runtime.create(scheduler.keys)
        self.fleet = Fleet(scheduler, self._runtime, on_lost=self._note_loss)
        self.on_outage: OnOutage = lambda unit, cause: None
        self._counters: dict[str, WorkerCounters] = {}
        self._sources = SourceRegistry(Path(scheduler.config.run_dir), role)

    @abstractmethod
    async def start_async(self) -> None: ...

    async def _launch(
        self, role: str, configs: Sequence[ActorConfig | RolloutConfig], search_path: str = ""
    ) -> None:
        """Starts one worker for each of these configurations of the engine.

        Args: search_path: see `WorkerOrder`.
        """
        device, num_devices = self.engine.devices
        await self.fleet.launch(
            [
                WorkerOrder(
                    role=role,
                    index=index,
                    engine=type(self.engine).__name__,
                    engine_config=to_plain(config),
                    device=device,
                    store_bytes=config.store_bytes,
                    num_devices=num_devices,
                    search_path=search_path,
                )
                for index, config in enumerate(configs)
            ]
        )

    async def close_async(self) -> None:
        """Ends the workers."""
        if self._recovery is not None:
            await self._recovery.close()
            self._recovery = None
        await self.fleet.close()
        if self._owns_transport:
            await self._runtime.transport.close()

    @property
    def num_restarts(self) -> int:
        """Of its workers, so far."""
        return 0 if self._recovery is None else self._recovery.num_restarts

    @property
    def num_bytes(self) -> int:
        """Bytes on this controller's sockets so far."""
        return self.fleet.num_bytes

    async def worker_stats_async(self) -> list[dict[str, float]]:
        """Counters of each worker's engine, store and data plane, over all its lives."""
        stats = await self.fleet.call_living(STATS, None, self.fleet.members)
        for member, its in stats.items():
            counters = self._counters.setdefault(member.name, WorkerCounters())
            counters.add(member.worker.incarnation, its.as_metrics())
        alive = {member.name for member in stats}
        return [c.total(is_alive=name in alive) for name, c in self._counters.items()]

    def begin_worker_stats(self) -> Future[list[dict[str, float]]]:
        """`worker_stats` beside what comes next."""
        return self._submit(self.worker_stats_async())

    def attach(self, control_loop: ControlLoop | None) -> None:
        """The loop of the `start` block, until it ends."""
        self._control_loop = control_loop
        if control_loop is not None:
            self.worker_lost = None  # that of an earlier start

    def _note_loss(self, member: Member, loss: WorkerLost) -> None:
        if self._recovery is None:
            self._give_up(loss)
        else:
            self._recovery.note_loss(member, loss)

    def _give_up(self, cause: WorkerError | RunFolderError) -> None:
        """The run cannot go on: every call that waits ends with the cause."""
        self.worker_lost = self.worker_lost or cause

    def _copy_prompts(self, prompts: PromptSource, *others: Any, **named: Any) -> None:
        self._sources.register_prompts(prompts)

    def _run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return self._started(coroutine).run(coroutine, needs_all_workers=True)

    def _submit(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
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
