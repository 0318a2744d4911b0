"""The advantages of recorded rows: they follow from the rewards of their group and the settings.

Those that need the whole batch, another model or a function of the user's are not known here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import chain, islice
from statistics import fmean
from typing import Final

import numpy as np

from areal_sc.algorithms.advantages import DEVIATIONS, normalized_advantages
from areal_sc.page.row_index import Advantages
from areal_sc.records.recorded_rows import RecordedGroup

_ADVANTAGE: Final = ("advantage", "advantage_std", "advantage_deviation", "advantage_eps")


def advantages_by(settings: Mapping[str, str]) -> Advantages:
    """How a run makes advantages of rewards, where it compares those of a group alone.

    That of a row whose answers have returns of their own is the mean of theirs.

    Args:
        settings: of the run, by their names.
    """
    named = {name: settings.get(f"actor.ppo.{name}", "") for name in _ADVANTAGE}
    mean, std = named["advantage"] or "group", named["advantage_std"] or "group"
    try:
        eps = float(named["advantage_eps"] or 1e-6)
    except ValueError:
        eps = 0.0
    deviation = named["advantage_deviation"] or "population"
    is_known = {mean, std} <= {"group", "leave_one_out", "none"} and eps > 0
    if settings.get("reward_model.path") or settings.get("actor.ppo.kl_place") == "reward":
        is_known = False  # of what models add to a reward records know nothing

    def advantages(group: RecordedGroup) -> Sequence[float | None]:
        returns = [row.returns or (row.reward,) for row in group.rows]
        rewards = [*chain.from_iterable(returns)]
        is_whole = not group.left_out and all(map(math.isfinite, rewards))
        if not (is_known and is_whole) or deviation not in DEVIATIONS:
            return [None] * len(returns)
        pairs = [*zip(group.rows, returns, strict=True)]
        found = normalized_advantages(
            rewards,
            [0] * len(rewards),
            [row.episode for row, its in pairs for _ in its],
            mean=mean,
            std=std,
            deviation=deviation,
            eps=eps,
            judged=np.array([value - row.shaping for row, its in pairs for value in its]),
        )
        of_rows = iter(found.tolist())
        return [fmean(islice(of_rows, len(its))) for its in returns]

    return advantages
