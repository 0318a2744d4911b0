from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from areal_sc.algorithms.loss_tokens import MEANS, LossTokens, loss_tokens_of
from areal_sc.algorithms.losses import Metrics, cross_entropy
from areal_sc.algorithms.named_loss import CROSS_ENTROPY, NamedLoss, loss_of
from areal_sc.algorithms.policy_gradient import policy_gradient
from areal_sc.config.ppo_settings import ClipCenter, PPOConfig
from areal_sc.errors import ConfigError

NUM_TOKENS = 200
SETTINGS: dict[str, Any] = {"clip_low": 0.2, "clip_high": 0.3}
NUM_LOSS_TOKENS = 243


def given(
    logprobs: torch.Tensor, fields: dict[str, torch.Tensor], num_loss_tokens: int
) -> LossTokens:
    """One row of a micro-batch; so many tokens are trained in all of them."""
    tokens = loss_tokens_of(logprobs, torch.zeros_like(logprobs), fields, [len(logprobs)])
    return replace(tokens, counts=replace(tokens.counts, tokens=num_loss_tokens))


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
    }


def by_hand(
    tokens: dict[str, torch.Tensor], cap: float | None
) -> tuple[float, np.ndarray, dict[str, float]]:
    """Loss, gradient and counts, token by token in Python floats."""
    loss = 0.0
    gradient = np.zeros(NUM_TOKENS)
    counts = {"clip_fraction": 0.0, "capped_fraction": 0.0}
    counts |= {"ratio": 0.0, "behavior_weight": 0.0, "proximal_kl": 0.0, "behavior_kl": 0.0}
    counts |= {"ratio_max": 0.0}
    for t in range(NUM_TOKENS):
        logprob, proximal, behavior, advantage = (
            float(tokens[name][t])
            for name in ("logprobs", "proximal_logprobs", "behavior_logprobs", "advantages")
        )
        ratio = math.exp(logprob - proximal)
        weight = math.exp(proximal - behavior)
        clipped_gain = min(max(ratio, 0.8), 1.3) * advantage
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
        loss -= weight * min(ratio * advantage, clipped_gain) / NUM_LOSS_TOKENS
        gradient[t] = 0.0 if is_clipped else -weight * advantage * ratio / NUM_LOSS_TOKENS
    return loss, gradient, counts


def loss_tokens(tokens: dict[str, torch.Tensor]) -> LossTokens:
    return given(tokens["logprobs"], tokens, NUM_LOSS_TOKENS)


@pytest.mark.parametrize("cap", [1.5, 5.0, math.inf])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_loss_gradient_and_counts(cap: float, dtype: torch.dtype) -> None:
    tokens = random_tokens()
    expected, expected_gradient, expected_counts = by_hand(tokens, cap)
    given = {name: values.to(dtype) for name, values in tokens.items()}
    given["logprobs"].requires_grad_()
    loss, metrics = policy_gradient(loss_tokens(given), **SETTINGS, behavior_weight_cap=cap)
    loss.backward()
    tolerance = 1e-12 if dtype == torch.float64 else 1e-6
    assert loss.item() == pytest.approx(expected, abs=tolerance)
    assert given["logprobs"].grad.numpy() == pytest.approx(expected_gradient, abs=tolerance)
    for name, count in expected_counts.items():
        assert float(metrics[name].value) == pytest.approx(count, rel=1e-5), name
    assert expected_counts["clip_fraction"] > 10
    assert cap == math.inf or expected_counts["capped_fraction"] > 0


