from __future__ import annotations

import pytest

from areal_sc.controller.rollout.evaluation import EvaluationOutcome
from areal_sc.errors import WorkflowError
from areal_sc.records.estimates import accuracy_interval
from areal_sc.rejection import Rejection, RejectionKind
from areal_sc.workers.calls import EvaluationReply

REJECTED = EvaluationReply(None, rejection=Rejection(RejectionKind.timeout, "too slow"))


def answer(accuracy: float, version: int = 3) -> EvaluationReply:
    return EvaluationReply(
        2 * accuracy, {"accuracy": accuracy, "turns": 4.0}, (version, version + 1)
    )


def test_rejected_answers_are_wrong_and_in_no_other_mean() -> None:
    outcome = EvaluationOutcome.of([answer(1.0), REJECTED, answer(0.0, 5), answer(1.0)])
    assert outcome == EvaluationOutcome(
        num_prompts=4,
        num_rejected=1,
        reward=4 / 3,
        metrics={"accuracy": 0.5, "turns": 4.0},
        versions=(3, 6),
        rejected={"timeout": 1},
        right=((1.0,), (0.0,), (0.0,), (1.0,)),
        accuracy_interval=accuracy_interval([[1.0], [0.0], [0.0], [1.0]]),
        first_rejection=REJECTED.rejection,
    )


def test_answers_belong_to_their_prompts() -> None:
    replies = [answer(it) for it in (1.0, 0.0, 0.0, 0.0, 0.0, 0.0)]
    outcome = EvaluationOutcome.of(replies, 3)
    assert (outcome.num_prompts, outcome.num_samples) == (2, 3)
    assert outcome.pass_at_k == pytest.approx({1: 1 / 6, 2: (2 / 3) / 2})
    assert outcome.accuracy_interval == accuracy_interval([[1.0, 0.0, 0.0], [0.0, 0.0, 0.0]])


def test_without_an_accuracy_there_is_no_interval() -> None:
    replies = [EvaluationReply(1.0, {"turns": 1.0}, (0, 0)), REJECTED]
    outcome = EvaluationOutcome.of(replies, 2)
    assert outcome.metrics == {"turns": 1.0}
    assert (outcome.accuracy_interval, outcome.pass_at_k) == (None, {})
    assert EvaluationOutcome.of([answer(3.0)]).accuracy_interval is None


def test_all_rejected() -> None:
    with pytest.raises(WorkflowError, match=r"all 2 answers .* were rejected.*too slow"):
        EvaluationOutcome.of([REJECTED, REJECTED], 2)


def cut(accuracy: float) -> EvaluationReply:
    return EvaluationReply(1.0, {"accuracy": accuracy, "stopped": 0.0}, (3, 3), vote="7")


def test_a_cut_answer_is_wrong_and_has_no_vote_unless_the_reward_is_to_decide() -> None:
    whole = EvaluationReply(1.0, {"accuracy": 1.0, "stopped": 1.0}, (3, 3), vote="7")
    wrong = EvaluationReply(0.0, {"accuracy": 0.0, "stopped": 1.0}, (3, 3), vote="8")
    replies = [cut(1.0), whole, wrong, wrong]
    outcome = EvaluationOutcome.of(replies, 4)
    assert (outcome.metrics["accuracy"], outcome.num_cut) == (0.25, 1)
    assert outcome.majority == 0.0, "8 has two votes, and 7 one"
    outcome = EvaluationOutcome.of(replies, 4, cut_is_wrong=False)
    assert (outcome.metrics["accuracy"], outcome.num_cut) == (0.5, 1)
    assert outcome.majority == 0.5


def test_together_has_only_what_every_set_has() -> None:
    one = EvaluationOutcome.of([answer(1.0), answer(0.0)], 2)
    other = EvaluationOutcome.of([EvaluationReply(4.0, {"turns": 1.0}, (1, 1)), REJECTED])
    together = EvaluationOutcome.together([one, other])
    assert together.metrics == {"turns": 2.5}
    assert together.reward == (1.0 + 4.0) / 2
    assert together.versions == (1, 4)
    assert (together.num_prompts, together.rejected) == (3, {"timeout": 1})
    assert (together.accuracy_interval, together.pass_at_k, together.majority) == (None, {}, None)
    both = EvaluationOutcome.together([one, EvaluationOutcome.of([answer(1.0)] * 4, 4)])
    assert both.pass_at_k == pytest.approx({1: 0.75, 2: 1.0})
