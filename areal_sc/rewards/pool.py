"""Rewards: async ones on the event loop, the others in processes that can be killed.

A thread cannot be stopped, so a reward that hangs, in a regular expression for example, would
hang its worker. Here it runs in a process of its own, and passing its time limit means SIGKILL.

    consumes     calls of `score`
    waits for    a process's start; then its reply, its end, or the time limit of the running call
    unblocked by the reward process, the kernel (end of file), or the event loop's clock

Each process runs one call at a time, so a call's time starts when it begins to execute. A process
that ends by itself is an infrastructure failure: its call runs once more on a fresh process. Only
a call that ends two processes is blamed on the reward. Signals that others send, as people, systemd
and clusters do, are no work of the reward: they count only when call after call is hit.

A reward may declare what it means by taking long (`RewardDeclaration`): then the limit is one of
CPU seconds, and passing it is a verdict.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from areal_sc.errors import RewardError, WorkerLost, WorkerStartError, WorkflowError
from areal_sc.log import tell_warning
from areal_sc.rejection import RejectionKind
from areal_sc.rewards.base import (
    DECLARATION,
    VOTE,
    Narrowing,
    RewardDeclaration,
    RewardFunction,
    RunCode,
    Score,
)
from areal_sc.rewards.functions import is_async, name_of, place_of_definition
from areal_sc.rewards.on_loop import score_on_loop, took_too_long
from areal_sc.rewards.process import make_unpacker, pack
from areal_sc.sources.reference import written_reference
from areal_sc.sources.values import UnfitValue, to_wire
from areal_sc.system.fork_server import Child, ForkServer
from areal_sc.system.process import num_killed_for_memory

log = logging.getLogger(__name__)

LOAD_TIMEOUT_S: Final = 120.0
"""Bound of importing the user's module, which is no part of a call's time."""

START_TIMEOUT_S: Final = 60.0
_MAX_STARTS: Final = 3
_MAX_ATTEMPTS: Final = 2
_MAX_KILLS: Final = 5
"""Most kills of a call from outside: a reward that sends itself such a signal must end, too."""
_SIGNALS_OF_OTHERS: Final = frozenset(
    {signal.SIGKILL, signal.SIGTERM, signal.SIGHUP, signal.SIGINT}
)
_EXIT_WAIT_S: Final = 2.0


@dataclass(eq=False)
class _RewardCall:
    """One call of a sync reward, or of a vote, until its future is done.

    Attributes:
        place: where the reward is defined, as of a RewardError.
        num_ends, num_kills: processes that ended while it ran, by themselves or by others.
    """

    key: int
    name: str
    place: str
    request: bytes
    declaration: RewardDeclaration | None
    verdict: asyncio.Future[Any]
    num_ends: int = 0
    num_kills: int = 0

    def fail(self, error: Exception) -> None:
        if not self.verdict.done():
            self.verdict.set_exception(error)


class _Process:
    """A reward process, as its pool sees it.

    Attributes:
        loaded: keys of the rewards that it has imported.
        pid: of the process that computes, which the child may only wait for.
        killed_before: processes of the machine killed for lack of memory before it was started.
    """

    def __init__(self, child: Child) -> None:
        self.killed_before = num_killed_for_memory()
        self.child = child
        self.pid = child.pid
        self.loaded: set[int] = set()
        self._unpacker = make_unpacker()

    async def ask(self, request: bytes) -> list[Any]:
        """Raises: ConnectionError: the process has ended."""
        await asyncio.get_running_loop().sock_sendall(self.child.connection, request)
        return await self.reply()

    async def reply(self) -> list[Any]:
        """Its next message. Raises: ConnectionError: it has ended."""
        while True:
            for kind, *rest in self._unpacker:
                if kind != "warned":
                    return [kind, *rest]
                tell_warning(rest[0], "a reward process")
            received = await asyncio.get_running_loop().sock_recv(self.child.connection, 1 << 16)
            if not received:
                raise ConnectionResetError
            self._unpacker.feed(received)

    def cpu_s(self) -> float:
        """CPU seconds that it has used; 0 if it is gone."""
        try:
            stat = Path(f"/proc/{self.pid}/stat").read_bytes()
        except (FileNotFoundError, ProcessLookupError):
            return 0.0
        ticks = map(int, stat.rpartition(b")")[2].split()[11:13])
        return sum(ticks) / os.sysconf("SC_CLK_TCK")

    async def end(self) -> None:
        """Waits for its end, which is near."""
        self.child.connection.close()
        await asyncio.wait([self.child.ended], timeout=_EXIT_WAIT_S)
        if not self.child.ended.done():
            log.error("reward_process pid=%d did not die of SIGKILL", self.child.pid)


@dataclass(eq=False)
class _Lanes:
    """Calls of rewards that give up the same, and the tasks that run them, a process each."""

    narrowing: Narrowing
    waiting: asyncio.Queue[_RewardCall | None] = field(default_factory=asyncio.Queue)
    tasks: list[asyncio.Task[None]] = field(default_factory=list)
    num_idle: int = 0


class RewardPool:
    """Scores completions with the user's functions.

    Args:
        processes: forks the reward processes.
        num_processes: how many sync rewards run at a time.
        timeout_s: limit of one call, from the moment it begins to execute; of async rewards too.
        log_path: file that the reward processes' own output is appended to.
        sources: that folder of the run.
        run_code: what async rewards get that ask for it.
        isolation: `rollout.sandbox.isolation`: how reward processes are kept apart.
        hides: folders that they cannot reach, `sources` aside.

    Attributes:
        isolation: what keeps the processes apart, "": nothing does; None: there was none yet.
    """

    def __init__(
        self,
        processes: ForkServer,
        *,
        num_processes: int,
        timeout_s: float,
        log_path: Path | str,
        sources: Path,
        run_code: RunCode,
        isolation: str = "none",
        hides: Sequence[Path | str] = (),
    ) -> None:
        if num_processes < 1 or timeout_s <= 0:
            raise ValueError(
                f"expected num_processes >= 1 and timeout_s > 0, got {num_processes}, {timeout_s}"
            )
        self._source = processes
        self._num_processes = num_processes
        self._timeout_s = timeout_s
        self._log_path = log_path
        self._sources = sources
        self.run_code = run_code
        self._spec: dict[str, Any] = {
            "sources": str(sources),
            "isolation": isolation,
            "hides": [str(path) for path in hides],
            "is_tried": False,
        }
        self.isolation: str | None = None
        self._references: list[dict[str, Any]] = []
        self._keys: dict[int, int] = {}
        self._rewards: list[RewardFunction] = []  # keeps the ids in `_keys` from being reused
        self._calls: set[_RewardCall] = set()  # without a verdict
        self._lanes: dict[Narrowing, _Lanes] = {}
        self._processes: set[_Process] = set()
        self._broken: Exception | None = None

    async def score(
        self,
        reward: RewardFunction,
        prompt: Mapping[str, Any],
        completion: str,
        *,
        name: str = "",
        **extra: Any,
    ) -> Score:
        """The reward's finite number; with parts, if it is async and has given them.

        Args: name: as messages call it; empty: that of the function.
        Raises:
            RewardError: it raised, returned no finite number, passed its time limit, or ended two
                processes.
            WorkflowError: the function or its arguments cannot be given to another process.
            RunFolderError: as `write_session`.
            WorkerError: reward processes cannot be had; says nothing about the completion.
        """
        name = name or name_of(reward)
        try:
            arguments = to_wire([dict(prompt), completion, extra])
        except UnfitValue as error:
            raise WorkflowError(error.located(f"reward {name}: argument ")) from None
        if is_async(reward):
            return await score_on_loop(
                reward, name, arguments, limit_s=self._timeout_s, run_code=self.run_code
            )
        return Score(await self._ask(reward, name, "call", arguments))

    async def vote(self, reward: RewardFunction, completion: str) -> str | None:
        """What a completion answers, as the reward's `vote` tells; in a process, as sync rewards.

        Raises: as `score`.
        """
        vote: str | None = await self._ask(reward, f"{name_of(reward)}.{VOTE}", VOTE, completion)
        return vote

    async def _ask(self, reward: RewardFunction, name: str, kind: str, argument: Any) -> Any:
        if self._broken is not None:
            raise self._broken
        key = self._key_of(reward)
        request = pack([kind, key, argument])
        verdict: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        declaration: RewardDeclaration | None = getattr(reward, DECLARATION, None)
        limits = declaration if kind == "call" else None  # its number stands for no vote
        call = _RewardCall(key, name, place_of_definition(reward), request, limits, verdict)
        self._calls.add(call)
        narrowing = declaration.narrowing if declaration else Narrowing()
        lanes = self._lanes.setdefault(narrowing, _Lanes(narrowing))
        lanes.waiting.put_nowait(call)
        if lanes.waiting.qsize() > lanes.num_idle and len(lanes.tasks) < self._num_processes:
            lanes.tasks.append(asyncio.create_task(self._run_calls(lanes)))
        try:
            return await verdict
        finally:
            self._calls.discard(call)

    async def close(self) -> None:
        """Kills all processes; calls that still run end with WorkerLost. Bounded."""
        self._give_up(WorkerLost("the reward pool was closed"))
        await asyncio.gather(*(task for lanes in self._lanes.values() for task in lanes.tasks))

    async def _run_calls(self, lanes: _Lanes) -> None:
        """Runs one call after the other, on one process as long as that lives."""
        process: _Process | None = None
        try:
            while self._broken is None:
                lanes.num_idle += 1
                call = await lanes.waiting.get()
                lanes.num_idle -= 1
                while call is not None and not call.verdict.done():  # else its asker is gone
                    if process is not None and process.child.ended.done():  # between two calls
                        await self._bury(process)
                        process = None
                    process = process or await self._start_process(lanes.narrowing)
                    if not await self._attempt(process, call):
                        process = None
        except Exception as error:  # nobody awaits this task: those who ask for verdicts hear
            self._give_up(error)
        finally:
            if process is not None:
                await self._kill(process)

    async def _start_process(self, narrowing: Narrowing) -> _Process:
        """Raises: WorkerError: several in a row did not start, or the fork server is gone."""
        num_failed = 0
        while True:
            try:
                return await self._start_one(narrowing)
            except WorkerStartError as error:
                num_failed += 1
                log.warning("reward_process_failed_starts=%d: %s", num_failed, error)
                if num_failed == _MAX_STARTS or self._broken:
                    raise

    async def _start_one(self, narrowing: Narrowing) -> _Process:
        spec = {**self._spec, **narrowing._asdict()}
        process = _Process(await self._source.spawn(spec, self._log_path))
        self._processes.add(process)
        if self._broken is not None:  # meanwhile
            self._source.kill(process.child)
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                kind, *told = await process.reply()
        except (ConnectionError, TimeoutError) as error:
            await self._kill(process)
            what = "ended at once" if isinstance(error, ConnectionError) else "was not ready"
            raise WorkerStartError(f"a reward process {what}; see {self._log_path}") from error
        if kind == "unfit":
            await self._kill(process)
            raise WorkflowError(f"a reward cannot be kept as it declares: {told[0]}")
        process.pid, layer, why_not = told
        self._tell_isolation(layer, why_not)
        return process

    def _tell_isolation(self, layer: str, why_not: str) -> None:
        """Once: what keeps rewards apart, or that nothing does."""
        if self.isolation is not None:
            return
        self.isolation, wanted = layer, self._spec["isolation"]
        self._spec |= {"isolation": layer or "none", "is_tried": True}
        if layer or wanted == "none":
            log.info("reward_isolation=%s", layer or "none")
            return
        text = (
            "rewards are not kept apart: they can read the run's keys and snapshots, and reach all "
            f"processes of this user ({why_not}); set rollout.sandbox.isolation=none to accept that"
        )
        tell_warning(text, "a reward process")

    async def _attempt(self, process: _Process, call: _RewardCall) -> bool:
        """Runs a call; False when the process has ended."""
        try:
            if call.key not in process.loaded:
                load = pack(["load", call.key, self._references[call.key]])
                async with asyncio.timeout(LOAD_TIMEOUT_S):
                    kind, *rest = await process.ask(load)
                if kind == "loaded":
                    process.loaded.add(call.key)
                else:
                    self._settle(call, kind, rest)
                    return True
            return await self._limited(process, call)
        except TimeoutError:
            await self._kill(process)
            what = "importing its module "
            call.fail(took_too_long(call.name, LOAD_TIMEOUT_S, what, place=call.place))
        except ConnectionError:
            await self._mourn(process, call, num_killed_for_memory() > process.killed_before)
        return False

    async def _limited(self, process: _Process, call: _RewardCall) -> bool:
        """Runs a call of a loaded reward under its limits; False when they have cost the process.

        A declared limit counts CPU seconds, because on a busy machine anything takes long.
        """
        loop, declared = asyncio.get_running_loop(), call.declaration
        end_s, end_cpu_s = loop.time() + self._timeout_s, math.inf
        if declared is not None and declared.late_after_s is not None:
            end_cpu_s = process.cpu_s() + min(declared.late_after_s, self._timeout_s / 2)
        asking = asyncio.create_task(process.ask(call.request))
        try:
            while not asking.done():
                cpu_left_s = end_cpu_s - process.cpu_s() if end_cpu_s < math.inf else math.inf
                left_s = min(end_s - loop.time(), cpu_left_s)
                if left_s <= 0:
                    break
                await asyncio.wait([asking], timeout=left_s)
            else:
                kind, *rest = asking.result()
                self._settle(call, kind, rest)
                return True
        finally:
            asking.cancel()
            await asyncio.wait([asking])
        if declared is not None and cpu_left_s <= 0:
            await self._kill(process)
            self._settle(call, "value", [declared.late_reward])
        else:
            stacks = "\n".join(await self._source.stacks(process.child, self._log_path))
            await self._kill(process)
            call.fail(took_too_long(call.name, self._timeout_s, place=call.place, frames=stacks))
        return False

    def _settle(self, call: _RewardCall, kind: str, rest: Sequence[Any]) -> None:
        if kind == "failed":
            what, details = rest
            message = f"reward {call.name}: {what}"
            call.fail(RewardError(message, **{"place": call.place, **details}))
        elif not call.verdict.done():
            call.verdict.set_result(rest[0])

    async def _mourn(self, process: _Process, call: _RewardCall, lacked_memory: bool) -> None:
        """A process has ended that the pool did not end; its second call is to blame.

        Args: lacked_memory: meanwhile the kernel has killed processes for lack of memory.
        """
        await self._bury(process)
        how, ended = process.child.how, process.child.ended
        is_killed = ended.done() and -ended.result() in _SIGNALS_OF_OTHERS and not lacked_memory
        call.num_kills += is_killed
        call.num_ends += not is_killed
        if call.num_ends >= _MAX_ATTEMPTS or call.num_kills >= _MAX_KILLS:
            why = "; the kernel killed processes for lack of memory" if lacked_memory else ""
            if ended.done() and ended.result() >= 0:
                why = ": the code ended it, as os._exit does"
            call.fail(
                RewardError(
                    f"reward {call.name}: its process ended {call.num_ends + call.num_kills} times "
                    f"while it ran ({how}{why}); see {self._log_path}",
                    kind=RejectionKind.reward_process_died,
                    place=call.place,
                )
            )

    async def _bury(self, process: _Process) -> None:
        """Removes a process that the pool did not end."""
        await process.end()
        self._processes.discard(process)
        log.warning(
            "reward_process pid=%d ended by itself: %s", process.child.pid, process.child.how
        )

    async def _kill(self, process: _Process) -> None:
        self._processes.discard(process)
        self._source.kill(process.child)
        await process.end()

    def _give_up(self, error: Exception) -> None:
        """No call gets a verdict any more, and every process ends."""
        self._broken = self._broken or error
        for call in self._calls:
            call.fail(self._broken)
        for process in self._processes:
            self._source.kill(process.child)
        for lanes in self._lanes.values():
            for _ in lanes.tasks:
                lanes.waiting.put_nowait(None)

    def _key_of(self, reward: RewardFunction) -> int:
        if id(reward) not in self._keys:
            self._references.append(written_reference(reward, self._sources))
            self._rewards.append(reward)
            self._keys[id(reward)] = len(self._references) - 1
        return self._keys[id(reward)]
