from __future__ import annotations

import math

import pytest
import torch

from areal_sc.config.schema import LrSchedule, OptimizerConfig
from areal_sc.engines.fsdp.cuts import Cut, CutParts
from areal_sc.engines.fsdp.optimizer import ShardedOptimizer
from areal_sc.engines.training.learning_rate import check_schedule, learning_rate
from areal_sc.engines.training.process_group import ProcessGroup
from areal_sc.errors import ConfigError

ALONE = ProcessGroup(rank=0, size=1, device=torch.device("cpu"))


def rates(schedule: LrSchedule, steps: list[int], **settings: float) -> list[float]:
    config = OptimizerConfig(
        lr=2.0, schedule=schedule, total_steps=12, **{"warmup_steps": 2, **settings}
    )
    return [learning_rate(config, step) for step in steps]


def test_warm_up_then_constant() -> None:
    assert rates(LrSchedule.constant, [0, 1, 2, 7, 100]) == [1.0, 2.0, 2.0, 2.0, 2.0]


def test_linear_falls_to_its_end_and_stays_there() -> None:
    found = rates(LrSchedule.linear, [0, 1, 2, 7, 12, 100], min_lr_ratio=0.1)
    assert found == pytest.approx([1.0, 2.0, 2.0, 1.1, 0.2, 0.2])


def test_cosine() -> None:
    found = rates(LrSchedule.cosine, [2, 3, 7, 12, 13])
    assert found == pytest.approx([2.0, 1 + math.cos(math.pi / 10), 1.0, 0.0, 0.0])


def test_no_warm_up_and_a_schedule_of_warm_up_only() -> None:
    assert rates(LrSchedule.linear, [0, 6], warmup_steps=0) == pytest.approx([2.0, 1.0])
    assert rates(LrSchedule.linear, [11, 12], warmup_steps=12) == pytest.approx([2.0, 2.0])


def test_a_warm_up_that_is_a_share_of_the_steps() -> None:
    assert rates(LrSchedule.linear, [0, 2, 3, 12], warmup_steps=0.25) == rates(
        LrSchedule.linear, [0, 2, 3, 12], warmup_steps=3
    )
    assert rates(LrSchedule.constant, [0], warmup_steps=1) == [2.0], "one step, no share"
    with pytest.raises(ConfigError, match=r"total_steps: expected at least 1 .*=0.1, got 0"):
        check_schedule(OptimizerConfig(warmup_steps=0.1, total_steps=0))


def parameters() -> dict[str, torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return {
        name: torch.nn.Parameter(torch.randn(shape, generator=generator))
        for name, shape in (("a", (3, 4)), ("b", (5,)), ("never_used", (2,)))
    }


WHOLE = (
    CutParts({name: Cut.copies(p.shape, 1) for name, p in parameters().items()}),
    ALONE,
    ALONE,
)


def test_its_state_exists_from_the_start() -> None:
    """A server that shares the GPU measures, when it starts, what the trainer leaves."""
    optimizer = ShardedOptimizer(parameters(), OptimizerConfig(total_steps=10), *WHOLE)
    sizes = {name: p.numel() for name, p in parameters().items()}
    state = optimizer._optimizer.state
    assert sum(v.numel() for held in state.values() for v in held.values()) == (
        2 * sum(sizes.values()) + len(sizes)
    )


@pytest.mark.parametrize("max_grad_norm", [0.0, 0.5, 1e6])
def test_updates_are_those_of_adamw_in_float64(max_grad_norm: float) -> None:
    config = OptimizerConfig(
        lr=0.1,
        beta1=0.8,
        beta2=0.9,
        eps=1e-4,
        weight_decay=0.1,
        max_grad_norm=max_grad_norm,
        total_steps=10,
    )
    ours = parameters()
    optimizer = ShardedOptimizer(ours, config, *WHOLE)
    exact = {name: p.detach().double().requires_grad_() for name, p in parameters().items()}
    weights = {"params": [exact["a"]], "weight_decay": 0.1}
    biases = {"params": [exact["b"], exact["never_used"]], "weight_decay": 0.0}
    reference = torch.optim.AdamW([weights, biases], lr=0.1, betas=(0.8, 0.9), eps=1e-4)
    for step in range(4):
        gradients = {
            name: torch.full_like(ours[name], 1.0 + step + index)
            for index, name in enumerate(("a", "b"))
        }
        for name, gradient in gradients.items():
            ours[name].grad = gradient.clone()
            exact[name].grad = gradient.double()
        expected_norm = math.sqrt(sum(float((g**2).sum()) for g in gradients.values()))
        if max_grad_norm:
            torch.nn.utils.clip_grad_norm_(exact.values(), max_grad_norm)
        reference.step()
        assert optimizer.update(step) == {0: pytest.approx(expected_norm)}
        assert all(parameter.grad is None for parameter in ours.values())
    for name, parameter in ours.items():
        assert torch.allclose(parameter.double(), exact[name], atol=1e-5)
    assert torch.equal(ours["never_used"], parameters()["never_used"])
    assert optimizer.num_updates == 4


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite_leaves_weights_and_moments(bad: float) -> None:
    ours = parameters()
    optimizer = ShardedOptimizer(ours, OptimizerConfig(lr=0.1, total_steps=10), *WHOLE)
    ours["a"].grad = torch.full_like(ours["a"], bad)
    assert not math.isfinite(optimizer.update(0)[0])
    for name, parameter in parameters().items():
        assert torch.equal(ours[name], parameter)
    assert optimizer.num_updates == 0
    assert all(state["step"] == 0 for state in optimizer.moments().values())


def test_a_falling_learning_rate_needs_the_number_of_its_steps() -> None:
    with pytest.raises(ConfigError, match="total_steps: expected at least 1 with"):
        ShardedOptimizer(parameters(), OptimizerConfig(schedule=LrSchedule.linear), *WHOLE)
