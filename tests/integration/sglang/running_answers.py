"""Answers that are known to run on their servers, whatever the kind."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from integration.sglang.policies import Answers, Generating

NUM_TRIES = 5


def generating_on(num_running: Callable[[], Awaitable[float]]) -> Generating:
    """Starts answers, and waits until the servers themselves run them, past their first tokens.

    On a busy machine answers may end before they were seen: then they are started again.

    Args:
        num_running: answers that the servers say they run.
    """

    async def wait(start: Callable[[], Answers]) -> Answers:
        for _ in range(NUM_TRIES):
            tasks = start()
            while not all(task.done() for task in tasks):
                if await num_running() >= len(tasks):
                    return tasks
                await asyncio.sleep(0.02)
            await asyncio.gather(*tasks)
        raise AssertionError(f"answers ended {NUM_TRIES} times before they were seen running")

    return wait
