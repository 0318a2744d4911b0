from __future__ import annotations

import math
import statistics
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from loss_rows import ROW, made_tokens, shapes

from areal_sc.algorithms.advantages import SCOPES, AdvantageRows
from areal_sc.algorithms.loss_tokens import RowTokens
from areal_sc.algorithms.named_advantage import (
    advantage_of,
    explained_variance,
    kl_of_row,
    weight_spread,
)
from areal_sc.config.ppo_settings import (
    BASELINES,
    Deviation,
    KLEstimator,
    KLPlace,
    NormScope,
    PPOConfig,
)
from areal_sc.errors import ConfigError, WorkflowError


def rows_of(shape: list[ROW], rewards: list[float]) -> AdvantageRows:
    columns = np.asarray(shape, dtype=np.int64)
    return AdvantageRows(
        rewards=np.asarray(rewards),
        groups=columns[:, 1],
        episodes=columns[:, 2],
        num_tokens=columns[:, 0] + 3,
        num_loss_tokens=columns[:, 0],
    )


def by_hand(
    shape: list[ROW], rewards: list[float], baseline: str, std: str, deviation: str
) -> list[float]:
    """Each episode counts once: every statistic is over rows that are repeated to the same number.

    60 is divisible by all numbers of rows that an episode has.
    """
    found = []
    sizes = {own: sum(row[1:] == own for row in shape) for own in (row[1:] for row in shape)}
    for row, reward in zip(shape, rewards, strict=True):

        def among(is_in: Any) -> list[float]:
            return [
                r
                for own, r in zip(shape, rewards, strict=True)
                for _ in range(60 // sizes[own[1:]])
                if is_in(own)
            ]

        group = row[1]
        scopes = {
            "group": among(lambda own, g=group: own[1] == g),
            "batch": among(lambda own: True),
            "leave_one_out": among(lambda own, me=row: own[1] == me[1] and own[2] != me[2]),
        }
        if baseline == "none":
            mean = 0.0
        elif baseline in ("group", "leave_one_out") and not scopes["leave_one_out"]:
            mean = reward  # there is nobody to be compared with
        else:
            mean = math.fsum(scopes[baseline]) / len(scopes[baseline])
        value = reward - mean
        if std != "none":
            n = len(scopes[std]) / 60
            scale = statistics.pstdev(scopes[std]) if scopes[std] else 0.0
            if deviation == "sample" and n > 1:
                scale *= math.sqrt(n / (n - 1))
            if scale or std != "leave_one_out":
                value /= scale + 1e-6
        found.append(value)
    return found


@given(
    shape=shapes(),
    values=st.lists(st.integers(-500, 500).map(lambda it: it / 100), min_size=27, max_size=27),
    baseline=st.sampled_from(BASELINES),
    std=st.sampled_from(SCOPES),
    deviation=st.sampled_from(["population", "sample"]),
)
def test_every_baseline_and_deviation(
    shape: list[ROW], values: list[float], baseline: str, std: str, deviation: str
) -> None:
    rewards = values[: len(shape)]
    ppo = PPOConfig(
        advantage=baseline,
        advantage_std=NormScope(std),
        advantage_deviation=Deviation(deviation),
    )
    found = advantage_of(ppo)(rows_of(shape, rewards))
    expected = by_hand(shape, rewards, baseline, std, deviation)
    assert found.tolist() == pytest.approx(expected, rel=1e-6, abs=1e-9)


def test_leave_one_out_of_equal_rewards_is_exactly_zero() -> None:
    shape = [(1, 0, 0), (1, 0, 1), (1, 0, 1), (2, 1, 0)]
    ppo = PPOConfig(advantage="leave_one_out", advantage_std=NormScope.none)
    assert not advantage_of(ppo)(rows_of(shape, [0.1] * 3 + [7.0])).any()


def by_length(rows: AdvantageRows, *, scale: float = 1.0) -> npt.NDArray[np.float64]:
    """An advantage of a user's own."""
    return scale * rows.rewards / rows.num_loss_tokens


def torn(rows: AdvantageRows) -> list[float]:
    return [1.0]


def failing(rows: AdvantageRows) -> list[float]:
    raise KeyError("score")


def test_a_function_of_the_users_own() -> None:
    ppo = PPOConfig(advantage=f"{__name__}:by_length", advantage_settings={"scale": 2.0})
    found = advantage_of(ppo)(rows_of([(1, 0, 0), (4, 0, 1)], [1.0, 2.0]))
    assert found.tolist() == [2.0, 1.0]


@pytest.mark.parametrize(
    ("name", "given", "message"),
    [
        ("rank", {}, "expected group, leave_one_out, batch, none, gae or package"),
        ("no.such:function", {}, "No module named 'no'"),
        (f"{__name__}:by_length", {"size": 1}, "unexpected keyword argument 'size'"),
        ("gae", {}, "from a critic's values"),
    ],
)
def test_advantages_that_are_not_there(name: str, given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        advantage_of(PPOConfig(advantage=name, advantage_settings=given))


@pytest.mark.parametrize("estimator", list(KLEstimator))
def test_the_kl_of_a_row_is_of_the_policy_that_sampled(estimator: KLEstimator) -> None:
    made = made_tokens([(3, 0, 0), (1, 0, 1)], seed=0)
    function = kl_of_row(PPOConfig(kl_coefficient=0.1, kl_estimator=estimator)).load()
    found = function(RowTokens(made.fields, made.rows, made.rows.reward[made.rows.of_token]))
    given = (made.fields[f"{name}_logprobs"].tolist() for name in ("behavior", "reference"))
    by_name = {
        "k1": lambda d: d,
        "k2": lambda d: d**2 / 2,
        "k3": lambda d: math.exp(-d) + d - 1,
    }
    expected = [by_name[estimator](mine - its) for mine, its in zip(*given, strict=True)]
    assert found.tolist() == pytest.approx(expected, rel=1e-9)


def test_a_kl_in_the_reward_weighs_what_its_beta_says() -> None:
    kl = np.array([0.8, 1.1, 0.9, 1.4])
    rows = rows_of([(5, 0, number) for number in range(4)], [1.0] * 4)
    found = {}
    for beta in (0.3, 0.001):
        ppo = PPOConfig(kl_place=KLPlace.reward, kl_coefficient=beta)
        shaped = replace(rows, rewards=rows.rewards - beta * kl)
        for judged in (rows.rewards, None):  # a script that does not say is on the safe side
            found[beta] = advantage_of(ppo)(replace(shaped, judged=judged))
            assert found[beta] == pytest.approx(beta * (kl.mean() - kl), rel=1e-9)


def test_what_a_function_of_the_users_own_does_wrong() -> None:
    rows = rows_of([(1, 0, 0), (1, 0, 1)], [0.0, 1.0])
    with pytest.raises(ConfigError, match="expected 2 finite numbers, one a row"):
        advantage_of(PPOConfig(advantage=f"{__name__}:torn"))(rows)
    with pytest.raises(WorkflowError, match=r"failing' raised KeyError: 'score' at "):
        advantage_of(PPOConfig(advantage=f"{__name__}:failing"))(rows)


def test_explained_variance_is_that_of_the_values() -> None:
    returns = np.array([1.0, 2.0, 4.0, 9.0])
    values = np.array([1.5, 2.0, 3.0, 8.0])

    def metrics(guesses: Any) -> dict[str, float]:
        return {
            "return": returns.mean(),
            "return_square": (returns**2).mean(),
            "value_error": ((guesses - returns) ** 2).mean(),
        }

    expected = 1 - ((values - returns) ** 2).mean() / returns.var()
    assert explained_variance(metrics(values)) == pytest.approx(expected)
    assert explained_variance(metrics(returns)) == 1.0
    assert explained_variance(metrics(returns.mean())) == pytest.approx(0.0)
    equal = {"return": 2.0, "return_square": 4.0, "value_error": 0.5}
    assert math.isnan(explained_variance(equal))


@given(st.lists(st.floats(0, 5), min_size=1, max_size=20))
def test_the_spread_of_weights(weights: list[float]) -> None:
    square = statistics.fmean(it * it for it in weights)
    found = weight_spread(
        {"behavior_weight": statistics.fmean(weights), "behavior_weight_square": square}
    )
    assert found["behavior_weight_std"] == pytest.approx(statistics.pstdev(weights), abs=1e-6)
    if square > 1e-6:
        kish = math.fsum(weights) ** 2 / math.fsum(it * it for it in weights) / len(weights)
        assert found["effective_share"] == pytest.approx(kish)
    nothing = {"behavior_weight": math.nan, "behavior_weight_square": math.nan}
    assert all(map(math.isnan, weight_spread(nothing).values()))
