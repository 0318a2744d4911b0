from __future__ import annotations

import math
import statistics
from typing import Any

import numpy as np
import pytest

from areal_sc.algorithms.advantages import normalized_advantages
from areal_sc.config.ppo_settings import NormScope

REWARDS = [1.0, 0.0, 0.25, 7.0, -3.0, 1.0, 0.5]
GROUPS = ["a", "b", "a", "c", "b", "a", "b"]  # not contiguous; c is alone


def by_hand(mean: str, std: str, eps: float) -> list[float]:
    advantages = []
    for reward, group in zip(REWARDS, GROUPS, strict=True):
        mates = [r for r, g in zip(REWARDS, GROUPS, strict=True) if g == group]
        rows = {"group": mates, "batch": REWARDS}
        value = reward - (math.fsum(rows[mean]) / len(rows[mean]) if mean != "none" else 0.0)
        advantages.append(value / (statistics.pstdev(rows[std]) + eps if std != "none" else 1.0))
    return advantages


@pytest.mark.parametrize("mean", ["group", "batch", "none"])
@pytest.mark.parametrize("std", ["group", "batch", "none"])
def test_every_pair_of_scopes(mean: str, std: str) -> None:
    found = normalized_advantages(REWARDS, GROUPS, mean=mean, std=std, eps=1e-3)
    assert found == pytest.approx(by_hand(mean, std, 1e-3), rel=1e-12)


EPISODES = [0, 0, 0, 0, 0, 1, 1]  # two rows of a's first, two of b's first
ROWS_OF_EPISODE = [2, 2, 2, 1, 2, 1, 1]