@pytest.mark.parametrize(
    ("settings", "proximal", "behavior"),
    [
        ({"clip_center": "behavior"}, "behavior_logprobs", "behavior_logprobs"),
        ({"behavior_weight": "none"}, "proximal_logprobs", "proximal_logprobs"),
    ],
)
def test_forms_without_the_behavior_weight(
    settings: dict[str, Any], proximal: str, behavior: str
) -> None:
    tokens = random_tokens()
    used = tokens | {"proximal_logprobs": tokens[proximal], "behavior_logprobs": tokens[behavior]}
    expected, _, counts = by_hand(used, math.inf)
    loss, metrics = policy_gradient(loss_tokens(tokens), **SETTINGS, **settings)
    assert loss.item() == pytest.approx(expected, abs=1e-12)
    assert metrics["clip_fraction"].value == counts["clip_fraction"] > 10


def test_metrics_and_losses_add_up_over_micro_batches() -> None:
    tokens = random_tokens()
    whole, whole_metrics = policy_gradient(loss_tokens(tokens), **SETTINGS, behavior_weight_cap=2.0)
    parts = [
        policy_gradient(
            loss_tokens({name: values[part] for name, values in tokens.items()}),
            **SETTINGS,
            behavior_weight_cap=2.0,
        )
        for part in (slice(0, 70), slice(70, 70), slice(70, 71), slice(71, 200))
    ]
    assert sum(loss for loss, _ in parts).item() == pytest.approx(whole.item(), rel=1e-12)
    first, second, third, fourth = (metrics for _, metrics in parts)
    for name, whole_metric in whole_metrics.items():
        combined = first[name] + second[name] + third[name] + fourth[name]
        assert combined.value.item() == pytest.approx(whole_metric.value.item())
        assert combined.weight == whole_metric.weight


def test_a_weight_that_overflows_is_capped_without_nan() -> None:
    logprobs = torch.zeros(2, requires_grad=True)
    fields = {
        "proximal_logprobs": torch.tensor([0.0, 0.0]),
        "behavior_logprobs": torch.tensor([-1e4, 0.0]),
        "advantages": torch.tensor([1.0, 1.0]),
    }
    loss, metrics = policy_gradient(
        given(logprobs, fields, 2),
        clip_low=0.2,
        clip_high=0.2,
        behavior_weight_cap=5.0,
    )
    loss.backward()
    assert loss.item() == -0.5
    assert logprobs.grad.tolist() == [0.0, -0.5]
    assert metrics["capped_fraction"].value == 1
    assert all(metric.value.isfinite() for metric in metrics.values())


@pytest.mark.parametrize(
    ("log_ratio", "log_weight", "advantage", "cap"),
    [
        (89.0, 0.0, 1.0, math.inf),  # the gain is cut
        (700.0, 0.0, 2.0, math.inf),
        (89.0, 0.0, 0.0, math.inf),
        (89.0, 3.0, -1.0, 5.0),  # capped
        (89.0, -120.0, -1.0, math.inf),  # the product is moderate
        (-200.0, 0.0, 1.0, math.inf),
        (-200.0, 0.0, -1.0, math.inf),
        (-95.0, 89.5, 1.0, math.inf),
        (0.1, 100.0, 1.0, 5.0),
        (0.1, 100.0, 0.0, math.inf),
    ],
)
def test_what_overflows_in_float32_has_the_gradient_that_it_has_in_float64(
    log_ratio: float, log_weight: float, advantage: float, cap: float
) -> None:
    """Beside it are tokens of every other kind, whose gradient must not be lost."""
    tokens = random_tokens()
    tokens["proximal_logprobs"][0] = tokens["logprobs"][0] - log_ratio
    tokens["behavior_logprobs"][0] = tokens["proximal_logprobs"][0] - log_weight
    tokens["advantages"][0] = advantage
    expected, expected_gradient, _ = by_hand(tokens, cap)
    given = {name: values.float() for name, values in tokens.items()}
    given["logprobs"].requires_grad_()
    loss, _ = policy_gradient(loss_tokens(given), **SETTINGS, behavior_weight_cap=cap)
    loss.backward()
    assert loss.item() == pytest.approx(expected, rel=1e-4)
    assert given["logprobs"].grad.numpy() == pytest.approx(expected_gradient, rel=1e-4, abs=1e-6)


