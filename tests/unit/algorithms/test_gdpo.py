"""Advantages of several rewards, by the equations of the paper in plain float64."""

from __future__ import annotations

import statistics

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_sc.algorithms.advantages import AdvantageRows
from areal_sc.algorithms.gdpo import decoupled_advantages
from areal_sc.algorithms.named_advantage import advantage_of
from areal_sc.config.loading.presets import preset_settings
from areal_sc.config.ppo_settings import PPOConfig

EPS = 1e-6


def rows_of(
    groups: list[int],
    parts: dict[str, list[float]],
    weights: dict[str, float],
    shaping: list[float] | None = None,
) -> AdvantageRows:
    columns = {name: np.asarray(its, dtype=np.float64) for name, its in parts.items()}
    rewards = np.asarray(shaping or [0.0] * len(groups), dtype=np.float64)
    for name, weight in weights.items():
        rewards = rewards + weight * columns[name]
    ones = np.ones(len(groups), dtype=np.int64)
    return AdvantageRows(
        rewards=rewards,
        groups=np.asarray(groups),
        episodes=np.arange(len(groups)),
        num_tokens=ones,
        num_loss_tokens=ones,
        parts=columns,
        weights={name: np.full(len(groups), weights.get(name, 0.0)) for name in columns},
    )


def by_hand(
    groups: list[int], parts: dict[str, list[float]], weights: dict[str, float]
) -> list[float]:
    """Equation by equation, row by row."""
    sums = [0.0] * len(groups)
    for name, weight in weights.items():
        for row, group in enumerate(groups):
            same = [it for it, own in zip(parts[name], groups, strict=True) if own == group]
            deviation = statistics.pstdev(same)
            if max(same) > min(same):
                gain = (parts[name][row] - statistics.fmean(same)) / (deviation + EPS)
                sums[row] += weight * gain
    spread = statistics.pstdev(sums)
    return [(it - statistics.fmean(sums)) / (spread + EPS) for it in sums]


values = st.sampled_from([0.0, 0.25, 1.0, -0.5, 3.0])


@given(st.data(), st.integers(1, 4), st.integers(2, 5))
def test_the_equations_of_the_paper(data: st.DataObject, num_groups: int, size: int) -> None:
    groups = [group for group in range(num_groups) for _ in range(size)]
    column = st.lists(values, min_size=len(groups), max_size=len(groups))
    parts = {"right": data.draw(column), "length": data.draw(column), "seen": data.draw(column)}
    weights = {"right": 1.0, "length": 0.3}  # `seen` is measured alone
    found = decoupled_advantages(rows_of(groups, parts, weights))
    np.testing.assert_allclose(found, by_hand(groups, parts, weights), rtol=1e-9, atol=1e-9)


def test_equal_sums_of_other_parts_differ() -> None:
    # the first group has one right answer, the second one right and short: GRPO sees no difference
    parts = {"right": [0.0, 1.0, 0.0, 1.0], "short": [0.0, 0.0, 0.0, 1.0]}
    found = decoupled_advantages(rows_of([0, 0, 1, 1], parts, {"right": 1.0, "short": 1.0}))
    np.testing.assert_allclose(found[3] / found[1], 2.0, rtol=1e-5)


def test_what_is_no_part_is_not_made_as_large_as_one() -> None:
    parts = {"right": [0.0, 1.0, 1.0, 1.0]}
    small = [-0.001, 0.0, -0.002, 0.0]
    found = decoupled_advantages(rows_of([0, 0, 1, 1], parts, {"right": 1.0}, small))
    assert abs(found[2]) < 0.01 < abs(found[0])


def test_groups_without_signal_teach_nothing() -> None:
    parts = {"a": [0.1, 0.1, 0.0, 1.0], "b": [0.2, 0.2, 0.3, 0.1]}
    found = decoupled_advantages(rows_of([0, 0, 1, 1], parts, {"a": 1.0, "b": 1.0}))
    assert found[:2].tolist() == [0.0, 0.0]
    assert (found[2:] != 0).all()


@pytest.mark.parametrize("has_weights", [True, False])
def test_one_reward_alone_is_normalized_twice(has_weights: bool) -> None:
    rewards = [0.0, 1.0, 3.0, 2.0]
    of_one = rows_of([0, 0, 1, 1], {"right": rewards}, {"right": 1.0})
    if not has_weights:
        alone = AdvantageRows(
            of_one.rewards, of_one.groups, of_one.episodes, of_one.num_tokens, of_one.num_tokens
        )
        of_one = alone
    expected = by_hand([0, 0, 1, 1], {"right": rewards}, {"right": 1.0})
    np.testing.assert_allclose(decoupled_advantages(of_one), expected, rtol=1e-9)


def test_a_group_in_which_one_has_no_parts_is_compared_as_a_whole() -> None:
    groups = [0, 0, 0, 1, 1, 1]
    parts = {"right": [1.0, 0.0, 1.0, 1.0, 0.0, 0.0], "length": [1.0, 2.0, 3.0, 2.0, 2.0, 1.0]}
    rows = rows_of(groups, parts, {"right": 1.0, "length": -0.1})
    rows.rewards[2] = 0.0  # it was cut
    for its in rows.weights.values():
        its[2] = 0.0
    whole = {
        "reward": [*rows.rewards[:3], 0, 0, 0],
        "right": [0, 0, 0, *parts["right"][3:]],
        "length": [0, 0, 0, *parts["length"][3:]],
    }
    expected = by_hand(groups, whole, {"reward": 1.0, "right": 1.0, "length": -0.1})
    np.testing.assert_allclose(decoupled_advantages(rows), expected, rtol=1e-9)


def test_the_preset_names_it() -> None:
    ppo = {name.removeprefix("actor.ppo."): it for name, it in preset_settings("gdpo").items()}
    compute = advantage_of(PPOConfig(**ppo))
    found = compute(rows_of([0, 0], {"right": [0.0, 1.0]}, {"right": 1.0}))
    np.testing.assert_allclose(found, [-(0.5**0.5), 0.5**0.5], rtol=1e-5)
