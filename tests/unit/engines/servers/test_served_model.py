"""What the engine knows of a model before any server is started."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from areal_sc.config.schema import (
    Device,
    Dtype,
    RolloutConfig,
    WeightUpdateConfig,
    WeightUpdateMethod,
)
from areal_sc.config.server_settings import ServersConfig
from areal_sc.engines.servers.engine import ServerEngine
from areal_sc.engines.servers.model import ServedModel, check_weights_folder
from areal_sc.engines.servers.sglang.handle import SGLangEngine
from areal_sc.errors import ConfigError, ModelError

MakeEngine = Callable[..., ServerEngine]


@pytest.fixture
def folder(tiny_model_folder: Path, tmp_path: Path) -> Path:
    """A copy whose files a test may change."""
    copy = tmp_path / "model"
    copy.mkdir()
    for file in tiny_model_folder.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    return copy


def make_engine(
    folder: Path,
    method: WeightUpdateMethod = WeightUpdateMethod.pull,
    max_context_tokens: int = 64,
) -> ServerEngine:
    config = RolloutConfig(
        path=str(folder),
        max_context_tokens=max_context_tokens,
        dtype=Dtype.float32,
        device=Device.cpu,
        seed=0,
        servers=ServersConfig(),
        weight_update=WeightUpdateConfig(method=method),
    )
    return ServerEngine(SGLangEngine(config), log_folder=folder.parent, name="rollout")


def test_parameters_are_those_that_trainers_publish(folder: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder)
    expected = {name: tuple(p.shape) for name, p in model.named_parameters()}
    served = ServedModel.read(str(folder))
    assert served.parameters == expected
    assert served.parameters.keys() <= served.stored.keys()


def test_a_folder_without_safetensors(folder: Path) -> None:
    weights = folder / "model.safetensors"
    torch.save(load_file(weights), folder / "pytorch_model.bin")
    expected = ServedModel.read(str(folder)).parameters
    weights.unlink()
    served = ServedModel.read(str(folder))
    assert served.parameters == served.shapes_in_folders == expected
    assert served.stored == {}


def test_tensors_that_are_no_parameters_are_of_no_concern(folder: Path) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    save_file({**tensors, "model.rotary_emb.inv_freq": torch.ones(4)}, path, {"format": "pt"})
    served = ServedModel.read(str(folder))
    check_weights_folder(str(folder), served.shapes_in_folders)


def test_names_that_servers_do_not_know(folder: Path) -> None:
    """As with experts, which are fused in memory."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    tensors["model.other.weight"] = tensors.pop("model.norm.weight")
    save_file(tensors, path, {"format": "pt"})
    for method in (WeightUpdateMethod.pull, WeightUpdateMethod.collective):
        with pytest.raises(ConfigError, match=r"are no parts of the weights in mem.*: choose disk"):
            make_engine(folder, method)
    make_engine(folder, WeightUpdateMethod.disk)


@pytest.mark.parametrize(
    ("rope", "message"),
    [
        ({"rope_type": "dynamic", "factor": 2.0}, r"dynamic rotary .*: servers scale them"),
        (
            {
                "rope_type": "longrope",
                "original_max_position_embeddings": 48,
                "short_factor": [],  # of the model's size
                "long_factor": [],
            },
            r"longrope rotary .* for all rows of a batch.* at most 48, got 64",
        ),
    ],
)
def test_rope_that_servers_compute_otherwise_than_trainers(
    folder: Path, rope: dict[str, object], message: str
) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text())
    half = config["hidden_size"] // config["num_attention_heads"] // 2
    for name in ("short_factor", "long_factor"):
        if name in rope:
            rope = {**rope, name: [1.0] * half}
    path.write_text(json.dumps({**config, "rope_parameters": {"rope_theta": 1e4, **rope}}))
    with pytest.raises(ModelError, match=message):
        make_engine(folder)
    if rope["rope_type"] == "longrope":
        make_engine(folder, max_context_tokens=48)
