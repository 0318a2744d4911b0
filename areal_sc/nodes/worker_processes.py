"""The processes of a node's workers, from their forks to their ends. Part of the agent.

    WorkerSpec ─► fork ─► WorkerKeys ─► WorkerReport ─► beats ─► EndedWorker

The fork server gets no key: a worker reads its own from the connection, when it has forked what
may not have them.

consumes     reports and beats of workers, and their ends, as the fork server tells of them
waits for    a worker's report, or its end
unblocked by the worker, or the time limit of its start

Killed workers and servers leave files in a node's shared memory. A server that ends by itself
deletes them, and so does the worker that ends its server. A worker deletes the buckets from which
its servers load weights. Whatever was killed with `kill -9` cannot, so its agent does.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from msgspec import MsgspecError, msgpack

from areal_sc.engines.handles import LEFT_FILES
from areal_sc.errors import WorkerStartError
from areal_sc.log import log_tail
from areal_sc.nodes.spec import EndedWorker, WorkerOrder, WorkerReport, WorkerSpec, WorkerStacks
from areal_sc.run.run_folder import RunFolder
from areal_sc.system.fork_server import Child, ForkServer
from areal_sc.system.process import IS_STOPPED, process_state
from areal_sc.system.waiting import cancel_all
from areal_sc.transport.rpc.newest_term import NewestTerm
from areal_sc.transport.security.passes import WorkerKeys
from areal_sc.transport.shards.memory_folder import SHARED_MEMORY

logger = logging.getLogger(__name__)

SERVERS_END_S: Final = 5.0
"""The kernel kills the servers of a killed worker; after so long they are gone."""
KILL_LIMIT_S: Final = 10.0
"""A process that takes longer to die of SIGKILL hangs in the kernel."""

MAX_STOPPED: Final = 5
"""Heartbeat intervals in which a worker that has not reported yet may be stopped."""

_MAX_ENDED: Final = 1024
"""Ends that are kept, each with the end of its log: far more than come between two answers."""

_NAMES_PER_MESSAGE: Final = 500
_MESSAGE_BYTES: Final = 64 << 10

_from_worker: Final = msgpack.Decoder(WorkerReport | tuple[int, int])


@dataclass(eq=False)
class WorkerProcess:
    """One life of a worker.

    Attributes:
        reported: what it told when it began to serve.
        beat_ns, turn_ns: its last signs of life, `CLOCK_MONOTONIC`.
        replaced: what it was told of `WorkerProcesses.replaced`.
    """

    order: WorkerOrder
    child: Child
    reported: asyncio.Future[WorkerReport]
    beat_ns: int
    turn_ns: int
    replaced: dict[str, int]


class WorkerProcesses:
    """All workers of a node.

    Args:
        newest_term: of the controllers that have called.
        shown: a path of this node, for people elsewhere.

    Attributes:
        living: by incarnation.
        num_ended: of those that were.
        ended_pids: of all of them; their files in shared memory are deleted.
        end_noted: set, and replaced, at the next end, and by `note`.
        begun_s: Unix time; younger files that killed servers left are deleted.
        replaced: workers of the run whose earlier passes are void; see `Passes`.
    """

    def __init__(
        self,
        fork_server: ForkServer,
        folder: RunFolder,
        newest_term: NewestTerm,
        shown: Callable[[str], str] = str,
    ) -> None:
        self.living: dict[str, WorkerProcess] = {}
        self.num_ended = 0
        self.ended_pids: set[int] = set()
        self._ended: deque[EndedWorker] = deque(maxlen=_MAX_ENDED)
        self.end_noted = asyncio.Event()
        self.begun_s = time.time()
        self.replaced: dict[str, int] = {}
        self._fork_server = fork_server
        self._folder = folder
        self._newest_term = newest_term
        self._shown = shown
        self._one_life: dict[str, asyncio.Lock] = {}  # by name
        self._forking: set[asyncio.Task[WorkerProcess]] = set()

    async def start(
        self, specs: Sequence[tuple[WorkerSpec, WorkerKeys]], timeout_s: float
    ) -> list[WorkerReport]:
        """Starts workers, each when its earlier life is dead; all serve afterwards, or none does.

        Raises: WorkerError: one did not come up. StaleTerm: a later script has called, and so was
            not told of them.
        """
        starts = [asyncio.create_task(self._start(*it, timeout_s)) for it in specs]
        try:
            return await asyncio.gather(*starts)
        except BaseException:
            await cancel_all(starts)
            orders = [spec.order for spec, _ in specs]
            await self._kill([w for w in self.living.values() if w.order in orders])
            raise

    async def forked(self) -> None:
        """Returns when `living` has all that scripts before the newest one have started."""
        if self._forking:
            await asyncio.wait(self._forking)

    async def stop(self, incarnations: Sequence[str], grace_s: float) -> None:
        """Waits for the end of workers, and kills those that take too long; skips unknown ones."""
        workers = [self.living[i] for i in incarnations if i in self.living]
        await _wait_for_ends(workers, grace_s)
        left = [worker for worker in workers if not worker.child.ended.done()]
        for worker in left:
            logger.warning("worker=%s did not end by itself; killed", worker.order.name)
        await self._kill(left)

    def note_replaced(self, replaced: Mapping[str, int]) -> None:
        """Has all workers refuse what lives before these have called."""
        if replaced.items() - self.replaced.items():
            self.replaced = {**self.replaced, **replaced}
        for worker in self.living.values():
            if worker.replaced is not self.replaced:
                self._tell_replaced(worker)

    def _tell_replaced(self, worker: WorkerProcess) -> None:
        """What there is no room for is told at the next occasion."""
        with suppress(OSError):  # the worker is stopped, or ends
            pairs = list(self.replaced.items())
            for first in range(0, len(pairs), _NAMES_PER_MESSAGE):
                part = dict(pairs[first : first + _NAMES_PER_MESSAGE])
                worker.child.connection.send(msgpack.encode(part))
            worker.replaced = self.replaced

    async def stacks(self, names: Sequence[str]) -> list[WorkerStacks]:
        """Where these workers are, as far as they live."""
        workers = [worker for worker in self.living.values() if worker.order.name in names]
        return list(await asyncio.gather(*map(self._stacks_of, workers)))

    async def _stacks_of(self, worker: WorkerProcess) -> WorkerStacks:
        name, child = worker.order.name, worker.child
        log = self._folder.log_path(name)
        state, lines = process_state(child.pid), list[str]()
        if state != IS_STOPPED:  # then it would write them when it goes on
            lines = await self._fork_server.stacks(child, log)
        return WorkerStacks(name, state, lines or log_tail(log))

    async def _start(self, spec: WorkerSpec, keys: WorkerKeys, timeout_s: float) -> WorkerReport:
        """Raises: WorkerStartError: it did not come up; WorkerLost: the fork server is gone."""
        path = spec.log_path
        forking = asyncio.create_task(self._fork(spec, keys, timeout_s))
        self._forking.add(forking)
        forking.add_done_callback(self._forking.discard)
        try:
            async with asyncio.timeout(timeout_s):
                worker = await asyncio.shield(forking)
                is_stopped = await _is_stopped(worker, spec.run.heartbeat_interval_s)
        except TimeoutError:
            what = f"did not report within scheduler.startup_timeout_s={timeout_s:g}"
        else:
            if worker.reported.done():
                return worker.reported.result()
            what = f"ended with {worker.child.how} before it served"
            if is_stopped:
                what = f"does not come up: its process {worker.child.pid} {IS_STOPPED}"
        finally:
            # also one that nobody waits for any more must not be left
            forking.add_done_callback(self._end_unreported)
        raise WorkerStartError.with_log(f"worker {spec.name} {what}", path, log_tail(path))

    async def _fork(self, spec: WorkerSpec, keys: WorkerKeys, timeout_s: float) -> WorkerProcess:
        """Forks a new life when the one before is dead.

        Nobody cancels it, and there is one at a time: two living ones would want the same port, and
        the shards of the one before.

        Raises: WorkerStartError, WorkerLost, StaleTerm.
        """
        async with self._one_life.setdefault(spec.name, asyncio.Lock()):
            self._newest_term.check(spec.term)  # the earlier life may be a later script's
            earlier = [w for w in self.living.values() if w.order.name == spec.name]
            await self._kill(earlier)
            for worker in earlier:
                if not worker.child.ended.done():
                    raise WorkerStartError(
                        f"worker {spec.name} cannot be started again: its process "
                        f"{worker.child.pid} did not die of SIGKILL within {KILL_LIMIT_S:g} s"
                    )
            self._newest_term.check(spec.term)
            child = await self._fork_server.spawn(
                asdict(spec), spec.log_path, kind=socket.SOCK_SEQPACKET, timeout_s=timeout_s
            )
            with suppress(OSError):  # it has ended, as is told then
                child.connection.send(msgpack.encode(keys))
            loop, now_ns = asyncio.get_running_loop(), time.monotonic_ns()
            worker = WorkerProcess(
                spec.order, child, loop.create_future(), now_ns, now_ns, spec.replaced
            )
            self.living[spec.order.incarnation] = worker
            loop.add_reader(child.connection, self._on_word, worker)
            child.ended.add_done_callback(lambda _: self._on_end(worker))
            return worker

    def _end_unreported(self, forking: asyncio.Task[WorkerProcess]) -> None:
        if not forking.cancelled() and forking.exception() is None:
            worker = forking.result()
            if not worker.reported.done():
                self._fork_server.kill(worker.child)

    def _on_word(self, worker: WorkerProcess) -> None:
        """A worker reports, or beats. It runs its user's code, so it may say anything."""
        try:
            while received := worker.child.connection.recv(_MESSAGE_BYTES):
                match _from_worker.decode(received):
                    case WorkerReport() as report if not worker.reported.done():
                        worker.reported.set_result(report)
                    case (beat_ns, turn_ns):
                        worker.beat_ns, worker.turn_ns = beat_ns, turn_ns
        except BlockingIOError:
            return
        except (OSError, MsgspecError, UnicodeDecodeError) as error:
            logger.warning("worker=%s is not understood: %s", worker.order.name, error)
        asyncio.get_running_loop().remove_reader(worker.child.connection)
        worker.child.connection.close()

    def _on_end(self, worker: WorkerProcess) -> None:
        order, how, path = worker.order, worker.child.how, self._folder.log_path(worker.order.name)
        if self._fork_server.is_gone.is_set():
            how += ", since the fork server is gone"
        logger.info("worker=%s pid=%d ended with %s", order.name, worker.child.pid, how)
        del self.living[order.incarnation]
        loop = asyncio.get_running_loop()
        loop.call_later(SERVERS_END_S, lambda: delete_left_files(self.begun_s, self.ended_pids))
        self.ended_pids.add(worker.child.pid)
        self.num_ended += 1
        self._ended.append(
            EndedWorker(order.name, order.incarnation, how, self._shown(str(path)), log_tail(path))
        )
        self.note()

    def ended_since(self, num_ended: int) -> list[EndedWorker]:
        """The workers that ended after the first `num_ended`, in order; of more than `_MAX_ENDED`
        the newest."""
        num_new = self.num_ended - num_ended
        return list(self._ended)[-num_new:] if num_new > 0 else []

    def note(self) -> None:
        """Gives news to whoever waits for them."""
        self.end_noted.set()
        self.end_noted = asyncio.Event()

    async def _kill(self, workers: Sequence[WorkerProcess]) -> None:
        for worker in workers:
            self._fork_server.kill(worker.child)
        await _wait_for_ends(workers, KILL_LIMIT_S)


