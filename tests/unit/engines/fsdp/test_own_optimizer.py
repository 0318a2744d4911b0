"""Optimizers of a user's own: their steps, their state from the start, and what is refused."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from builders import save_qwen2
from unit.engines.fsdp.test_fsdp_engine import actor_config, make_rows, ppo_update, weights
from unit.engines.fsdp.test_fsdp_optimizer import WHOLE

from areal_sc.config.schema import OptimizerConfig
from areal_sc.engines.fsdp.cuts import Cut, CutParts
from areal_sc.engines.fsdp.engine import FSDPEngine
from areal_sc.engines.fsdp.optimizer import ShardedOptimizer
from areal_sc.engines.training.process_group import ProcessGroup
from areal_sc.errors import ConfigError, WorkflowError

HERE = __name__
SHAPES = {
    "model.layers.0.up.weight": (6, 4),
    "model.layers.0.down.weight": (4, 6),
    "model.embed_tokens.weight": (5, 4),
    "model.norm.weight": (4,),
}


class Lion(torch.optim.Optimizer):
    """Elementwise; one state, no counter."""

    def __init__(self, groups: list[dict[str, Any]]) -> None:
        super().__init__(groups, {"lr": 0.0, "betas": (0.9, 0.99)})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for shard in group["params"]:
                if shard.grad is not None:
                    mean = self.state[shard].setdefault("mean", torch.zeros_like(shard))
                    shard.sub_(mean.lerp(shard.grad, 0.1).sign(), alpha=group["lr"])
                    mean.lerp_(shard.grad, 0.01)


class Counting(Lion):
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for shard in group["params"]:
                self.state[shard]["step"] = 1


class Raising(Lion):
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        raise RuntimeError("no such thing")


def parameters(shapes: dict[str, tuple[int, ...]] = SHAPES) -> dict[str, torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return {
        name: torch.nn.Parameter(torch.randn(shape, generator=generator))
        for name, shape in shapes.items()
    }


def made(kind: str, ours: dict[str, torch.nn.Parameter], **settings: Any) -> ShardedOptimizer:
    parts = CutParts({name: Cut.copies(p.shape, 1) for name, p in ours.items()})
    config = OptimizerConfig(type=kind, max_grad_norm=0, **settings)
    return ShardedOptimizer(ours, config, parts, *WHOLE[1:])


def test_muon_is_that_of_torch_beside_its_adam(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[4] / "examples"))
    ours, theirs = parameters(), parameters()
    settings = {"lr": 0.02, "beta1": 0.8, "beta2": 0.9, "eps": 1e-6, "weight_decay": 0.1}
    optimizer = made("muon:Muon", ours, **settings)
    before = {name: parameter.detach().clone() for name, parameter in ours.items()}
    assert {kind for state in optimizer.moments().values() for kind in state} == {
        *("momentum", "mean", "square", "step")
    }, "it exists from the start"
    for name, parameter in ours.items():
        assert torch.equal(parameter, before[name]), "and nothing has moved"
    hidden = [theirs[name] for name in SHAPES if ".layers." in name]
    adams = {"lr": 0.02, "betas": (0.8, 0.9), "eps": 1e-6}
    references = [
        torch.optim.Muon(
            hidden, lr=0.02, weight_decay=0.1, momentum=0.95, adjust_lr_fn="match_rms_adamw"
        ),
        torch.optim.AdamW([theirs["model.embed_tokens.weight"]], weight_decay=0.1, **adams),
        torch.optim.AdamW([theirs["model.norm.weight"]], weight_decay=0.0, **adams),
    ]
    generator = torch.Generator().manual_seed(1)
    for step in range(5):
        for name, shape in SHAPES.items():
            gradient = torch.randn(shape, generator=generator)
            ours[name].grad, theirs[name].grad = gradient.clone(), gradient.clone()
        optimizer.update(step)
        for reference in references:
            reference.step()
    for name, parameter in ours.items():
        torch.testing.assert_close(
            parameter, theirs[name], rtol=0, atol=2e-3 if ".l" in name else 1e-6
        )
        assert (parameter - before[name]).abs().max() > 0.02


def test_an_empty_shard_has_the_state_that_others_have() -> None:
    ours = parameters({"some": (3, 2), "none": (0, 2), "nothing": (0,)})
    moments = made(f"{HERE}:Lion", ours).moments()
    assert {name: sorted(state) for name, state in moments.items()} == {
        name: ["mean"] for name in ours
    }
    assert all(moments[name]["mean"].shape == parameter.shape for name, parameter in ours.items())


@pytest.mark.parametrize(
    ("kind", "error", "message"),
    [
        ("lion", ConfigError, "expected adamw or package.module:Class, got 'lion'"),
        (f"{HERE}:Tiger", ConfigError, "Tiger"),
        (f"{HERE}:SHAPES", ConfigError, "expected a torch.optim.Optimizer"),
        (f"{HERE}:Raising", WorkflowError, "RuntimeError: no such thing"),
        (f"{HERE}:Counting", ConfigError, "keeps 'step' of model.layers.0.up.weight, int"),
    ],
)
def test_what_cannot_be_an_optimizer(kind: str, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        made(kind, parameters())


def test_whole_parameters_are_not_had_where_ranks_share_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[4] / "examples"))
    ours = parameters()
    parts = CutParts({name: Cut.copies(p.shape, 2) for name, p in ours.items()})
    world = ProcessGroup(rank=0, size=2, device=torch.device("cpu"))
    with pytest.raises(ConfigError, match="muon:Muon needs whole parameters, and 2 ranks have"):
        ShardedOptimizer(ours, OptimizerConfig(type="muon:Muon"), parts, world, WHOLE[2])
    assert "muon" in sys.modules


def test_a_snapshot_has_all_that_it_keeps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that goes back to a snapshot makes the same steps as one that never stopped."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[4] / "examples"))
    folder = save_qwen2(tmp_path / "model", hidden_size=16, intermediate_size=24)
    config = replace(actor_config(folder), optimizer=OptimizerConfig(type="muon:Muon", lr=1e-2))
    engines = [FSDPEngine(config) for _ in range(2)]
    for engine in engines:
        engine.initialize(0, 1, "")
    first, second = engines
    begun = weights(first)
    for step in range(2):
        ppo_update(first, [make_rows(step)], step=step)
    assert all((values != begun[name]).any() for name, values in weights(first).items())
    first.begin_snapshot(tmp_path / "snapshot").result()
    second.load_snapshot(tmp_path / "snapshot")
    for engine in engines:
        ppo_update(engine, [make_rows(7)], step=2)
    expected = weights(first)
    assert all(torch.equal(values, expected[name]) for name, values in weights(second).items())
    for engine in engines:
        engine.close()
