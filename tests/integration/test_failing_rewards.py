"""Rewards that fail: cause and place are told at once, and a run that only loses time ends."""

from __future__ import annotations

import queue
import re
from collections.abc import Callable
from typing import Any

import pytest
from integration.scripts import episodes

from areal_sc import SingleTurnWorkflow
from areal_sc.controller.rollout import progress
from areal_sc.errors import TooManyRejections
from areal_sc.rewards.base import RewardFunction

PROMPTS = [{"prompt": f"a{n}=", "answer": "a", "number": n} for n in range(20)]
LIMIT_S = 60.0


@pytest.mark.parametrize(
    ("reward", "cause"),
    [
        (episodes.raises, "reward_error: KeyError at episodes.py:"),
        (episodes.not_a_number, "bad_reward: episodes.py:"),
        (episodes.kills_its_process, "reward_process_died: episodes.py:"),
    ],
)
def test_a_reward_that_always_fails_is_told_with_its_place(
    start_rollout: Callable[..., Any], reward: RewardFunction, cause: str
) -> None:
    told: list[str] = []
    with start_rollout("rollout.rejection_window=4", "rollout.train_batch_groups=1") as rollout:
        rollout.rejections.warn = told.append
        with pytest.raises(TooManyRejections, match=re.escape(cause)):
            rollout.prepare_batch(PROMPTS, SingleTurnWorkflow(reward))
    assert len(told) == 1
    assert f"the first for this cause: {cause}" in told[0]
    assert re.search(r"; prompt \d+: 'a\d+='; more in /.*rollout-0\.log", told[0])


def test_of_several_rewards_the_failing_one_is_named(start_rollout: Callable[..., Any]) -> None:
    told: list[str] = []
    rewards = {"first": episodes.right, "second": (episodes.raises, 0.5)}
    with start_rollout("rollout.rejection_window=4") as rollout:
        rollout.rejections.warn = told.append
        with pytest.raises(TooManyRejections):
            rollout.prepare_batch(PROMPTS, SingleTurnWorkflow(rewards))
    (text,) = told
    assert "reward second (raises): KeyError: 'solution'" in text


def test_a_reward_that_fails_for_some_prompts_is_told_once_and_counted(
    start_rollout: Callable[..., Any],
) -> None:
    told: list[str] = []
    with start_rollout("rollout.rejection_window=100") as rollout:
        rollout.rejections.warn = told.append
        batch = rollout.rollout_batch(PROMPTS, SingleTurnWorkflow(episodes.raises_for_some))
        assert len(batch.group_ids) == 18
        ((cause, count),) = rollout.rejections.by_cause().items()
    assert re.fullmatch(r"reward_error: KeyError at episodes\.py:\d+", cause)
    assert count == 4
    (text,) = told
    assert cause in text
    assert "KeyError: 'solution'" in text
    assert re.search(r'episodes\.py", line \d+, in .*\n.*prompt\["solution"\] == ', text)


def test_a_group_reward_that_fails_rejects_its_group_alone(
    start_rollout: Callable[..., Any],
) -> None:
    workflow = SingleTurnWorkflow(None, group_reward=episodes.in_their_order)
    with start_rollout("rollout.rejection_window=100") as rollout:
        batch = rollout.rollout_batch(PROMPTS, workflow)
        ((cause, count),) = rollout.rejections.by_cause().items()
    assert len(batch.group_ids) == 19
    assert {row.reward for row in batch.rows} == {1.0, 2.0}
    assert all(row.reward == row.episode + 1.0 for row in batch.rows)
    assert re.fullmatch(r"reward_error: KeyError at episodes\.py:\d+", cause)
    assert count == 2  # both episodes of the group


@pytest.mark.parametrize("call", ["prepare_batch", "evaluate"])
def test_a_reward_that_always_hangs_ends_the_run_before_any_group_has_replied(
    start_rollout: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """One process has all calls; the first groups would reply after all of them timed out."""
    monkeypatch.setattr(progress, "LOOK_S", 0.2)
    monkeypatch.setattr(progress, "MAX_LOST_S", 1.0)
    told: list[str] = []
    limits = ("rollout.reward_timeout_s=0.3", "rollout.group_size=16")
    with start_rollout(*limits, "rollout.rejection_window=100000") as rollout:
        rollout.rejections.warn = told.append
        with pytest.raises(TooManyRejections, match=r"none was kept.*the limit is 1 s"):
            getattr(rollout, call)(PROMPTS, SingleTurnWorkflow(episodes.hangs))
        assert rollout.groups.num_finished == 0
    assert "the first for this cause: reward_timeout: episodes.py:" in told[0]
    assert "took longer than 0.3 s" in told[0]


def test_what_a_run_waits_for_is_told_where_nothing_finishes(
    start_rollout: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "LOOK_S", 0.2)
    monkeypatch.setattr(progress, "FIRST_NOTICE_S", 0.5)
    told: queue.Queue[str] = queue.Queue()
    with start_rollout() as rollout:
        rollout.rejections.warn = told.put
        rollout._submit(rollout.prepare_batch_async(PROMPTS, SingleTurnWorkflow(episodes.hangs)))
        first, second = (seconds_without_end(told) for _ in range(2))
    assert second >= first


def seconds_without_end(told: queue.Queue[str]) -> int:
    """As the next notice says that tells of the reward: the first answers are generated before."""
    pattern = (
        r"nothing has finished for (\d+) s; \d+ groups are open; episodes on rollout/0: "
        r".*wait for the reward hangs"
    )
    while not (found := re.match(pattern, told.get(timeout=LIMIT_S))):
        pass
    return int(found[1])
