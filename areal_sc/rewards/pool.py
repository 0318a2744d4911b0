"""Rewards: async ones on the event loop, the others in processes that can be killed.

A thread cannot be stopped, so a reward that hangs, in a regular expression for example, would
hang its worker. Here it runs in a process of its own, and passing its time limit means SIGKILL.

    consumes     calls of `score`
    waits for    a process that is free; then its reply, its end, or the time limit of the call
    unblocked by another call's end, the reward process, or the event loop's clock

Each process runs one call at a time, so a call's time starts when it begins to execute. A process
that ends by itself is an infrastructure failure: its call runs once more on a fresh process. Only
a call that ends two processes is blamed on the reward. Signals that others send, as people, systemd
and clusters do, are no work of the reward: they count only when call after call is hit.

A reward may declare what it means by taking long (`RewardDeclaration`): then the limit is one of
CPU seconds, and passing it is a verdict.
"""

from __future__ import annotations

import asyncio
import math
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final

from areal_sc.errors import NeverWorks, RewardError, WorkflowError
from areal_sc.rejection import RejectionKind
from areal_sc.rewards.base import (
    DECLARATION,
    VOTE,
    Narrowing,
    RewardDeclaration,
    RewardFunction,
    RunCode,
    Score,
    is_async,
    name_of,
    place_of_definition,
)
from areal_sc.rewards.on_loop import score_on_loop, took_too_long
from areal_sc.sources.reference import written_reference
from areal_sc.sources.values import UnfitValue, to_wire
from areal_sc.system.deaths import Deaths
from areal_sc.system.fork_server import ForkServer
from areal_sc.system.own_processes import (
    LOAD_TIMEOUT_S,
    OwnProcess,
    OwnProcesses,
    TooMuchCpu,
)
from areal_sc.system.process import num_killed_for_memory

_USE: Final = "rewards"
_MAX_ENDS: Final = 1
_MAX_KILLS: Final = 4
"""Kills from outside that a call survives: a reward may send itself such a signal, and must end."""
_SIGNALS_OF_OTHERS: Final = frozenset(
    {signal.SIGKILL, signal.SIGTERM, signal.SIGHUP, signal.SIGINT}
)


@dataclass
class _RewardCall:
    """One call of a sync reward, or of a vote.

    Attributes:
        kind, argument: as the process gets them.
        ends, kills: of processes while it ran, by themselves or by others.
    """

    key: int
    name: str
    reward: RewardFunction
    kind: str
    argument: Any
    declaration: RewardDeclaration | None
    ends: Deaths = field(default_factory=lambda: Deaths(_MAX_ENDS))
    kills: Deaths = field(default_factory=lambda: Deaths(_MAX_KILLS))

    @property
    def place(self) -> str:
        """Where the reward is defined, for a RewardError."""
        return place_of_definition(self.reward)


