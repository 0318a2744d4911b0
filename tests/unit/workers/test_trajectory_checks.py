"""What becomes of what a workflow returns."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from areal_sc.config.length_settings import CutAnswers, SoftLengthConfig
from areal_sc.config.schema import GenerationConfig, RolloutConfig
from areal_sc.rewards.base import Score
from areal_sc.workers.trajectory_checks import Rejection, checked_episode, shaped
from areal_sc.workflows.base import Trajectory

LIMITS = RolloutConfig(max_context_tokens=8, max_episode_tokens=20)


def row(num_tokens: int, **changes: Any) -> Trajectory:
    n = num_tokens
    return replace(Trajectory([3] * n, [True] * n, [-1.0] * n, [0] * n, [1.0] * n, 1.0), **changes)


@pytest.mark.parametrize(
    ("returned", "lengths"),
    [
        (row(8), [8]),
        ([row(8)], [8]),
        ((row(8), row(8), row(4)), [8, 8, 4]),  # the limit
        (row(2, input_ids=np.array([3, 4]), loss_mask=torch.tensor([True, False])), [2]),
    ],
)
def test_one_trajectory_or_several(returned: Any, lengths: list[int]) -> None:
    rows = checked_episode(returned, LIMITS, {}, is_trained=True)
    assert isinstance(rows, list)
    assert [len(row.input_ids) for row in rows] == lengths


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("has_gradient", [False, True])
@pytest.mark.parametrize("is_list", [False, True])
def test_logprobs_may_be_any_tensors(dtype: torch.dtype, has_gradient: bool, is_list: bool) -> None:
    values: Any = torch.tensor([0.0, -1.5], dtype=dtype, requires_grad=has_gradient)
    returned = row(2, behavior_logprobs=list(values) if is_list else values)
    [checked] = checked_episode(returned, LIMITS, {}, is_trained=True)  # type: ignore[misc]
    assert checked.behavior_logprobs.dtype == np.float32
    assert checked.behavior_logprobs.tolist() == [0.0, -1.5]


@pytest.mark.parametrize(
    ("returned", "cause", "message"),
    [
        (None, "rejected", "the workflow returned None"),
        ([], "rejected", "the workflow returned no trajectory"),
        (1.0, "workflow_error", "a Trajectory, a list of them, or None, got float"),
        ([row(2), None], "workflow_error", "row 2 of 2: run_episode must .* got NoneType"),
        ([row(2), row(9)], "too_long", "row 2 of 2: .* 9 tokens.*max_context_tokens=8"),
        ([row(2, reward=float("nan")), row(3)], "bad_reward", "row 1 of 2: the reward must"),
        ([row(7)] * 3, "too_long", "3 rows have 21 tokens together, expected at most 20"),
        ([row(9)], "too_long", "^the trajectory has 9 tokens"),
        (row(2, input_ids=[3, 3.7]), "workflow_error", "input_ids are not what int32 can hold"),
        (row(2, input_ids=[3, 2**31]), "workflow_error", "input_ids are not what int32 can hold"),
        (row(2, versions=[0, None]), "workflow_error", "versions are not what int32 can hold"),
        (row(2, loss_mask=[1, 0.5]), "workflow_error", "loss_mask are not what bool can hold"),
        (row(2, behavior_logprobs=[0.0, float("nan")]), "workflow_error", "behavior_logprobs are"),
        (row(2, answer=5), "workflow_error", "answer must be text that UTF-8 can hold, got 5"),
        (row(2, answer="a\ud83d"), "workflow_error", "answer must be text"),
        (row(2, vote=5), "workflow_error", "vote must be text"),
        (row(2, vote="\udc00"), "workflow_error", "vote must be text"),
        (row(2, weights={"a": float("nan")}), "workflow_error", "weight 'a' must be finite"),
        (row(2, weights={"a": "1"}), "workflow_error", "weight 'a' must be finite"),
        (row(2, weights=[1.0]), "workflow_error", "each weight by its name, got list"),
        (row(2, reward=Score(1.0, weights={"\n": 1})), "workflow_error", "name of a weight"),
        (row(2, metrics={1: 0.5}), "workflow_error", "must be printable text, got 1"),
        (row(2, metrics={"\ud83d": 0.5}), "workflow_error", "must be printable text"),
        (row(2, metrics={"n": 10**400}), "workflow_error", "metric 'n' must be finite"),
        (row(2, returns=[(1.0, 1)]), "workflow_error", "of which there are 2"),
        (row(2, returns=[(1.0, 2), (0.0, 0)]), "workflow_error", r"\(0.0, 0\)"),
        (
            row(2, returns=[(1.0, 1), (float("inf"), 1)]),
            "workflow_error",
            "expected finite ones",
        ),
        (row(2, returns=[(1.0, 1)] * 33), "workflow_error", "at most 32"),
        *(
            (row(2, returns=given), "workflow_error", "each with its trained tokens")
            for given in (
                [0.5, 1.0],
                None,
                5,
                [(1.0, "1"), (0.0, 1)],
                [(1.0, 1.5), (0.0, 0.5)],
                [(1.0, 1, 1), (0.0, 1)],
            )
        ),
    ],
)
def test_one_bad_row_rejects_the_episode(returned: Any, cause: str, message: str) -> None:
    rejection = checked_episode(returned, LIMITS, {}, is_trained=True)
    assert isinstance(rejection, Rejection)
    assert rejection.cause == cause
    assert re.search(message, rejection.message)


def test_without_a_limit_of_its_own_an_episode_has_that_of_a_row() -> None:
    limits = RolloutConfig(max_context_tokens=8)
    assert isinstance(checked_episode([row(4), row(4)], limits, {}, is_trained=True), list)
    assert isinstance(checked_episode([row(4), row(5)], limits, {}, is_trained=True), Rejection)


def test_long_rows_pay_by_their_sampled_tokens() -> None:
    soft = SoftLengthConfig(limit_tokens=6, margin_tokens=4, penalty=0.5)
    limits = replace(LIMITS, soft_length=soft)
    mask = [False, True, True, True, False, True, True]  # two turns, of five tokens
    score = Score(1.0, {"right": 1.0})
    twice = row(7, loss_mask=mask, reward=score, metrics={"n": 2.0})
    given = [twice, replace(twice, returns=[(0.5, 3), (1.5, 2)]), row(2)]
    checked = checked_episode(given, limits, {}, is_trained=True)
    assert isinstance(checked, list)
    rows = shaped(checked, limits, is_trained=True)
    assert [one.reward for one in rows] == [0.625, 0.625, 1.0]
    assert rows[1].returns == [(0.125, 3), (1.125, 2)]
    assert [one.shaping for one in rows] == [-0.375, -0.375, 0.0]
    assert rows[0].metrics == {"n": 2.0, "reward/right": 1.0, "length_penalty": -0.375}
    assert rows[2].metrics == {"length_penalty": 0.0}
    free = shaped(checked, limits, is_trained=False)
    assert [one.reward for one in free] == [1.0, 1.0, 1.0]
    assert "length_penalty" not in free[0].metrics


CUT = {"accuracy": 1.0, "stopped": 0.0}


@pytest.mark.parametrize("is_trained", [True, False])
@pytest.mark.parametrize("counts", CutAnswers)
def test_what_a_cut_answer_counts(counts: CutAnswers, is_trained: bool) -> None:
    limits = replace(LIMITS, generation=GenerationConfig(cut_answers=counts))
    given = [
        row(2, reward=Score(1.0, {"right": 1.0}, weights={"right": 1.0}), metrics=CUT),
        row(2, reward=-0.5, metrics={"stopped": 0.0}),
        row(4, returns=[(0.5, 3), (-1.0, 1)], metrics=CUT),
        row(2, metrics={**CUT, "stopped": 1.0}),
        row(2),  # whose workflow does not tell
    ]
    checked = checked_episode(given, limits, {}, is_trained=is_trained)
    assert isinstance(checked, list)
    rows = shaped(checked, limits, is_trained=is_trained)
    if counts is not CutAnswers.wrong:
        assert [one.reward for one in rows] == [1.0, -0.5, 1.0, 1.0, 1.0]
        of_cut = float(counts is CutAnswers.judged)
        assert [one.metrics.get("accuracy") for one in rows] == [of_cut, None, of_cut, 1.0, None]
        assert rows[0].weights == {"right": 1.0}
        return
    assert rows[0].weights == {}
    assert [one.reward for one in rows] == [0.0, -0.5, 0.0, 1.0, 1.0]
    assert rows[0].metrics == {"accuracy": 0.0, "stopped": 0.0, "reward/right": 1.0}
    assert rows[1].metrics == {"stopped": 0.0}
    assert rows[2].returns == [(0.0, 3), (-1.0, 1)]
    assert rows[3].metrics == {"accuracy": 1.0, "stopped": 1.0}


def test_a_greedy_row_is_for_evaluations() -> None:
    greedy = [row(2), row(2, temperatures=[0.0, 0.0])]
    assert isinstance(checked_episode(greedy, LIMITS, {}, is_trained=False), list)
    assert isinstance(checked_episode(greedy, LIMITS, {}, is_trained=True), Rejection)