def by_episodes(mean: str, std: str, eps: float) -> list[float]:
    """Each reward as often as gives every episode the same number of them."""
    advantages = []
    for reward, group in zip(REWARDS, GROUPS, strict=True):
        repeated = {
            scope: [
                r
                for r, g, num_rows in zip(REWARDS, GROUPS, ROWS_OF_EPISODE, strict=True)
                for _ in range(2 // num_rows)
                if scope == "batch" or g == group
            ]
            for scope in ("group", "batch")
        }
        value = reward - (math.fsum(repeated[mean]) / len(repeated[mean]) if mean != "none" else 0)
        advantages.append(value / (statistics.pstdev(repeated[std]) + eps if std != "none" else 1))
    return advantages


@pytest.mark.parametrize("mean", ["group", "batch", "none"])
@pytest.mark.parametrize("std", ["group", "batch", "none"])
def test_an_episode_counts_once_however_many_rows_it_has(mean: str, std: str) -> None:
    found = normalized_advantages(REWARDS, GROUPS, EPISODES, mean=mean, std=std, eps=1e-3)
    assert found == pytest.approx(by_episodes(mean, std, 1e-3), rel=1e-12)
    is_weighted = (mean, std) != ("none", "none")
    assert (
        found != normalized_advantages(REWARDS, GROUPS, mean=mean, std=std)
    ).any() == is_weighted


def test_episodes_of_one_row_change_no_bit() -> None:
    rewards = np.random.default_rng(0).normal(size=64)
    groups, episodes = np.repeat(np.arange(8), 8), np.tile(np.arange(8), 8)
    found = normalized_advantages(rewards, groups, episodes, mean="group", std="batch")
    assert (found == normalized_advantages(rewards, groups, mean="group", std="batch")).all()


def test_equal_rewards_of_the_rows_of_episodes_get_zero() -> None:
    for scope in ("group", "batch"):
        alone = normalized_advantages([0.1] * 3, [5] * 3, [0] * 3, mean=scope, std=scope)
        assert not alone.any()
        uneven = normalized_advantages([0.1] * 4, [5] * 4, [0, 0, 0, 1], mean=scope, std=scope)
        assert not uneven.any()


def test_settings_enums_are_scopes() -> None:
    found = normalized_advantages(REWARDS, GROUPS, mean=NormScope.batch, std=NormScope.none)
    assert found == pytest.approx(by_hand("batch", "none", 0.0), rel=1e-12)


def test_a_group_of_one_and_equal_rewards_get_zero() -> None:
    found = normalized_advantages(REWARDS, GROUPS)
    assert found[3] == 0
    # exactly: rows of advantage 0 are left out of the update
    for scope in ("group", "batch"):
        assert not normalized_advantages([0.1] * 3, [5, 5, 5], mean=scope, std=scope).any()


@pytest.mark.parametrize("scope", ["group", "batch"])
@pytest.mark.parametrize("size", [0.3, 0.001])
def test_a_penalty_alone_is_not_divided_by_its_own_deviation(scope: str, size: float) -> None:
    judged = np.ones(4)
    penalties = size * np.array([0.8, 1.1, 0.9, 1.4])
    found = normalized_advantages(judged - penalties, [0] * 4, std=scope, judged=judged)
    assert found == pytest.approx(penalties.mean() - penalties, rel=1e-9)
    judged[0] = 0.0  # now there is signal, and its deviation counts
    divided = normalized_advantages(judged - penalties, [0] * 4, std=scope, judged=judged)
    assert divided == pytest.approx(normalized_advantages(judged - penalties, [0] * 4, std=scope))


def test_signal_of_one_group_is_none_of_another() -> None:
    judged = np.array([0.0, 1.0, 1.0, 1.0])
    rewards = judged - np.array([0.0, 0.0, 0.0, 0.1])
    found = normalized_advantages(rewards, [0, 0, 1, 1], judged=judged)
    assert found == pytest.approx([-1, 1, 0.05, -0.05], abs=1e-5)


def test_rounding_is_no_advantage() -> None:
    assert not normalized_advantages([0.1 + 0.2, 0.3], [0, 0]).any()


def test_rows_of_one_episode_have_nobody_to_be_compared_with() -> None:
    for mean in ("group", "leave_one_out"):
        found = normalized_advantages([0.3, -3.7, 1.0, 0.0], [0, 0, 1, 1], [5, 5, 0, 1], mean=mean)
        assert not found[:2].any()
        assert found[2] > 0 > found[3]


def test_population_standard_deviation() -> None:
    assert normalized_advantages([0.0, 1.0], [0, 0], eps=0.0).tolist() == [-1.0, 1.0]


@pytest.mark.parametrize(
    "group_ids",
    [[0, 1, 0, 2, 1, 0, 1], np.array([0, 1, 0, 2, 1, 0, 1]), list("abacbab")],
)
def test_kinds_of_group_ids_and_rewards(group_ids: Any) -> None:
    expected = by_hand("group", "group", 1e-6)
    from_list = normalized_advantages(REWARDS, group_ids)
    assert isinstance(from_list, np.ndarray)
    assert from_list.dtype == np.float64
    assert from_list == pytest.approx(expected)
    assert normalized_advantages(np.array(REWARDS, np.float32), group_ids) == pytest.approx(
        expected
    )


def test_computed_in_float64() -> None:
    # in float32 these two rewards are too large to tell their mean apart from them
    found = normalized_advantages([2.0**40, 2.0**40 + 1], [0, 0], std="none")
    assert found.tolist() == [-0.5, 0.5]


def test_arguments_are_left_alone() -> None:
    rewards = np.array([1.0, 2.0])
    normalized_advantages(rewards, [0, 0])
    assert rewards.tolist() == [1.0, 2.0]


def test_no_rows() -> None:
    assert normalized_advantages([], []).shape == (0,)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_reward_that_is_not_finite_is_named(bad: float) -> None:
    with pytest.raises(ValueError, match=r"reward of row 2 is -?(nan|inf)"):
        normalized_advantages([0.0, 1.0, bad], [0, 0, 0])


def test_errors() -> None:
    with pytest.raises(ValueError, match=r"shape \(2,\) do not fit 3 group ids"):
        normalized_advantages([0.0, 1.0], [0, 0, 0])
    with pytest.raises(ValueError, match="shorter"):
        normalized_advantages([0.0, 1.0], [0, 0], [0])
    with pytest.raises(
        ValueError, match=r"mean='rank': expected one of group, leave_one_out, batch, none"
    ):
        normalized_advantages([0.0], [0], mean="rank")
    with pytest.raises(ValueError, match=r"std='rank'"):
        normalized_advantages([0.0], [0], std="rank")
