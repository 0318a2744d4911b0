"""What an evaluated episode is remembered by: its completions, and the vote of its reward."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, cast

import pytest

from areal_sc.config.schema import GenerationConfig
from areal_sc.engines.base import Completion, GenerationEngine
from areal_sc.errors import PromptTooLong, RewardError, WorkflowError
from areal_sc.rewards.base import Reward
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


def told(prompt: dict[str, Any], completion: str) -> float:
    """Has a vote, which its process tells."""
    return 0.0


told.vote = str.upper  # type: ignore[attr-defined]


class Pool:
    """Answers as it is told."""

    def __init__(self, vote: str | Exception) -> None:
        self.told = vote
        self.asked: list[Any] = []

    async def vote(self, reward: Any, completion: str) -> str:
        self.asked.append((reward, completion))
        if isinstance(self.told, Exception):
            raise self.told
        return self.told


async def test_a_vote_is_asked_of_the_pool() -> None:
    pool = Pool("A")
    rewards: Reward = {"length": len, "told": (told, 0.5)}
    assert await EvaluatedEpisode(scored=(rewards, "a")).vote(cast("RewardPool", pool)) == "A"
    assert pool.asked == [(told, "a")]
    assert await EvaluatedEpisode(scored=(len, "a")).vote(cast("RewardPool", pool)) is None
    assert len(pool.asked) == 1


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (
            lambda n: RewardError(f"no {n}", error_type="KeyError", place="a.py:7"),
            "reward_error: KeyError at a.py:7",
        ),
        (lambda _: WorkflowError("not importable"), "not importable"),
    ],
)
async def test_without_a_vote_an_answer_has_none_and_each_cause_is_told_once(
    make: Callable[[int], Exception], why: str, caplog: pytest.LogCaptureFixture
) -> None:
    for number in range(2):
        pool = cast("RewardPool", Pool(make(number)))
        assert await EvaluatedEpisode(scored=(told, "a")).vote(pool) is None
    assert caplog.messages == [f"such answers have no vote: {why}"]
