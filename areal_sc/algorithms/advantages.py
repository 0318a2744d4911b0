"""Critic-less advantages: rewards normalised over their group or over the whole batch. No torch."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

SCOPES = ("group", "batch", "none")


def normalized_advantages(
    rewards: Sequence[float] | npt.NDArray[Any],
    group_ids: Sequence[Hashable] | npt.NDArray[Any],
    episodes: Sequence[Hashable] | npt.NDArray[Any] | None = None,
    *,
    mean: str = "group",
    std: str = "group",
    eps: float = 1e-6,
) -> npt.NDArray[np.float64]:
    """(reward - mean) / (std + eps), each statistic over the group, over the batch, or left out.

    An episode counts once however many rows it has: in both statistics a row weighs 1 / (rows of
    its episode). The standard deviation is that of the population. A group consists of all rows
    with its id, wherever they stand. A group of equal rewards, or of one row, gets exactly 0 when
    `mean` is "group". With `std="none"` nothing is divided.

    Args:
        rewards: [N] finite numbers.
        group_ids: [N] hashable ids.
        episodes: [N] hashable; rows of one group and episode are of one episode. None: each row is
            an episode.
        mean, std: "group", "batch" or "none".
        eps: added to the standard deviation.
    Returns: [N].
    Raises: ValueError: the lengths differ, a scope is unknown, or a reward is not finite.
    """
    for name, scope in (("mean", mean), ("std", std)):
        if scope not in SCOPES:
            raise ValueError(f"{name}={scope!r}: expected one of {', '.join(SCOPES)}")
    values = np.asarray(rewards, dtype=np.float64)
    groups = _numbered(group_ids)
    if values.ndim != 1 or len(values) != len(groups):
        raise ValueError(f"rewards of shape {values.shape} do not fit {len(groups)} group ids")
    of_rows = range(len(groups)) if episodes is None else episodes
    of_groups = _numbered(zip(group_ids, of_rows, strict=True))
    weights = 1.0 / np.bincount(of_groups)[of_groups]
    for row in np.flatnonzero(~np.isfinite(values))[:1]:
        raise ValueError(f"the reward of row {row} is {values[row]}; rewards must be finite")
    advantages = values.copy()
    if mean != "none":
        advantages -= _mean(values, weights, groups, str(mean))
    if std != "none":
        deviations = values - _mean(values, weights, groups, str(std))
        advantages /= np.sqrt(_mean(deviations**2, weights, groups, str(std))) + eps
    return advantages


def _numbered(ids: Iterable[Hashable]) -> npt.NDArray[np.int64]:
    """[N] numbers from 0 in place of ids, in order of appearance."""
    numbers: dict[Hashable, int] = {}
    return np.asarray([numbers.setdefault(key, len(numbers)) for key in ids], dtype=np.int64)


def _mean(
    values: npt.NDArray[np.float64],
    weights: npt.NDArray[np.float64],
    groups: npt.NDArray[np.int64],
    scope: str,
) -> npt.NDArray[np.float64]:
    """[N] weighted mean over each row's group, or over all; exact where all of these are equal."""
    if not len(values):
        return values.copy()
    if scope == "batch":
        groups = np.zeros_like(groups)
    # The mean of equal numbers may be off by rounding; that of their differences to one is 0.
    origins = values[np.unique(groups, return_index=True)[1]][groups]
    sums = np.bincount(groups, weights=(values - origins) * weights)
    return np.asarray(origins + (sums / np.bincount(groups, weights))[groups], dtype=np.float64)
