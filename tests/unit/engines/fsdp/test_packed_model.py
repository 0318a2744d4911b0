"""The probe finds the fast path that is right for each kind of model, and the path is right."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from unit.engines.families import FAMILIES, LIMIT, SAME_HEADS, SIZES, build

from areal_sc.config.schema import ActorConfig
from areal_sc.engines.fsdp.model import decoder_layers, load_causal_lm, load_sharded_model
from areal_sc.engines.fsdp.packed_model import ModelAbilities, PackedModel, probe_abilities
from areal_sc.engines.fsdp.process_group import ProcessGroup
from areal_sc.errors import ModelError

FAST = ModelAbilities(packs=True, has_linear_head=True)
OWN_HEAD = ModelAbilities(packs=True, has_linear_head=False)
PADDED = ModelAbilities(packs=False, has_linear_head=True)
ITS_OWN_WAY = ModelAbilities(packs=False, has_linear_head=False)
SLOWER = {
    "gemma2": OWN_HEAD,  # soft-capped logits
    "granite": OWN_HEAD,  # scaled logits
    "cohere2": OWN_HEAD,
    "llama4": ITS_OWN_WAY,  # chunks; the scores' scale follows the index in the whole input
    "bloom": PADDED,  # distances that packing would get wrong
    "qwen3_next": PADDED,  # a state that goes from token to token
}


@pytest.mark.parametrize("family", FAMILIES)
def test_rows_beyond_every_limit_of_any_family(family: str, tmp_path: Path) -> None:
    original = build(family)
    original.save_pretrained(tmp_path)
    model = PackedModel(load_causal_lm(tmp_path), chunk_tokens=4)
    model.abilities = probe_abilities(model)
    assert model.abilities == SLOWER.get(family, FAST)
    assert len(decoder_layers(model.causal_lm)) == len(decoder_layers(original))

    generator = torch.Generator().manual_seed(1)
    lengths = (LIMIT - 2, 1, 3 * LIMIT + 1, 4, 2 * LIMIT)
    rows = [torch.randint(64, (length,), generator=generator) for length in lengths]
    token_ids = torch.cat(rows)
    targets = token_ids.roll(-1)
    temperatures = torch.linspace(0.5, 1.5, len(targets))
    layout = model.layout(lengths, torch.device("cpu"))
    logprobs, _ = model(token_ids, layout, torch.arange(len(targets)), targets, temperatures)
    logprobs.sum().backward()

    logits = torch.cat([original(input_ids=row[None], use_cache=False).logits[0] for row in rows])
    expected = (logits / temperatures[:, None]).log_softmax(-1).gather(1, targets[:, None])[:, 0]
    expected.sum().backward()
    assert (logprobs - expected).abs().max() < 1e-5
    gradients = dict(model.causal_lm.named_parameters())
    for name, parameter in original.named_parameters():
        found, exact = gradients[name].grad, parameter.grad
        if exact is not None:
            assert (found - exact).abs().max() <= 1e-4 * max(1.0, exact.abs().max()), name


def load(folder: Path, config: Any, **settings: Any) -> PackedModel:
    """As the engine loads a model, its weights drawn."""
    config.save_pretrained(folder)
    group = ProcessGroup(0, 1, torch.device("cpu"))
    return load_sharded_model(
        ActorConfig(path=str(folder), random_init=True, seed=0, **settings), group
    )


def test_dynamic_rope_is_refused_where_rows_can_be_too_long(tmp_path: Path) -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
    config = hf.LlamaConfig(**SIZES, rope_parameters=rope)
    with pytest.raises(ModelError, match=r"LlamaForCausalLM has dynamic rotary .* 64, got 65"):
        load(tmp_path, config, max_tokens_per_micro_batch=65)
    assert load(tmp_path, config, max_tokens_per_micro_batch=64).abilities == FAST


def test_attention_that_picks_tokens_by_score_is_refused(tmp_path: Path) -> None:
    config = hf.DeepseekV32Config(
        **SAME_HEADS,
        q_lora_rank=16,
        kv_lora_rank=16,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        moe_intermediate_size=16,
        index_head_dim=64,
        index_n_heads=2,
    )
    with pytest.raises(ModelError, match="DeepseekV32ForCausalLM has layers of type indexed_att"):
        load(tmp_path, config)


@pytest.mark.parametrize("family", ["llama", "granite", "phi"])
def test_the_output_layer_sees_the_asked_positions_alone(family: str) -> None:
    causal_lm = build(family).eval()
    model = PackedModel(causal_lm, chunk_tokens=64)
    model.abilities = probe_abilities(model)
    num_rows: list[int] = []
    causal_lm.base_model.register_forward_hook(lambda *_: num_rows.clear())
    causal_lm.lm_head.register_forward_hook(
        lambda _, inputs, __: num_rows.append(inputs[0].shape[:-1].numel())
    )
    asked = torch.tensor([3, 8])
    model(torch.arange(10), model.layout([4, 6], torch.device("cpu")), asked, asked, None)
    # where logits are just what the layer gives, the layer itself is not called
    assert num_rows == ([2] if family == "granite" else [])


def test_slow_paths_are_told(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        probe_abilities(PackedModel(build("bloom"), chunk_tokens=4))
        probe_abilities(PackedModel(build("granite"), chunk_tokens=4))
    assert "BloomForCausalLM cannot attend within packed rows" in caplog.text
    assert "GraniteForCausalLM changes its logits" in caplog.text


def test_folders_that_are_no_models(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"there is no such folder"):
        load_causal_lm(tmp_path / "nowhere")
    build("llama").save_pretrained(tmp_path)
    weights = tmp_path / "model.safetensors"
    whole = weights.read_bytes()

    weights.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ModelError, match="it is truncated or damaged"):
        load_causal_lm(tmp_path)

    weights.unlink()
    with pytest.raises(ModelError, match="it has no weights"):
        load_causal_lm(tmp_path)

    hf.LlamaForCausalLM(hf.LlamaConfig(**{**SIZES, "num_hidden_layers": 1})).save_pretrained(
        tmp_path / "smaller"
    )
    weights.write_bytes((tmp_path / "smaller" / "model.safetensors").read_bytes())
    with pytest.raises(ModelError, match=r"do not fit its config\.json: 9 missing.*layers\.1\."):
        load_causal_lm(tmp_path)

    (tmp_path / "config.json").write_text('{"model_type": "perceptron"}')
    with pytest.raises(ModelError, match="cannot load the model"):
        load_causal_lm(tmp_path)
