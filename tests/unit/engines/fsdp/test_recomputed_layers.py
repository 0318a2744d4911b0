"""What is computed again in the backward pass, and what torch compiles, changes no numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from builders import packed_rows
from torch.utils.flop_counter import FlopCounterMode

from areal_sc.algorithms.loss_tokens import LossTokens
from areal_sc.config.schema import ActivationCheckpointing, ActorConfig, Device, OptimizerConfig
from areal_sc.engines.fsdp import packed_model
from areal_sc.engines.fsdp.engine import FSDPEngine
from areal_sc.transport.packed_rows import PackedRows

# torch's compiler warns of its own code
pytestmark = pytest.mark.filterwarnings("default")

LENGTHS = ((9, 14, 5, 11), (3, 16), (2, 2, 2, 2, 2, 13, 7, 8, 9), (6,))


@pytest.fixture(autouse=True)
def _without_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs are what is tested, not kernels."""
    monkeypatch.setattr(packed_model, "COMPILER", "aot_eager")
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()


def mean_logprob(tokens: LossTokens) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    return -tokens.mean(tokens.logprobs), {}


def rows(lengths: tuple[int, ...]) -> PackedRows:
    is_trained = torch.cat([torch.arange(length) > 0 for length in lengths])
    return packed_rows(lengths, 1, loss_mask=is_trained, advantages=(1.0,) * len(lengths))


def engine_of(folder: Path, **settings: Any) -> FSDPEngine:
    engine = FSDPEngine(
        ActorConfig(
            path=str(folder),
            device=Device.cpu,
            max_tokens_per_micro_batch=16,
            optimizer=OptimizerConfig(lr=1e-3, total_steps=10),
            **settings,
        )
    )
    engine.initialize(0, 1, "")
    return engine


def trained(engine: FSDPEngine) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Norms of the gradients of some updates, and the weights that they leave."""
    norms = [
        engine.update([rows(lengths)], mean_logprob, step=step)["grad_norm"]
        for step, lengths in enumerate(LENGTHS)
    ]
    weights = {
        name: parameter.detach().clone()
        for name, parameter in engine._model.causal_lm.named_parameters()
    }
    engine.close()
    return norms, weights


@pytest.mark.parametrize(
    ("kind", "compiles"),
    [
        *((kind, False) for kind in ActivationCheckpointing),
        (ActivationCheckpointing.selective, True),
        (ActivationCheckpointing.layers, True),
    ],
)
def test_the_updates_are_the_same(
    kind: ActivationCheckpointing, compiles: bool, tiny_model_folder: Path
) -> None:
    norms, weights = trained(engine_of(tiny_model_folder, compile_layers=False))
    engine = engine_of(tiny_model_folder, activation_checkpointing=kind, compile_layers=compiles)
    sizes = list[int]()
    plain = engine._micro_batch

    def noting(*arguments: Any) -> Any:
        batch = plain(*arguments)
        sizes.append(len(batch.input_ids))
        return batch

    engine._micro_batch = noting  # type: ignore[method-assign]
    found_norms, found = trained(engine)
    assert found_norms == pytest.approx(norms, rel=1e-5)
    for name, expected in weights.items():
        torch.testing.assert_close(found[name], expected, rtol=1e-4, atol=1e-6)
    counters = torch._dynamo.utils.counters
    assert not counters["graph_break"]
    assert counters["stats"]["unique_graphs"] == int(compiles), "one for all layers and sizes"
    if compiles:
        assert engine._model.is_compiled
        assert set(sizes) <= {4, 8, 12, 16}
        assert len(set(sizes)) > 1


def flops_of_layers(folder: Path, kind: ActivationCheckpointing) -> int:
    engine = engine_of(folder, activation_checkpointing=kind, compile_layers=False)
    with FlopCounterMode(display=False) as counter:
        engine.update([rows(LENGTHS[0])], mean_logprob, step=0)
    engine.close()
    products = counter.get_flop_counts()["Global"]
    return sum(products.values())


def test_products_are_computed_once_where_they_are_kept(tiny_model_folder: Path) -> None:
    counts = {kind: flops_of_layers(tiny_model_folder, kind) for kind in ActivationCheckpointing}
    assert counts[ActivationCheckpointing.selective] == counts[ActivationCheckpointing.none]
    assert counts[ActivationCheckpointing.layers] > 1.2 * counts[ActivationCheckpointing.none]


def test_a_layer_that_is_no_graph_computes_as_it_is(
    tiny_model_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    expected = trained(engine_of(tiny_model_folder, compile_layers=False))
    engine = engine_of(tiny_model_folder, compile_layers=True)
    mlp = engine._model.causal_lm.model.layers[0].mlp
    plain = mlp.forward

    def reading(hidden: torch.Tensor) -> torch.Tensor:
        torch._dynamo.graph_break()
        return plain(hidden)

    mlp.forward = reading
    assert trained(engine)[0] == pytest.approx(expected[0], rel=1e-5)
    assert not engine._model.is_compiled
    (told,) = [it.getMessage() for it in caplog.records if "compiled" in it.getMessage()]
    assert told.startswith("layers are not compiled, and slower: ")
