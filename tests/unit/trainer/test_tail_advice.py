from __future__ import annotations

import pytest

from areal_sc.config.schema import OverBound
from areal_sc.trainer.advice import tail_advice


def test_trained_groups_far_over_the_bound() -> None:
    advice = tail_advice(max_staleness=4, over_bound=OverBound.train, group_staleness_max=27)
    assert advice is not None
    assert "\n" not in advice
    for part in ("27", "rollout.max_staleness is 4", "rollout.num_workers", "mask, wait or regen"):
        assert part in advice


@pytest.mark.parametrize(("max_staleness", "group_staleness_max"), [(4, 8), (1, 2), (0, 2), (0, 0)])
def test_a_tail_near_the_bound_needs_no_advice(
    max_staleness: int, group_staleness_max: int
) -> None:
    advice = tail_advice(
        max_staleness=max_staleness,
        over_bound=OverBound.train,
        group_staleness_max=group_staleness_max,
    )
    assert advice is None


def test_masked_and_wasted_tokens() -> None:
    masked = tail_advice(
        max_staleness=1, over_bound=OverBound.mask, group_staleness_max=3, masked_share=0.27
    )
    assert masked is not None
    assert "27% of the tokens are masked" in masked
    wasted = tail_advice(
        max_staleness=1, over_bound=OverBound.regenerate, group_staleness_max=1, wasted_share=0.4
    )
    assert wasted is not None
    assert "40% of the generated tokens are thrown away" in wasted
    for over_bound in (OverBound.mask, OverBound.regenerate, OverBound.wait):
        assert (
            tail_advice(
                max_staleness=4,
                over_bound=over_bound,
                group_staleness_max=27,
                masked_share=0.06,
                wasted_share=0.06,
            )
            is None
        )
