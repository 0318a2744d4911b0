"""Exported folders are what `transformers` writes and loads, value for value."""

from __future__ import annotations

import json
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from random_models import random_model
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from areal_sc.engines.fsdp.cuts import CutParts
from areal_sc.engines.training.background import BackgroundWriter
from areal_sc.engines.training.export import ModelExport
from areal_sc.engines.training.parts import Box
from areal_sc.engines.training.process_group import ProcessGroup
from areal_sc.engines.training.tensor_file import TensorFile

WAIT_S = 60.0
Export = Callable[..., Path]


@pytest.fixture
def writer() -> Iterator[BackgroundWriter]:
    writer = BackgroundWriter(ProcessGroup(0, 1, torch.device("cpu")))
    yield writer
    writer.close()


@pytest.fixture
def export(writer: BackgroundWriter, tmp_path: Path) -> Export:
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "tokenizer.json").write_text("{}")

    def run(model: Any, dtype: torch.dtype = torch.float32, **settings: Any) -> Path:
        folder = tmp_path / "exported"
        export = ModelExport(
            model,
            CutParts.of_one_rank(model),
            model.get_parameter,
            tmp_path / "source",
            folder,
            dtype,
            writer,
            **settings,
        )
        export.begin().result(WAIT_S)
        return folder

    return run


def stored(folder: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for path in folder.glob("*.safetensors"):
        content = load_file(path)
        assert not found.keys() & content.keys()
        found |= content
    return found


def reloaded(folder: Path) -> Any:
    model, loading = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(loading[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    return model


def assert_same(found: Any, expected: Any) -> None:
    found, expected = found.state_dict(), expected.state_dict()
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        assert found[name].dtype == values.dtype
        assert torch.equal(found[name], values), name


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "llama"])
@pytest.mark.parametrize("tied", [True, False])
def test_the_files_hold_what_transformers_writes(
    family: str, tied: bool, export: Export, tmp_path: Path
) -> None:
    model = random_model(family, tie_word_embeddings=tied)
    folder = export(model)
    model.save_pretrained(tmp_path / "expected")
    found, expected = stored(folder), stored(tmp_path / "expected")
    assert found.keys() == expected.keys()
    assert ("lm_head.weight" in found) != tied
    assert all(torch.equal(found[name], expected[name]) for name in found)
    assert_same(reloaded(folder), model)
    assert {path.name for path in folder.iterdir()} == {
        "config.json",
        "model.safetensors",
        "tokenizer.json",
    }
    configs = [json.loads((f / "config.json").read_text()) for f in (folder, tmp_path / "expected")]
    assert configs[0] == configs[1]


def test_a_large_model_is_split_over_files(export: Export, tmp_path: Path) -> None:
    model = random_model(num_hidden_layers=3)
    limit = 16_000
    folder = export(model, max_file_bytes=limit)
    model.save_pretrained(tmp_path / "expected", max_shard_size=limit)
    found, expected = (
        json.loads((f / "model.safetensors.index.json").read_text())
        for f in (folder, tmp_path / "expected")
    )
    assert found == expected
    files = sorted(folder.glob("*.safetensors"))
    assert len(files) > 2
    for path in files:
        with safe_open(path, framework="pt") as file:
            assert {found["weight_map"][name] for name in file.keys()} == {path.name}  # noqa: SIM118
    assert_same(reloaded(folder), model)


def test_weights_are_written_in_the_dtype_of_computation(export: Export) -> None:
    model = random_model()
    folder = export(model, torch.bfloat16)
    assert json.loads((folder / "config.json").read_text())["dtype"] == "bfloat16"
    assert next(model.parameters()).dtype == torch.float32
    assert_same(reloaded(folder), model.to(torch.bfloat16))


def test_experts_that_loading_fuses_are_written_apart(export: Export, tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=30,
        hidden_size=16,
        intermediate_size=24,
        moe_intermediate_size=12,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        num_experts=4,
        num_experts_per_tok=2,
    )
    Qwen3MoeForCausalLM(config).save_pretrained(tmp_path / "expected")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "expected")
    folder = export(model, max_file_bytes=20_000)
    found, expected = stored(folder), stored(tmp_path / "expected")
    assert found.keys() == expected.keys()
    assert "model.layers.0.mlp.experts.0.gate_proj.weight" in found
    assert all(torch.equal(found[name], expected[name]) for name in found)
    assert_same(reloaded(folder), model)
    assert not [path for path in folder.iterdir() if path.is_dir()]


