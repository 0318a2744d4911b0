"""What is read of model files in parts is what transformers loads as a whole."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from safetensors.torch import load_file, save_file
from transformers.conversion_mapping import get_model_conversion_mapping
from unit.engines.families import EXPERTS, FAMILIES, HEADS_OF_8, SIZES, build

from areal_sc.config.schema import ActorConfig, ModelHead
from areal_sc.engines.training.causal_lm import build_without_parameters, load_causal_lm
from areal_sc.engines.training.stored_weights import StoredWeights, WeightsInMemory, open_weights
from areal_sc.errors import ModelError

TIED = hf.Qwen2Config(**SIZES, tie_word_embeddings=True)


def save(folder: Path, model: Any) -> Path:
    model.save_pretrained(folder)
    return folder


def open_parts(folder: Path) -> StoredWeights:
    weights = open_weights(ActorConfig(path=str(folder)))
    assert isinstance(weights, StoredWeights)
    return weights


def assert_reads(weights: StoredWeights, folder: Path) -> None:
    """One name after the other, and buffers as the unfilled model has them, or as they are read."""
    expected, found = load_causal_lm(folder), build_without_parameters(folder)
    parameters = dict(expected.named_parameters(remove_duplicate=False))
    assert dict(found.named_parameters(remove_duplicate=False)).keys() == parameters.keys()
    assert {parameter.device.type for parameter in found.parameters()} == {"meta"}
    for name, values in parameters.items():
        assert torch.equal(weights.read([name])[name], values), name
    for name, values in expected.named_buffers():
        own = weights.read([name]).get(name, found.get_buffer(name))
        assert torch.equal(own, values), name
    known = [str(conversion) for conversion in get_model_conversion_mapping(found)]
    used = [known[index] for index in weights.conversions]
    assert used == [str(conversion) for conversion in expected._weight_conversions]


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_is_read_as_transformers_loads_it(family: str, tmp_path: Path) -> None:
    assert_reads(open_parts(save(tmp_path, build(family))), tmp_path)


def as_torch_file(folder: Path) -> None:
    stored = folder / "model.safetensors"
    torch.save(load_file(stored), folder / "pytorch_model.bin")
    stored.unlink()


def without_prefix(folder: Path) -> None:
    """As of a model that was saved without its head."""
    stored = load_file(folder / "model.safetensors")
    named = {name.removeprefix("model."): values for name, values in stored.items()}
    save_file(named, folder / "model.safetensors", {"format": "pt"})


def under_the_other_name(folder: Path) -> None:
    stored = load_file(folder / "model.safetensors")
    stored["lm_head.weight"] = stored.pop("model.embed_tokens.weight")
    save_file(stored, folder / "model.safetensors", {"format": "pt"})


@pytest.mark.parametrize("change", [as_torch_file, without_prefix, under_the_other_name])
def test_files_may_have_another_form(change: Callable[[Path], None], tmp_path: Path) -> None:
    save(tmp_path, hf.AutoModelForCausalLM.from_config(TIED))
    change(tmp_path)
    assert_reads(open_parts(tmp_path), tmp_path)


def test_a_model_may_be_split_over_files(tmp_path: Path) -> None:
    model = hf.AutoModelForCausalLM.from_config(hf.Qwen3MoeConfig(**HEADS_OF_8, **EXPERTS))
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    assert_reads(open_parts(tmp_path), tmp_path)


def test_no_more_is_read_than_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, hf.AutoModelForCausalLM.from_config(hf.Qwen3MoeConfig(**HEADS_OF_8, **EXPERTS)))
    weights, asked = open_parts(tmp_path), list[str]()
    convert = StoredWeights._convert

    def watch(self: StoredWeights, stored: dict[str, Any], device: str) -> Any:
        asked.extend(stored)
        return convert(self, stored, device)

    monkeypatch.setattr(StoredWeights, "_convert", watch)
    weights.read(["model.layers.1.mlp.experts.down_proj"])
    experts = [f"model.layers.1.mlp.experts.{index}.down_proj.weight" for index in range(4)]
    assert sorted(asked) == experts
    kept = [values for values in weights._unfilled.values() if not values.is_meta]
    assert kept == []


def test_files_that_do_not_hold_the_model(tmp_path: Path) -> None:
    save(tmp_path, hf.AutoModelForCausalLM.from_config(TIED))
    stored = load_file(tmp_path / "model.safetensors")
    norm = stored.pop("model.norm.weight")
    save_file(stored, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match=r"config\.json: 1 missing .*, e\.g\. model\.norm\.weight"):
        open_parts(tmp_path)
    stored["model.norm.weight"] = norm[:-1]
    save_file(stored, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match=r"config\.json: 1 missing .*, e\.g\. model\.norm\.weight"):
        open_parts(tmp_path)


def test_weights_that_the_model_has_no_place_for_are_refused(tmp_path: Path) -> None:
    """Of another kind of layers, say: a newer family, or a setting that the config lacks."""
    untied = hf.Qwen2Config(**SIZES, tie_word_embeddings=False)
    save(tmp_path, hf.AutoModelForCausalLM.from_config(untied))
    stored = load_file(tmp_path / "model.safetensors")
    stored["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)  # of old files
    save_file(stored, tmp_path / "model.safetensors", {"format": "pt"})
    assert_reads(open_parts(tmp_path), tmp_path)
    for head in ModelHead:  # one has no place for an output layer, and needs none
        open_weights(ActorConfig(path=str(tmp_path), head=head))
        load_causal_lm(tmp_path, head)
    stored["model.layers.0.self_attn.q_norm.weight"] = torch.ones(8)
    save_file(stored, tmp_path / "model.safetensors", {"format": "pt"})
    words = r"has no place for 1 of the stored weights, e\.g\. model\.layers\.0\.self_attn\.q_norm"
    for head in ModelHead:
        with pytest.raises(ModelError, match=words):
            open_weights(ActorConfig(path=str(tmp_path), head=head))
        with pytest.raises(ModelError, match=words):
            load_causal_lm(tmp_path, head)


def test_tied_parameters_must_be_stored_alike(tmp_path: Path) -> None:
    save(tmp_path, hf.AutoModelForCausalLM.from_config(TIED))
    stored = load_file(tmp_path / "model.safetensors")
    stored["lm_head.weight"] = stored["model.embed_tokens.weight"].clone()
    save_file(stored, tmp_path / "model.safetensors", {"format": "pt"})
    assert_reads(open_parts(tmp_path), tmp_path)
    stored["lm_head.weight"][0, 0] += 1
    save_file(stored, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match=r"embed_tokens\.weight and lm_head\.weight .* different"):
        open_parts(tmp_path)


def as_old_torch_file(folder: Path) -> None:
    stored = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    torch.save(stored, folder / "pytorch_model.bin", _use_new_zipfile_serialization=False)


def quantized(folder: Path) -> None:
    """By a method that transformers does not know, and passes over."""
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "unheard of"}
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("change", [as_old_torch_file, quantized])
def test_what_cannot_be_read_in_parts_is_read_as_a_whole(
    change: Callable[[Path], None], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = hf.AutoModelForCausalLM.from_config(TIED)
    save(tmp_path, model)
    change(tmp_path)
    with caplog.at_level(logging.WARNING):
        weights = open_weights(ActorConfig(path=str(tmp_path)))
    assert isinstance(weights, WeightsInMemory)
    assert "cannot be read in parts" in caplog.text
    name = "model.layers.1.mlp.up_proj.weight"
    assert torch.equal(weights.read([name])[name], model.get_parameter(name))