async def _is_stopped(worker: WorkerProcess, interval_s: float) -> bool:
    """Returns when a worker has reported or ended, or does nothing for that, being stopped."""
    first: list[asyncio.Future[Any]] = [worker.reported, worker.child.ended]
    num_stopped = 0
    while num_stopped < MAX_STOPPED:
        await asyncio.wait(first, timeout=interval_s, return_when=asyncio.FIRST_COMPLETED)
        if any(future.done() for future in first):
            return False
        is_stopped = process_state(worker.child.pid) == IS_STOPPED
        num_stopped = num_stopped + 1 if is_stopped else 0
    return True


async def _wait_for_ends(workers: Sequence[WorkerProcess], timeout_s: float) -> None:
    if workers:
        await asyncio.wait([worker.child.ended for worker in workers], timeout=timeout_s)


def delete_left_files(
    since_s: float, ended_pids: Iterable[int] = (), folder: Path = SHARED_MEMORY
) -> None:
    """Deletes files of this user that no process has open or maps.

    Args:
        since_s: Unix time; files that have not changed since then are left alone.
        ended_pids: of workers. torch names shared memory by the process that has made it.
    """
    patterns = (*LEFT_FILES, *(f"torch_{pid}_*" for pid in ended_pids))
    left = set()
    for path in (path for pattern in patterns for path in folder.glob(pattern)):
        with suppress(FileNotFoundError):
            status = path.stat(follow_symlinks=False)
            if status.st_uid == os.geteuid() and status.st_ctime >= since_s:
                left.add(str(path))
    if left:
        left -= _used(left)
    for name in left:
        Path(name).unlink(missing_ok=True)


def _used(names: set[str]) -> set[str]:
    """The files among these that a process has open or maps.

    A process opens a file, maps it, and closes it. So its open files are looked at first: whoever
    has none of them open any more maps it by then.
    """
    used = set()
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended, or is another user's
            used |= set(_opened(process)) & names
            maps = (process / "maps").read_text(errors="replace")
            used |= {name for name in names if f" {name}\n" in maps}
    return used


def _opened(process: Path) -> Iterator[str]:
    for fd in (process / "fd").iterdir():
        with suppress(FileNotFoundError):  # it was closed
            yield os.readlink(fd)
