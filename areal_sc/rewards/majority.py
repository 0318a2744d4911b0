"""The majority of a group as the label of its prompt. No torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from areal_sc.rewards.base import VOTE, RewardFunction
from areal_sc.sources.reference import Referable

if TYPE_CHECKING:
    from areal_sc.workflows.trajectory import Trajectory


class MajorityLabel(Referable):
    """1.0 for each answer that says what most of the group's answers say, else 0.0.

    So a run needs no right answers. What an answer says is told by the `vote` of a reward, which a
    worker asks before (`Workflow.group_voter`). Of sayings that are equally frequent the one counts
    that came first; where no answer says anything, all get 0.0. An answer that is alone keeps the
    reward of its own.
    Source: TTRL, arXiv:2504.16084, section 2.

    Args:
        voter: a reward with `vote`, as `numeric_match`, `MultipleChoice()` and `ExactMatch()` have.
        min_share: of the group's answers that have to say the same, in [0, 1]; with fewer there is
            no label, and all get 0.0, which teaches nothing.
    Raises: ValueError: the voter has no `vote`, or the share is out of bounds.
    """

    def __init__(self, voter: RewardFunction, *, min_share: float = 0.0) -> None:
        if not 0 <= min_share <= 1:
            raise ValueError(f"min_share={min_share}: expected a number in [0, 1]")
        if getattr(voter, VOTE, None) is None:
            raise ValueError(
                f"voter: expected a reward with a method vote(completion), got {voter!r:.100}"
            )
        self.voter = voter
        self.min_share = min_share

    async def __call__(
        self, prompt: dict[str, Any], trajectories: Sequence[Trajectory]
    ) -> list[float]:
        if len(trajectories) == 1:
            return [trajectories[0].reward]
        votes = Counter(it.vote for it in trajectories if it.vote is not None)
        label, count = votes.most_common(1)[0] if votes else ("", 0)
        if count < self.min_share * len(trajectories):
            return [0.0] * len(trajectories)
        return [float(it.vote == label) for it in trajectories]
