"""What a transcript tells of the rewards of its completions."""

from __future__ import annotations

import pytest

from areal_sc.engines.base import Completion
from areal_sc.rewards.base import Score
from areal_sc.workflows.transcript import Transcript


def test_a_row_tells_the_mean_of_each_part_of_its_scores() -> None:
    transcript = Transcript()
    for token in (3, 4, 5):
        transcript.add_completion(Completion([token], [-1.0], [0], "stop", 1.0))
    scores = [Score(1.0, {"style": 0.5, "right": 1.0}), Score(0.0, {"style": 0.25}), 0.5]
    row = transcript.trajectory(scores, {"turns": 3.0})
    assert row.metrics == {"turns": 3.0, "reward/style": 0.375, "reward/right": 1.0}
    assert (row.reward, row.returns) == (0.5, [(1.0, 1), (0.0, 1), (0.5, 1)])
    with pytest.raises(ValueError, match=r"metric 'reward/style' is 1\.0, and the reward"):
        transcript.trajectory(scores, {"reward/style": 1.0})
