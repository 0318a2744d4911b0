"""The scale of the loss against torch's own."""

from __future__ import annotations

import math
import random

import torch

from areal_sc.engines.loss_scale import GROWTH_INTERVAL, LossScale


def test_a_scale_is_that_of_torch() -> None:
    """Through overflow, and through more updates without it than make it grow."""
    scaler = torch.amp.GradScaler("cpu")
    weight = torch.nn.Parameter(torch.zeros(()))
    optimizer = torch.optim.SGD([weight], lr=0.0)
    draws = random.Random(0)
    overflows = [draws.random() < 0.4 for _ in range(50)] + [False] * (2 * GROWTH_INTERVAL)
    scale, seen = LossScale(), set()
    for is_overflow in [*overflows, True, False]:
        scaler.scale(weight * 0).backward()
        assert scale.value == scaler.get_scale()
        norm = math.inf if is_overflow else 1.0
        weight.grad = torch.tensor(norm)
        scaler.step(optimizer)
        scaler.update()
        weight.grad = None
        scale = scale.after(norm)
        seen.add(scale.value)
    assert scale.value == scaler.get_scale()
    assert scale.num_good == scaler._get_growth_tracker()
    assert len(seen) > 3, "it has changed"


def test_a_scale_stays_above_zero() -> None:
    scale = LossScale()
    for _ in range(2000):
        scale = scale.after(math.nan)
    assert scale.value > 0
