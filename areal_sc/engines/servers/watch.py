"""Watches one server until it is lost: whether its silence is work, or the end.

waits for    the scheduler's answer to a question that is asked every `probe_interval_s`
unblocked by an answer, the end of the process, `suspect`, `fail`, or the clock

The question goes to the scheduler, which answers between two steps, also while it is paused. The
HTTP process alone proves nothing: it goes on answering for a scheduler that hangs.

A server that somebody else has started may be started again by them. So it is waited for, whether
it refuses connections or is silent, for as long as a start may take.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from areal_sc.config.server_settings import ServersConfig
from areal_sc.engines.servers.client import ServerClient
from areal_sc.engines.servers.process import (
    ProcessState,
    ServerProcess,
    read_process,
    session_members,
)
from areal_sc.errors import ArealError, RpcTimeout
from areal_sc.system.waiting import first_of

_MAX_REFUSALS = 2
"""Connections in a row that fail while the process lives: one may have been closing just then."""

_REFUSED_POLL_S = 0.25


@dataclass
class Activity:
    """What the processes of a server did since its last answer.

    Attributes:
        main: the HTTP process; None when the server runs on another machine.
        schedulers: those that compute.
    """

    main: int | None = None
    schedulers: Sequence[int] = ()
    _ticks_at_answer: dict[int, int] = field(default_factory=dict)
    _known: frozenset[int] = frozenset()
    _builder_ticks: dict[int, int] = field(default_factory=dict)
    _built_at: float = -math.inf

    def __post_init__(self) -> None:
        if self.main is not None:
            self._known = frozenset(session_members(self.main))

    def note_answer(self) -> None:
        """Counts from here."""
        self._ticks_at_answer = {pid: s.cpu_ticks for pid, s in _states(self.schedulers)}

    def ended(self) -> list[int]:
        return [pid for pid in self._all() if read_process(pid) is None]

    def stopped(self) -> list[int]:
        """Processes that a signal has stopped."""
        return [pid for pid, state in _states(self._all()) if state.is_stopped]

    def idle(self) -> list[int]:
        """Schedulers that have computed nothing since the answer."""
        before = self._ticks_at_answer
        return [pid for pid, state in _states(before) if state.cpu_ticks <= before[pid]]

    def is_building(self, within_s: float) -> bool:
        """Whether a process that the server has started since computes, as compilers do.

        The schedulers wait for it, without computing, also those of other ranks.

        Args: within_s: it may have done so lately; one compiler ends, and another begins.
        """
        if self.main is None:
            return False
        members = [pid for pid in session_members(self.main) if pid not in self._known]
        before, now = self._builder_ticks, time.monotonic()
        self._builder_ticks = {pid: state.cpu_ticks for pid, state in _states(members)}
        if any(ticks > before.get(pid, 0) for pid, ticks in self._builder_ticks.items()):
            self._built_at = now
        return now - self._built_at < within_s

    def _all(self) -> list[int]:
        return [] if self.main is None else [self.main, *self.schedulers]


def why_lost(
    silent_s: float, activity: Activity, servers: ServersConfig, *, is_updating: bool
) -> str | None:
    """Why a server is lost; None: it may answer yet.

    Args:
        silent_s: time since its scheduler's last answer.
        is_updating: it may be silent while it loads weights; that has a limit of its own, and a
            member of a collective operation waits without computing.
    """
    if gone := activity.ended():
        return f"dead: its process {gone[0]} has ended"
    is_elsewhere = activity.main is None
    if silent_s < (servers.start_timeout_s if is_elsewhere else servers.hung_after_s):
        return None
    silence = f"hung: it has not answered for {silent_s:.1f} s"
    if stopped := activity.stopped():
        return f"{silence}, and its process {stopped[0]} is stopped"
    if is_updating:
        return None
    if is_elsewhere:
        return silence
    if activity.is_building(servers.hung_after_s):
        built_s = servers.start_timeout_s
        return None if silent_s < built_s else f"{silence}, though it builds kernels"
    if idle := activity.idle():
        return f"{silence}, and its process {idle[0]} has computed nothing"
    if silent_s >= servers.busy_limit_s:
        return f"{silence}, though it computes"
    return None


class ServerWatch:
    """One life of a server.

    Args:
        process: the server's, when it is ours.
        on_refusal: called when it has refused a connection, or a question.
        on_answer: called when it has answered; asks it more, or raises as a question does.

    Attributes:
        is_updating: it loads weights.
    """

    def __init__(
        self,
        client: ServerClient,
        process: ServerProcess | None,
        servers: ServersConfig,
        on_refusal: Callable[[], None],
        on_answer: Callable[[], Awaitable[None]],
    ) -> None:
        self._client = client
        self._process = process
        self._activity = Activity(process.pid, process.schedulers) if process else Activity()
        self._servers = servers
        self._on_refusal = on_refusal
        self._on_answer = on_answer
        self._loop = asyncio.get_running_loop()
        self._failed: asyncio.Future[str] = self._loop.create_future()
        self._ask_now = asyncio.Event()
        self.is_updating = False
        self._note_answer()

    def fail(self, reason: str) -> None:
        """The server is given up: `run` returns."""
        if not self._failed.done():
            self._failed.set_result(reason)

    def set_updating(self, is_updating: bool) -> None:
        """While it loads weights it may be silent; its time starts anew when it has loaded them."""
        if self.is_updating and not is_updating:
            self._note_answer()
        self.is_updating = is_updating

    def suspect(self) -> None:
        """Asks the server at once."""
        self._ask_now.set()

    async def run(self) -> str:
        """Returns why the server is lost."""
        reasons = [self._ask_until_refused(), self._judge_until_hung()]
        if self._process is not None:
            reasons.append(_end_of(self._process))
        return await first_of(self._failed, *reasons)

    async def _ask_until_refused(self) -> str:
        num_refusals = 0
        while self._process is None or num_refusals < _MAX_REFUSALS:
            self._ask_now.clear()
            wait_s = self._servers.probe_interval_s
            try:
                with suppress(RpcTimeout):  # judged by its silence
                    await self._client.probe(timeout_s=self._servers.busy_limit_s)
                    await self._on_answer()
                    num_refusals = 0
                    self._note_answer()
            except ArealError as error:
                self._on_refusal()
                num_refusals += 1
                reason = f"it does not answer: {error}"
                wait_s = min(wait_s, _REFUSED_POLL_S)
            with suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await self._ask_now.wait()
        return reason

    async def _judge_until_hung(self) -> str:
        interval_s, reason = self._servers.probe_interval_s, None
        while reason is None:
            slept_at = self._loop.time()
            await asyncio.sleep(interval_s)
            late_s = self._loop.time() - slept_at - interval_s
            if late_s > interval_s:  # nobody was there to hear an answer
                self._answered_at += late_s
            silent_s = self._loop.time() - self._answered_at
            reason = why_lost(silent_s, self._activity, self._servers, is_updating=self.is_updating)
        return reason

    def _note_answer(self) -> None:
        self._answered_at = self._loop.time()
        self._activity.note_answer()


async def _end_of(process: ServerProcess) -> str:
    return f"its process ended with exit code {await process.wait()}"


def _states(pids: Iterable[int]) -> Iterator[tuple[int, ProcessState]]:
    found = ((pid, read_process(pid)) for pid in pids)
    return ((pid, state) for pid, state in found if state is not None)
