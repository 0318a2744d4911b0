"""What an evaluated episode is remembered by: its completions, and the vote of its reward."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from typing import Any, cast

import pytest

from areal_sc.config.schema import GenerationConfig
from areal_sc.engines.base import Completion, GenerationEngine
from areal_sc.errors import PromptTooLong
from areal_sc.rewards.pool import RewardPool
from areal_sc.workers.episodes import WorkerEpisodeEngine
from areal_sc.workers.evaluated import EvaluatedEpisode, evaluated_text


class Numbers:
    """A tokenizer."""

    def decode(self, tokens: Sequence[int], **_: Any) -> str:
        return " ".join(map(str, tokens))


class LaterFirst:
    """Answers a prompt with its token once the next one is answered; the last one fails."""

    tokenizer = Numbers()
    max_context_tokens = 99
    end_token_ids = ()

    def __init__(self) -> None:
        self.ended = [asyncio.Event() for _ in range(4)]

    async def generate(self, input_ids: Sequence[int], *_: Any, **__: Any) -> Completion:
        (number,) = input_ids
        if number == 3:
            self.ended[3].set()
            raise PromptTooLong("too long")
        await self.ended[number + 1].wait()
        self.ended[number].set()
        return Completion([number], [0.0], [0], "stop", 1.0)


async def test_completions_stand_in_the_order_in_which_they_were_asked_for() -> None:
    seen, model = EvaluatedEpisode(), cast("GenerationEngine", LaterFirst())
    pool = cast("RewardPool", None)
    engine = WorkerEpisodeEngine(model, pool, "g", GenerationConfig(), seen)
    asked = (engine.generate([number]) for number in range(4))
    *_, failed = await asyncio.gather(*asked, return_exceptions=True)
    assert isinstance(failed, PromptTooLong)
    text = evaluated_text(seen, cast("Any", Numbers()))
    assert [it.token_ids for it in text.completions] == [[0], [1], [2]]
    assert (text.prompt, text.answer) == ("0", "0 1 2")


class Reward:
    """Votes as it is told."""

    def __init__(self, vote: Callable[[str], Any]) -> None:
        self.vote = vote

    def __call__(self, prompt: dict[str, Any], completion: str) -> float:
        return 0.0


def no_vote(completion: str) -> str:
    raise SystemExit(completion)


@pytest.mark.parametrize(
    ("vote", "expected", "warning"),
    [
        (str.upper, "A", ""),
        (len, "1", ""),
        (lambda _: None, None, ""),
        (no_vote, None, "raised SystemExit at test_evaluated.py"),
    ],
)
async def test_a_vote_is_the_users_code(
    vote: Callable[[str], Any],
    expected: str | None,
    warning: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    for _ in range(2):
        assert await EvaluatedEpisode(scored=(Reward(vote), "a")).vote(60.0) == expected
    assert len(caplog.messages) == bool(warning)
    assert warning in "".join(caplog.messages)


async def test_a_slow_vote_is_none(caplog: pytest.LogCaptureFixture) -> None:
    gate = threading.Event()
    try:
        seen = EvaluatedEpisode(scored=(Reward(lambda _: gate.wait()), "a"))
        assert await seen.vote(0.05) is None
    finally:
        gate.set()
    assert "took longer than 0.05 s" in caplog.text
