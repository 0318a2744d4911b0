"""Tiny models of several families, and the reference that generation is compared with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from areal_sc.engines.base import Completion

_FAMILIES: dict[str, tuple[Any, Any]] = {
    "qwen2": (Qwen2ForCausalLM, Qwen2Config),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config),
    "llama": (LlamaForCausalLM, LlamaConfig),
}


def random_model(family: str = "qwen2", seed: int = 0, **settings: Any) -> PreTrainedModel:
    """A model of a family with random weights that make its distributions far from uniform."""
    model_class, config_class = _FAMILIES[family]
    config = config_class(
        **{
            "vocab_size": 40,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 128,
            "bos_token_id": None,
            "eos_token_id": None,
            **settings,
        }
    )
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        model = model_class(config).eval()
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.15)
    return model


def reference_logprobs(
    models: Mapping[int, PreTrainedModel],
    prompt: Sequence[int],
    completion: Completion,
    temperature: float,
) -> list[float]:
    """float64 log-probabilities of a completion by plain forward passes, one per version."""
    ids = torch.tensor([[*prompt, *completion.token_ids]])
    with torch.no_grad():
        by_version = {
            version: models[version](ids, use_cache=False).logits[0].double()
            for version in set(completion.versions)
        }
    found = []
    for i, (token, version) in enumerate(
        zip(completion.token_ids, completion.versions, strict=True)
    ):
        logits = by_version[version][len(prompt) - 1 + i] / (temperature or 1.0)
        found.append(torch.log_softmax(logits, dim=-1)[token].item())
    return found
