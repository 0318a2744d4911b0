"""A model computes the same when its layers have values only while they compute."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from unit.engines.families import FOUR_LAYERS, SIZES, build

from areal_sc.engines.fsdp.ability_probe import probe_abilities
from areal_sc.engines.fsdp.model import take_memory
from areal_sc.engines.fsdp.packed_model import PackedModel
from areal_sc.engines.training.causal_lm import build_without_parameters
from areal_sc.engines.training.stored_weights import WeightsInMemory
from areal_sc.engines.training.streamed_layers import (
    SharedPasses,
    decoder_layers,
    stream_layers,
)

INPUT_IDS = torch.tensor([[3, 1, 4, 1, 5, 9]])


def unfilled_copy(model: Any, folder: Path) -> Any:
    model.save_pretrained(folder)
    return build_without_parameters(folder)


def num_filled(causal_lm: Any) -> int:
    """Layers that have values."""
    layers = decoder_layers(causal_lm)
    return sum(not any(p.is_meta for p in layer.parameters()) for layer in layers)


@pytest.mark.parametrize(("num_ranks", "num_kept"), [(1, 4), (2, 1), (3, 0), (8, 0)])
def test_layers_come_and_go(num_ranks: int, num_kept: int, tmp_path: Path) -> None:
    model = hf.AutoModelForCausalLM.from_config(hf.Qwen2Config(**FOUR_LAYERS)).eval()
    streamed = unfilled_copy(model, tmp_path)
    layers = decoder_layers(streamed)
    filled = list[int]()
    for layer in layers:
        layer.register_forward_hook(lambda *_: filled.append(num_filled(streamed)))
    stream_layers(streamed, WeightsInMemory(model).read, num_ranks)
    for _ in range(2):
        with torch.no_grad():
            assert torch.equal(streamed(INPUT_IDS).logits, model(INPUT_IDS).logits)
        assert num_filled(streamed) == num_kept
    assert max(filled) == min(num_kept + 1, len(layers))


def test_a_failed_forward_leaves_no_values(tmp_path: Path) -> None:
    model = build("qwen3")
    streamed = unfilled_copy(model, tmp_path)
    layers = decoder_layers(streamed)
    stream_layers(streamed, WeightsInMemory(model).read, 2)
    layers[1].mlp.forward = None  # type: ignore[assignment]
    with pytest.raises(TypeError):
        streamed(INPUT_IDS)
    assert num_filled(streamed) == 0


def test_tied_parameters_have_one_memory(tmp_path: Path) -> None:
    config = hf.Qwen2Config(**SIZES, tie_word_embeddings=True)
    model = hf.AutoModelForCausalLM.from_config(config)
    streamed = unfilled_copy(model, tmp_path)
    stream_layers(streamed, WeightsInMemory(model).read, 2)
    head, embeddings = streamed.lm_head.weight, streamed.model.embed_tokens.weight
    assert head.data_ptr() == embeddings.data_ptr()


@pytest.mark.parametrize(("family", "num_kept"), [("mistral", 0), ("gemma2", 0), ("qwen3_next", 1)])
def test_the_probe_finds_the_same_without_the_whole_model(
    family: str, num_kept: int, tmp_path: Path
) -> None:
    """Also where it tries a copy of the model with smaller limits."""
    model = build(family).eval()
    whole = PackedModel(model, chunk_tokens=4)
    streamed = PackedModel(unfilled_copy(model, tmp_path), chunk_tokens=4)
    most, tried = 0, list[Any]()

    def read(names: Iterable[str]) -> dict[str, torch.Tensor]:
        nonlocal most
        most = max(most, *(num_filled(causal_lm) for causal_lm in tried))
        return WeightsInMemory(model).read(names)

    def fill(causal_lm: Any) -> None:
        tried.append(causal_lm)
        stream_layers(causal_lm, read, 2)

    fill(streamed.causal_lm)
    found, expected = probe_abilities(streamed, 64, fill), probe_abilities(whole, 64)
    assert found.abilities == expected.abilities
    assert [*map(torch.Tensor.tolist, found.rows)] == [*map(torch.Tensor.tolist, expected.rows)]
    assert found.noise == pytest.approx(expected.noise)
    assert most == num_kept  # before the next one is read


def test_the_probe_reads_each_layer_twice(tmp_path: Path) -> None:
    model = hf.AutoModelForCausalLM.from_config(hf.Qwen2Config(**FOUR_LAYERS)).eval()
    reads = Counter[str]()

    def read(names: Iterable[str]) -> dict[str, torch.Tensor]:
        reads.update(names := list(names))
        return WeightsInMemory(model).read(names)

    def fill(causal_lm: Any) -> None:
        stream_layers(causal_lm, read, 8)

    streamed = PackedModel(unfilled_copy(model, tmp_path), chunk_tokens=4)
    fill(streamed.causal_lm)
    probe_abilities(streamed, 64, fill)
    of_layers = {name: reads[name] for name, _ in model.named_parameters() if ".layers." in name}
    assert set(of_layers.values()) == {2}  # for rows to try, and for all that is tried


class Passes:
    """Streamed models of the same weights, and which layers were read for their passes."""

    def __init__(self, folder: Path) -> None:
        self.model = hf.AutoModelForCausalLM.from_config(hf.Qwen2Config(**FOUR_LAYERS)).eval()
        self.models = [unfilled_copy(self.model, folder) for _ in range(3)]
        self.read_layers = list[str]()
        self.fails_at = ""
        for causal_lm in self.models:
            stream_layers(causal_lm, self._read, 8)
        self._shared = SharedPasses()
        self.read_layers.clear()

    def _read(self, names: Iterable[str]) -> dict[str, torch.Tensor]:
        names = list(names)
        self.read_layers += {name.split(".")[2] for name in names if ".layers." in name}
        if self.fails_at and self.fails_at in self.read_layers:
            raise OSError("the disk is gone")
        return WeightsInMemory(self.model).read(names)

    def logits(self, num_calls: int = 1) -> list[Future[torch.Tensor]]:
        """Of all models; the first one is called so often."""
        asked = [
            self._shared.add(lambda it=it, n=n: [it(INPUT_IDS).logits for _ in range(n)][-1])
            for it, n in zip(self.models, (num_calls, 1, 1), strict=True)
        ]
        self._shared.run()
        return asked


def test_passes_together_read_a_layer_once(tmp_path: Path) -> None:
    passes = Passes(tmp_path)
    with torch.no_grad():
        expected = passes.model(INPUT_IDS).logits
    for logits in passes.logits():
        assert torch.equal(logits.result(), expected)
    assert passes.read_layers == ["0", "1", "2", "3"]
    assert [*map(num_filled, passes.models)] == [0, 0, 0]


def test_a_pass_that_ends_early_or_goes_on_holds_no_other_up(tmp_path: Path) -> None:
    passes = Passes(tmp_path)
    decoder_layers(passes.models[1])[1].mlp.forward = None  # type: ignore[assignment]
    first, second, third = passes.logits(num_calls=2)
    assert isinstance(second.exception(), TypeError)
    assert torch.equal(first.result(), third.result())
    assert passes.read_layers == ["0", "1", "2", "3"] * 2


def test_what_cannot_be_read_ends_all_passes(tmp_path: Path) -> None:
    passes = Passes(tmp_path)
    passes.fails_at = "2"
    assert {type(it.exception()) for it in passes.logits()} == {OSError}
    assert passes.read_layers == ["0", "1", "2"]


def test_memory_for_an_unfilled_model_leaves_tied_parameters_tied(tmp_path: Path) -> None:
    config = hf.Qwen2Config(**SIZES, tie_word_embeddings=True)
    unfilled = unfilled_copy(hf.AutoModelForCausalLM.from_config(config), tmp_path)
    take_memory(PackedModel(unfilled, chunk_tokens=4), torch.device("cpu"))
    assert unfilled.lm_head.weight is unfilled.model.embed_tokens.weight
    assert {parameter.device.type for parameter in unfilled.parameters()} == {"cpu"}
