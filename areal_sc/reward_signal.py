"""Whether rewards differ: what an advantage, a filter of groups and a choice of prompts go by.

They look at what an answer has earned before anything shaped it: a penalty for its length, or the
KL to a reference, says nothing of how good it is.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate, chain, pairwise
from typing import Final

ROUNDING: Final = 1e-13
"""Share of the largest of some rewards by which equal ones may differ, as 0.1 + 0.2 and 0.3 do."""


def have_signal(episodes: Sequence[Sequence[float]]) -> bool:
    """Whether the episodes of a group differ in what their answers have earned.

    Episodes of (1, 1) and of (1,) do not: they differ in the number of their answers alone.
    """
    levels = _levels(chain.from_iterable(episodes))
    return any(levels.values()) and len({tuple(map(levels.get, it)) for it in episodes}) > 1


def _levels(rewards: Iterable[float]) -> dict[float, int]:
    """The level of each of them, from 0 for the lowest: those that are equal share one."""
    ordered = sorted(set(rewards))
    least = ROUNDING * max(map(abs, ordered), default=0.0)
    steps = (after - before > least for before, after in pairwise(ordered))
    return dict(zip(ordered, accumulate(steps, initial=0), strict=False))
