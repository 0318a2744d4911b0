"""The probe finds the fast path that is right for each kind of model, and the path is right."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf

from areal_sc.engines.fsdp.model import decoder_layers, load_causal_lm
from areal_sc.engines.fsdp.packed_model import ModelAbilities, PackedModel, probe_abilities
from areal_sc.errors import ModelError

SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 0,
}
FAST = ModelAbilities(packs=True, has_linear_head=True)
OWN_HEAD = ModelAbilities(packs=True, has_linear_head=False)
PADDED = ModelAbilities(packs=False, has_linear_head=True)


def llama() -> Any:
    return hf.LlamaForCausalLM(hf.LlamaConfig(**SIZES))


def qwen3() -> Any:
    return hf.Qwen3ForCausalLM(hf.Qwen3Config(**SIZES, head_dim=8))


def phi() -> Any:  # output layer with a bias
    return hf.PhiForCausalLM(hf.PhiConfig(**SIZES))


def gemma2() -> Any:  # sliding windows, soft-capped scores and logits
    config = hf.Gemma2Config(
        **SIZES,
        head_dim=8,
        sliding_window=3,
        attn_logit_softcapping=1.0,
        final_logit_softcapping=2.0,
    )
    return hf.Gemma2ForCausalLM(config)


def granite() -> Any:  # scaled logits
    return hf.GraniteForCausalLM(hf.GraniteConfig(**SIZES, logits_scaling=4.0))


def mixtral() -> Any:
    return hf.MixtralForCausalLM(hf.MixtralConfig(**SIZES, num_local_experts=4))


def gpt2() -> Any:  # learned positions, dropout
    return hf.GPT2LMHeadModel(
        hf.GPT2Config(
            vocab_size=64,
            n_embd=32,
            n_layer=2,
            n_head=4,
            n_positions=64,
            bos_token_id=0,
            eos_token_id=0,
        )
    )


def bloom() -> Any:  # ALiBi: distances, that packing would get wrong
    return hf.BloomForCausalLM(hf.BloomConfig(vocab_size=64, hidden_size=32, n_layer=2, n_head=4))


@pytest.mark.parametrize(
    ("build", "expected"),
    [
        (llama, FAST),
        (qwen3, FAST),
        (phi, FAST),
        (mixtral, FAST),
        (gpt2, FAST),
        (gemma2, OWN_HEAD),
        (granite, OWN_HEAD),
        (bloom, PADDED),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_any_causal_language_model(build: Any, expected: ModelAbilities, tmp_path: Path) -> None:
    torch.manual_seed(0)
    original = build().eval()
    with torch.no_grad():
        for parameter in original.parameters():  # initial weights hide mistakes: make them matter
            parameter.mul_(3) if parameter.dim() > 1 else parameter.add_(
                0.3 * torch.rand_like(parameter)
            )
    original.save_pretrained(tmp_path)
    model = PackedModel(load_causal_lm(tmp_path), chunk_tokens=4)
    model.abilities = probe_abilities(model)
    assert model.abilities == expected
    assert len(decoder_layers(model.causal_lm)) == 2

    rows = [torch.randint(64, (length,)) for length in (6, 1, 9, 4)]
    asked = torch.tensor([0, 2, 7, 9, 15])  # positions 0 and 2 of row 0, 0 and 2 and 8 of row 2
    targets = torch.tensor([5, 6, 7, 8, 9])
    layout = model.layout([len(row) for row in rows], torch.device("cpu"))
    logprobs, _ = model(torch.cat(rows), layout, asked, targets, 0.5)
    logprobs.sum().backward()

    if hasattr(original.config, "num_local_experts"):
        original.set_experts_implementation("eager")  # the faster one knows no float64
    original = original.double()
    logits = [original(row[None]).logits[0] for row in rows]
    expected_logprobs = (torch.cat(logits)[asked] / 0.5).log_softmax(-1)
    expected_logprobs = expected_logprobs.gather(1, targets[:, None])[:, 0]
    expected_logprobs.sum().backward()
    assert torch.allclose(logprobs.double(), expected_logprobs, atol=1e-4)
    gradients = dict(model.causal_lm.named_parameters())
    for name, parameter in original.named_parameters():
        found, exact = gradients[name].grad, parameter.grad
        if exact is not None:
            assert (found - exact).abs().max() <= 1e-4 * max(1.0, exact.abs().max()), name


@pytest.mark.parametrize("build", [llama, granite, phi])
def test_the_output_layer_sees_the_asked_positions_alone(build: Any) -> None:
    torch.manual_seed(0)
    causal_lm = build().eval()
    model = PackedModel(causal_lm, chunk_tokens=64)
    model.abilities = probe_abilities(model)
    num_rows: list[int] = []
    causal_lm.base_model.register_forward_hook(lambda *_: num_rows.clear())
    causal_lm.lm_head.register_forward_hook(
        lambda _, inputs, __: num_rows.append(inputs[0].shape[:-1].numel())
    )
    asked = torch.tensor([3, 8])
    tokens = torch.arange(10)
    model(tokens, model.layout([4, 6], torch.device("cpu")), asked, asked, 1.0)
    # where logits are the product with the weight, the layer itself is not called
    assert num_rows == ([] if build is llama else [2])


def test_slow_paths_are_told(caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(0)
    with caplog.at_level(logging.WARNING):
        probe_abilities(PackedModel(bloom().eval(), chunk_tokens=4))
        probe_abilities(PackedModel(granite().eval(), chunk_tokens=4))
    assert "BloomForCausalLM cannot attend within packed rows" in caplog.text
    assert "GraniteForCausalLM changes its logits" in caplog.text


def test_folders_that_are_no_models(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no config\.json"):
        load_causal_lm(tmp_path / "nowhere")
    llama().save_pretrained(tmp_path)
    weights = tmp_path / "model.safetensors"
    whole = weights.read_bytes()

    weights.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ModelError, match="cannot load the model"):
        load_causal_lm(tmp_path)

    weights.unlink()
    with pytest.raises(ModelError, match="cannot load the model"):
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
