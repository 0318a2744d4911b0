"""Rewards that the episodes of a prompt get together, when all have ended."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest

from areal_sc.config.length_settings import CutAnswers, SoftLengthConfig
from areal_sc.config.schema import GenerationConfig, RolloutConfig
from areal_sc.errors import NeverWorks, RewardError, WorkflowError
from areal_sc.metadata import PromptReference
from areal_sc.rejection import Rejection, RejectionKind
from areal_sc.rewards.base import Score
from areal_sc.rewards.majority import MajorityLabel
from areal_sc.workers.calls import RunGroup
from areal_sc.workers.group_judging import judged_group
from areal_sc.workers.group_rows import metadata_of
from areal_sc.workflows.base import Trajectory, Workflow
from areal_sc.workflows.math_reward import exact_match, numeric_match
from areal_sc.workflows.task_mix import MixedWorkflow

PROMPT = {"prompt": "2 + 2 ="}
REFUSED = Rejection(RejectionKind.reward_error, "before")
LIMITS = RolloutConfig(max_context_tokens=64)


class Letters:
    """Decodes token n as the letter number n."""

    def decode(self, tokens: Sequence[int], **_: Any) -> str:
        return "".join(chr(ord("a") + token) for token in tokens)


def row(reward: float = 0.0, **changes: Any) -> Trajectory:
    """Reads `ab`, says `c`, reads `d`, says `ef`."""
    mask = [False, False, True, False, True, True]
    zeros = [0.0] * 6
    return replace(Trajectory(range(6), mask, zeros, [0] * 6, [1.0] * 6, reward), **changes)


class Judged(Workflow):
    """A workflow whose groups are scored by what the test gives it."""

    def __init__(self, gives: Any) -> None:
        self.gives = gives
        self.seen: list[Trajectory] = []

    async def score_group(self, prompt: dict[str, Any], trajectories: Any) -> Any:
        assert prompt == PROMPT
        self.seen = list(trajectories)
        if isinstance(self.gives, BaseException):
            raise self.gives
        return self.gives(trajectories) if callable(self.gives) else self.gives


async def says(reward: Any, completion: str) -> str | None:
    """Without the process."""
    vote: str | None = reward.vote(completion)
    return vote


async def judged(
    workflow: Workflow, played: Sequence[Any], limits: RolloutConfig = LIMITS, **row: Any
) -> list[Any]:
    return await judged_group(
        workflow, {**PROMPT, **row}, played, Letters(), limits, vote=says, is_trained=True
    )


async def test_a_group_is_scored_without_what_was_rejected() -> None:
    workflow = Judged(lambda them: [it.reward + place for place, it in enumerate(them)])
    played = [[row(0.5)], REFUSED, [row(1.0), row(2.0, answer="own")]]
    first, second, third = await judged(workflow, played)
    assert second is REFUSED
    assert [it.reward for it in (*first, *third)] == [0.5, 2.0, 3.0]
    assert [it.answer for it in workflow.seen] == ["ef", "own"]


async def test_what_the_last_row_gains_its_episode_gains() -> None:
    turns = [row(0.25, returns=[(0.25, 1), (0.75, 2)]), row(0.5)]
    ((first, last),) = await judged(Judged([2.0]), [turns])
    assert (first.reward, last.reward) == (1.75, 2.0)
    assert first.returns == [(1.75, 1), (2.25, 2)]


async def test_none_leaves_the_rewards() -> None:
    played = [[row(0.5)], [row(1.0)]]
    assert await judged(Judged(None), played) == played


async def test_the_number_comes_before_what_shapes_it() -> None:
    soft = SoftLengthConfig(limit_tokens=4, margin_tokens=2, penalty=1.0)
    generation = GenerationConfig(cut_answers=CutAnswers.wrong)
    limits = replace(LIMITS, soft_length=soft, generation=generation)
    workflow = Judged([Score(2.0, {"style": 4.0, "size": 1.0}, -0.25, {"style": 0.5}), 3.0])
    played = [[row(0.5, shaping=9.0)], [row(0.5, metrics={"stopped": 0.0})]]
    (first,), (second,) = await judged(workflow, played, limits)
    assert workflow.seen[0].reward == 0.5
    assert (first.reward, first.shaping) == (1.5, -0.75)
    assert (second.reward, second.shaping) == (-0.5, -0.5)  # it was cut, so it is worth nothing
    group = RunGroup(0, 0, 0, PromptReference(0, 0, 0), 0, 2)
    told, _ = metadata_of(group, {0: [first], 1: [second]})
    assert told.judged == (2.25,)
    assert told.reward_parts == (("style", 4.0, 0.5), ("size", 1.0, 0.0))


def test_the_prompt_ends_where_the_first_answer_begins() -> None:
    group = RunGroup(0, 0, 0, PromptReference(0, 0, 0), 0, 2)
    answers, context = row(), row(loss_mask=[False] * 6)
    told = metadata_of(group, {0: [answers], 1: [context]})
    assert [it.prompt_length for it in told] == [2, 6]


async def forgotten() -> float:
    return 1.0


async def sleeps(_: Any) -> None:
    await asyncio.sleep(60)


@pytest.mark.parametrize(
    ("gives", "cause", "message"),
    [
        ([1.0], "bad_reward", "gave 1 numbers, expected a list of 2 numbers, one an episode"),
        (1.0, "bad_reward", "gave float"),
        ("ab", "bad_reward", "gave str"),
        ({0: 1.0, 1: 2.0}, "bad_reward", "gave dict"),
        ([1.0, float("nan")], "bad_reward", "nan"),
        ([1.0, Score(float("inf"))], "bad_reward", "inf"),
        ([1.0, Score(1.0, {"a": float("nan")})], "bad_reward", "part 'a' must be finite"),
        ([1.0, Score(1.0, {"a\n": 1.0})], "bad_reward", "name of a part must be printable"),
        ([1.0, Score(1.0, weights={"a": float("inf")})], "bad_reward", "weight 'a' must be"),
        ([1.0, Score(1.0, None, float("nan"))], "bad_reward", "shaping must be finite"),
        ({1.0, 2.0}, "bad_reward", "gave set"),
        (frozenset((1.0, 2.0)), "bad_reward", "gave frozenset"),
        (MappingProxyType({0: 1.0, 1: 2.0}), "bad_reward", "gave mappingproxy"),
        ((it for it in (1.0, 2.0)), "bad_reward", "gave generator"),
        ([1.0, None], "bad_reward", "NoneType"),
        (lambda _: [1.0, forgotten()], "bad_reward", "awaitable"),
        (KeyError("gone"), "reward_error: KeyError", "gone"),
        (RewardError("no verdict"), "reward_error", "no verdict"),
    ],
)
async def test_a_failure_rejects_the_group(gives: Any, cause: str, message: str) -> None:
    first, second, third = await judged(Judged(gives), [[row()], REFUSED, [row()]])
    assert second is REFUSED
    for found in (first, third):
        assert isinstance(found, Rejection)
        assert found.cause.startswith(cause)
        assert message in found.message
        assert found.place.startswith("test_group_judging.py:")


PARTS: dict[str, Any] = {
    "metrics": {"reward/right": 1.0},
    "weights": {"right": 0.5},
    "shaping": -0.25,
}


@pytest.mark.parametrize(
    ("gives", "shaping", "weights"),
    [
        (lambda them: [1.0 for _ in them], 0.0, {}),
        (lambda them: [it.reward for it in them], -0.25, {"right": 0.5}),
        (lambda them: [it.reward + 1 for it in them], -0.25, {}),
        (lambda them: [1 + it.reward - np.float64(2) for it in them], -0.25, {}),
        (lambda them: [it.reward - them[0].reward for it in them], 0.0, {}),
        (lambda them: [Score(it.reward, weights={"own": 1.0}) for it in them], 0.0, {"own": 1.0}),
        (None, -0.25, {"right": 0.5}),
    ],
)
async def test_what_is_left_of_the_reward_before(
    gives: Any, shaping: float, weights: dict[str, float]
) -> None:
    for (found,) in await judged(Judged(gives), [[row(0.5, **PARTS)], [row(0.5, **PARTS)]]):
        assert (found.shaping, found.weights) == (shaping, weights)
        assert found.metrics == {"reward/right": 1.0}
        assert type(found.reward) is float


async def test_a_group_without_its_row_is_not_scored() -> None:
    unread = Rejection(RejectionKind.dataset_error, "KeyError", "KeyError", "rows.py:3")

    async def found(workflow: Workflow, played: list[Any]) -> list[Any]:
        return await judged_group(
            workflow, None, played, Letters(), LIMITS, vote=says, is_trained=True
        )

    assert await found(Judged([1.0]), [[row()], REFUSED, unread]) == [unread, REFUSED, unread]
    (alone,) = await found(Judged([1.0]), [[row()]])
    assert alone.kind == RejectionKind.dataset_error
    assert await found(Workflow(), [[row()], unread]) == [[row()], unread]


async def test_a_group_reward_has_a_limit() -> None:
    class Sleeps(Judged):
        async def score_group(self, prompt: dict[str, Any], trajectories: Any) -> Any:
            await asyncio.sleep(60)

    (found,) = await judged(Sleeps(0), [[row()]], replace(LIMITS, reward_timeout_s=0.05))
    assert isinstance(found, Rejection)
    assert found.kind == RejectionKind.reward_timeout
    assert "rollout.reward_timeout_s" in found.message


async def test_what_never_works_ends_the_run() -> None:
    with pytest.raises(NeverWorks, match="no key"):
        await judged(Judged(NeverWorks("no key")), [[row()]])


def test_what_scores_groups_is_async() -> None:
    class Plain(Workflow):
        def score_group(self, prompt: Any, trajectories: Any) -> Any:
            return [1.0] * len(trajectories)

    for workflow in (Plain(), MixedWorkflow({"plain": Plain()})):
        with pytest.raises(WorkflowError, match=r"score_group: expected `async def`"):
            workflow.check_group_reward()
    Workflow().check_group_reward()
    Judged(None).check_group_reward()
    assert not Workflow().scores_groups


async def test_each_task_of_a_mix_scores_its_own() -> None:
    mix = MixedWorkflow({"plain": Workflow(), "judged": Judged([Score(2.0, {"style": 4.0}), 1.0])})
    assert mix.scores_groups
    (same,), _ = await judged(mix, [[row(0.5)], [row(0.5)]], task="plain")
    assert same.reward == 0.5
    (first,), (second,) = await judged(mix, [[row(0.5)], [row(0.5)]], task="judged")
    assert first.metrics == {"reward/style": 4.0, "reward/judged": 2.0}
    assert second.metrics == {"reward/judged": 1.0}


@pytest.mark.parametrize(
    ("votes", "rewards"),
    [
        (["4", "5", "4", None], [1.0, 0.0, 1.0, 0.0]),
        (["5", "4", "4", "5"], [1.0, 0.0, 0.0, 1.0]),  # as often: the first
        ([None, None], [0.0, 0.0]),
        (["4"], [0.5]),  # alone: as it was
    ],
)
async def test_the_majority_is_the_label(votes: list[str | None], rewards: list[float]) -> None:
    label = MajorityLabel(numeric_match)
    assert await label({}, [row(0.5, vote=vote) for vote in votes]) == rewards


class Says:
    """Letters vote for their first one, and `x` for nothing."""

    def vote(self, completion: str) -> str | None:
        return None if completion == "x" else completion[0]

    def __call__(self, prompt: Any, completion: str) -> float:
        raise NotImplementedError


class ByMajority(Workflow):
    """Has said neither its answers nor their votes."""

    def __init__(self) -> None:
        self.group_reward = MajorityLabel(Says())


@pytest.mark.parametrize("in_mix", [False, True])
async def test_votes_are_asked_for_whatever_the_workflow(in_mix: bool) -> None:
    workflow = MixedWorkflow({"own": ByMajority()}) if in_mix else ByMajority()
    answers: list[dict[str, Any]] = [
        {},
        {"answer": "ea"},
        {"answer": "x"},
        {"answer": "f"},
        {"answer": "f", "vote": "e"},
    ]
    found = await judged(workflow, [[row(**it)] for it in answers], task="own")
    assert [rows[0].reward for rows in found] == [1.0, 1.0, 0.0, 0.0, 1.0]


async def test_a_vote_that_fails_rejects_the_group() -> None:
    async def fails(*_: Any) -> str:
        raise RewardError("vote: took longer", kind=RejectionKind.reward_timeout)

    played = [[row()], [row()]]
    found = await judged_group(
        ByMajority(), PROMPT, played, Letters(), LIMITS, vote=fails, is_trained=True
    )
    assert [it.kind for it in found] == [RejectionKind.reward_timeout] * 2  # type: ignore[union-attr]
    ((alone,),) = await judged_group(  # type: ignore[misc]
        ByMajority(), PROMPT, [[row(0.5)]], Letters(), LIMITS, vote=fails, is_trained=True
    )
    assert alone.reward == 0.5


async def test_a_majority_may_have_to_be_large() -> None:
    rows = [row(vote=vote) for vote in ("4", "5", "4", None)]
    assert await MajorityLabel(numeric_match, min_share=0.5)({}, rows) == [1.0, 0.0, 1.0, 0.0]
    assert await MajorityLabel(numeric_match, min_share=0.6)({}, rows) == [0.0] * 4
    with pytest.raises(ValueError, match="min_share=2"):
        MajorityLabel(numeric_match, min_share=2)


def test_a_majority_needs_votes() -> None:
    with pytest.raises(ValueError, match="a reward with a method vote"):
        MajorityLabel(exact_match)
