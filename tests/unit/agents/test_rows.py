"""Returns of answers: each trained token has its own answer's advantage, however rows are cut."""

from __future__ import annotations

from collections.abc import Sequence
from math import fsum, sqrt
from random import Random
from typing import Any

import chat_templates as templates
import pytest
import torch
from scripted_engine import ScriptedEngine, answer_to, check_trained, engine_for

from areal_sc.agents.calls import ModelCall
from areal_sc.agents.session import Session, SessionSettings
from areal_sc.algorithms.named_loss import loss_of
from areal_sc.config.ppo_settings import PPOConfig
from areal_sc.config.schema import GenerationConfig
from areal_sc.controller.train.train_step import TrainStep
from areal_sc.engines.training.updates.micro_batches import with_token_advantages
from areal_sc.engines.training.updates.token_values import token_values
from areal_sc.metadata import MAX_RETURNS, BatchMetadata, RowMetadata
from areal_sc.rewards.base import Score
from areal_sc.transport.packed_rows import PackedRows
from areal_sc.workflows.chat_format import Message
from areal_sc.workflows.trajectory import Trajectory

Episode = dict[int, float]
"""The return of each answer, by its number in the episode from 1 on."""


async def play(rng: Random, rows: str, num_calls: int) -> tuple[Session, list[str], ScriptedEngine]:
    """A session whose calls go on from any earlier answer, or begin anew; ids of its answers."""
    engine = engine_for(templates.QWEN)
    session = Session(engine, GenerationConfig(max_new_tokens=64), SessionSettings(rows=rows))
    engine.will_say(*[f"answer{' so' * rng.randrange(4)} {n}<|im_end|>" for n in range(num_calls)])
    histories, ids = list[list[Message]]([[]]), list[str]()
    for number in range(num_calls):
        past = rng.choice(histories)
        messages = [*past, {"role": "user", "content": f"question {number}"}]
        answer = await answer_to(session, ModelCall(tuple(messages)))
        ids.append(answer.answer_id)
        histories.append([*messages, {"role": "assistant", "content": answer.turn.content}])
    return session, ids, engine


def packed(rows: Sequence[RowMetadata], trajectories: Sequence[Trajectory]) -> PackedRows:
    mask = torch.tensor([it for row in trajectories for it in row.loss_mask])
    lengths = tuple(row.sequence_length for row in rows)
    advantages = [row.advantage for row in rows if row.advantage is not None]
    return PackedRows({"loss_mask": mask}, lengths, tuple(advantages), tuple(rows))


def sealed(row: Trajectory, group: int, episode: int, place: int) -> RowMetadata:
    spans = ((0, sum(row.loss_mask)),)
    size, returns = len(row.input_ids), tuple(row.returns)
    return RowMetadata(group, 0, size, row.reward, 0, spans, episode, row=place, returns=returns)


def by_hand(groups: Sequence[Sequence[Episode]], mean: str, std: str) -> list[list[Episode]]:
    """Float64: a mean over episodes of the mean over an episode's answers, in loops."""

    def average(values: Sequence[float]) -> float:
        return fsum(values) / len(values)

    found = []
    for group in groups:
        own = [average([*it.values()]) for it in group]
        centre = average(own)
        squares = [average([(v - centre) ** 2 for v in it.values()]) for it in group]
        deviation = sqrt(average(squares)) + 1e-6 if std == "group" else 1.0
        advantages = []
        for number, episode in enumerate(group):
            others = own[:number] + own[number + 1 :]
            base = average(others) if mean == "leave_one_out" else centre
            advantages.append({call: (v - base) / deviation for call, v in episode.items()})
        found.append(advantages)
    return found