def test_a_logprob_that_is_nan_is_not_hidden() -> None:
    tokens = random_tokens()
    tokens["logprobs"][0] = math.nan
    assert policy_gradient(loss_tokens(tokens), **SETTINGS)[0].isnan()


def test_no_gradient_through_the_behavior_weight() -> None:
    tokens = random_tokens()
    for name in ("proximal_logprobs", "behavior_logprobs", "logprobs"):
        tokens[name].requires_grad_()
    policy_gradient(loss_tokens(tokens), **SETTINGS, behavior_weight_cap=5.0)[0].backward()
    assert tokens["logprobs"].grad is not None
    for name in ("proximal_logprobs", "behavior_logprobs"):
        assert tokens[name].grad is None


def test_cross_entropy_is_the_mean_over_all_loss_tokens() -> None:
    tokens = random_tokens()
    logprobs = tokens["logprobs"].requires_grad_()
    loss, metrics = cross_entropy(loss_tokens(tokens))
    loss.backward()
    assert loss.item() == pytest.approx(-logprobs.detach().numpy().sum() / NUM_LOSS_TOKENS)
    assert metrics["logprob"].weight == NUM_TOKENS
    assert logprobs.grad.numpy() == pytest.approx(np.full(NUM_TOKENS, -1 / NUM_LOSS_TOKENS))


def squared_ratio(tokens: LossTokens, *, scale: float) -> tuple[torch.Tensor, Metrics]:
    """A loss of a user's own."""
    log_ratio = tokens.logprobs - tokens.fields["behavior_logprobs"]
    return scale * log_ratio.square().sum() / tokens.num_loss_tokens, {}


@pytest.mark.parametrize("over", MEANS)
def test_a_row_without_trained_tokens_changes_no_mean(over: str) -> None:
    values = torch.tensor([1.0, 2.0, 4.0], dtype=torch.float64)
    whole = loss_tokens_of(values, values, {}, [2, 0, 1], groups=[0, 0, 1])
    without = loss_tokens_of(values, values, {}, [2, 1], groups=[0, 1])
    assert whole.mean(values, over) == without.mean(values, over)
    assert whole.rows.mean(values).tolist() == [1.5, 0.0, 4.0]


def test_losses_are_found_by_name_and_by_import_path() -> None:
    tokens = loss_tokens(random_tokens())
    ppo = PPOConfig(clip_low=0.1, clip_high=0.4, clip_center=ClipCenter.behavior)
    named = loss_of(ppo)
    expected = policy_gradient(tokens, clip_low=0.1, clip_high=0.4, clip_center="behavior")
    assert named.load()(tokens)[0] == expected[0]
    assert named.is_zero_without_advantage
    assert CROSS_ENTROPY.load()(tokens)[0] == cross_entropy(tokens)[0]
    own = PPOConfig(loss=f"{__name__}:squared_ratio", loss_settings={"scale": 3.0})
    assert loss_of(own) == NamedLoss(own.loss, {"scale": 3.0})
    assert loss_of(own).load()(tokens)[0] == squared_ratio(tokens, scale=3.0)[0]
    assert not loss_of(own).is_zero_without_advantage


@pytest.mark.parametrize(
    "name", ["ppo", "areal_sc.algorithms.losses:pop", "no.such:loss", ":x", ""]
)
def test_a_loss_that_is_not_there(name: str) -> None:
    known = "policy_gradient, .*cross_entropy, .*"
    expected = rf"loss '{name}': .*expected {known} or package\.module:function"
    with pytest.raises(ConfigError, match=expected):
        NamedLoss(name).load()


def test_a_loss_without_its_settings() -> None:
    with pytest.raises(ConfigError, match=r"squared_ratio': missing a required .*'scale'"):
        NamedLoss(f"{__name__}:squared_ratio", {}).load()
