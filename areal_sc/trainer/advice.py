"""One line of advice for a run whose staleness goes far over its bound."""

from __future__ import annotations

from areal_sc.config.schema import OverBound, RolloutConfig
from areal_sc.trainer.metrics import StepMetrics

MAX_TAIL = 2
"""A group older than this many times the bound is far over it."""

MAX_LOST_SHARE = 0.1
"""Masked or wasted share of tokens above which the bound costs more than it should."""


def tail_advice(config: RolloutConfig, metrics: StepMetrics) -> str | None:
    """What to change when the step's slowest groups do not fit the run's staleness bound.

    Returns: one sentence, or None while the tail is acceptable.
    """
    bound = config.max_staleness
    match config.over_bound:
        case OverBound.train if metrics.group_staleness_max > MAX_TAIL * max(bound, 1):
            found = (
                f"groups were trained up to {metrics.group_staleness_max} policy versions old, "
                f"rollout.max_staleness is {bound}"
            )
            choice = "mask, wait or regenerate"
        case OverBound.mask if metrics.masked_share > MAX_LOST_SHARE:
            found = (
                f"{metrics.masked_share:.0%} of the tokens are masked, "
                f"older than rollout.max_staleness={bound} allows"
            )
            choice = "train"
        case OverBound.regenerate if metrics.wasted_share > MAX_LOST_SHARE:
            found = (
                f"{metrics.wasted_share:.0%} of the generated tokens are thrown away, "
                f"their groups older than rollout.max_staleness={bound} allows"
            )
            choice = "train or mask"
        case _:  # with `wait` no group is over the bound; the price shows as waiting time
            return None
    return (
        f"{found}: raise rollout.max_staleness, give generation more workers "
        f"(rollout.num_workers) or shorter answers (generation.max_new_tokens), or choose "
        f"rollout.over_bound={choice}"
    )
