"""Weights in memory under the names of files: which families' experts are taken apart, and how."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
from unit.engines.families import build

from areal_sc.engines.servers.model import StoredNames
from areal_sc.sizing.model_folder import read_stored_shapes
from areal_sc.weights.group import in_byte_order, layout_of

FUSED = (
    *("qwen2_moe", "qwen3_moe", "mixtral", "deepseek_v2", "deepseek_v3", "glm4_moe", "minimax_m2"),
    *("olmoe", "phimoe", "ernie4_5_moe", "dots1", "qwen3_next", "jamba"),
)


@pytest.mark.parametrize("family", ["qwen2", "gpt_neox", "gpt_oss", "granitemoe", *FUSED])
def test_the_bytes_in_memory_are_those_of_the_files(family: str, tmp_path: Path) -> None:
    build(family).save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    with torch.device("meta"):
        unfilled = AutoModelForCausalLM.from_config(model.config)
    unfilled.tie_weights()
    names = StoredNames.find(unfilled, read_stored_shapes(tmp_path))
    assert names is not None
    stored = load_file(tmp_path / "model.safetensors")
    bucket = [(name, parameter.detach()) for name, parameter in model.named_parameters()]
    found = names.split(bucket)
    missing = stored.keys() - dict(found).keys()
    assert all(name.endswith("e_score_correction_bias") for name in missing)  # nobody trains it
    for name, tensor in found:
        assert torch.equal(tensor, stored[name]), name
    assert (len(found) > len(bucket)) == (family in FUSED)

    # the same, of the bytes of a bucket
    flat = torch.cat([tensor.flatten() for _, tensor in in_byte_order(bucket)])
    layout = names.describe(layout_of(bucket))
    parts = torch.split(flat, [torch.Size(shape).numel() for shape in layout.shapes])
    for name, shape, values in zip(layout.names, layout.shapes, parts, strict=True):
        assert torch.equal(values.view(shape), stored[name]), name
