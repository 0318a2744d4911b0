"""Critic-less advantages: rewards normalised over their group or over the whole batch. No torch."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

SCOPES = ("group", "batch", "none")


def normalized_advantages(
    rewards: Any,
    group_ids: Any,
    *,
    mean: str = "group",
    std: str = "group",
    eps: float = 1e-6,
) -> Any:
    """(reward - mean) / (std + eps), each statistic over the group, over the batch, or left out.

    The standard deviation is that of the population. A group consists of all rows with its id,
    wherever they stand. A group of equal rewards, or of one, gets exactly 0 when `mean` is
    "group". With `std="none"` nothing is divided.

    Args:
        rewards: [N] finite numbers: a sequence, a numpy array or a torch tensor.
        group_ids: [N] hashable ids: a sequence, an array or a tensor.
        mean, std: "group", "batch" or "none".
        eps: added to the standard deviation.
    Returns: [N], computed in float64: a tensor of the rewards' dtype and device where they are a
        tensor, else a numpy float64 array.
    Raises: ValueError: the lengths differ, a scope is unknown, or a reward is not finite.
    """
    for name, scope in (("mean", mean), ("std", std)):
        if scope not in SCOPES:
            raise ValueError(f"{name}={scope!r}: expected one of {', '.join(SCOPES)}")
    values = _to_float64(rewards)
    groups = _to_group_numbers(group_ids)
    if values.ndim != 1 or len(values) != len(groups):
        raise ValueError(f"rewards of shape {values.shape} do not fit {len(groups)} group ids")
    for row in np.flatnonzero(~np.isfinite(values))[:1]:
        raise ValueError(f"the reward of row {row} is {values[row]}; rewards must be finite")
    advantages = values.copy()
    if mean != "none":
        advantages -= _mean(values, groups, str(mean))
    if std != "none":
        deviations = values - _mean(values, groups, str(std))
        advantages /= np.sqrt(_mean(deviations**2, groups, str(std))) + eps
    if _is_tensor(rewards):
        # numpy -> tensor without importing torch: fill a copy of the rewards' own kind
        return rewards.detach().double().new_tensor(advantages.tolist()).to(rewards.dtype)
    return advantages


def _mean(
    values: npt.NDArray[np.float64], groups: npt.NDArray[np.int64], scope: str
) -> npt.NDArray[np.float64]:
    """[N] mean over each row's group, or over all rows; exact where all of these are equal."""
    if not len(values):
        return values.copy()
    if scope == "batch":
        groups = np.zeros_like(groups)
    # The mean of equal numbers may be off by rounding; that of their differences to one is 0.
    origins = values[np.unique(groups, return_index=True)[1]][groups]
    sums = np.bincount(groups, weights=values - origins)
    return np.asarray(origins + (sums / np.bincount(groups))[groups], dtype=np.float64)


def _is_tensor(values: Any) -> bool:
    return hasattr(values, "detach") and hasattr(values, "new_tensor")


def _to_float64(values: Any) -> npt.NDArray[np.float64]:
    if _is_tensor(values):
        values = values.detach().double().cpu().numpy()
    return np.asarray(values, dtype=np.float64)


def _to_group_numbers(group_ids: Any) -> npt.NDArray[np.int64]:
    """[N] the groups numbered from 0 in order of appearance."""
    ids: Sequence[Hashable] = group_ids.tolist() if hasattr(group_ids, "tolist") else group_ids
    numbers: dict[Hashable, int] = {}
    return np.asarray([numbers.setdefault(group, len(numbers)) for group in ids], dtype=np.int64)
