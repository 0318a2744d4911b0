from __future__ import annotations

from typing import Any

import pytest
from builders import make_step

from areal_sc.config.ppo_settings import PPOConfig
from areal_sc.config.schema import ActorConfig, GRPOConfig, OverBound, RolloutConfig
from areal_sc.trainer.advice import tail_advice


def advice(
    over_bound: OverBound, max_staleness: int = 4, advantage: str = "group", **changes: Any
) -> str | None:
    """On a step that differs in so much, of a run with that bound and that advantage."""
    config = GRPOConfig(
        actor=ActorConfig(ppo=PPOConfig(advantage=advantage)),
        rollout=RolloutConfig(over_bound=over_bound, max_staleness=max_staleness),
    )
    return tail_advice(config, make_step(num_trained_tokens=1000, **changes))


def test_trained_groups_far_over_the_bound() -> None:
    found = advice(OverBound.train, group_staleness_max=27)
    assert found is not None
    assert "\n" not in found
    for part in ("27", "rollout.max_staleness is 4", "rollout.num_workers", "mask, wait or regen"):
        assert part in found


@pytest.mark.parametrize(("max_staleness", "group_staleness_max"), [(4, 8), (1, 2), (0, 2), (0, 0)])
def test_a_tail_near_the_bound_needs_no_advice(
    max_staleness: int, group_staleness_max: int
) -> None:
    assert advice(OverBound.train, max_staleness, group_staleness_max=group_staleness_max) is None


def test_masked_and_wasted_tokens() -> None:
    masked = advice(OverBound.mask, 1, group_staleness_max=3, num_masked_tokens=370)
    assert masked is not None
    assert "27% of the tokens are masked" in masked
    wasted = advice(OverBound.regenerate, 1, group_staleness_max=1, num_wasted_tokens=667)
    assert wasted is not None
    assert "40% of the generated tokens are thrown away" in wasted
    for over_bound in (OverBound.mask, OverBound.regenerate, OverBound.wait):
        few = {"num_masked_tokens": 60, "num_wasted_tokens": 60}
        assert advice(over_bound, group_staleness_max=27, **few) is None


def test_a_larger_bound_is_advised_only_where_the_algorithm_bears_it() -> None:
    for max_staleness, advantage, is_raised in (
        *((4, "group", True), (15, "gae", True), (16, "group", False)),
        *((4, "batch", False), (4, "none", False), (4, "mine:advantage", False)),
    ):
        found = advice(OverBound.train, max_staleness, advantage, group_staleness_max=99)
        assert found is not None
        assert ("raise rollout.max_staleness, to 16 at most" in found) == is_raised, advantage
        assert "rollout.num_workers" in found
