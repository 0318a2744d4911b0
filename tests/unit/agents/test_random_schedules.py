"""Agents that branch, change their past, give up, come back and lose answers, at random."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import chat_templates as templates
import pytest
from scripted_engine import ScriptedEngine, check_trained

from areal_sc.agents.calls import CallRefused, ModelCall
from areal_sc.agents.session import Session, SessionSettings
from areal_sc.agents.session_call import SessionCall
from areal_sc.config.schema import GenerationConfig
from areal_sc.engines.base import Completion
from areal_sc.workflows.chat_format import Message

NUM_SCHEDULES = 60
SAMPLING = GenerationConfig(max_new_tokens=64)
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}


class Slow(ScriptedEngine):
    """Takes a random number of the loop's turns for an answer."""

    rng: random.Random
    num_asked: int = 0

    async def generate(
        self, input_ids: Sequence[int], sampling: GenerationConfig, **options: Any
    ) -> Completion:
        self.num_asked += 1
        number = self.num_asked
        self.will_say(f"<think>\nhm {number}\n</think>\n\nanswer {number}<|im_end|>")
        told = super().generate(input_ids, sampling, **options)
        task = asyncio.ensure_future(told)
        for _ in range(self.rng.randrange(12)):
            await asyncio.sleep(0)
        return await task


class Clients:
    """Several agents of one session, and the answers that they have got."""

    def __init__(self, session: Session, rng: random.Random) -> None:
        self.session = session
        self.rng = rng
        self.pasts: list[list[Message]] = [[{"role": "user", "content": "hi there"}]]
        self.got = set[int]()  # numbers of the calls

    async def one(self, key: str) -> None:
        """A call, with a client that may give up, and come back."""
        rng = self.rng
        past = list(rng.choice(self.pasts))
        answered = [n for n, it in enumerate(past) if it["role"] == "assistant"]
        if answered and rng.random() < 0.1:  # it changes what was said
            place = rng.choice(answered)
            past[place] = {**past[place], "content": "something else"}
        if answered and rng.random() < 0.1:  # it makes its history shorter
            past = [{"role": "user", "content": f"so far: {past[-1]['content']}"}]
        call = ModelCall(tuple(past), (TOOL,) if rng.random() < 0.2 else ())
        with suppress(CallRefused):  # once the session has ended
            while not await self.tried(call, past, key):
                if rng.random() < 0.4:
                    return  # it gives up for good

    async def tried(self, call: ModelCall, past: list[Message], key: str) -> bool:
        """Whether the client has the answer."""
        begun = self.session.begin(call, key=key)
        with begun.client():
            waiting = asyncio.ensure_future(begun.answer())
            for _ in range(self.rng.randrange(30)):
                await asyncio.sleep(0)
            if not waiting.done() and self.rng.random() < 0.3:
                waiting.cancel()
                return False
            answer = await waiting
            if self.rng.random() < 0.2:
                self.loses(begun)
                return False
            with begun.delivering():
                pass
        self.got.add(int(answer.turn.content.split()[-1]))
        message = dict(answer.turn.message)
        if self.rng.random() < 0.5:
            message.pop("reasoning_content", None)
        question = f"and {self.rng.randrange(3)}?"
        self.pasts.append([*past, message, {"role": "user", "content": question}])
        return True

    def loses(self, begun: SessionCall) -> None:
        with pytest.raises(ConnectionError), begun.delivering():
            raise ConnectionError


@pytest.mark.parametrize("template", ["QWEN", "QWEN_THINKING"])
async def test_every_answer_that_was_delivered_is_trained_once(template: str) -> None:
    tokenizer = templates.tokenizer_for(getattr(templates, template))
    num_lost = num_rows = num_retries = 0
    for seed in range(NUM_SCHEDULES):
        rng = random.Random(seed)
        engine = Slow(tokenizer)
        engine.rng = rng
        session = Session(engine, SAMPLING, SessionSettings())
        clients = Clients(session, rng)
        for turn in range(4):
            calls = [clients.one(f"{turn} {n}") for n in range(rng.randrange(1, 5))]
            if turn == 3 and rng.random() < 0.3:
                asyncio.get_running_loop().call_soon(session.end)
            await asyncio.gather(*calls)
        session.end()
        await asyncio.sleep(0)
        assert not [it for it in asyncio.all_tasks() if it.get_name().startswith("call ")]
        rows = session.trajectories(1.0)
        check_trained(engine, rows, clients.got)
        num_lost += len(engine.sent) - len(clients.got)
        num_retries += session.counts["retries"]
        num_rows += len(rows) > 1
    assert min(num_lost, num_retries, num_rows) > NUM_SCHEDULES // 4
