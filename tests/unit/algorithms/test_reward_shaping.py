from __future__ import annotations

import pytest

from areal_sc.algorithms.reward_shaping import soft_length_penalty


@pytest.mark.parametrize(
    ("num_tokens", "expected"),
    [(0, 0), (80, 0), (81, -0.05), (90, -0.5), (100, -1), (120, -1)],
)
def test_it_falls_from_the_margin_to_the_limit(num_tokens: int, expected: float) -> None:
    assert soft_length_penalty(num_tokens, 100, 20) == pytest.approx(expected)


@pytest.mark.parametrize("margin", [0, 101])
def test_a_margin_that_is_none(margin: int) -> None:
    with pytest.raises(ValueError, match=f"margin={margin}: expected 1 to max_tokens=100"):
        soft_length_penalty(1, 100, margin)