class RewardPool:
    """Scores completions with the user's functions.

    Args:
        processes: forks the reward processes.
        num_processes: how many sync rewards of one narrowing run at a time.
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
        self._make_processes = partial(
            OwnProcesses,
            processes,
            role="reward",
            num_processes=num_processes,
            log_path=log_path,
            sources=sources,
            isolation=isolation,
            hides=hides,
        )
        self._log_path = log_path
        self._timeout_s = timeout_s
        self._sources = sources
        self.run_code = run_code
        self.num_late = 0
        self._references: list[dict[str, Any]] = []
        self._keys: dict[int, int] = {}
        self._rewards: list[RewardFunction] = []  # keeps the ids in `_keys` from being reused
        self._processes: dict[Narrowing, OwnProcesses] = {}

    @property
    def isolation(self) -> str | None:
        """What keeps the processes apart, "": nothing does; None: there was none yet."""
        return next((own.isolation for own in self._processes.values()), None)

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
        declaration: RewardDeclaration | None = getattr(reward, DECLARATION, None)
        limits = declaration if kind == "call" else None  # its number stands for no vote
        call = _RewardCall(self._key_of(reward), name, reward, kind, argument, limits)
        narrowing = declaration.narrowing if declaration else Narrowing()
        if narrowing not in self._processes:
            self._processes[narrowing] = self._make_processes()
        own = self._processes[narrowing]
        while True:
            process = await own.lend(_USE, lambda: own.start(narrowing._asdict()))
            try:
                return await self._attempt(own, process, call)
            except ConnectionError:
                lacked_memory = num_killed_for_memory() > process.killed_before
                await own.end(process)
            finally:
                await own.take_back(_USE, process)
            await self._mourn(process, call, lacked_memory)

    async def close(self) -> None:
        """Kills all processes; calls that still run end with WorkerLost. Bounded."""
        for own in self._processes.values():
            await own.close()

    async def _attempt(self, own: OwnProcesses, process: OwnProcess, call: _RewardCall) -> Any:
        """Runs a call. Raises: ConnectionError: the process has ended; else as `score`."""
        if call.key not in process.loaded:
            try:
                reference = self._references[call.key]
                told = await process.ask("load", call.key, reference, limit_s=LOAD_TIMEOUT_S)
            except TimeoutError:
                what = "importing its module "
                raise took_too_long(call.name, LOAD_TIMEOUT_S, what, place=call.place) from None
            if told[0] == "failed":
                what, details = told[1:]
                place = details.get("place") or call.place
                where = "" if place in what else f" at {place}"
                raise NeverWorks(
                    f"reward {call.name} cannot be loaded in its process: {what}{where}"
                )
            process.loaded.add(call.key)
        return await self._limited(own, process, call)

    async def _limited(self, own: OwnProcesses, process: OwnProcess, call: _RewardCall) -> Any:
        """Runs a call of a loaded reward under its limits.

        A declared limit counts CPU seconds, because on a busy machine anything takes long.
        """
        declared, cpu_limit_s = call.declaration, math.inf
        if declared is not None and declared.late_after_s is not None:
            cpu_limit_s = min(declared.late_after_s, self._timeout_s / 2)
        try:
            kind, *rest = await process.ask(
                call.kind,
                call.key,
                call.argument,
                limit_s=self._timeout_s,
                cpu_limit_s=cpu_limit_s,
            )
        except TimeoutError as error:
            if declared is not None and isinstance(error, TooMuchCpu):
                self.num_late += 1
                return declared.late_reward
            stacks = await own.stacks(process)
            raise took_too_long(
                call.name, self._timeout_s, place=call.place, frames=stacks
            ) from None
        if kind == "failed":
            what, details = rest
            raise RewardError(f"reward {call.name}: {what}", **{"place": call.place, **details})
        return rest[0]

    async def _mourn(self, process: OwnProcess, call: _RewardCall, lacked_memory: bool) -> None:
        """A process has ended that the pool did not end; its second call is to blame.

        Args: lacked_memory: meanwhile the kernel has killed processes for lack of memory.
        Raises: RewardError: this call is to blame.
        """
        how, ended = process.child.how, process.child.ended
        is_killed = ended.done() and -ended.result() in _SIGNALS_OF_OTHERS and not lacked_memory
        pause_s = (call.kills if is_killed else call.ends).note_death()
        num_ends = call.ends.number + call.kills.number
        if pause_s is not None:
            await asyncio.sleep(pause_s)
        else:
            why = "; the kernel killed processes for lack of memory" if lacked_memory else ""
            if ended.done() and ended.result() >= 0:
                why = ": the code ended it, as os._exit does"
            raise RewardError(
                f"reward {call.name}: its process ended {num_ends} times "
                f"while it ran ({how}{why}); see {self._log_path}",
                kind=RejectionKind.reward_process_died,
                place=call.place,
            )

    def _key_of(self, reward: RewardFunction) -> int:
        if id(reward) not in self._keys:
            self._references.append(written_reference(reward, self._sources))
            self._rewards.append(reward)
            self._keys[id(reward)] = len(self._references) - 1
        return self._keys[id(reward)]
