from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from loss_rows import ROW, made_tokens, shapes

from areal_sc.algorithms.gae import (
    clipped_squared_error,
    generalized_advantages,
    token_rewards,
    value_loss,
)
from areal_sc.algorithms.loss_tokens import RowTokens
from areal_sc.algorithms.named_advantage import critic_fields
from areal_sc.config.ppo_settings import KLEstimator, KLPlace, PPOConfig


def tensor(values: list[float]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


@settings(max_examples=30)
@given(
    shape=shapes(),
    seed=st.integers(0, 10_000),
    discount=st.floats(0, 1),
    gae_lambda=st.floats(0, 1),
    beta=st.floats(0, 1),
)
def test_advantages_are_discounted_sums_of_temporal_differences(
    shape: list[ROW], seed: int, discount: float, gae_lambda: float, beta: float
) -> None:
    """GAE, eq. 16, as a double sum and not as a recurrence."""
    tokens = made_tokens(shape, seed)
    row_tokens, values = tokens.rows.num_loss_tokens, tokens.fields["values"]
    kl = tokens.fields["returns"]
    rewards = token_rewards(tokens.rows.spread(tokens.rows.reward), row_tokens, kl, beta)
    found = generalized_advantages(
        rewards, values, row_tokens, discount=discount, gae_lambda=gae_lambda
    ).tolist()
    start = 0
    for length, reward in zip(row_tokens.tolist(), tokens.rows.reward.tolist(), strict=True):
        own = values[start : start + length].tolist()
        of_token = [-beta * value for value in kl[start : start + length].tolist()]
        of_token[-1] += reward
        deltas = [
            of_token[t] + (discount * own[t + 1] if t + 1 < length else 0) - own[t]
            for t in range(length)
        ]
        for t in range(length):
            expected = math.fsum(
                (discount * gae_lambda) ** k * deltas[t + k] for k in range(length - t)
            )
            assert found[start + t] == pytest.approx(expected, rel=1e-6, abs=1e-12)
        start += length


def test_without_values_and_discount_they_are_the_reward_itself() -> None:
    row_tokens = torch.tensor([3, 1])
    rewards = token_rewards(tensor([2.0, 2.0, 2.0, -1.0]), row_tokens)
    assert rewards.tolist() == [0, 0, 2, -1]
    found = generalized_advantages(rewards, torch.zeros_like(rewards), row_tokens)
    assert found.tolist() == [2, 2, 2, -1]


def test_without_values_and_discount_they_are_the_returns_of_answers() -> None:
    returns, row_tokens = tensor([0.25, 0.25, 0.5, 2.0, -1.0, 3.0]), torch.tensor([4, 2])
    rewards = token_rewards(returns, row_tokens)
    assert rewards.tolist() == [0, -0.25, -1.5, 2, -4, 3]
    found = generalized_advantages(rewards, torch.zeros_like(rewards), row_tokens)
    assert found.tolist() == returns.tolist()


def test_no_rows() -> None:
    nothing, none = tensor([]), torch.zeros(0, dtype=torch.int64)
    assert generalized_advantages(nothing, nothing, none).tolist() == []


def test_token_functions_of_a_critic() -> None:
    """They are what `actor.ppo` says, and the returns are advantages and values."""
    ppo = PPOConfig(
        advantage="gae",
        discount=0.9,
        gae_lambda=0.8,
        kl_coefficient=0.1,
        kl_estimator=KLEstimator.k3,
        kl_place=KLPlace.reward,
    )
    made = made_tokens([(3, 0, 0), (1, 0, 1)], seed=0)
    rewards_of_rows = made.rows.spread(made.rows.reward)
    tokens = RowTokens(made.fields, made.rows, rewards_of_rows)
    found = {name: it.load()(tokens) for name, it in critic_fields(ppo).items()}
    d = made.fields["behavior_logprobs"] - made.fields["reference_logprobs"]
    rewards = token_rewards(rewards_of_rows, torch.tensor([3, 1]), (-d).exp() + d - 1, 0.1)
    values = made.fields["values"]
    expected = generalized_advantages(
        rewards, values, torch.tensor([3, 1]), discount=0.9, gae_lambda=0.8
    )
    assert found["advantages"].tolist() == pytest.approx(expected.tolist(), rel=1e-9)
    assert found["returns"].tolist() == pytest.approx((expected + values).tolist(), rel=1e-9)


def value_by_hand(v: float, old: float, target: float, clip: float) -> tuple[float, float]:
    """The error and its derivative by V."""
    near = min(max(v, old - clip), old + clip)
    if (near - target) ** 2 > (v - target) ** 2:
        return (near - target) ** 2 / 2, 0.0
    return (v - target) ** 2 / 2, v - target


@settings(max_examples=30)
@given(shape=shapes(), seed=st.integers(0, 10_000), clip=st.sampled_from([0.2, 1.0, math.inf]))
def test_value_loss_and_its_gradient(shape: list[ROW], seed: int, clip: float) -> None:
    tokens = made_tokens(shape, seed)
    assert tokens.values is not None
    loss, metrics = value_loss(tokens, value_clip=clip)
    (gradient,) = torch.autograd.grad(loss, tokens.values)
    expected = [
        value_by_hand(*numbers, clip)
        for numbers in zip(
            tokens.values.tolist(),
            tokens.fields["values"].tolist(),
            tokens.fields["returns"].tolist(),
            strict=True,
        )
    ]
    count = len(expected)
    assert loss.item() == pytest.approx(sum(e for e, _ in expected) / count, rel=1e-6)
    assert gradient.tolist() == pytest.approx([g / count for _, g in expected], rel=1e-6)
    num_cut = sum(g == 0 for _, g in expected)
    assert metrics["value_clip_fraction"].value == num_cut


def test_a_model_without_values() -> None:
    tokens = made_tokens([(2, 0, 0)], 0)
    with pytest.raises(ValueError, match="expected a model with a value head"):
        value_loss(type(tokens)(**{**fields_of(tokens), "values": None}))


def fields_of(tokens: object) -> dict[str, object]:
    return {name: getattr(tokens, name) for name in tokens.__dataclass_fields__}  # type: ignore[attr-defined]


def test_the_wide_clip_is_the_squared_error() -> None:
    values, targets = tensor([1.0, -2.0]), tensor([0.0, 0.0])
    assert clipped_squared_error(values, values, targets, math.inf).tolist() == [0.5, 2.0]
