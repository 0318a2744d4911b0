"""Which folders and models the generator takes, and how weights are replaced."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from random_models import random_model
from safetensors.torch import load_file, save_file
from transformers import (
    AutoTokenizer,
    BlenderbotSmallConfig,
    BlenderbotSmallForCausalLM,
    BloomConfig,
    BloomForCausalLM,
    PhimoeConfig,
    PhimoeForCausalLM,
    PreTrainedModel,
)

from areal_sc.config.schema import Device, Dtype, RolloutConfig
from areal_sc.engines.local.engine import LocalEngine
from areal_sc.engines.local.model import LocalModel, check_context, load_folder
from areal_sc.engines.servers.model import ServedModel
from areal_sc.errors import ModelError

CPU = torch.device("cpu")


@pytest.fixture
def folder(tiny_model_folder: Path, tmp_path: Path) -> Path:
    """A copy that a test may break."""
    return Path(shutil.copytree(tiny_model_folder, tmp_path / "model"))


def config_for(folder: Path, **settings: object) -> RolloutConfig:
    return RolloutConfig(
        **{
            "path": str(folder),
            "device": Device.cpu,
            "dtype": Dtype.float32,
            "max_context_tokens": 64,
            "seed": 0,
            **settings,
        }
    )


def test_a_folder_becomes_an_engine(folder: Path) -> None:
    engine = LocalEngine(config_for(folder))
    assert engine.tokenizer.eos_token == "$"
    assert engine.max_context_tokens == 64
    assert engine.version == 0


@pytest.mark.parametrize(
    ("of_config", "of_generation", "expected"),
    [
        (5, None, {0, 5}),
        ([5, 7], None, {0, 5, 7}),
        (5, {"temperature": 0.6}, {0, 5}),  # it names no end
        (5, {"eos_token_id": [6]}, {0, 6}),
        (None, None, {0}),
    ],
)
def test_every_engine_ends_at_the_same_tokens(
    folder: Path, of_config: Any, of_generation: Any, expected: set[int]
) -> None:
    config = json.loads((folder / "config.json").read_text()) | {"eos_token_id": of_config}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").unlink(missing_ok=True)
    if of_generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(of_generation))
    end = AutoTokenizer.from_pretrained(folder).eos_token_id
    expected = expected - {0} | {end}
    assert set(ServedModel.read(str(folder)).end_token_ids) == expected
    assert set(LocalEngine(config_for(folder)).end_token_ids) == expected


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ('{"eos_token_id": ["$"]}', r"eos_token_id of the model: expected numbers .*, got '\$'"),
        ("{", "generation_config.json"),
    ],
)
def test_ends_that_cannot_be_read_are_named(folder: Path, content: str, words: str) -> None:
    (folder / "generation_config.json").write_text(content)
    with pytest.raises(ModelError, match=words):
        ServedModel.read(str(folder))


def test_weights_that_are_not_finite_are_named(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    weights["model.layers.0.mlp.down_proj.weight"][0, 0] = torch.inf
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match=r"not finite: there is NaN .* in model\.layers\.0\.mlp"):
        LocalEngine(config_for(folder))


def remove_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def truncate_weights(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def remove_config(folder: Path) -> None:
    (folder / "config.json").unlink()


def break_config(folder: Path) -> None:
    (folder / "config.json").write_text("{")


def add_a_layer(folder: Path) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config["num_hidden_layers"] += 1
    config["layer_types"] = ["full_attention"] * config["num_hidden_layers"]
    path.write_text(json.dumps(config))


def add_a_norm(folder: Path) -> None:
    stored = load_file(folder / "model.safetensors")
    stored["model.layers.0.self_attn.q_norm.weight"] = torch.ones(8)
    save_file(stored, folder / "model.safetensors", {"format": "pt"})


def remove_tokenizer(folder: Path) -> None:
    for path in folder.glob("tokenizer*"):
        path.unlink()


@pytest.mark.parametrize(
    ("damage", "cause"),
    [
        (remove_weights, "no weights"),
        (truncate_weights, "truncated or damaged"),
        (remove_config, "it has no config.json"),
        (break_config, "cannot be read"),
        (add_a_layer, r"missing or of another shape, the first is model\.layers\.2\."),
        (add_a_norm, r"has no place for 1 of the stored weights, e\.g\. model\.layers\.0\.self"),
        (remove_tokenizer, "no usable tokenizer"),
        (shutil.rmtree, "there is no such folder"),
    ],
)
def test_an_unusable_folder_is_named_with_its_cause(
    folder: Path, damage: Callable[[Path], None], cause: str
) -> None:
    damage(folder)
    with pytest.raises(ModelError, match=cause) as raised:
        load_folder(str(folder), CPU, Dtype.float32)
    assert str(folder) in str(raised.value)


def test_more_context_than_the_model_has_positions(folder: Path) -> None:
    with pytest.raises(ValueError, match=r"max_context_tokens is 257.*max_position_embeddings 256"):
        LocalEngine(config_for(folder, max_context_tokens=257))


def test_a_window_that_the_attention_is_not_told_of_is_noticed() -> None:
    config = PhimoeConfig(
        vocab_size=10,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        num_local_experts=2,
        max_position_embeddings=64,
        sliding_window=32,
    )
    model = PhimoeForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter))

    def start(max_context_tokens: int) -> None:
        settings = RolloutConfig(
            path="",
            max_context_tokens=max_context_tokens,
            max_prefill_tokens=16,
            max_running_sequences=4,
            seed=0,
        )
        LocalEngine(settings, (model, NoEos()))

    start(32)  # never longer than the window
    with pytest.raises(ModelError, match=r"PhimoeForCausalLM: log-prob.* in a way that"):
        start(33)


def test_half_precision_does_not_hide_a_wrong_attention() -> None:
    """Positions that the model counts otherwise change less than bfloat16 could round."""
    config = BlenderbotSmallConfig(
        vocab_size=32,
        d_model=16,
        decoder_layers=1,
        decoder_attention_heads=2,
        decoder_ffn_dim=16,
        max_position_embeddings=64,
    )
    model = BlenderbotSmallForCausalLM(config).to(torch.bfloat16)
    settings = RolloutConfig(path="", max_context_tokens=64, max_prefill_tokens=16, seed=0)
    with pytest.raises(ModelError, match=r"BlenderbotSmallForCausalLM: log-prob.* most 30;"):
        LocalEngine(settings, (model, NoEos()))
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}


class NoEos:
    """As much of a tokenizer as the engine needs."""

    eos_token_id = None


def test_models_with_their_own_attention_are_refused() -> None:
    bloom = BloomForCausalLM(BloomConfig(vocab_size=10, hidden_size=8, n_layer=1, n_head=2))
    with pytest.raises(ModelError, match="does not use transformers' attention interface"):
        LocalModel(bloom)


def test_longrope_is_taken_where_no_sequence_is_long() -> None:
    rope = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "original_max_position_embeddings": 48,
        "short_factor": [1.0] * 4,
        "long_factor": [2.0] * 4,
    }
    model = random_model("llama", rope_parameters=rope)
    check_context(model, 48)
    with pytest.raises(ModelError, match=r"longrope rotary embeddings: .* at most 48, got 49"):
        check_context(model, 49)


def test_the_given_model_keeps_its_attention_and_shares_its_weights() -> None:
    model = random_model()
    ids = torch.tensor([[1, 2, 3]])
    before = model(ids).logits
    local = LocalModel(model)
    assert torch.equal(model(ids).logits, before)
    local.replace_weights([(n, torch.zeros_like(p)) for n, p in model.named_parameters()])
    assert not model(ids).logits.any()


def snapshot(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize("is_flat", [True, False])
@pytest.mark.parametrize("given_as", ["lm_head.weight", "model.embed_tokens.weight", "both"])
def test_tied_weights_may_be_given_under_any_name(is_flat: bool, given_as: str) -> None:
    model = random_model(tie_word_embeddings=True)
    new = snapshot(random_model(tie_word_embeddings=True, seed=1))
    tied = {"lm_head.weight", "model.embed_tokens.weight"}
    given = {
        name: (tensor.flatten() if is_flat else tensor)
        for name, tensor in new.items()
        if name not in tied or given_as in (name, "both")
    }
    LocalModel(model).replace_weights(list(given.items()))
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, new[name]), name


def without_last(tensors: dict[str, torch.Tensor]) -> None:
    tensors.popitem()


def with_unknown(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.layers.9.weight"] = torch.zeros(1)


def with_other_shape(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.norm.weight"] = torch.zeros(33)


def with_transposed(tensors: dict[str, torch.Tensor]) -> None:
    name = "model.layers.0.mlp.up_proj.weight"
    tensors[name] = tensors[name].T


@pytest.mark.parametrize(
    ("change", "cause"),
    [
        (without_last, r"1 parameters are missing \(lm_head\.weight\), 0 unknown"),
        (with_unknown, r"1 unknown \(model\.layers\.9\.weight\)"),
        (with_other_shape, r"model\.norm\.weight has shape \(33,\), expected \(32,\)"),
        (with_transposed, r"has shape \(32, 48\), expected \(48, 32\)"),
    ],
)
def test_a_refused_update_changes_nothing(
    change: Callable[[dict[str, torch.Tensor]], None], cause: str
) -> None:
    model = random_model(tie_word_embeddings=False)
    before = snapshot(model)
    given = snapshot(random_model(tie_word_embeddings=False, seed=1))
    change(given)
    with pytest.raises(ModelError, match=cause):
        LocalModel(model).replace_weights(list(given.items()))
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name]), name
