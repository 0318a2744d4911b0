"""Two ranks that train the tower of a model, of which one has no picture, are as one."""

from __future__ import annotations

import json
from itertools import chain
from pathlib import Path

import pytest
import torch
from builders import picture
from integration.picture_ranks_program import NUM_STEPS, actor_config
from integration.ranks import run_program
from picture_models import save_picture_model
from safetensors.torch import load_file

from areal_sc.algorithms.named_loss import CROSS_ENTROPY
from areal_sc.engines.fsdp.engine import FSDPEngine
from areal_sc.engines.picture_processor import picture_processor
from areal_sc.engines.tokenizer import load_tokenizer
from areal_sc.sources.pictures import packed
from areal_sc.token_fields import PICTURES
from areal_sc.transport.packed_rows import PackedRows, RowValues

ROWS = (
    ("see <image>!", (picture(0),), "one"),
    ("see <image> and <image>", (picture(1), picture(2)), "two"),
    ("a text", (), "alone"),
    ("and another", (), "one"),
)


def rows_of(model: Path) -> PackedRows:
    tokenizer = load_tokenizer(model)
    processor = picture_processor(model, tokenizer)
    assert processor is not None
    ids, masks = list[list[int]](), list[list[bool]]()
    for text, pictures, answer in ROWS:
        prompt = tokenizer(processor.expand(text, pictures))["input_ids"]
        answered = tokenizer(answer)["input_ids"]
        ids.append([*prompt, *answered])
        masks.append([False] * len(prompt) + [True] * len(answered))
    fields = {
        "input_ids": torch.tensor([*chain(*ids)]).int(),
        "loss_mask": torch.tensor([*chain(*masks)]),
    }
    values = RowValues.of_bytes([packed(pictures).tobytes() for _, pictures, _ in ROWS])
    return PackedRows(fields, tuple(map(len, ids)), row_fields={PICTURES: values})


def test_a_rank_without_pictures_trains_the_tower_with_the_other(tmp_path: Path) -> None:
    model = save_picture_model(tmp_path / "model", "qwen3_vl")
    rows = rows_of(model)
    for rank, its in enumerate(([0, 1], [2, 3])):
        torch.save(rows.take(its), tmp_path / f"rows-{rank}.pt")
    run_program(Path(__file__).with_name("picture_ranks_program.py"), tmp_path, {})
    engine = FSDPEngine(actor_config(model, 1))
    engine.initialize(0, 1, "")
    stats = [engine.update([rows], CROSS_ENTROPY, step=step) for step in range(NUM_STEPS)]
    engine.begin_save_hf(tmp_path / "alone").result()
    engine.close()
    for rank in range(2):
        its = json.loads((tmp_path / f"stats-{rank}.json").read_text())
        for found, expected in zip(its, stats, strict=True):
            assert found["grad_norm"] == pytest.approx(expected["grad_norm"], abs=1e-5)
    found, expected = (load_file(tmp_path / it / "model.safetensors") for it in ("saved", "alone"))
    before = load_file(model / "model.safetensors")
    assert found.keys() == expected.keys() == before.keys()
    for name, values in expected.items():
        assert torch.allclose(found[name], values, atol=1e-5), name
    tower = [name for name in before if "visual" in name]
    assert all(not torch.equal(found[name], before[name]) for name in tower)
