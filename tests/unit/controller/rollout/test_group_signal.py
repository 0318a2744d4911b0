"""Groups whose rewards are all equal are drawn anew; the simulation checks the account."""

from __future__ import annotations

from collections import defaultdict

import pytest
from simulation.settings import Settings
from simulation.training_run import play

from areal_sc.config.schema import KeepGroups, OverBound, RolloutConfig, SoftLengthConfig
from areal_sc.controller.ledger.group import past_of
from areal_sc.controller.rollout.rejections import MAX_BATCHES, lack_of_signal
from areal_sc.errors import TooManyRejections
from areal_sc.metadata import BatchMetadata, PromptReference, RowMetadata
from areal_sc.sources.prompt_choice import PromptPast
from areal_sc.workers.calls import RunGroup
from areal_sc.workers.group_rows import metadata_of
from areal_sc.workers.trajectory_checks import checked_episode, shaped
from areal_sc.workflows.base import Trajectory


@pytest.mark.parametrize("over_bound", list(OverBound))
def test_only_groups_with_signal_are_trained(over_bound: OverBound) -> None:
    settings = Settings(over_bound=over_bound, keep_groups=KeepGroups.with_signal)
    run = play(settings)
    for batch in run.batches:
        rewards = defaultdict[int, set[float]](set)
        for row in batch.rows:
            rewards[row.group_id].add(row.reward)
        assert len(rewards) == settings.batch_groups
        assert all(len(of) == 2 for of in rewards.values())
    assert "equal_rewards" in run.rejected.values()


def test_all_groups_are_trained_by_default() -> None:
    assert not play(Settings()).rejected


def test_a_run_in_which_nothing_has_signal_ends() -> None:
    settings = Settings(group_size=1, keep_groups=KeepGroups.with_signal)
    with pytest.raises(TooManyRejections, match=f"nothing has signal.* {MAX_BATCHES * 4} groups"):
        play(settings)


def test_episodes_are_compared_by_all_their_returns() -> None:
    def group(*episodes: tuple[float, ...]) -> BatchMetadata:
        rows = tuple(
            RowMetadata(0, 0, 9, 0.5, 0, ((0, 2),), number, returns=tuple((it, 1) for it in its))
            for number, its in enumerate(episodes)
        )
        return BatchMetadata("b", 0, (), rows)

    assert lack_of_signal(group((), ())) == "equal_rewards"
    assert lack_of_signal(group((0.25, 0.75), (0.25, 0.75))) == "equal_rewards"
    assert lack_of_signal(group((0.25, 0.75), (0.75, 0.25))) is None
    assert lack_of_signal(group((0.25, 0.75))) == "one_episode"
    assert lack_of_signal(group((1.0, 1.0), (1.0,))) == "equal_rewards"


def test_what_shapes_rewards_is_no_signal() -> None:
    soft = SoftLengthConfig(limit_tokens=6, margin_tokens=4)
    limits = RolloutConfig(max_context_tokens=9, soft_length=soft)
    call = RunGroup(0, 0, 0, PromptReference(0, 0, 0), 0, 4)

    def finished(*rewards: float) -> BatchMetadata:
        rows = {}
        for number, reward in enumerate(rewards):
            size = 3 + number  # each answer is longer than the one before
            zeros, mask = [0.0] * size, [False] + [True] * (size - 1)
            row = Trajectory([1] * size, mask, zeros, [0] * size, [1.0] * size, reward)
            checked = checked_episode(row, limits, {}, is_trained=True)
            assert isinstance(checked, list)
            rows[number] = shaped(checked, limits, is_trained=True)
        return BatchMetadata("b", 0, (), metadata_of(call, rows))

    for right in (0.0, 1.0, 0.1):
        group = finished(right, right, right, right)
        assert len({row.reward for row in group.rows}) == 4
        assert lack_of_signal(group) == "equal_rewards"
        assert past_of(group, {}, None) == PromptPast(1, pytest.approx(right), has_signal=False)
        with_kl = group.add_rewards([-0.3, -0.1, -0.2, -0.4], is_shaping=True)
        assert lack_of_signal(with_kl) == "equal_rewards"
        assert lack_of_signal(group.add_rewards([0.5, 0.0, 0.0, 0.0])) is None
    assert lack_of_signal(finished(0.0, 1.0)) is None
    assert lack_of_signal(finished(0.1 + 0.2, 0.3)) == "equal_rewards"
    assert lack_of_signal(finished(0.75, 1.0)) is None  # the length costs what more is earned