def test_weights_are_those_of_the_moment(writer: BackgroundWriter, tmp_path: Path) -> None:
    """The write waits behind another one, which ends after the weights have changed."""
    model = random_model()
    goes_on = threading.Event()
    before = {name: values.clone() for name, values in model.state_dict().items()}
    (tmp_path / "source").mkdir()
    original = writer.group.together
    first = True

    def together(what: str, action: Any) -> Any:
        nonlocal first
        if first:
            first = False
            assert goes_on.wait(WAIT_S)
        return original(what, action)

    writer.group.together = together  # type: ignore[method-assign]
    written = ModelExport(
        model,
        CutParts.of_one_rank(model),
        model.get_parameter,
        tmp_path / "source",
        tmp_path / "exported",
        torch.float32,
        writer,
    ).begin()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)
    goes_on.set()
    written.result(WAIT_S)
    found = reloaded(tmp_path / "exported").state_dict()
    assert all(torch.equal(found[name], values) for name, values in before.items())


def test_weights_that_are_read_late_are_copied_one_after_the_other(
    writer: BackgroundWriter, tmp_path: Path
) -> None:
    model = random_model()
    copies: list[weakref.ref[Any]] = []
    num_alive: list[int] = []

    def copied(name: str) -> torch.Tensor:
        num_alive.append(sum(copy() is not None for copy in copies))
        copy = model.get_parameter(name).detach().clone()
        copies.append(weakref.ref(copy.untyped_storage()))
        return copy

    (tmp_path / "source").mkdir()
    export = ModelExport(
        model,
        CutParts.of_one_rank(model),
        copied,
        tmp_path / "source",
        tmp_path / "exported",
        torch.float32,
        writer,
    )
    export.begin(is_staged=False, reads_late=True).result(WAIT_S)
    assert_same(reloaded(tmp_path / "exported"), model)
    assert len(num_alive) == len(list(model.parameters()))
    assert not any(num_alive)


def test_a_file_of_many_dtypes_and_shapes_is_read_by_safetensors(tmp_path: Path) -> None:
    tensors = {
        "odd": torch.arange(3, dtype=torch.uint8),
        "scalar": torch.tensor(2.5, dtype=torch.float64),
        "half": torch.randn(3, 1).to(torch.bfloat16),
        "empty": torch.empty(0, 4),
        "turned": torch.randn(4, 3).t(),
        "mask": torch.tensor([True, False, True]),
        "long": torch.tensor([[1 << 40]]),
    }
    layout = TensorFile.lay_out(tensors)
    layout.write_whole(tmp_path / "whole", tensors)
    layout.create(tmp_path / "parts")
    layout.write_parts(
        tmp_path / "parts", ((name, Box.whole(t.shape), t) for name, t in tensors.items())
    )
    assert (tmp_path / "whole").read_bytes() == (tmp_path / "parts").read_bytes()
    assert (tmp_path / "whole").stat().st_size == layout.num_bytes
    found = load_file(tmp_path / "whole")
    assert found.keys() == tensors.keys()
    for name, values in tensors.items():
        assert found[name].dtype == values.dtype
        assert torch.equal(found[name], values)
    with pytest.raises(ValueError, match=r"safetensors holds no torch\.complex64"):
        TensorFile.lay_out({"complex": torch.zeros(1, dtype=torch.complex64)})


def test_what_belongs_to_the_model_comes_along_and_no_other_model(
    export: Export, tmp_path: Path
) -> None:
    source, folder = tmp_path / "source", tmp_path / "exported"
    for path, content in {
        "additional_chat_templates/rag.jinja": "B",
        "tokenizer/deep/table.json": "{}",
        "vocabulary.txt": "a",
        "original/consolidated.00.pth": "weights",
        ".cache/huggingface/lock": "",
        "checkpoint-5/config.json": "{}",
        "checkpoint-5/trainer_state.json": "{}",
        "flax_model.msgpack": "weights",
    }.items():
        (source / path).parent.mkdir(exist_ok=True, parents=True)
        (source / path).write_text(content)
    export(random_model("qwen2"))
    found = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    assert found == {
        *("additional_chat_templates/rag.jinja", "tokenizer/deep/table.json", "vocabulary.txt"),
        *("config.json", "model.safetensors", "tokenizer.json"),
    }
    assert not (folder / "original").exists()
