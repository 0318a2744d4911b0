from __future__ import annotations

import pytest

from areal_sc.config.schema import RolloutConfig
from areal_sc.controller.ledger.group import Group, GroupState
from areal_sc.controller.rollout.rejections import Rejections
from areal_sc.errors import TooManyRejections, WorkflowError
from areal_sc.metadata import BatchMetadata, PromptReference, RowMetadata
from areal_sc.rejection import Rejection, RejectionKind, describe_counts
from areal_sc.workers.calls import RejectedEpisodes


def group(state: GroupState, batch: BatchMetadata | None = None) -> Group:
    return Group(0, PromptReference(0, 0, 0), 0, state=state, batch=batch)


def rejected(**causes: tuple[int, str]) -> list[RejectedEpisodes]:
    return [
        RejectedEpisodes(count, Rejection(RejectionKind(kind), message))
        for kind, (count, message) in causes.items()
    ]


def test_the_rate_is_that_of_a_whole_window() -> None:
    rejections = Rejections(RolloutConfig(rejection_window=2, max_rejection_rate=0.5))
    rejections.add_group(rejected(reward_error=(4, "boom")), 4)
    rejections.check_rate()  # one group says nothing yet
    rejections.add_group((), 4)
    rejections.check_rate()  # half of the episodes: at the limit, not over it
    rejections.add_group(rejected(timeout=(1, "slow")), 4)
    rejections.check_rate()  # the first group has left the window
    rejections.add_group(rejected(timeout=(4, "slower")), 4)
    with pytest.raises(TooManyRejections, match=r"5 of the last 8 episodes .*timeout x5.*slow"):
        rejections.check_rate()


def test_causes_come_by_their_number_and_keep_their_first_message() -> None:
    rejections = Rejections(RolloutConfig(rejection_window=1, max_rejection_rate=1.0))
    assert describe_counts(rejections.by_cause()) == "none"
    told: list[str] = []
    rejections.warn = told.append
    rejections.add_group(rejected(timeout=(1, "slow"), reward_error=(2, "boom")), 4)
    rejections.add_group(rejected(reward_error=(1, "again")), 4)
    assert describe_counts(rejections.by_cause()) == "reward_error x3, timeout x1"
    first_of = "an episode was rejected, the first for this cause:"
    assert told == [f"{first_of} timeout: slow", f"{first_of} reward_error: boom"]
    assert {cause: first.message for cause, first in rejections.firsts.items()} == {
        "timeout": "slow",
        "reward_error": "boom",
    }


def test_stale_groups_waste_the_tokens_that_they_have_and_are_no_rejections() -> None:
    rejections = Rejections(RolloutConfig(rejection_window=1, max_rejection_rate=0.1))
    rejections.add_stale(group(GroupState.queued), 8)
    assert rejections.num_stale_episodes == 0
    rejections.add_stale(group(GroupState.running), 8)
    rows = [
        RowMetadata(0, 0, 10, 0.0, 0, ((0, 3),), 0),
        RowMetadata(0, 0, 10, 0.0, 0, ((1, 2),), 0),
        RowMetadata(0, 0, 9, 0.0, 0, (), 1),
    ]
    batch = BatchMetadata("b", 0, (), tuple(rows))
    rejections.add_stale(group(GroupState.finished, batch), 8)
    rejections.add_group((), 4)
    rejections.check_rate()
    assert rejections.by_cause() == {"stale": 10}
    assert (rejections.num_stale_episodes, rejections.wasted_tokens) == (10, 5)


def test_counts_go_on_from_a_snapshot() -> None:
    before = Rejections(RolloutConfig(rejection_window=1, max_rejection_rate=1.0))
    before.add_group(rejected(timeout=(3, "slow")), 4)
    before.add_stale(group(GroupState.running), 2)
    after = Rejections(RolloutConfig(rejection_window=1, max_rejection_rate=1.0))
    after.restore(before.snapshot())
    after.add_group(rejected(timeout=(1, "slow")), 4)
    assert (after.episodes["timeout"], after.num_stale_episodes) == (4, 2)
    assert after.num_episodes == 6


def test_prompts_that_are_too_long_are_left_out_and_are_no_rejections() -> None:
    rejections, told = (
        Rejections(RolloutConfig(rejection_window=8, max_rejection_rate=0.5)),
        list[str](),
    )
    rejections.warn = told.append
    for index in (*range(6), 3):
        rejections.add_group(unanswered(RejectionKind.prompt_too_long, index), 4)
        rejections.check_rate(num_prompts=7)
    assert rejections.left_out == set(range(6))
    assert (rejections.num_episodes, rejections.by_cause()) == (0, {})
    assert told == ["a prompt is left out, row 0 of the dataset: it is what it is"]
    rejections.add_group((), 4)
    rejections.add_group(unanswered(RejectionKind.prompt_too_long, 6), 4)
    rejections.check_rate(num_prompts=7)  # the model was asked something meanwhile


@pytest.mark.parametrize(("num_prompts", "number"), [(3, 3), (100, 8), (None, 8)])
def test_a_dataset_of_which_no_prompt_is_left(num_prompts: int | None, number: int) -> None:
    rejections = Rejections(RolloutConfig(rejection_window=8, max_rejection_rate=0.5))
    for index in range(number - 1):
        rejections.add_group(unanswered(RejectionKind.prompt_too_long, index), 4)
        rejections.check_rate(num_prompts)
    rejections.add_group(unanswered(RejectionKind.prompt_too_long, number), 4)
    with pytest.raises(WorkflowError, match=f"all {number} prompts so far leave no room"):
        rejections.check_rate(num_prompts)


@pytest.mark.parametrize("kind", [RejectionKind.prompt_error, RejectionKind.agent_no_call])
def test_where_no_model_was_asked_anything_the_run_ends_soon(kind: RejectionKind) -> None:
    rejections = Rejections(RolloutConfig(rejection_window=128, max_rejection_rate=1.0))
    for index in range(8):
        rejections.check_rate(1000)
        rejections.add_group(unanswered(kind, index), 4)
    with pytest.raises(TooManyRejections, match=rf"none of the first 8 prompts .* {kind} x32"):
        rejections.check_rate(1000)


def unanswered(kind: RejectionKind, index: int) -> tuple[RejectedEpisodes, ...]:
    first = Rejection(kind, "it is what it is", prompt_index=index)
    return (RejectedEpisodes(4, first),)
