from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from areal_sc.algorithms.losses import decoupled_ppo_loss, sft_loss

NUM_TOKENS = 200
SETTINGS: dict[str, Any] = {"clip_low": 0.2, "clip_high": 0.3, "num_loss_tokens": 173}


def random_tokens(seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def normal(scale: float) -> torch.Tensor:
        return scale * torch.randn(NUM_TOKENS, generator=generator, dtype=torch.float64)

    logprobs = normal(1.0) - 2
    return {
        "logprobs": logprobs,
        "proximal_logprobs": logprobs + normal(0.3),
        "behavior_logprobs": logprobs + normal(0.8),
        "advantages": normal(1.0),
        "loss_mask": torch.rand(NUM_TOKENS, generator=generator) < 0.7,
    }


def by_hand(
    tokens: dict[str, torch.Tensor], cap: float | None
) -> tuple[float, np.ndarray, dict[str, float]]:
    """Loss, gradient and counts, token by token in Python floats."""
    loss = 0.0
    gradient = np.zeros(NUM_TOKENS)
    counts = {"num_effective_tokens": 0.0, "clip_fraction": 0.0, "capped_fraction": 0.0}
    counts |= {"ratio": 0.0, "behavior_weight": 0.0, "proximal_kl": 0.0, "behavior_kl": 0.0}
    counts |= {"ratio_max": 0.0}
    for t in range(NUM_TOKENS):
        if not tokens["loss_mask"][t]:
            continue
        logprob, proximal, behavior, advantage = (
            float(tokens[name][t])
            for name in ("logprobs", "proximal_logprobs", "behavior_logprobs", "advantages")
        )
        ratio = math.exp(logprob - proximal)
        weight = math.exp(proximal - behavior)
        clipped_gain = min(max(ratio, 0.8), 1.3) * advantage
        counts["num_effective_tokens"] += 1
        counts["ratio"] += ratio
        counts["ratio_max"] = max(counts["ratio_max"], ratio)
        counts["proximal_kl"] += ratio - 1 - (logprob - proximal)
        is_clipped = clipped_gain < ratio * advantage
        counts["clip_fraction"] += is_clipped
        if cap is not None and weight > cap:
            counts["capped_fraction"] += 1
            continue
        counts["behavior_weight"] += weight
        counts["behavior_kl"] += weight - 1 - (proximal - behavior)
        loss -= weight * min(ratio * advantage, clipped_gain) / 173
        gradient[t] = 0.0 if is_clipped else -weight * advantage * ratio / 173
    return loss, gradient, counts


@pytest.mark.parametrize("cap", [1.5, 5.0, None])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_loss_gradient_and_counts(cap: float | None, dtype: torch.dtype) -> None:
    tokens = random_tokens()
    expected, expected_gradient, expected_counts = by_hand(tokens, cap)
    given = {
        name: values if name == "loss_mask" else values.to(dtype) for name, values in tokens.items()
    }
    given["logprobs"].requires_grad_()
    loss, metrics = decoupled_ppo_loss(**given, **SETTINGS, behavior_weight_cap=cap)
    loss.backward()
    tolerance = 1e-12 if dtype == torch.float64 else 1e-6
    assert loss.item() == pytest.approx(expected, abs=tolerance)
    assert given["logprobs"].grad.numpy() == pytest.approx(expected_gradient, abs=tolerance)
    for name, count in expected_counts.items():
        assert float(metrics[name].value) == pytest.approx(count, rel=1e-5), name
    assert expected_counts["clip_fraction"] > 10
    assert cap is None or expected_counts["capped_fraction"] > 0


def test_masked_tokens_may_hold_anything() -> None:
    tokens = random_tokens()
    dirty = {name: values.clone() for name, values in tokens.items()}
    outside = ~tokens["loss_mask"]
    for name, rubbish in (
        ("logprobs", math.nan),
        ("proximal_logprobs", math.inf),
        ("behavior_logprobs", -math.inf),
        ("advantages", math.nan),
    ):
        dirty[name][outside] = rubbish
    dirty["logprobs"].requires_grad_()
    clean_loss, clean_metrics = decoupled_ppo_loss(**tokens, **SETTINGS, behavior_weight_cap=5.0)
    loss, metrics = decoupled_ppo_loss(**dirty, **SETTINGS, behavior_weight_cap=5.0)
    loss.backward()
    assert loss.item() == clean_loss.item()
    assert metrics == clean_metrics
    assert dirty["logprobs"].grad[outside].abs().max() == 0
    assert dirty["logprobs"].grad.isfinite().all()


def test_metrics_and_losses_add_up_over_micro_batches() -> None:
    tokens = random_tokens()
    whole, whole_metrics = decoupled_ppo_loss(**tokens, **SETTINGS, behavior_weight_cap=2.0)
    parts = [
        decoupled_ppo_loss(
            **{name: values[part] for name, values in tokens.items()},
            **SETTINGS,
            behavior_weight_cap=2.0,
        )
        for part in (slice(0, 70), slice(70, 71), slice(71, 200))
    ]
    assert sum(loss for loss, _ in parts).item() == pytest.approx(whole.item(), rel=1e-12)
    first, second, third = (metrics for _, metrics in parts)
    for name, whole_metric in whole_metrics.items():
        combined = first[name] + second[name] + third[name]
        assert combined.value.item() == pytest.approx(whole_metric.value.item())
        assert combined.weight == whole_metric.weight


def test_a_weight_that_overflows_is_capped_without_nan() -> None:
    logprobs = torch.zeros(2, requires_grad=True)
    loss, metrics = decoupled_ppo_loss(
        logprobs,
        torch.tensor([0.0, 0.0]),
        torch.tensor([-1e4, 0.0]),
        torch.tensor([1.0, 1.0]),
        torch.ones(2, dtype=torch.bool),
        clip_low=0.2,
        clip_high=0.2,
        behavior_weight_cap=5.0,
        num_loss_tokens=2,
    )
    loss.backward()
    assert loss.item() == -0.5
    assert logprobs.grad.tolist() == [0.0, -0.5]
    assert metrics["capped_fraction"].value == 1
    assert all(metric.value.isfinite() for metric in metrics.values())


def test_no_gradient_through_the_behavior_weight() -> None:
    tokens = random_tokens()
    for name in ("proximal_logprobs", "behavior_logprobs", "advantages", "logprobs"):
        tokens[name].requires_grad_()
    decoupled_ppo_loss(**tokens, **SETTINGS, behavior_weight_cap=5.0)[0].backward()
    assert tokens["logprobs"].grad is not None
    for name in ("proximal_logprobs", "behavior_logprobs", "advantages"):
        assert tokens[name].grad is None


def test_ppo_errors() -> None:
    tokens = random_tokens()
    with pytest.raises(ValueError, match=r"one shape \[T\].*advantages \(199,\)"):
        decoupled_ppo_loss(
            **{**tokens, "advantages": tokens["advantages"][1:]},
            **SETTINGS,
            behavior_weight_cap=5.0,
        )
    for denominator in (0, -1, math.nan):
        with pytest.raises(ValueError, match="num_loss_tokens must be > 0"):
            decoupled_ppo_loss(
                **tokens,
                clip_low=0.2,
                clip_high=0.2,
                behavior_weight_cap=5.0,
                num_loss_tokens=denominator,
            )


def test_sft_loss_is_the_mean_cross_entropy_of_the_mask() -> None:
    tokens = random_tokens()
    logprobs = tokens["logprobs"].clone()
    logprobs[~tokens["loss_mask"]] = math.nan
    logprobs.requires_grad_()
    loss, metrics = sft_loss(logprobs, tokens["loss_mask"], num_loss_tokens=173)
    loss.backward()
    trained = tokens["logprobs"][tokens["loss_mask"]].numpy()
    assert loss.item() == pytest.approx(-trained.sum() / 173)
    assert metrics["num_effective_tokens"].value == len(trained)
    expected = np.where(tokens["loss_mask"].numpy(), -1 / 173, 0.0)
    assert logprobs.grad.numpy() == pytest.approx(expected)
    with pytest.raises(ValueError, match="num_loss_tokens"):
        sft_loss(logprobs, tokens["loss_mask"], num_loss_tokens=0)
    with pytest.raises(ValueError, match="one shape"):
        sft_loss(logprobs, tokens["loss_mask"][1:], num_loss_tokens=1)
