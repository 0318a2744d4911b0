"""Sampled tokens on their way to the caller who waits for the rest of the answer. No torch."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from areal_sc.engines.base import Completion, OnTokens


async def hand_over(
    on_tokens: OnTokens, sample: Callable[[OnTokens], Coroutine[Any, Any, Completion]]
) -> Completion:
    """Samples an answer, and calls `on_tokens` with its tokens in the caller's own task.

    So the callback may raise, or cancel that task; the answer is given up then.

    Args:
        sample: is given a function that takes new tokens on the event loop, and never raises.
    """
    untold: list[int] = []
    has_news = asyncio.Event()

    def take(token_ids: Sequence[int]) -> None:
        untold.extend(token_ids)
        has_news.set()

    answer = asyncio.create_task(sample(take))
    answer.add_done_callback(lambda _: has_news.set())
    try:
        while untold or not answer.done():
            await has_news.wait()
            has_news.clear()
            if untold:
                token_ids = untold.copy()
                untold.clear()
                on_tokens(token_ids)
        return await answer
    finally:
        answer.cancel()
        await asyncio.gather(answer, return_exceptions=True)
