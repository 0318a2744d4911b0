"""Model folders are read without torch; broken ones are named."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from areal_sc.errors import CheckpointError, ModelError
from areal_sc.sizing.model_folder import (
    check_model_folder,
    check_replaceable,
    read_model_shape,
)

TINY = {
    "hidden_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}


def write_safetensors(path: Path, shapes: dict[str, list[int]]) -> None:
    save_file({name: np.zeros(shape, np.float32) for name, shape in shapes.items()}, path)


def write_model(folder: Path, config: dict[str, object] | None = None) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config or TINY))
    write_safetensors(folder / "model-1.safetensors", {"a": [30, 96], "b": [96]})
    write_safetensors(folder / "model-2.safetensors", {"c": [2, 3, 4], "scale": []})
    return folder


def test_shape_of_a_sharded_model(tmp_path: Path) -> None:
    shape = read_model_shape(write_model(tmp_path / "m"))
    assert shape is not None
    assert shape.num_parameters == 30 * 96 + 96 + 24 + 1
    assert shape.num_expert_parameters == 0
    assert shape.max_context_tokens == 128
    assert shape.kv_values_per_token == 2 * 3 * 2 * (96 // 4)


def test_parameters_of_experts_are_told_apart(tmp_path: Path) -> None:
    """One tensor for each expert, or one for all; all tokens go through a shared one."""
    folder = write_model(tmp_path / "m")
    mlp = "model.layers.0.mlp."
    experts = {f"{mlp}experts.{n}.up_proj.weight": [5, 7] for n in range(3)}
    experts[f"{mlp}experts.down_proj"] = [3, 7, 5]
    others = {f"{mlp}gate.weight": [3, 7], f"{mlp}shared_experts.up_proj.weight": [5, 7]}
    write_safetensors(folder / "model-3.safetensors", {**experts, **others})
    shape = read_model_shape(folder)
    assert shape is not None
    assert shape.num_expert_parameters == 3 * 35 + 105
    assert shape.num_layer_parameters == 3 * 35 + 105 + 21 + 35
    assert shape.num_other_parameters == 30 * 96 + 96 + 24 + 1
    assert shape.num_vocabulary_parameters == 30 * 96


def test_shape_of_other_spellings(tmp_path: Path) -> None:
    gpt2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
    shape = read_model_shape(write_model(tmp_path / "gpt2", gpt2))
    assert shape is not None
    assert (shape.max_context_tokens, shape.kv_values_per_token) == (64, 2 * 2 * 4 * 8)
    multimodal = {"text_config": {**TINY, "head_dim": 128}, "hidden_size": 1}
    shape = read_model_shape(write_model(tmp_path / "multimodal", multimodal))
    assert shape is not None
    assert (shape.max_context_tokens, shape.kv_values_per_token) == (128, 2 * 3 * 2 * 128)


def test_no_model_yet(tmp_path: Path) -> None:
    assert read_model_shape(tmp_path / "missing") is None
    assert read_model_shape(tmp_path) is None


def test_check_names_what_is_missing(tmp_path: Path) -> None:
    folder = tmp_path / "m"
    with pytest.raises(ModelError, match="there is no such folder"):
        check_model_folder(folder)
    folder.mkdir()
    with pytest.raises(ModelError, match=r"has no config\.json"):
        check_model_folder(folder)
    (folder / "config.json").write_text("{}")
    with pytest.raises(ModelError, match=r"has no weights; expected files named \*\.safetensors"):
        check_model_folder(folder)
    (folder / "pytorch_model-00001-of-00002.bin").write_bytes(b"")
    check_model_folder(folder)
    (folder / "adapter_config.json").write_text("{}")
    with pytest.raises(ModelError, match=r"holds an adapter .* save the merged model in a folder"):
        check_model_folder(folder)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {"vision_config": {"hidden_size": 8}},
            r"multimodal \(its config\.json has vision_config\)",
        ),
        ({"vq_config": {"embed_dim": 4}}, r"multimodal \(its config\.json has vq_config\)"),
        ({"is_encoder_decoder": True}, "the model has an encoder"),
    ],
)
def test_models_of_more_than_a_decoder(
    config: dict[str, Any], message: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=message):
        check_model_folder(tmp_path)


@pytest.mark.parametrize("text", ["{", "[1]", "\x00"])
def test_broken_config(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ModelError, match=r"config\.json: "):
        read_model_shape(tmp_path)


@pytest.mark.parametrize(
    "content",
    [b"", b"abc", struct.pack("<Q", 1 << 60), struct.pack("<Q", 5) + b"{nope", b"\x02" + b"\0" * 7],
)
def test_broken_safetensors(tmp_path: Path, content: bytes) -> None:
    folder = write_model(tmp_path / "m")
    (folder / "model-2.safetensors").write_bytes(content)
    with pytest.raises(ModelError, match=r"model-2\.safetensors: not a"):
        read_model_shape(folder)


def test_truncated_and_missing_weight_files(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "m")
    check_model_folder(folder)
    weights = folder / "model-2.safetensors"
    weights.write_bytes(weights.read_bytes()[:-3])
    with pytest.raises(ModelError, match=r"model-2\.safetensors: .* truncated or damaged: copy"):
        check_model_folder(folder)
    (folder / "model-2.safetensors").unlink()
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "model-1.safetensors", "c": "model-2.st"}}))
    with pytest.raises(ModelError, match=r"1 of the 2 files .* missing, e\.g\. model-2\.st"):
        check_model_folder(folder)
    index.write_text("[]")
    with pytest.raises(ModelError, match=r"index\.json: cannot be read"):
        check_model_folder(folder)


def test_a_model_replaces_a_model_but_no_other_files(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    write_model(tmp_path / "model")
    for name in ("new", "empty", "model"):
        assert check_replaceable(tmp_path / name) == tmp_path / name
    for taken in (tmp_path, tmp_path / "model" / "config.json"):
        with pytest.raises(CheckpointError, match="cannot write the model to"):
            check_replaceable(taken)
