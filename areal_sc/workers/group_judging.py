"""A group is judged: its episodes have all ended, and `Workflow.score_group` compares them.

episodes ──► score_group ──► what shapes rewards (cut answers, length) ──► what is known of rows
                 └─ fails ──► all of them are rejected, with the cause
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from areal_sc.config.schema import RolloutConfig
from areal_sc.errors import ConfigError, NeverWorks, RewardError
from areal_sc.rejection import Rejection, RejectionKind
from areal_sc.rewards.base import Score
from areal_sc.rewards.functions import name_of, place_of_definition
from areal_sc.rewards.on_loop import took_too_long
from areal_sc.rewards.process import failure_of, finite_reward
from areal_sc.user_code import Raised, await_user_code
from areal_sc.workers.trajectory_checks import shaped
from areal_sc.workflows.base import Trajectory, Workflow

Episode = list[Trajectory]
"""The rows that one run of a workflow gave, at least one."""


async def judged_group(
    workflow: Workflow,
    prompt: dict[str, Any],
    played: Sequence[Episode | Rejection],
    tokenizer: Any,
    config: RolloutConfig,
    *,
    is_trained: bool,
) -> list[Episode | Rejection]:
    """What came of the episodes of a prompt, with the rewards that count.

    Args:
        played: checked rows; episodes that were rejected stay so.
        tokenizer: makes the answers' texts.
        is_trained: False: it is the only episode, of an evaluation.
    Raises: NeverWorks, ConfigError: `score_group` raised that.
    """
    kept = [it for it in played if not isinstance(it, Rejection)]
    if kept and workflow.scores_groups:
        try:
            kept = await _scored(workflow, prompt, kept, tokenizer, config.reward_timeout_s)
        except RewardError as error:
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
) -> list[Episode]:
    """Raises: RewardError: `score_group` failed, or took too long."""
    last = [with_answer(rows[-1], tokenizer) for rows in episodes]
    judge = workflow.group_reward or workflow.score_group
    name = name_of(judge)

    async def score() -> list[Score] | None:
        given = await workflow.score_group(dict(prompt), last)
        return None if given is None else _as_scores(given, len(last))

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


def with_answer(row: Trajectory, tokenizer: Any) -> Trajectory:
    """The row with the text of its last answer, unless its workflow has said it."""
    if row.answer:
        return row
    mask = np.asarray(row.loss_mask)
    end = int(np.flatnonzero(mask)[-1]) + 1
    before = np.flatnonzero(~mask[:end])
    tokens = [int(it) for it in row.input_ids[int(before[-1]) + 1 if len(before) else 0 : end]]
    text = tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    return replace(row, answer=str(text))


def _as_scores(given: Any, num_episodes: int) -> list[Score]:
    """Raises: RewardError: they are not as many finite numbers as there are episodes."""
    if not hasattr(given, "__len__") or isinstance(given, str | bytes | dict):
        found = type(given).__name__
    elif len(given) != num_episodes:
        found = f"{len(given)} numbers"
    else:
        numbers = [(it, finite_reward(it)) for it in given]
        return [it if isinstance(it, Score) else Score(number) for it, number in numbers]
    raise RewardError(
        f"it gave {found}, expected a list of {num_episodes} numbers, one an episode",
        kind=RejectionKind.bad_reward,
    )


def _with_score(rows: Episode, score: Score) -> Episode:
    """The rows of an episode, whose reward is another one now."""
    gain = float(score) - float(rows[-1].reward)
    return [
        replace(
            row,
            reward=float(row.reward) + gain,
            returns=[(float(value) + gain, size) for value, size in row.returns],
            shaping=score.shaping,
            metrics={**row.metrics, **score.metrics},
            weights={**row.weights, **score.weights},
        )
        for row in rows
    ]
