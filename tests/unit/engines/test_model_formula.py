"""Sizes by formula, against transformers: numbers of parameters, and what layers really keep."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers as hf

from areal_sc.engines.fsdp.packed_model import PackedModel
from areal_sc.sizing.model_formula import LayerSizes, numbers_of_parameters

SIZES = {
    "vocab_size": 60,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "intermediate_size": 160,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "pad_token_id": 0,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
FAMILIES = [
    hf.LlamaConfig(**SIZES),
    hf.LlamaConfig(**SIZES, attention_bias=True),
    hf.MistralConfig(**SIZES),
    hf.Phi3Config(**SIZES),
    hf.Qwen2Config(**SIZES, tie_word_embeddings=True),
    hf.Qwen2Config(**SIZES),
    hf.Qwen3Config(**SIZES),
    hf.Qwen3MoeConfig(**SIZES, **EXPERTS),
    hf.MixtralConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2),
]
NUM_TOKENS = 64


@pytest.mark.parametrize("config", FAMILIES, ids=lambda it: it.model_type)
def test_parameters_are_those_of_the_model(config: Any) -> None:
    with torch.device("meta"):
        model = hf.AutoModelForCausalLM.from_config(config)
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
    in_layer = sum(size for name, size in sizes.items() if ".layers.1." in name)
    in_layers = config.num_hidden_layers * in_layer
    found = numbers_of_parameters(config.to_dict())
    assert found == {
        "num_parameters": sum(sizes.values()),
        "num_expert_parameters": sum(n for name, n in sizes.items() if ".experts." in name),
        "num_layer_parameters": in_layer,
        "num_other_parameters": sum(sizes.values()) - in_layers,
        "num_vocabulary_parameters": config.vocab_size * config.hidden_size,
    }


def test_an_unknown_family_has_no_formula() -> None:
    assert numbers_of_parameters({**FAMILIES[0].to_dict(), "model_type": "another"}) == {}
    assert numbers_of_parameters({"model_type": "llama"}) == {}
    assert LayerSizes.of({"hidden_size": 4}) is None


@pytest.mark.parametrize(
    "kind", [hf.LlamaConfig, hf.Qwen2Config, hf.Qwen3Config], ids=lambda it: it.model_type
)
def test_activations_are_what_a_layer_keeps(kind: Any) -> None:
    """Counted in bfloat16 by the storages that autograd saves, parameters apart."""

    def kept(num_layers: int) -> int:
        config = kind(**{**SIZES, "num_hidden_layers": num_layers})
        model = PackedModel(hf.AutoModelForCausalLM.from_config(config).bfloat16(), chunk_tokens=8)
        own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
        saved: dict[int, torch.Tensor] = {}

        def keep(tensor: torch.Tensor) -> torch.Tensor:
            saved[tensor.untyped_storage().data_ptr()] = tensor
            return tensor

        layout = model.layout([NUM_TOKENS], torch.device("cpu"))
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            model.hidden_states(torch.arange(NUM_TOKENS) % 60, layout)
        return sum(t.untyped_storage().nbytes() for at, t in saved.items() if at not in own)

    layer = LayerSizes.of(kind(**SIZES).to_dict())
    assert layer is not None
    assert layer.activation_values * 2 * NUM_TOKENS == pytest.approx(kept(3) - kept(2), rel=0.05)


def test_scores_are_counted_where_they_are_stored() -> None:
    plain = LayerSizes.of(FAMILIES[0].to_dict())
    assert plain is not None
    assert plain.score_bytes(100) == 0
    for config in (hf.Gemma2Config(), hf.GptOssConfig()):
        sizes = LayerSizes.of(config.to_dict())
        assert sizes is not None
        assert sizes.score_bytes(100) == 16 * config.num_attention_heads * 100**2
