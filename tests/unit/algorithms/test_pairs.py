from __future__ import annotations

import math
import statistics
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from loss_rows import made_tokens

from areal_sc.algorithms.loss_tokens import LossTokens
from areal_sc.algorithms.pairs import bradley_terry, dpo, pairs_of
from areal_sc.trainer.row_trainer import pair_metrics

LENGTHS = st.lists(st.integers(1, 6), min_size=2, max_size=8).filter(lambda x: len(x) % 2 == 0)


def pairs(lengths: list[int], seed: int) -> LossTokens:
    """Groups of two rows, all first ones before all second ones."""
    num_groups = len(lengths) // 2
    return made_tokens(
        [(n, row % num_groups, row // num_groups) for row, n in enumerate(lengths)], seed
    )


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def chosen_of(tokens: LossTokens) -> list[tuple[int, int]]:
    rewards, groups = tokens.rows.reward.tolist(), tokens.rows.group.tolist()
    found = []
    for group in sorted(set(groups)):
        first, second = (row for row, own in enumerate(groups) if own == group)
        found.append((first, second) if rewards[first] > rewards[second] else (second, first))
    return found


@settings(max_examples=30)
@given(lengths=LENGTHS, seed=st.integers(0, 10_000), smoothing=st.sampled_from([0.0, 0.1]))
def test_dpo_and_its_gradient(lengths: list[int], seed: int, smoothing: float) -> None:
    tokens = pairs(lengths, seed)
    loss, metrics = dpo(tokens, beta=0.3, label_smoothing=smoothing)
    (gradient,) = torch.autograd.grad(loss, tokens.logprobs)
    rows = tokens.rows.of_token.tolist()
    gains = (tokens.logprobs - tokens.fields["reference_logprobs"]).tolist()
    sums = [
        math.fsum(g for g, r in zip(gains, rows, strict=True) if r == row)
        for row in range(len(lengths))
    ]
    expected, of_rows, right = 0.0, [0.0] * len(lengths), 0
    for chosen, rejected in chosen_of(tokens):
        margin = 0.3 * (sums[chosen] - sums[rejected])
        right += margin > 0
        count = len(lengths) // 2
        expected -= (1 - smoothing) * math.log(sigmoid(margin)) / count
        expected -= smoothing * math.log(sigmoid(-margin)) / count
        slope = 0.3 * (-(1 - smoothing) * sigmoid(-margin) + smoothing * sigmoid(margin)) / count
        of_rows[chosen], of_rows[rejected] = slope, -slope
    assert loss.item() == pytest.approx(expected, rel=1e-6)
    assert gradient.tolist() == pytest.approx([of_rows[row] for row in rows], rel=1e-6, abs=1e-12)
    assert metrics["pair_accuracy"].value == right
    assert metrics["pair_accuracy"].weight == len(lengths) // 2


@settings(max_examples=30)
@given(
    lengths=LENGTHS,
    seed=st.integers(0, 10_000),
    of_margin=st.sampled_from(["sigmoid", "square", "hinge"]),
    of_row=st.sampled_from(["sum", "mean"]),
    share=st.sampled_from([0.0, 0.7]),
)
def test_other_forms_of_dpo(
    lengths: list[int], seed: int, of_margin: str, of_row: str, share: float
) -> None:
    tokens = pairs(lengths, seed)
    forms = {"of_margin": of_margin, "of_row": of_row, "cross_entropy": share}
    loss, metrics = dpo(tokens, beta=0.3, **forms)  # type: ignore[arg-type]
    rows = tokens.rows.of_token.tolist()

    def of_answer(values: list[float], row: int, is_mean: bool) -> float:
        whole = math.fsum(value for value, own in zip(values, rows, strict=True) if own == row)
        return whole / lengths[row] if is_mean else whole

    gains = (tokens.logprobs - tokens.fields["reference_logprobs"]).tolist()
    losses, margins, crosses = [], [], []
    for answers in chosen_of(tokens):
        chosen, rejected = (of_answer(gains, row, of_row == "mean") for row in answers)
        margin = 0.3 * (chosen - rejected)
        losses.append(
            {
                "sigmoid": -math.log(sigmoid(margin)),
                "square": (chosen - rejected - 1 / (2 * 0.3)) ** 2,
                "hinge": max(0.0, 1 - margin),
            }[of_margin]
        )
        margins.append(margin)
        crosses.append(-of_answer(tokens.logprobs.tolist(), answers[0], True))
    expected = statistics.fmean(losses)
    assert loss.item() == pytest.approx(expected + share * statistics.fmean(crosses), rel=1e-6)
    assert pair_metrics(margins, of_margin=of_margin, beta=0.3)["loss"] == pytest.approx(expected)
    if share:
        assert metrics["chosen_cross_entropy"].value == pytest.approx(math.fsum(crosses), rel=1e-6)


@settings(max_examples=30)
@given(lengths=LENGTHS, seed=st.integers(0, 10_000))
def test_bradley_terry_and_its_gradient(lengths: list[int], seed: int) -> None:
    tokens = pairs(lengths, seed)
    assert tokens.values is not None
    loss, _ = bradley_terry(tokens)
    (gradient,) = torch.autograd.grad(loss, tokens.values)
    ends = [sum(lengths[: row + 1]) - 1 for row in range(len(lengths))]
    scores = [tokens.values[end].item() for end in ends]
    expected, slopes = 0.0, [0.0] * len(tokens.values)
    for chosen, rejected in chosen_of(tokens):
        margin = scores[chosen] - scores[rejected]
        expected -= math.log(sigmoid(margin)) / (len(lengths) // 2)
        slope = -sigmoid(-margin) / (len(lengths) // 2)
        slopes[ends[chosen]], slopes[ends[rejected]] = slope, -slope
    assert loss.item() == pytest.approx(expected, rel=1e-6)
    assert gradient.tolist() == pytest.approx(slopes, rel=1e-6, abs=1e-12)


def test_pairs_that_are_torn_apart_or_equal() -> None:
    torn = made_tokens([(2, 0, 0), (2, 0, 1), (3, 7, 0)], seed=0)
    with pytest.raises(ValueError, match=r"group 7: expected a pair.*got 1 rows"):
        pairs_of(torn.rows)
    equal = made_tokens([(2, 0, 0), (2, 0, 1)], seed=0).rows
    with pytest.raises(ValueError, match="a higher reward than the rejected"):
        pairs_of(replace(equal, reward=torch.zeros(2)))
