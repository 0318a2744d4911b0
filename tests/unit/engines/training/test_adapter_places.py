"""Adapters beside each other on one base, in one process; on meshes: test_adapters_beside."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from builders import engines_on, packed_rows
from random_models import random_model
from safetensors.torch import load_file

from areal_sc.algorithms.loss_tokens import LossTokens
from areal_sc.algorithms.losses import Metrics
from areal_sc.algorithms.named_loss import NamedLoss
from areal_sc.config.lora_settings import LoraConfig
from areal_sc.config.schema import ActorConfig, Dtype, ModelHead, OptimizerConfig
from areal_sc.engines.base import AdapterBeginning
from areal_sc.engines.fsdp.engine import FSDPEngine
from areal_sc.engines.fsdp.packed_model import ModelAbilities, PackedModel
from areal_sc.engines.handles import make_actor
from areal_sc.engines.training.adapters.lora import adapter_place, add_adapters
from areal_sc.engines.training.snapshot_index import SnapshotIndex
from areal_sc.errors import ConfigError, ModelError
from areal_sc.metadata import RowMetadata
from areal_sc.sizing.machine import Machine
from areal_sc.sizing.model_folder import read_model_shape
from areal_sc.token_fields import field_type
from areal_sc.transport.packed_rows import PackedRows, RowValues

LORA = LoraConfig(rank=4, alpha=6.0, places=3)
OPTIMIZER = OptimizerConfig(lr=1e-2, max_grad_norm=0.5)
Build = Callable[..., FSDPEngine]


@pytest.fixture
def build(tmp_path: Path) -> Iterator[Build]:
    random_model(vocab_size=30).save_pretrained(tmp_path / "model")
    with engines_on(tmp_path / "model") as build_engine:
        yield lambda lora=LORA, **settings: build_engine(
            lora=lora, **{"optimizer": OPTIMIZER, **settings}
        )


def summed(tokens: LossTokens) -> tuple[torch.Tensor, Metrics]:
    return -tokens.logprobs.sum(), {}


def rows_of(*places: int, step: int = 0, begin: int = 0) -> PackedRows:
    """Three rows of each place, with the same first tokens in all of them."""
    rows = packed_rows([5 + row % 3 for row in range(3 * len(places))], seed=step)
    for tokens in torch.split(rows.fields["input_ids"], list(rows.lengths)):
        tokens[:begin] = torch.arange(begin) + 7
    adapter = torch.tensor([float(place) for place in places for _ in range(3)])
    of_tokens = adapter.repeat_interleave(torch.tensor(rows.lengths))
    return replace(rows, fields={**rows.fields, "adapter": of_tokens})


def begin(engine: FSDPEngine, place: int, **changes: Any) -> None:
    engine.fill_adapter(place, AdapterBeginning(**{"seed": place, **changes}))


def adapter(engine: FSDPEngine, place: int) -> dict[str, torch.Tensor]:
    named = engine._model.causal_lm.named_parameters()
    its = {n: p.detach().clone() for n, p in named if adapter_place(n) == place}
    return {n.removesuffix(f"_{place}") if place else n: values for n, values in its.items()}


def is_same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    assert one.keys() == other.keys()
    return all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_place_whose_rows_are_alone_has_the_bits_of_one_adapter(build: Build, dtype: str) -> None:
    beside, alone = build(dtype=dtype), build(replace(LORA, places=1), dtype=dtype, seed=2)
    begin(beside, 2)
    assert is_same(adapter(beside, 2), adapter(alone, 0))
    others = adapter(beside, 0), adapter(beside, 1)
    for step in range(3):
        rows = rows_of(2, step=step)
        metrics = beside.update([rows], summed, step=step)
        only = replace(rows, fields={n: it for n, it in rows.fields.items() if n != "adapter"})
        assert alone.update([only], summed, step=step) == metrics
    assert is_same(adapter(beside, 2), adapter(alone, 0))
    assert is_same(others[0], adapter(beside, 0))
    assert is_same(others[1], adapter(beside, 1))
    moments = beside._optimizer.moments().items()
    steps = {(adapter_place(name), float(state["step"])) for name, state in moments}
    assert steps == {(0, 0), (1, 0), (2, 3)}


@pytest.mark.parametrize("kind", ["packed", "shared", "padded"])
def test_rows_are_computed_with_their_own_adapter(
    build: Build, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr(
        PackedModel, "min_saved_tokens", lambda *_: 1 if kind == "shared" else math.inf
    )
    engine = build()
    if kind == "padded":
        engine._model.abilities = ModelAbilities(packs=False, has_linear_head=True)
    for place in range(3):
        begin(engine, place)
        engine.update([rows_of(place, step=place)], summed, step=0)
    rows = rows_of(2, 0, 1, 2, begin=3)
    order = [4, 11, 0, 7, 3, 9, 1, 8, 2, 10, 5, 6]
    shuffled = rows.take(order)
    found = torch.split(engine.forward(shuffled, "logprobs"), list(shuffled.lengths))
    for row, its in zip(order, found, strict=True):
        expected = engine.forward(rows.take([row]), "logprobs")
        assert torch.allclose(its, expected, atol=1e-5), row
    tokens = torch.split(shuffled.fields["adapter"], list(shuffled.lengths))
    of_rows = torch.tensor([int(its[0]) for its in tokens])
    spans = tuple((row, row + 1) for row in range(shuffled.num_rows))
    named = {"adapter": RowValues(of_rows, spans, field_type("row:int64"))}
    only = {n: it for n, it in shuffled.fields.items() if n != "adapter"}
    by_row = replace(shuffled, fields=only, row_fields=named)
    assert torch.equal(engine.forward(by_row, "logprobs"), torch.cat(found))
    base = engine.forward(shuffled, "base_logprobs")
    assert (torch.cat(found) - base).abs().max() > 0.1


def test_prompts_are_shared_within_a_place_alone(
    build: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PackedModel, "min_saved_tokens", lambda *_: 1)
    engine = build()
    metrics = engine.update([rows_of(0, 1, begin=3)], summed, step=0)
    assert metrics["num_tokens"] - metrics["num_computed_tokens"] >= 2 * 2 * 3
    first = rows_of(0, 1, begin=3)
    metrics = engine.update([first.take([0, 3])], summed, step=0)  # of two places
    assert metrics["num_tokens"] == metrics["num_computed_tokens"]


def test_a_place_begins_anew_and_goes_on_from_a_folder(build: Build, tmp_path: Path) -> None:
    engine = build()
    begin(engine, 1, rank=2)
    for step in range(2):
        engine.update([rows_of(0, 1, step=step)], summed, step=step)
    values = adapter(engine, 1)
    assert all(not it[2:].any() for n, it in values.items() if n.endswith("A"))
    assert all(not it[:, 2:].any() for n, it in values.items() if n.endswith("B"))
    engine.begin_save_adapter(1, tmp_path / "one", with_optimizer=True).result()
    engine.begin_snapshot(tmp_path / "snapshot").result()
    assert SnapshotIndex.read(tmp_path / "snapshot").shapes["adapter_ranks"] == (3,)
    engine.update([rows_of(1, step=2)], summed, step=2)
    expected = adapter(engine, 1)

    begin(engine, 1)
    assert is_same(adapter(engine, 1), adapter(build(replace(LORA, places=1), seed=1), 0))
    begin(engine, 2, folder=str(tmp_path / "one"), with_optimizer=True)
    engine.update([rows_of(2, step=2)], summed, step=2)
    assert is_same(adapter(engine, 2), expected)
    begin(engine, 2, folder=str(tmp_path / "one"))  # without: its moments begin at 0
    engine.update([rows_of(2, step=2)], summed, step=2)
    assert not is_same(adapter(engine, 2), expected)
    engine.load_snapshot(tmp_path / "snapshot")
    engine.update([rows_of(1, step=2)], summed, step=2)
    assert is_same(adapter(engine, 1), expected)

    state = load_file(tmp_path / "one" / "optimizer.safetensors")
    assert float(state["step"]) == 2
    (tmp_path / "one" / "optimizer.safetensors").write_bytes(b"{}")
    before = adapter(engine, 2)
    with pytest.raises(ModelError, match="not a whole safetensors file"):
        begin(engine, 2, folder=str(tmp_path / "one"), with_optimizer=True)
    with pytest.raises(ModelError, match=r"cannot read adapter_config\.json"):
        begin(engine, 2, folder=str(tmp_path / "nowhere"))
    assert is_same(adapter(engine, 2), before)
    small = build(replace(LORA, rank=1))
    with pytest.raises(ModelError, match=r"expected an adapter of rank at most 1, got 2"):
        begin(small, 0, folder=str(tmp_path / "one"))
    alone = build(replace(LORA, places=1))  # the scale is that of the settings' rank
    with pytest.raises(ModelError, match="rank"):
        begin(alone, 0, folder=str(tmp_path / "one"))


def test_rows_of_no_place_are_refused_and_nothing_changes(build: Build) -> None:
    engine = build()
    before = [adapter(engine, place) for place in range(3)]
    settings = {0: OPTIMIZER, 2: OPTIMIZER}
    for rows, got in (
        (rows_of(0, 3), r"places \[0, 2\] .* got 3"),
        (rows_of(1), r"places \[0, 2\] .* got 1"),
        (rows_of(0), "one number for all tokens of a row"),
    ):
        if "one number" in got:
            rows.fields["adapter"][1] = 2
        with pytest.raises(ValueError, match=f"field adapter: expected .*{got}"):
            engine.update([rows], summed, step=0, optimizers=settings)
    pair = replace(
        rows_of(0, 1).take([0, 3]),
        metadata=tuple(RowMetadata(0, 0, 5, 1.0 - it, 0, (), it) for it in range(2)),
    )
    with pytest.raises(ValueError, match="one place for all rows of a group"):
        engine.update([pair], NamedLoss("bradley_terry"), step=0)
    alone = build(replace(LORA, places=1))
    with pytest.raises(ValueError, match=r"places \[0\]"):
        alone.update([rows_of(1)], summed, step=0)
    assert all(is_same(adapter(engine, place), before[place]) for place in range(3))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lora": LoraConfig(places=2)}, "lora.rank: expected one above 0 .*places=2, got 0"),
        ({"lora": replace(LORA, dropout=0.1)}, "lora.dropout: expected 0"),
        ({"head": ModelHead.value}, "head: expected lm"),
        ({"dtype": Dtype.float16}, "dtype: expected float32 or bfloat16"),
        ({"compile_layers": True}, "compile_layers: expected false"),
    ],
)
def test_settings_that_do_not_go_with_several_are_named(
    settings: dict[str, Any], message: str
) -> None:
    config = ActorConfig(**{"path": "model", "device": "cpu", "lora": LORA, **settings})
    with pytest.raises(ConfigError, match=f"actor.{message}"):
        make_actor(config).check(None)


def test_experts_that_are_linear_layers_are_refused() -> None:
    model = random_model(vocab_size=30)
    model.model.layers[0].mlp.experts = torch.nn.ModuleList([torch.nn.Linear(4, 4)])
    with pytest.raises(ModelError, match="experts get tokens of all places, mixed"):
        add_adapters(model, LORA)


def test_the_plan_counts_every_place(tmp_path: Path, build: Build) -> None:
    build()  # writes nothing; the model's folder is there
    shape = read_model_shape(tmp_path / "model")
    assert shape is not None
    one, three = (
        make_actor(ActorConfig(path="", device="cpu", lora=lora)).plan_worker(
            0, shape, ["cpu"], Machine()
        )[0]
        for lora in (replace(LORA, places=1), LORA)
    )
    assert three.optimizer_bytes == 3 * one.optimizer_bytes
