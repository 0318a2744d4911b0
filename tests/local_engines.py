"""Embedded engines that run, and weights for them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from typing import Any

from builders import NumberTokenizer
from transformers import PreTrainedModel

from areal_sc.config.schema import GenerationConfig, RolloutConfig
from areal_sc.engines.local.engine import LocalEngine
from areal_sc.weights.group import NamedTensor

TensorSource = Callable[[], Awaitable[Iterable[NamedTensor]]]

TIMEOUT_S = 60.0
MAX_CONTEXT = 4096
ENDLESS = GenerationConfig(max_new_tokens=4000)  # some seconds: a test ends it


def at_hand(named_tensors: Iterable[NamedTensor]) -> TensorSource:
    """A source of weights that are there already."""
    tensors = list(named_tensors)

    async def source() -> list[NamedTensor]:
        return tensors

    return source


@asynccontextmanager
async def running(
    model: PreTrainedModel, eos_token_id: int | None = None, **settings: Any
) -> AsyncIterator[LocalEngine]:
    config = RolloutConfig(
        **{
            "path": "",
            "max_running_sequences": 4,
            "max_context_tokens": MAX_CONTEXT,
            "max_prefill_tokens": 64,
            "seed": 0,
            **settings,
        }
    )
    engine = LocalEngine(config, (model, NumberTokenizer(eos_token_id)))
    await engine.start()
    try:
        async with asyncio.timeout(TIMEOUT_S):
            yield engine
    finally:
        await engine.close()
