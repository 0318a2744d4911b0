"""Advantages of several rewards, each compared with its own in the group. No torch."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from areal_sc.algorithms.advantages import AdvantageRows, normalized_advantages
from areal_sc.reward_signal import ROUNDING


def decoupled_advantages(
    rows: AdvantageRows, *, deviation: str = "population", eps: float = 1e-6
) -> npt.NDArray[np.float64]:
    """Advantages of GDPO: each part of the reward is normalized within its group.

        A_k = (r_k - mean_group r_k) / (std_group r_k + eps)
        A   = sum_k w_k A_k / (std_batch of these sums + eps)

    So a part that differs little counts as much as one that differs much, and answers that earn the
    same sum by different parts have different advantages. The mean over the batch, which the paper
    subtracts, is 0. What is in a reward beside its parts, as a penalty for the length or the KL to
    a reference, is compared within the group and not divided. Where a row of
    a group has no parts, as a number of its own took the place of their sum, the group has its
    reward as the only part, of weight 1. An episode counts once, however many rows it has.
    Source: GDPO, arXiv:2601.05242, section 3.

    Args:
        deviation: of a group and of the batch, as `normalized_advantages` says.
        eps: added to each standard deviation.
    Returns: [R].
    """
    has_none = np.logical_and.reduce([its == 0 for its in rows.weights.values()], axis=0)
    is_whole = has_none | np.isin(rows.groups, rows.groups[has_none])
    weights = {name: np.where(is_whole, 0.0, its) for name, its in rows.weights.items()}
    parts = {name: np.where(weights[name] != 0, its, 0.0) for name, its in rows.parts.items()}
    parts[""] = np.where(is_whole, rows.rewards, 0.0)
    weights[""] = np.where(is_whole, 1.0, 0.0)
    known, size, advantages = (np.zeros(len(rows.rewards)) for _ in range(3))
    for name, values in parts.items():
        within = normalized_advantages(
            values, rows.groups, rows.episodes, deviation=deviation, eps=eps
        )
        advantages += weights[name] * within
        known += weights[name] * values
        size += np.abs(weights[name] * values)
    rest = rows.rewards - known
    rest[np.abs(rest) <= ROUNDING * size] = 0.0
    advantages += normalized_advantages(rest, rows.groups, rows.episodes, std="none")
    return normalized_advantages(
        advantages,
        rows.groups,
        rows.episodes,
        mean="none",
        std="batch",
        deviation=deviation,
        eps=eps,
    )
