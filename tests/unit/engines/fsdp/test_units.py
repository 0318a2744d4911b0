"""Which models FSDP cuts into units, and which would be trained wrongly."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import transformers as hf
from torch import nn
from unit.engines.families import SIZES

from areal_sc.engines.fsdp.model import decoder_layers
from areal_sc.engines.fsdp.units import check_units
from areal_sc.errors import ModelError


def build() -> Any:
    return hf.AutoModelForCausalLM.from_config(hf.Qwen2Config(**SIZES, tie_word_embeddings=True))


def test_what_is_tied_outside_of_layers_or_within_one_is_trained(
    caplog: pytest.LogCaptureFixture,
) -> None:
    causal_lm = build()
    layer = causal_lm.model.layers[0]
    layer.input_layernorm.weight = layer.post_attention_layernorm.weight
    causal_lm.other_name = causal_lm.model.layers
    check_units(causal_lm, decoder_layers(causal_lm))
    assert not caplog.records


@pytest.mark.parametrize("other", ["model.layers.1.input_layernorm", "model.norm"])
def test_what_is_tied_across_layers_is_refused(other: str) -> None:
    causal_lm = build()
    first = causal_lm.model.layers[0].input_layernorm
    causal_lm.get_submodule(other).weight = first.weight
    names = rf"layers\.0\.input_layernorm\.weight and {other}\.weight"
    with pytest.raises(ModelError, match=f"{names}: .*data=1, .*cpu_offload=false"):
        check_units(causal_lm, decoder_layers(causal_lm))


def test_a_module_that_two_layers_share_is_refused() -> None:
    causal_lm = build()
    causal_lm.model.layers[1].mlp = causal_lm.model.layers[0].mlp
    with pytest.raises(ModelError, match=r"layers\.0\.mlp\.\w+\.weight and model\.layers\.1\.mlp"):
        check_units(causal_lm, decoder_layers(causal_lm))


def test_a_model_that_does_not_name_its_layers_is_told(caplog: pytest.LogCaptureFixture) -> None:
    config = hf.CTRLConfig(vocab_size=64, n_embd=32, n_layer=2, n_head=4, dff=32, n_positions=64)
    causal_lm: nn.Module = hf.AutoModelForCausalLM.from_config(config)
    with caplog.at_level(logging.WARNING):
        check_units(causal_lm, decoder_layers(causal_lm))
    assert "CTRLLMHeadModel does not name its decoder layers" in caplog.text
