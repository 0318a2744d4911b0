"""A long conversation with a real engine whose weights change all the while."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any, cast

import aiohttp
import chat_templates as templates
import numpy as np
import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from areal_sc.agents.server import AgentServer
from areal_sc.agents.session import SessionSettings
from areal_sc.config.schema import GenerationConfig, RolloutConfig
from areal_sc.engines.base import Completion
from areal_sc.engines.local.engine import LocalEngine
from areal_sc.rewards.pool import RewardPool
from areal_sc.workers.episodes import WorkerEpisodeEngine
from areal_sc.workflows.chat import Conversation
from areal_sc.workflows.trajectory import Trajectory

Chat = tuple[
    Callable[[], Awaitable[None]], Callable[[str], None], Callable[[float], list[Trajectory]]
]
"""Asks for the next answer, adds a message of the user, gives the rows."""

NUM_TURNS, NUM_UPDATES, MAX_CONTEXT = 50, 20, 1536


class Recorded(WorkerEpisodeEngine):
    """Notes what is sent and what is sampled."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.calls: list[tuple[list[int], Completion]] = []

    async def generate(
        self, input_ids: Sequence[int], sampling: GenerationConfig | None = None, **options: Any
    ) -> Completion:
        completion = await super().generate(input_ids, sampling, **options)
        self.calls.append((list(input_ids), completion))
        return completion


def models(vocab_size: int) -> list[Qwen2ForCausalLM]:
    """The first weights, and those of each update."""
    config = Qwen2Config(
        vocab_size=vocab_size,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=MAX_CONTEXT,
        bos_token_id=None,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        made = [Qwen2ForCausalLM(config).eval()]
        for _ in range(NUM_UPDATES):
            made.append(copy.deepcopy(made[-1]))
            with torch.no_grad():
                for parameter in made[-1].parameters():
                    parameter.add_(torch.randn_like(parameter) * 0.03)
    return made


@asynccontextmanager
async def conversing(
    episode: WorkerEpisodeEngine, sampling: GenerationConfig, question: str
) -> AsyncIterator[Chat]:
    conversation = Conversation(question)

    async def answer() -> None:
        await episode.chat(conversation)

    def add(text: str) -> None:
        conversation.add({"role": "user", "content": text})

    yield answer, add, conversation.trajectories


@asynccontextmanager
async def calling(
    episode: WorkerEpisodeEngine, sampling: GenerationConfig, question: str
) -> AsyncIterator[Chat]:
    """An agent that sends the whole conversation over HTTP at each turn."""
    server = AgentServer("rollout/0")
    messages: list[Any] = [{"role": "user", "content": question}]
    async with (
        server.open(episode, sampling, SessionSettings()) as session,
        aiohttp.ClientSession(headers={"Authorization": f"Bearer {session.api_key}"}) as client,
    ):

        async def answer() -> None:
            url = f"{session.base_url}/chat/completions"
            async with client.post(url, json={"messages": messages}) as response:
                messages.append((await response.json())["choices"][0]["message"])

        def add(text: str) -> None:
            messages.append({"role": "user", "content": text})

        yield answer, add, session.trajectories
    await server.close()


@pytest.mark.parametrize("chatting", [conversing, calling])
async def test_fifty_turns_across_twenty_updates_train_what_was_sent_and_sampled(
    chatting: Any,
) -> None:
    tokenizer = templates.tokenizer_for(templates.QWEN)
    versions = models(len(tokenizer))
    end_of_turn = tokenizer.convert_tokens_to_ids("<|im_end|>")
    config = RolloutConfig(
        path="", max_context_tokens=MAX_CONTEXT, max_running_sequences=2, max_prefill_tokens=4096
    )
    engine = LocalEngine(config, (copy.deepcopy(versions[0]), tokenizer))
    sampling = GenerationConfig(
        max_new_tokens=4, stop_token_ids=[tokenizer.eos_token_id, end_of_turn]
    )
    episode = Recorded(engine, cast("RewardPool", None), "g", sampling, None)
    published = iter(range(1, NUM_UPDATES + 1))

    async def update() -> None:
        version = next(published)
        tensors: Any = list(versions[version].named_parameters())
        await engine.update_weights(version, lambda: asyncio.sleep(0, tensors))

    await engine.start()
    try:
        async with chatting(episode, sampling, "How is the weather?") as (answer, add, rows):
            for turn in range(NUM_TURNS):
                answered = asyncio.create_task(answer())
                last = (turn + 1) * NUM_UPDATES // NUM_TURNS
                for _ in range(last - turn * NUM_UPDATES // NUM_TURNS):
                    await update()
                await answered
                add(f"{turn}?")
            [row] = rows(1.0)
    finally:
        await engine.close()

    assert len(episode.calls) == NUM_TURNS
    trained = [place for place, is_trained in enumerate(row.loss_mask) if is_trained]
    expected = list[int]()
    for sent, completion in episode.calls:
        end = len(sent) + len(completion.token_ids)
        assert row.input_ids[:end] == [*sent, *completion.token_ids]
        assert row.behavior_logprobs[len(sent) : end] == completion.logprobs
        assert row.versions[len(sent) : end] == completion.versions
        expected += range(len(sent), end)
    assert trained == expected
    assert set(row.versions) == {-1, *range(NUM_UPDATES + 1)}

    ids = torch.tensor([row.input_ids])
    with torch.no_grad():
        forwards = [model(ids, use_cache=False).logits[0].double() for model in versions]
    for place in trained:
        logits = forwards[row.versions[place]][place - 1]
        reference = torch.log_softmax(logits, dim=-1)[row.input_ids[place]].item()
        np.testing.assert_allclose(row.behavior_logprobs[place], reference, atol=1e-4)
