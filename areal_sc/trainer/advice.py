"""One line of advice for a run whose staleness goes far over its bound."""

from __future__ import annotations

from areal_sc.config.schema import OverBound

MAX_TAIL = 2
"""A group older than this many times the bound is far over it."""

MAX_LOST_SHARE = 0.1
"""Masked or wasted share of tokens above which the bound costs more than it should."""


def tail_advice(
    *,
    max_staleness: int,
    over_bound: OverBound,
    group_staleness_max: int,
    masked_share: float = 0.0,
    wasted_share: float = 0.0,
) -> str | None:
    """What to change when the run's slowest groups do not fit its staleness bound.

    Args:
        max_staleness: the bound, `rollout.max_staleness`.
        over_bound: what the run does with what is over it.
        group_staleness_max: policy versions, over all groups trained so far.
        masked_share: tokens kept out of the loss as a share of all in the batches.
        wasted_share: tokens thrown away as a share of all that were generated.
    Returns: one sentence, or None while the tail is acceptable.
    """
    if over_bound == OverBound.train:
        if group_staleness_max <= MAX_TAIL * max(max_staleness, 1):
            return None
        found = (
            f"groups were trained up to {group_staleness_max} policy versions old, "
            f"rollout.max_staleness is {max_staleness}"
        )
        choice = "choose rollout.over_bound=mask, wait or regenerate"
    elif over_bound == OverBound.mask:
        if masked_share <= MAX_LOST_SHARE:
            return None
        found = (
            f"{masked_share:.0%} of the tokens are masked, "
            f"older than rollout.max_staleness={max_staleness} allows"
        )
        choice = "choose rollout.over_bound=train"
    elif over_bound == OverBound.regenerate:
        if wasted_share <= MAX_LOST_SHARE:
            return None
        found = (
            f"{wasted_share:.0%} of the generated tokens are thrown away, "
            f"their groups older than rollout.max_staleness={max_staleness} allows"
        )
        choice = "choose rollout.over_bound=train or mask"
    else:  # wait: no group is over the bound; the price shows as waiting time
        return None
    return (
        f"{found}: raise rollout.max_staleness, give generation more workers "
        f"(rollout.num_workers) or shorter answers (generation.max_new_tokens), or {choice}"
    )
