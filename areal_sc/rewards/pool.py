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
import itertools
import logging
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from areal_sc.errors import NeverWorks, RewardError, WorkerLost, WorkflowError
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
from areal_sc.rewards.process import pack
from areal_sc.sources.reference import written_reference
from areal_sc.sources.values import UnfitValue, to_wire
from areal_sc.system.deaths import Deaths
from areal_sc.system.fork_server import ForkServer
from areal_sc.system.own_processes import OwnProcess, OwnProcesses
from areal_sc.system.process import num_killed_for_memory

log = logging.getLogger(__name__)

LOAD_TIMEOUT_S: Final = 120.0
"""Bound of importing the user's module, which is no part of a call's time."""

_MAX_ENDS: Final = 1
_MAX_KILLS: Final = 4
"""Kills from outside that a call survives: a reward may send itself such a signal, and must end."""
_SIGNALS_OF_OTHERS: Final = frozenset(
    {signal.SIGKILL, signal.SIGTERM, signal.SIGHUP, signal.SIGINT}
)


@dataclass(eq=False)
class _RewardCall:
    """One call of a sync reward, or of a vote, until its future is done.

    Attributes:
        number: that its replies name.
        ends, kills: of processes while it ran, by themselves or by others.
    """

    number: int
    key: int
    name: str
    reward: RewardFunction
    request: bytes
    declaration: RewardDeclaration | None
    verdict: asyncio.Future[Any]
    ends: Deaths = field(default_factory=lambda: Deaths(_MAX_ENDS))
    kills: Deaths = field(default_factory=lambda: Deaths(_MAX_KILLS))

    @property
    def place(self) -> str:
        """Where the reward is defined, as of a RewardError."""
        return place_of_definition(self.reward)

    def fail(self, error: Exception) -> None:
        if not self.verdict.done():
            self.verdict.set_exception(error)


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
        num_late: calls that got the number which their reward has declared for taking long.
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
        self._own = OwnProcesses(
            processes,
            role="reward",
            log_path=log_path,
            sources=sources,
            isolation=isolation,
            hides=hides,
        )
        self._num_processes = num_processes
        self._timeout_s = timeout_s
        self._sources = sources
        self.run_code = run_code
        self.num_late = 0
        self._references: list[dict[str, Any]] = []
        self._keys: dict[int, int] = {}
        self._rewards: list[RewardFunction] = []  # keeps the ids in `_keys` from being reused
        self._numbers = itertools.count()
        self._calls: set[_RewardCall] = set()  # without a verdict
        self._lanes: dict[Narrowing, _Lanes] = {}
        self._broken: Exception | None = None

    @property
    def isolation(self) -> str | None:
        """What keeps the processes apart, "": nothing does; None: there was none yet."""
        return self._own.isolation

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
            NeverWorks: it cannot be loaded.
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
        number = next(self._numbers)
        request = pack([kind, number, key, argument])
        verdict: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        declaration: RewardDeclaration | None = getattr(reward, DECLARATION, None)
        limits = declaration if kind == "call" else None  # its number stands for no vote
        call = _RewardCall(number, key, name, reward, request, limits, verdict)
        self._calls.add(call)
        narrowing = declaration.narrowing if declaration else Narrowing()
        lanes = self._lanes.get(narrowing)
        if lanes is None:
            lanes = self._lanes[narrowing] = _Lanes(narrowing)
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
        process: OwnProcess | None = None
        try:
            while self._broken is None:
                lanes.num_idle += 1
                call = await lanes.waiting.get()
                lanes.num_idle -= 1
                while call is not None and not call.verdict.done():  # else its asker is gone
                    if process is not None and process.child.ended.done():  # between two calls
                        await self._own.bury(process)
                        process = None
                    process = process or await self._own.start(lanes.narrowing._asdict())
                    if not await self._attempt(process, call):
                        process = None
                    elif process.is_forged:
                        await self._own.kill(process)
                        process = None
        except Exception as error:  # nobody awaits this task: those who ask for verdicts hear
            self._give_up(error)
        finally:
            if process is not None:
                await self._own.kill(process)

    async def _attempt(self, process: OwnProcess, call: _RewardCall) -> bool:
        """Runs a call; False when the process has ended."""
        try:
            if call.key not in process.loaded:
                number = next(self._numbers)
                load = pack(["load", number, call.key, self._references[call.key]])
                async with asyncio.timeout(LOAD_TIMEOUT_S):
                    kind, *rest = await process.ask(number, load)
                if kind == "failed":
                    what, details = rest
                    place = details.get("place") or call.place
                    where = "" if place in what else f" at {place}"
                    told = f"reward {call.name} cannot be loaded in its process: {what}{where}"
                    call.fail(NeverWorks(told))
                    return True
                process.loaded.add(call.key)
            return await self._limited(process, call)
        except TimeoutError:
            await self._own.kill(process)
            what = "importing its module "
            call.fail(took_too_long(call.name, LOAD_TIMEOUT_S, what, place=call.place))
        except ConnectionError:
            await self._mourn(process, call, num_killed_for_memory() > process.killed_before)
        return False

    async def _limited(self, process: OwnProcess, call: _RewardCall) -> bool:
        """Runs a call of a loaded reward under its limits; False when they have cost the process.

        A declared limit counts CPU seconds, because on a busy machine anything takes long.
        """
        loop, declared = asyncio.get_running_loop(), call.declaration
        is_late = False
        watch: asyncio.TimerHandle | None = None

        def end() -> None:
            """A turn later, so that a reply which is there by then counts: the loop stood still."""
            if not limit.expired():
                limit.reschedule(loop.time())

        def end_at_cpu_s(end_cpu_s: float) -> None:
            nonlocal is_late, watch
            left_s = end_cpu_s - process.cpu_s()
            is_late = left_s <= 0
            if is_late:
                end()
            else:  # it computes no faster than that
                watch = loop.call_later(left_s, end_at_cpu_s, end_cpu_s)

        try:
            async with asyncio.timeout(None) as limit:
                last = loop.call_later(self._timeout_s, end)
                if declared is not None and declared.late_after_s is not None:
                    may_use_s = min(declared.late_after_s, self._timeout_s / 2)
                    end_at_cpu_s(process.cpu_s() + may_use_s)
                try:
                    kind, *rest = await process.ask(call.number, call.request)
                finally:
                    last.cancel()
                    if watch is not None:
                        watch.cancel()
        except TimeoutError:
            if declared is not None and is_late:
                await self._own.kill(process)
                self.num_late += 1
                self._settle(call, "value", [declared.late_reward])
            else:
                stacks = await self._own.stacks(process)
                await self._own.kill(process)
                late = took_too_long(call.name, self._timeout_s, place=call.place, frames=stacks)
                call.fail(late)
            return False
        self._settle(call, kind, rest)
        return True

    def _settle(self, call: _RewardCall, kind: str, rest: Sequence[Any]) -> None:
        if kind == "failed":
            what, details = rest
            message = f"reward {call.name}: {what}"
            call.fail(RewardError(message, **{"place": call.place, **details}))
        elif not call.verdict.done():
            call.verdict.set_result(rest[0])

    async def _mourn(self, process: OwnProcess, call: _RewardCall, lacked_memory: bool) -> None:
        """A process has ended that the pool did not end; its second call is to blame.

        Args: lacked_memory: meanwhile the kernel has killed processes for lack of memory.
        """
        await self._own.bury(process)
        how, ended = process.child.how, process.child.ended
        is_killed = ended.done() and -ended.result() in _SIGNALS_OF_OTHERS and not lacked_memory
        pause_s = (call.kills if is_killed else call.ends).note()
        num_ends = call.ends.number + call.kills.number
        if pause_s is not None:
            await asyncio.sleep(pause_s)
        else:
            why = "; the kernel killed processes for lack of memory" if lacked_memory else ""
            if ended.done() and ended.result() >= 0:
                why = ": the code ended it, as os._exit does"
            call.fail(
                RewardError(
                    f"reward {call.name}: its process ended {num_ends} times "
                    f"while it ran ({how}{why}); see {self._own.log_path}",
                    kind=RejectionKind.reward_process_died,
                    place=call.place,
                )
            )

    def _give_up(self, error: Exception) -> None:
        """No call gets a verdict any more, and every process ends."""
        self._broken = self._broken or error
        for call in self._calls:
            call.fail(self._broken)
        self._own.kill_all()
        for lanes in self._lanes.values():
            for _ in lanes.tasks:
                lanes.waiting.put_nowait(None)

    def _key_of(self, reward: RewardFunction) -> int:
        if id(reward) not in self._keys:
            self._references.append(written_reference(reward, self._sources))
            self._rewards.append(reward)
            self._keys[id(reward)] = len(self._references) - 1
        return self._keys[id(reward)]
