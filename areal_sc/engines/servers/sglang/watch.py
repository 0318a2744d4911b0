"""Watches one server until it has to be replaced.

consumes     nothing
waits for    the scheduler's answer to a question that is asked every `probe_interval_s`
unblocked by an answer, the end of the process, `suspect`, `fail`, or the clock
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

from areal_sc.engines.servers.sglang.client import SGLangClient
from areal_sc.engines.servers.sglang.liveness import Activity, Health, Limits, judge
from areal_sc.errors import ArealError, RpcTimeout

_MAX_REFUSALS = 2
"""Connections in a row that fail while the process lives: one may have been closing just then."""

_REFUSED_POLL_S = 0.25


class Watch:
    """One life of a server.

    Args:
        process_end: waits for the end of its process, when it is ours.
        on_health: told what is known after each look.
        on_cleared: called when a suspected server has answered.

    """

    def __init__(
        self,
        client: SGLangClient,
        activity: Activity,
        limits: Limits,
        *,
        probe_interval_s: float,
        process_end: Callable[[], Awaitable[int]] | None,
        on_health: Callable[[Health, str], None],
        on_cleared: Callable[[], None],
    ) -> None:
        self._is_updating = False
        self._client = client
        self._activity = activity
        self._limits = limits
        self._probe_interval_s = probe_interval_s
        self._process_end = process_end
        self._on_health = on_health
        self._on_cleared = on_cleared
        self._loop = asyncio.get_running_loop()
        self._failed: asyncio.Future[str] = self._loop.create_future()
        self._is_suspected = False
        self._ask_now = asyncio.Event()
        self._answered_at = self._loop.time()
        activity.note_answer()

    def fail(self, reason: str) -> None:
        """The server is given up: `run` returns."""
        if not self._failed.done():
            self._failed.set_result(reason)

    def set_updating(self, is_updating: bool) -> None:
        """While it loads weights it may be silent; its time starts anew when it has loaded them."""
        if self._is_updating and not is_updating:
            self._note_answer()
        self._is_updating = is_updating

    def suspect(self) -> None:
        """Asks the server at once."""
        self._is_suspected = True
        self._ask_now.set()

    async def run(self) -> str:
        """Returns why the server has to be replaced."""
        steps = [self._ask_repeatedly(), self._judge_repeatedly()]
        if self._process_end is not None:
            steps.append(self._await_end(self._process_end))
        tasks = [asyncio.create_task(step) for step in steps]
        try:
            ends: list[asyncio.Future[Any]] = [self._failed, *tasks]
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            for task in tasks:
                if task.done():
                    task.result()
            return await self._failed
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _await_end(self, process_end: Callable[[], Awaitable[int]]) -> None:
        self.fail(f"its process ended with exit code {await process_end()}")

    async def _ask_repeatedly(self) -> None:
        num_refusals = 0
        while num_refusals < _MAX_REFUSALS:
            self._ask_now.clear()
            wait_s = self._probe_interval_s
            try:
                await self._client.server_info(timeout_s=self._limits.busy_limit_s)
            except RpcTimeout:
                pass  # judged by its silence
            except ArealError as error:
                num_refusals += 1
                reason = f"it does not answer: {error}"
                wait_s = min(wait_s, _REFUSED_POLL_S)
            else:
                num_refusals = 0
                self._note_answer()
            with suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await self._ask_now.wait()
        self.fail(reason)

    async def _judge_repeatedly(self) -> None:
        interval_s = self._probe_interval_s
        while True:
            slept_at = self._loop.time()
            await asyncio.sleep(interval_s)
            late_s = self._loop.time() - slept_at - interval_s
            if late_s > interval_s:  # nobody was there to hear an answer
                self._answered_at += late_s
            silent_s = self._loop.time() - self._answered_at
            health, why = judge(
                silent_s, self._activity, self._limits, is_updating=self._is_updating
            )
            self._on_health(health, why)
            if health in (Health.dead, Health.hung):
                self.fail(f"{health}: {why}")

    def _note_answer(self) -> None:
        self._answered_at = self._loop.time()
        self._activity.note_answer()
        if self._is_suspected:
            self._is_suspected = False
            self._on_cleared()
