"""What a controller's concurrent work shares: one signal of change, and the first failure.

waits for    `wait` returns at the next `notify`, whatever changed; the caller looks again
unblocked by every change of the controller's state, and every failure of background work
bounded by   `limit_s`; what is waited for is in the message
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any

from areal_sc.errors import ArealError, WaitTimeout

logger = logging.getLogger(__name__)


class Background:
    """Guards background work; its first exception is raised by whoever waits next.

    Args:
        limit_s: without any change for so long a wait ends with WaitTimeout.
        describe: state of the controller, for that error's message.
    """

    def __init__(self, limit_s: float, describe: Callable[[], str]) -> None:
        self._limit_s = limit_s
        self._describe = describe
        self._changed = asyncio.Event()
        self._failure: Exception | None = None

    @property
    def has_failed(self) -> bool:
        return self._failure is not None

    def notify(self) -> None:
        """Something changed: everyone who waits looks again."""
        self._changed.set()
        self._changed = asyncio.Event()

    def fail(self, error: Exception) -> None:
        """Every later `raise_failure` raises the first error given here."""
        if self._failure is None:
            self._failure = error
        self.notify()

    def raise_failure(self) -> None:
        if self._failure:
            raise self._failure

    async def wait(self, what: str) -> None:
        """Waits for the next change.

        Raises: WaitTimeout: there was none; names `what`.
        """
        try:
            async with asyncio.timeout(self._limit_s):
                await self._changed.wait()
        except TimeoutError:
            raise WaitTimeout(
                f"waited {self._limit_s:g} s without any change for {what}; {self._describe()}"
            ) from None

    async def wait_until(self, is_done: Callable[[], bool], what: str) -> None:
        """Waits until the condition holds; a failure of background work ends the wait."""
        self.raise_failure()
        while not is_done():
            await self.wait(what)
            self.raise_failure()

    async def guard(self, work: Coroutine[Any, Any, None]) -> None:
        """Runs background work; its exception becomes the failure."""
        try:
            await work
        except ArealError as error:
            self.fail(error)
        except Exception as error:  # the task's end: nobody awaits it, so whoever waits is told
            logger.exception("background work failed")
            self.fail(error)
        finally:
            self.notify()
