"""Training in float16: a scaled loss, updates that overflow, and models that do not fit."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import transformers as hf
from builders import engines_on, packed_rows

from areal_sc.algorithms.loss_tokens import LossTokens
from areal_sc.config.schema import Dtype, OptimizerConfig
from areal_sc.engines.fsdp.engine import FSDPEngine
from areal_sc.engines.loss_scale import LossScale
from areal_sc.errors import ModelError

LENGTHS = (9, 14, 5, 11)
Build = Callable[..., FSDPEngine]


class SmallLoss:
    """The mean log-probability, times a factor: gradients of this size."""

    def __init__(self, factor: float) -> None:
        self.factor = factor

    def __call__(self, tokens: LossTokens) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        return -self.factor * tokens.mean(tokens.logprobs), {}


@pytest.fixture
def build(tiny_model_folder: Path) -> Iterator[Build]:
    optimizer = OptimizerConfig(lr=1e-3, total_steps=10, weight_decay=0.01)
    with engines_on(tiny_model_folder) as build_engine:
        yield lambda dtype, *path: build_engine(*path, dtype=dtype, optimizer=optimizer)


rows = functools.partial(packed_rows, LENGTHS)


def masters(engine: FSDPEngine) -> dict[str, torch.Tensor]:
    """Copies of the float32 parameters."""
    return {name: p.detach().clone() for name, p in engine._model.causal_lm.named_parameters()}


def is_same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(values, other[name]) for name, values in one.items())


def test_gradients_that_float16_would_lose_count(build: Build) -> None:
    """The smallest number above 0 is 6e-8 in float16."""
    loss = SmallLoss(1e-6)
    expected = build(Dtype.float32).update([rows()], loss, step=0)["grad_norm"]
    engine = build(Dtype.float16)
    found = engine.update([rows()], loss, step=0)
    assert found["grad_norm"] == pytest.approx(expected, rel=2e-3)
    assert found["loss_scale"] == 2.0**16
    engine._optimizer.loss_scale = LossScale(1.0)
    lost = engine.update([rows()], loss, step=0)["grad_norm"]
    assert lost != pytest.approx(expected, rel=0.02), "there was something to lose"


def test_an_update_that_overflows_is_skipped_and_counted(build: Build) -> None:
    engine = build(Dtype.float16)
    engine.update([rows()], SmallLoss(1.0), step=0)
    before = masters(engine)
    moments = {
        name: kinds["exp_avg"].clone() for name, kinds in engine._optimizer.moments().items()
    }
    engine._optimizer.loss_scale = LossScale(2.0**40, 7)
    found = engine.update([rows(1)], SmallLoss(1.0), step=1)
    assert (found["num_updates"], found["num_skipped_updates"]) == (0, 1)
    assert found["loss_scale"] == 2.0**39
    assert is_same(masters(engine), before)
    after = engine._optimizer.moments()
    assert all(torch.equal(values, after[name]["exp_avg"]) for name, values in moments.items())
    # each minibatch halves it until one fits, and what comes then is an update
    found = engine.update([rows(seed) for seed in range(40)], SmallLoss(1.0), step=2)
    assert found["num_updates"] > 10
    assert found["num_updates"] + found["num_skipped_updates"] == 40
    assert found["loss_scale"] == 2.0 ** (39 - found["num_skipped_updates"])


def test_a_resumed_run_goes_on_with_the_same_scale(build: Build, tmp_path: Path) -> None:
    """To the bit; float32 and bfloat16 read the same snapshot, and have no scale."""
    engine = build(Dtype.float16)
    engine._optimizer.loss_scale = LossScale(2.0**30, 3)
    engine.update([rows(seed) for seed in range(20)], SmallLoss(1.0), step=0)
    at_snapshot = engine._optimizer.loss_scale
    assert at_snapshot.value < 2.0**30
    assert at_snapshot.num_good > 0
    engine.begin_snapshot(tmp_path / "snapshot").result()
    expected = engine.update([rows(30)], SmallLoss(1e-6), step=1)
    resumed = build(Dtype.float16)
    resumed.load_snapshot(tmp_path / "snapshot")
    assert resumed._optimizer.loss_scale == at_snapshot
    assert resumed.update([rows(30)], SmallLoss(1e-6), step=1) == expected
    assert is_same(masters(resumed), masters(engine))
    for dtype in (Dtype.float32, Dtype.bfloat16):
        other = build(dtype)
        other.load_snapshot(tmp_path / "snapshot")
        assert "loss_scale" not in other.update([rows(30)], SmallLoss(1.0), step=1)
    other.begin_snapshot(tmp_path / "without").result()
    resumed.load_snapshot(tmp_path / "without")
    assert resumed._optimizer.loss_scale.value == expected["loss_scale"], "it keeps its own"


def test_a_model_beyond_the_range_of_float16_is_refused(
    build: Build, tiny_model_folder: Path, tmp_path: Path
) -> None:
    """Its hidden states reach 65,504; in bfloat16 it trains."""
    model = hf.AutoModelForCausalLM.from_pretrained(tiny_model_folder)
    model.model.layers[0].mlp.down_proj.weight.data *= 1e7
    model.save_pretrained(tmp_path)
    hf.AutoTokenizer.from_pretrained(tiny_model_folder).save_pretrained(tmp_path)
    message = r"Qwen2ForCausalLM does not .* in torch\.float16 .*set actor\.dtype=bfloat16"
    with pytest.raises(ModelError, match=message):
        build(Dtype.float16, tmp_path)
    assert build(Dtype.bfloat16, tmp_path).update([rows()], SmallLoss(1.0), step=0)["num_updates"]
