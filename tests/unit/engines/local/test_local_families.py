"""Every family gets its own log-probabilities beyond its limits, or is refused by name."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from unit.engines.families import FAMILIES, LIMIT, build

from areal_sc.config.schema import RolloutConfig
from areal_sc.engines.local.engine import LocalEngine
from areal_sc.engines.local.generator import SlotGenerator
from areal_sc.engines.local.model import LocalModel
from areal_sc.engines.local.slots import SlotRequest, SlotTable
from areal_sc.errors import ModelError

MAX_CONTEXT = 64
SLIDING = "layers of type sliding_attention"
OTHER_WAY = "does not use transformers' attention interface"
REFUSED = {
    "qwen2_sliding": SLIDING,
    "qwen3_next": "layers of type linear_attention",
    "mistral": "MistralAttention asks for sliding_window",
    "mixtral": "MixtralAttention asks for sliding_window",
    "gemma2": SLIDING,
    "gemma3": SLIDING,
    "phi3_longrope": "Phi3ForCausalLM has longrope rotary embeddings",
    "llama4": "layers of type chunked_attention",
    "gpt_neo": OTHER_WAY,
    "bloom": OTHER_WAY,
    "gpt_oss": SLIDING,
    "cohere2": SLIDING,
    "diffllama": "DiffLlamaForCausalLM: log-probabilities of embedded generation differ by ",
}


class Tokenizer:
    """As much of a tokenizer as the engine needs."""

    eos_token_id = None


def start(model: Any) -> LocalEngine:
    config = RolloutConfig(path="", max_context_tokens=MAX_CONTEXT, seed=0)
    tokenizer: Any = Tokenizer()
    return LocalEngine.from_model(model, tokenizer, config)


@pytest.mark.parametrize("family", [name for name in FAMILIES if name not in REFUSED])
def test_generation_beyond_every_limit(family: str) -> None:
    model = build(family)
    start(model)
    table = SlotTable(4, MAX_CONTEXT, 2 * LIMIT, seed=5)
    generator = SlotGenerator(LocalModel(copy.deepcopy(model)), table, MAX_CONTEXT)
    for index, length in enumerate((3, 3 * LIMIT, LIMIT + 1)):
        prompt = (np.arange(length) * 7 + index) % 64
        table.add(SlotRequest(index, prompt, length + 2 * LIMIT, "length"))
    finished = []
    while table.has_work:
        finished += generator.step()
    for request, completion in finished:
        ids = torch.tensor([[*request.prompt.tolist(), *completion.token_ids]])
        with torch.no_grad():
            logprobs = model(input_ids=ids, use_cache=False).logits[0, :-1].log_softmax(-1)
        expected = logprobs.gather(1, ids[0, 1:, None])[-2 * LIMIT :, 0]
        np.testing.assert_allclose(completion.logprobs, expected.numpy(), atol=1e-5)


@pytest.mark.parametrize(("family", "cause"), REFUSED.items(), ids=REFUSED)
def test_a_family_that_would_be_wrong_is_refused(family: str, cause: str) -> None:
    with pytest.raises(ModelError, match=cause):
        start(build(family))
