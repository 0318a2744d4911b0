"""Critic-less advantages: rewards against those of their group or of the whole batch. No torch."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from areal_sc.config.ppo_settings import BASELINES
from areal_sc.reward_signal import ROUNDING

SCOPES = ("group", "leave_one_out", "batch", "none")
DEVIATIONS = ("population", "sample")


@dataclass(frozen=True, slots=True)
class AdvantageRows:
    """What an advantage of whole rows may depend on: R rows of one batch.

    A row whose answers have returns of their own stands here once for each of them.

    Attributes:
        rewards: [R] float64, of the row or the answer.
        groups, episodes: [R] int64; rows of one prompt have one group, and rows of one group and
            episode are of one answer or agent.
        num_tokens, num_loss_tokens: [R] int64, tokens of the row, and those that are trained, of
            the answer alone where it has a return.
        judged: [R] float64, the rewards before anything shaped them: without a penalty for the
            length, or the KL to a reference. None: nobody says.
        parts: by name, [R] float64, what each part of the row's reward gave, before its weight;
            NaN in rows that have no such part.
        weights: by the same names, [R] float64; 0 where the part was measured alone, or is not
            there. The sum of the weighted parts is the row's reward, but for what shapes it.
    """

    rewards: npt.NDArray[np.float64]
    groups: npt.NDArray[np.int64]
    episodes: npt.NDArray[np.int64]
    num_tokens: npt.NDArray[np.int64]
    num_loss_tokens: npt.NDArray[np.int64]
    judged: npt.NDArray[np.float64] | None = None
    parts: Mapping[str, npt.NDArray[np.float64]] = field(default_factory=dict)
    weights: Mapping[str, npt.NDArray[np.float64]] = field(default_factory=dict)


def normalized_advantages(
    rewards: Sequence[float] | npt.NDArray[Any],
    group_ids: Sequence[Hashable] | npt.NDArray[Any],
    episodes: Sequence[Hashable] | npt.NDArray[Any] | None = None,
    *,
    mean: str = "group",
    std: str = "group",
    deviation: str = "population",
    eps: float = 1e-6,
    judged: npt.NDArray[np.float64] | None = None,
) -> npt.NDArray[np.float64]:
    """(reward - mean) / (std + eps), each statistic over the group, over the batch, or left out.

    An episode counts once however many rows it has: in both statistics a row weighs 1 / (rows of
    its episode). A group consists of all rows with its id, wherever they stand. A group of rewards
    that are equal but for rounding, or of one episode, gets exactly 0 when `mean` is "group" or
    "leave_one_out". With `std="none"` nothing is divided; nor where the rewards before shaping are
    all equal: by its own deviation a small penalty would become as large as any other.
    Source: GRPO, arXiv:2402.03300, section 4.1.2; "leave_one_out": RLOO, arXiv:2402.14740.

    Args:
        rewards: [N] finite numbers.
        group_ids: [N] hashable ids.
        episodes: [N] hashable; rows of one group and episode are of one episode. None: each row is
            an episode.
        mean: "group", "batch", "none", or "leave_one_out": over the group's other episodes.
        std: "group", "batch", "none", or "leave_one_out": over the group's other episodes, and
            where these are all equal nothing is divided.
        deviation: "population", or "sample": of n episodes, (n / (n - 1))^0.5 times as large.
        eps: added to the standard deviation.
        judged: [N] the rewards before shaping; None: they are `rewards`.
    Returns: [N].
    Raises: ValueError: the lengths differ, a scope is unknown, or a reward is not finite.
    """
    choices = (("mean", mean, BASELINES), ("std", std, SCOPES))
    for name, choice, allowed in (*choices, ("deviation", deviation, DEVIATIONS)):
        if choice not in allowed:
            raise ValueError(f"{name}={choice!r}: expected one of {', '.join(allowed)}")
    values = np.asarray(rewards, dtype=np.float64)
    groups = _numbered(group_ids)
    if values.ndim != 1 or len(values) != len(groups):
        raise ValueError(f"rewards of shape {values.shape} do not fit {len(groups)} group ids")
    of_rows = range(len(groups)) if episodes is None else episodes
    of_groups = _numbered(zip(group_ids, of_rows, strict=True))
    weights = 1.0 / np.bincount(of_groups)[of_groups]
    alone = np.zeros_like(groups)
    for row in np.flatnonzero(~np.isfinite(values))[:1]:
        raise ValueError(f"the reward of row {row} is {values[row]}; rewards must be finite")
    within = {"group": groups, "leave_one_out": groups, "batch": alone}
    advantages = values.copy()
    if mean != "none":
        advantages -= _mean(values, weights, within[mean])
        advantages[~_differs(values, within[mean])] = 0.0
    num_episodes = _num_episodes(weights, groups)
    if mean == "leave_one_out":
        # what is left of the group's mean without the episode's own part of it
        own = _mean(values, weights, of_groups)
        advantages += (own - _mean(values, weights, groups)) / np.maximum(num_episodes - 1, 1)
    if mean in ("group", "leave_one_out"):
        advantages[num_episodes == 1] = 0.0  # also where its rows have different rewards
    if std != "none":
        deviations = values - _mean(values, weights, within[std])
        variances = _mean(deviations**2, weights, within[std])
        num_counted = _num_episodes(weights, within[std])
        if std == "leave_one_out":
            variances = _variances_of_others(values, weights, groups, of_groups)
            num_counted = np.maximum(num_counted - 1, 1)
        if deviation == "sample":
            variances *= num_counted / np.maximum(num_counted - 1, 1)
        divisors = np.sqrt(variances) + eps
        if std == "leave_one_out":
            divisors[variances == 0.0] = 1.0
        if judged is not None:
            divisors[~_differs(judged, within[std])] = 1.0
        advantages /= divisors
    return advantages


def _differs(
    values: npt.NDArray[np.float64], groups: npt.NDArray[np.int64]
) -> npt.NDArray[np.bool_]:
    """[N] whether the values of each row's group differ by more than rounding."""
    highest = np.full(int(groups.max(initial=-1)) + 1, -np.inf)
    lowest = -highest
    np.maximum.at(highest, groups, values)
    np.minimum.at(lowest, groups, values)
    least = ROUNDING * np.maximum(np.abs(highest), np.abs(lowest))
    return np.asarray((highest - lowest > least)[groups], dtype=np.bool_)