@pytest.mark.parametrize("rows", ["merge", "per_call"])
@pytest.mark.parametrize(("mean", "std"), [("group", "group"), ("leave_one_out", "none")])
async def test_each_trained_token_has_the_advantage_of_its_answer(
    rows: str, mean: str, std: str
) -> None:
    """Trees of calls: rewards of the episode and of single calls, discounted over the calls."""
    rng, groups = Random(5), list[list[Episode]]()
    sealed_rows, trajectories, answers = list[RowMetadata](), list[Trajectory](), list[int]()
    for group in range(6):
        groups.append([])
        for episode in range(4):
            num_calls, discount = rng.randint(1, 6), rng.choice([1.0, 0.9, 0.5, 0.0])
            session, ids, engine = await play(rng, rows, num_calls)
            if episode % 2:
                named = {n: rng.gauss(0, 1) for n in range(num_calls) if rng.random() < 0.6}
                given: Any = {f"resp_{ids[n]}": value for n, value in named.items()}
                named, given = named or {0: 1.0}, given or {ids[0]: 1.0}
            else:
                named = {num_calls - 1: float(rng.randint(0, 1))}
                given = named[num_calls - 1]
            groups[-1].append(
                {
                    n + 1: fsum(discount ** (k - n) * r for k, r in named.items() if k >= n)
                    for n in range(num_calls)
                }
            )
            its = session.trajectories(given, discount=discount)
            check_trained(engine, its)
            sealed_rows += [sealed(row, group, episode, place) for place, row in enumerate(its)]
            trajectories += its
            answers += [
                round(-value)
                for row in its
                for value, mask in zip(row.behavior_logprobs, row.loss_mask, strict=True)
                if mask
            ]
    if rows == "merge":
        assert any(len(row.returns) > 2 for row in sealed_rows)
    else:
        assert not any(row.returns for row in sealed_rows)

    ppo = PPOConfig(advantage=mean, advantage_std=std)  # type: ignore[arg-type]
    step = TrainStep(None, ppo, loss_of(ppo), None, None)  # type: ignore[arg-type]
    batch = step.with_advantages(BatchMetadata("b", 0, (), tuple(sealed_rows)))
    known = with_token_advantages(packed(batch.rows, trajectories))
    mask = known.fields["loss_mask"]
    expected, returns = list[float](), list[float]()
    advantages, of_answer = by_hand(groups, mean, std), iter(answers)
    for row in sealed_rows:
        for _ in range(row.num_loss_tokens):
            number = next(of_answer)
            expected.append(advantages[row.group_id][row.episode][number])
            returns.append(groups[row.group_id][row.episode][number])
    assert known.fields["advantages"][mask].tolist() == pytest.approx(expected, rel=1e-5, abs=1e-6)
    found = token_values(packed(batch.rows, trajectories), lambda it: it.returns, "f")
    assert found[mask].tolist() == pytest.approx(returns, rel=1e-6)


async def test_many_answers_are_several_rows_and_parts_of_a_score_stay() -> None:
    num_calls = MAX_RETURNS + 3
    engine = engine_for(templates.QWEN)
    session = Session(engine, GenerationConfig(max_new_tokens=64))
    engine.will_say(*[f"answer {n}<|im_end|>" for n in range(num_calls)])
    messages = list[Message]()
    for number in range(num_calls):
        messages.append({"role": "user", "content": f"question {number}"})
        answer = await answer_to(session, ModelCall(tuple(messages)))
        messages.append({"role": "assistant", "content": answer.turn.content})
    (row,) = session.trajectories(Score(1.0, {"style": 0.5}))
    assert (row.reward, row.returns, row.metrics["reward/style"]) == (1.0, [], 0.5)
    first, second = session.trajectories(Score(1.0, {"style": 0.5}), discount=0.5)
    check_trained(engine, [first, second])
    assert [len(it.returns) for it in (first, second)] == [MAX_RETURNS, 3]
    assert [value for value, _ in second.returns] == [0.25, 0.5, 1.0]
    assert second.reward == pytest.approx(1.75 / 3)
    assert second.metrics["reward/style"] == 0.5
