"""An engine that says what it is told to, and what must be trained of that."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import chat_templates as templates

from areal_sc.agents.calls import ModelAnswer, ModelCall
from areal_sc.agents.session import Session
from areal_sc.config.schema import GenerationConfig
from areal_sc.engines.base import PLAIN, Completion, GenerationEngine, OnTokens, RequestOptions
from areal_sc.engines.stop_strings import StopStrings
from areal_sc.rewards.pool import RewardPool
from areal_sc.workers.episodes import WorkerEpisodeEngine
from areal_sc.workflows.trajectory import Trajectory


@dataclass
class ScriptedEngine:
    """Answers with the texts that it is given, up to a stop string, and keeps what it was sent.

    Attributes:
        may_answer: cleared, it holds its answers back.
    """

    tokenizer: Any
    max_context_tokens: int = 10_000
    answers: list[list[int]] = field(default_factory=list)
    sent: list[list[int]] = field(default_factory=list)
    sampled: list[list[int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.processor = None
        self.end_token_ids = templates.end_token_ids(self.tokenizer)
        self.may_answer = asyncio.Event()
        self.may_answer.set()

    def will_say(self, *texts: str) -> None:
        self.answers += [self.tokenizer.encode(text, add_special_tokens=False) for text in texts]

    async def generate(
        self,
        input_ids: Sequence[int],
        sampling: GenerationConfig,
        options: RequestOptions = PLAIN,
        *,
        on_tokens: OnTokens | None = None,
    ) -> Completion:
        tokens, reason = self.answers.pop(0), "length"
        self.sent.append(list(input_ids))
        self.sampled.append([])
        number = len(self.sent)
        await asyncio.sleep(0)
        await self.may_answer.wait()
        if tokens and tokens[-1] in self.end_token_ids:
            reason = "stop"
        if sampling.stop:
            stops = StopStrings(self.tokenizer, sampling.stop)
            found = next((n for n, it in enumerate(tokens, 1) if stops.completes(it)), 0)
            tokens, reason = (tokens[:found], "stop") if found else (tokens, reason)
        self.sampled[number - 1] = tokens
        for token in tokens if on_tokens else ():
            await asyncio.sleep(0)
            on_tokens((token,))
        logprobs = [-number - n / 1000 for n in range(len(tokens))]
        versions = [number // 2] * len(tokens)
        return Completion(tokens, logprobs, versions, reason, 1.0, tuple(sampling.stop))

    @property
    def episode(self) -> WorkerEpisodeEngine:
        engine, pool = cast("GenerationEngine", self), cast("RewardPool", None)
        return WorkerEpisodeEngine(engine, pool, "g", GenerationConfig(), None)


def engine_for(template: str, **settings: Any) -> ScriptedEngine:
    return ScriptedEngine(templates.tokenizer_for(template), **settings)


async def answer_to(session: Session, call: ModelCall) -> ModelAnswer:
    """What a client in this process gets."""
    begun = session.begin(call)
    with begun.client():
        answer = await begun.answer()
    begun.note_delivered()
    return answer


def check_trained(
    engine: ScriptedEngine, rows: Sequence[Trajectory], calls: Collection[int] | None = None
) -> None:
    """Each sampled token is trained once, behind the very tokens that were sent before it.

    Args:
        calls: numbers of those whose answers are trained, from 1 on; None: all.
    """
    trained = [
        (list(row.input_ids[:place]), row.input_ids[place], *columns)
        for row in rows
        for place, (mask, *columns) in enumerate(
            zip(row.loss_mask, row.behavior_logprobs, row.versions, strict=True)
        )
        if mask
    ]
    expected = [
        (sent + sampled[:n], token, -number - n / 1000, number // 2)
        for number, (sent, sampled) in enumerate(zip(engine.sent, engine.sampled, strict=True), 1)
        for n, token in enumerate(sampled)
        if calls is None or number in calls
    ]
    assert sorted(trained) == sorted(expected)