def _variances_of_others(
    values: npt.NDArray[np.float64],
    weights: npt.NDArray[np.float64],
    groups: npt.NDArray[np.int64],
    episodes: npt.NDArray[np.int64],
) -> npt.NDArray[np.float64]:
    """[N] variance over the other episodes of each row's group; 0 where these are equal."""
    variances = np.zeros_like(values)
    order = np.argsort(groups, kind="stable")
    for rows in np.split(order, np.flatnonzero(np.diff(groups[order])) + 1):
        of_rows = episodes[rows]
        for episode in np.unique(of_rows):
            is_own = of_rows == episode
            own, others = rows[is_own], rows[~is_own]
            rewards, shares = values[others], weights[others]
            if _differs(rewards, np.zeros(len(rewards), dtype=np.int64)).any():
                mean = np.average(rewards, weights=shares)
                variances[own] = np.average((rewards - mean) ** 2, weights=shares)
    return variances


def _numbered(ids: Iterable[Hashable]) -> npt.NDArray[np.int64]:
    """[N] numbers from 0 in place of ids, in order of appearance."""
    numbers: dict[Hashable, int] = {}
    return np.asarray([numbers.setdefault(key, len(numbers)) for key in ids], dtype=np.int64)


def _num_episodes(
    weights: npt.NDArray[np.float64], groups: npt.NDArray[np.int64]
) -> npt.NDArray[np.float64]:
    """[N] episodes of each row's group: the sum of its weights, which is whole."""
    return np.asarray(np.rint(np.bincount(groups, weights))[groups], dtype=np.float64)


def _mean(
    values: npt.NDArray[np.float64],
    weights: npt.NDArray[np.float64],
    groups: npt.NDArray[np.int64],
) -> npt.NDArray[np.float64]:
    """[N] weighted mean over each row's group; exact where all of its values are equal."""
    if not len(values):
        return values.copy()
    # The mean of equal numbers may be off by rounding; that of their differences to one is 0.
    origins = values[np.unique(groups, return_index=True)[1]][groups]
    sums = np.bincount(groups, weights=(values - origins) * weights)
    return np.asarray(origins + (sums / np.bincount(groups, weights))[groups], dtype=np.float64)
