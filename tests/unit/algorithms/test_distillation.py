from __future__ import annotations

import math
from dataclasses import replace
from typing import Literal

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from loss_rows import ROW, made_tokens, shapes

from areal_sc.algorithms.distillation import reverse_kl, top_k_kl
from areal_sc.algorithms.named_loss import NamedLoss


@settings(max_examples=30)
@given(shape=shapes(), seed=st.integers(0, 10_000), cap=st.sampled_from([1.1, math.inf]))
def test_reverse_kl_and_its_gradient(shape: list[ROW], seed: int, cap: float) -> None:
    tokens = made_tokens(shape, seed)
    loss, _ = reverse_kl(tokens, ratio_cap=cap)
    (gradient,) = torch.autograd.grad(loss, tokens.logprobs)
    expected, slopes = 0.0, []
    for logprob, behavior, teacher in zip(
        tokens.logprobs.tolist(),
        tokens.fields["behavior_logprobs"].tolist(),
        tokens.fields["teacher_logprobs"].tolist(),
        strict=True,
    ):
        ratio = math.exp(logprob - behavior)
        value = ratio * (logprob - teacher) / len(tokens.logprobs) if ratio <= cap else 0.0
        expected += value
        slopes.append(value)  # the derivative of an exponential by its exponent is itself
    assert loss.item() == pytest.approx(expected, rel=1e-6, abs=1e-12)
    assert gradient.tolist() == pytest.approx(slopes, rel=1e-6, abs=1e-12)


def test_its_expected_gradient_is_that_of_the_divergence() -> None:
    """Over all tokens of a vocabulary, weighed by the sampling policy."""
    logits = torch.tensor([0.3, -0.2, 0.9], dtype=torch.float64, requires_grad=True)
    teacher = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64).log()
    behavior = torch.tensor([0.2, 0.3, 0.5], dtype=torch.float64).log()
    logprobs = logits.log_softmax(-1)
    divergence = (logprobs.exp() * (logprobs - teacher)).sum()
    (expected,) = torch.autograd.grad(divergence, logits, retain_graph=True)
    single = made_tokens([(1, 0, 0)], 0)
    found = torch.zeros_like(expected)
    for token in range(3):
        fields = {
            "teacher_logprobs": teacher[token : token + 1],
            "behavior_logprobs": behavior[token : token + 1],
        }
        given = type(single)(
            logprobs[token : token + 1], single.entropy, fields, single.rows, single.counts
        )
        loss, _ = reverse_kl(given, ratio_cap=math.inf)
        (part,) = torch.autograd.grad(loss, logits, retain_graph=True)
        found += behavior[token].exp() * part
    assert found.tolist() == pytest.approx(expected.tolist(), rel=1e-9)


@settings(max_examples=30)
@given(
    shape=shapes(),
    seed=st.integers(0, 10_000),
    top_k=st.integers(1, 16),
    direction=st.sampled_from(["forward", "reverse"]),
)
def test_the_divergence_of_k_tokens_and_the_rest(
    shape: list[ROW], seed: int, top_k: int, direction: Literal["forward", "reverse"]
) -> None:
    """Value and gradient, number by number in double precision."""
    tokens = made_tokens(shape, seed)
    assert tokens.top_logprobs is not None
    loss, metrics = top_k_kl(tokens, top_k=top_k, direction=direction)
    (gradient,) = torch.autograd.grad(loss, tokens.top_logprobs)
    total, rests = 0.0, 0.0
    for given_p, given_q, slopes in zip(
        tokens.top_logprobs.tolist(),
        tokens.fields["teacher_top_logprobs"].tolist(),
        gradient.tolist(),
        strict=True,
    ):
        p, q = ([math.exp(it) for it in each[:top_k]] for each in (given_p, given_q))
        p.append(1 - math.fsum(p))
        q.append(1 - math.fsum(q))
        rests += p[-1]
        for place, (own, other) in enumerate(zip(p, q, strict=True)):
            log_ratio = math.log(own / other)
            total += -other * log_ratio if direction == "forward" else own * log_ratio
            if place == top_k:
                continue
            # d / d log p_i: p_i moves, and the rest by as much against it
            of_rest = math.log(p[-1] / q[-1])
            slope = (
                -other + q[-1] / p[-1] * own
                if direction == "forward"
                else own * (log_ratio - of_rest)
            )
            assert slopes[place] == pytest.approx(slope / len(gradient), rel=1e-6, abs=1e-9)
        assert not any(slopes[top_k:]), "of tokens beyond the k there is no gradient"
    count = len(gradient)
    assert loss.item() == pytest.approx(total / count, rel=1e-9)
    assert metrics["teacher_kl"].value.item() == pytest.approx(total, rel=1e-5)
    assert metrics["rest"].value.item() == pytest.approx(rests, rel=1e-5)
    assert loss.item() >= 0


@pytest.mark.parametrize("direction", ["forward", "reverse"])
def test_all_tokens_are_the_whole_divergence(direction: Literal["forward", "reverse"]) -> None:
    """In float32, where the rest's probability is rounding; of sure teachers, too."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 40, 16, generator=generator)
    logits[0, :9] *= 8
    p, q = logits.log_softmax(-1)
    exact = [it.double().log_softmax(-1) for it in (p, q)]
    own, other = exact if direction == "reverse" else exact[::-1]
    expected = (own.exp() * (own - other)).sum(-1).mean()
    q, order = q.sort(descending=True)
    single = made_tokens([(40, 0, 0)], 0)
    student = p.gather(1, order).requires_grad_()
    fields = {"teacher_top_logprobs": q, "teacher_top_tokens": order}
    tokens = replace(single, logprobs=p[:, 0], fields=fields, top_logprobs=student)
    loss, _ = top_k_kl(tokens, direction=direction)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-4)
    (gradient,) = torch.autograd.grad(loss, student)
    assert gradient.isfinite().all()


def test_a_rank_without_rows_and_a_teacher_that_gives_too_little() -> None:
    tokens = made_tokens([(3, 0, 0)], 0)
    assert tokens.top_logprobs is not None
    nothing = torch.zeros(0)
    fields = {"teacher_top_logprobs": nothing, "teacher_top_tokens": nothing}
    empty = replace(
        tokens, logprobs=tokens.logprobs[:0], fields=fields, top_logprobs=torch.zeros(0, 0)
    )
    loss, metrics = NamedLoss("top_k_kl").load()(empty)
    assert (loss.item(), metrics["teacher_kl"].weight) == (0, 0)
    with pytest.raises(ValueError, match=r"of 17 tokens at each place, got \(3, 16\) of \(3, 16\)"):
        top_k_kl(tokens, top_k=17)
    with pytest.raises(ValueError, match=r"of 2 tokens at each place, got \(3, 16\)"):
        top_k_kl(replace(tokens, top_logprobs=tokens.top_logprobs[:, :2]), top_k=2)
