"""A group is judged: its episodes have all ended, and `Workflow.score_group` compares them.

episodes ──► votes ──► score_group ──► what shapes rewards (cut answers, length)
               └───────────┴─ fails ──► all of them are rejected, with the cause
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any, TypeGuard

import numpy as np

from areal_sc.config.schema import RolloutConfig
from areal_sc.errors import ConfigError, NeverWorks, RewardError, WorkflowError
from areal_sc.rejection import Rejection, RejectionKind
from areal_sc.rewards.base import RewardFunction, Score, name_of, place_of_definition
from areal_sc.rewards.on_loop import took_too_long
from areal_sc.rewards.process import failure_of
from areal_sc.rewards.scores import scores_of_group
from areal_sc.system.waiting import all_of
from areal_sc.user_code import Raised, await_user_code
from areal_sc.workers.trajectory_checks import shaped
from areal_sc.workflows.base import Trajectory, Workflow

Episode = list[Trajectory]
"""The rows that one run of a workflow gave, at least one."""

Vote = Callable[[RewardFunction, str], Awaitable[str | None]]
"""What an answer says, as the reward's `vote` tells, such as `RewardPool.vote`."""

_UNREAD = Rejection(
    RejectionKind.dataset_error, "the row of the dataset by which to score its group is not there"
)


def _is_unread(it: Episode | Rejection) -> TypeGuard[Rejection]:
    """Whether it was rejected because the row of the dataset could not be read."""
    return isinstance(it, Rejection) and it.kind == RejectionKind.dataset_error


async def judged_group(
    workflow: Workflow,
    prompt: dict[str, Any] | None,
    played: Sequence[Episode | Rejection],
    tokenizer: Any,
    config: RolloutConfig,
    *,
    vote: Vote,
    is_trained: bool,
) -> list[Episode | Rejection]:
    """What came of the episodes of a prompt, with the rewards that count.

    Args:
        prompt: None: the row cannot be read, so that there is nothing to compare answers by.
        played: checked rows; episodes that were rejected stay so.
        tokenizer: makes the answers' texts.
        vote: tells what an answer says; not called for one that is alone.
        is_trained: False: it is the only episode, of an evaluation.
    Raises: NeverWorks, ConfigError: `score_group` raised that. WorkerError: see `RewardPool.vote`.
    """
    kept = [it for it in played if not isinstance(it, Rejection)]
    if kept and workflow.scores_groups:
        if prompt is None:
            refused = next((it for it in played if _is_unread(it)), _UNREAD)
            return [it if isinstance(it, Rejection) else refused for it in played]
        try:
            kept = await _scored(workflow, prompt, kept, tokenizer, config.reward_timeout_s, vote)
        except NeverWorks:
            raise
        except WorkflowError as error:
            refused = Rejection.of(error)
            return [it if isinstance(it, Rejection) else refused for it in played]
    rest = (shaped(rows, config, is_trained=is_trained) for rows in kept)
    return [it if isinstance(it, Rejection) else next(rest) for it in played]


async def _scored(
    workflow: Workflow,
    prompt: dict[str, Any],
    episodes: list[Episode],
    tokenizer: Any,
    limit_s: float,
    vote: Vote,
) -> list[Episode]:
    """Raises: RewardError: `score_group` failed, or took too long. Others: as `vote`."""
    last = [with_answer(rows[-1], tokenizer) for rows in episodes]
    voter = workflow.group_voter(prompt)
    if voter is not None and len(last) > 1:
        last = await all_of(_with_vote(row, voter, vote) for row in last)
    judge = workflow.group_reward or workflow.score_group
    name = name_of(judge)

    async def score() -> list[Score] | None:
        given = await workflow.score_group(dict(prompt), last)
        return None if given is None else scores_of_group(given, len(last))

    try:
        scores = await await_user_code(score, limit_s)
    except Raised as raised:
        if isinstance(raised.error, NeverWorks | ConfigError):
            raise raised.error from None
        if raised.is_late:
            raise took_too_long(name, limit_s, place=place_of_definition(judge)) from raised.error
        what, details = failure_of(raised.error)
        details = {"place": place_of_definition(judge), **details}
        raise RewardError(f"reward of a group, {name}: {what}", **details) from raised.error
    if scores is None:
        return episodes
    return [_with_score(rows, score) for rows, score in zip(episodes, scores, strict=True)]


async def _with_vote(row: Trajectory, voter: RewardFunction, vote: Vote) -> Trajectory:
    """The row with what its answer says, unless its workflow has said it."""
    said = row.vote if row.vote is not None else await vote(voter, row.answer)
    return replace(row, vote=said)


def with_answer(row: Trajectory, tokenizer: Any) -> Trajectory:
    """The row with the text of its last answer, unless its workflow has said it.

    Its reward is a `Score` of the same shaping and weights.
    """
    row = replace(row, reward=Score(row.reward, None, row.shaping, row.weights))
    if row.answer:
        return row
    mask = np.asarray(row.loss_mask)
    end = int(np.flatnonzero(mask)[-1]) + 1
    before = np.flatnonzero(~mask[:end])
    tokens = [int(it) for it in row.input_ids[int(before[-1]) + 1 if len(before) else 0 : end]]
    text = tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    return replace(row, answer=str(text))


def _with_score(rows: Episode, score: Score) -> Episode:
    """The rows of an episode, whose reward is another one now.

    The parts of the one before do not add up to it, so they have no weights but those of `score`.
    """
    gain = float(score) - float(rows[-1].reward)
    return [
        replace(
            row,
            reward=float(row.reward) + gain,
            returns=[(float(value) + gain, size) for value, size in row.returns],
            shaping=score.shaping,
            metrics={**row.metrics, **score.metrics},
            weights=dict(score.weights),
        )
        for row in rows
    ]
