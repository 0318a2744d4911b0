"""The probe finds the fast path that is right for each kind of model, and the path is right."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from unit.engines.families import SAME_HEADS, SIZES, build

from areal_sc.config.schema import ActorConfig
from areal_sc.engines.fsdp.ability_probe import probe_abilities
from areal_sc.engines.fsdp.model import load_sharded_model
from areal_sc.engines.fsdp.packed_model import ModelAbilities, PackedModel
from areal_sc.engines.likely_rows import plain_logprobs
from areal_sc.engines.training.causal_lm import load_causal_lm
from areal_sc.engines.training.probe import require_agreement
from areal_sc.engines.training.process_group import ProcessGroup, ProcessGroups
from areal_sc.errors import ModelError

FAST = ModelAbilities(packs=True, has_linear_head=True, shares=True)
OWN_HEAD = ModelAbilities(packs=True, has_linear_head=False, shares=True)
PADDED = ModelAbilities(packs=False, has_linear_head=True)
LONGEST = 64


def load(folder: Path, config: Any, **settings: Any) -> PackedModel:
    """As the engine loads a model, its weights drawn."""
    config.save_pretrained(folder)
    groups = ProcessGroups.of_one_rank(torch.device("cpu"))
    config = ActorConfig(path=str(folder), random_init=True, seed=0, **settings)
    return load_sharded_model(config, groups)[0]


def test_dynamic_rope_is_refused_where_rows_can_be_too_long(tmp_path: Path) -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
    config = hf.LlamaConfig(**SIZES, rope_parameters=rope)
    with pytest.raises(ModelError, match=r"LlamaForCausalLM has dynamic rotary .* 64, got 65"):
        load(tmp_path, config, max_tokens_per_micro_batch=65)
    assert load(tmp_path, config, max_tokens_per_micro_batch=64).abilities == FAST


def test_a_model_that_sees_what_comes_is_refused(tmp_path: Path) -> None:
    sizes = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}
    config = hf.BertConfig(**sizes, intermediate_size=32, initializer_range=0.3)
    with pytest.raises(ModelError, match="BertLMHeadModel is not causal here: a token changes"):
        load(tmp_path, config)
    config.is_decoder = True
    assert load(tmp_path, config).abilities == OWN_HEAD


def test_weights_that_are_not_finite_are_named_before_anything_is_compared(tmp_path: Path) -> None:
    model = load(tmp_path, hf.LlamaConfig(**SIZES))
    rows = [torch.arange(5), torch.arange(2)]
    with torch.no_grad():
        model.causal_lm.get_parameter("model.norm.weight")[0] = torch.nan
    message = (
        r"LlamaForCausalLM gives .* not finite: there is NaN or infinity in model\.norm\.weight"
    )
    with pytest.raises(ModelError, match=message):
        probe_abilities(model, LONGEST)
    model.causal_lm.set_attn_implementation(model.own_attention)
    with pytest.raises(ModelError, match=message):
        plain_logprobs(model.causal_lm, rows)


def test_a_model_that_draws_random_numbers_is_refused() -> None:
    """Or its noise would hide every mistake."""
    causal_lm = build("gpt2").train()
    with pytest.raises(ModelError, match=r"GPT2LMHeadModel: rounding in float32 moves .* by"):
        probe_abilities(PackedModel(causal_lm, chunk_tokens=4), LONGEST)


def test_ranks_that_overflow_are_not_said_to_compute_something_else() -> None:
    alone = ProcessGroup(0, 1, torch.device("cpu"))
    words = {"subject": "the ranks differ", "advice": "use one"}
    with pytest.raises(ModelError, match=r"\(values that are not finite\)"):
        require_agreement(lambda: float("nan"), 0.1, alone, **words)
    with pytest.raises(ModelError, match=r"\(42 times what rounding .* most 30\)"):
        require_agreement(lambda: 42.0, 30.0, alone, **words)


def test_layers_that_are_not_compiled_are_refused(tmp_path: Path) -> None:
    ctrl = hf.CTRLConfig(vocab_size=64, n_embd=32, n_layer=1, n_head=4, dff=32, n_positions=64)
    with pytest.raises(ModelError, match=r"CTRLLMHeadModel does not name .*=false, got true"):
        load(tmp_path, ctrl, compile_layers=True)
    model = load(tmp_path, hf.LlamaConfig(**SIZES))
    model.abilities = PADDED
    with pytest.raises(ModelError, match=r"Llama.* does not attend within packed .*=false, got"):
        model.compile_layers(list(model.causal_lm.model.layers))


def test_a_model_that_takes_rows_of_some_lengths_only_is_refused(tmp_path: Path) -> None:
    config = hf.xLSTMConfig(
        **{"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 1, "num_heads": 4},
        chunk_size=8,
        mode="train",
    )
    with pytest.raises(ModelError, match="xLSTMForCausalLM does not compute rows of any length"):
        load(tmp_path, config)


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
    model.abilities = probe_abilities(model, LONGEST).abilities
    num_rows: list[int] = []
    causal_lm.base_model.register_forward_hook(lambda *_: num_rows.clear())
    causal_lm.lm_head.register_forward_hook(
        lambda _, inputs, __: num_rows.append(inputs[0].shape[:-1].numel())
    )
    asked = torch.tensor([3, 8])
    model(torch.arange(10), model.layout([4, 6], torch.device("cpu")), asked, asked, None)
    # where logits are just what the layer gives, the layer itself is not called
    assert num_rows == ([2] if family == "granite" else [])


def test_a_model_that_changes_its_logits_makes_few_of_them_at_a_time() -> None:
    causal_lm = build("gemma2").eval()
    model = PackedModel(causal_lm, chunk_tokens=1)
    model.abilities = probe_abilities(model, LONGEST).abilities
    assert model.abilities == OWN_HEAD
    tokens, rows = torch.arange(10), model.layout([4, 6], torch.device("cpu"))
    asked, temperatures = torch.tensor([0, 1, 3, 4, 8, 5, 7]), torch.linspace(0.5, 2.0, 7)
    found: list[tuple[torch.Tensor, ...]] = []
    for chunk_tokens, sizes in ((7, [7]), (3, [3, 3, 1] * 2)):  # once more in backward
        model.chunk_tokens = chunk_tokens
        num_rows: list[int] = []
        hook = causal_lm.lm_head.register_forward_hook(
            lambda _, inputs, __, found=num_rows: found.append(inputs[0].shape[:-1].numel())
        )
        logprobs, entropy = model(tokens, rows, asked, asked, temperatures)
        causal_lm.zero_grad()
        logprobs.sum().backward()
        gradients = [parameter.grad.clone() for parameter in causal_lm.parameters()]
        found.append((logprobs.detach(), entropy, *gradients))
        hook.remove()
        assert sorted(num_rows) == sorted(sizes)
    for whole, in_chunks in zip(*found, strict=True):
        torch.testing.assert_close(in_chunks, whole)


def test_logits_are_not_rounded_before_the_model_caps_them() -> None:
    causal_lm = build("gemma2").eval()
    model = PackedModel(causal_lm, chunk_tokens=2)
    model.abilities = probe_abilities(model, LONGEST).abilities
    causal_lm.bfloat16()
    tokens, rows = torch.arange(10), model.layout([4, 6], torch.device("cpu"))
    asked = torch.arange(10)
    logprobs, entropy = model(tokens, rows, asked, asked, None)
    logprobs.sum().backward()
    head, cap = causal_lm.lm_head, causal_lm.config.final_logit_softcapping
    with torch.no_grad():
        hidden = model.hidden_states(tokens, rows)[1].double()
        expected = (cap * (hidden @ head.weight.double().t() / cap).tanh()).log_softmax(-1)
    assert (logprobs - expected.gather(-1, asked[:, None])[:, 0]).abs().max() < 1e-5
    assert (entropy + (expected.exp() * expected).sum(-1)).abs().max() < 1e-5
    assert head.weight.grad.dtype == torch.bfloat16
    assert "forward" not in vars(head)


def test_slow_paths_are_told(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        probe_abilities(PackedModel(build("bloom"), chunk_tokens=4), LONGEST)
        probe_abilities(PackedModel(build("granite"), chunk_tokens=4), LONGEST)
    assert "BloomForCausalLM cannot attend within packed rows" in caplog.text
    assert "Granite" not in caplog.text


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

    build("llama").save_pretrained(tmp_path)
    settings = json.loads((tmp_path / "config.json").read_text())
    settings["tie_word_embeddings"] = not settings["tie_word_embeddings"]
    assert settings["tie_word_embeddings"]
    (tmp_path / "config.json").write_text(json.dumps(settings))
    with pytest.raises(ModelError, match=r"lm_head\.weight are stored with different values"):
        load_causal_lm(tmp_path)

    (tmp_path / "config.json").write_text('{"model_type": "perceptron"}')
    with pytest.raises(ModelError, match="cannot load the model"):
        load_causal_lm(tmp_path)
