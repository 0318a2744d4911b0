from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from loss_rows import ROW, made_tokens, shapes

from areal_sc.algorithms.distillation import reverse_kl, top_k_kl


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


@given(seed=st.integers(0, 10_000), k=st.integers(1, 4))
def test_top_k_kl_and_its_gradient(seed: int, k: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(3, 6, generator=generator, dtype=torch.float64, requires_grad=True)
    student = logits.log_softmax(-1)
    teacher = torch.randn(3, 6, generator=generator, dtype=torch.float64).log_softmax(-1)
    likeliest, ids = teacher.topk(k)
    found = top_k_kl(student.gather(-1, ids), likeliest)
    (gradient,) = torch.autograd.grad(found.sum(), logits)
    for row in range(3):
        p = [math.exp(value) for value in likeliest[row].tolist()]
        of_all = student[row].exp().tolist()
        q = [of_all[i] for i in ids[row].tolist()]
        rest_p, rest_q = 1 - math.fsum(p), 1 - math.fsum(q)
        expected = math.fsum(a * math.log(a / b) for a, b in zip(p, q, strict=True))
        expected += rest_p * math.log(rest_p / rest_q)
        assert found[row].item() == pytest.approx(expected, rel=1e-6)
        for token in range(6):  # of a softmax: each bucket has q - p, shared as q is shared within
            place = ids[row].tolist().index(token) if token in ids[row].tolist() else None
            slope = (
                q[place] - p[place] if place is not None else (1 - rest_p / rest_q) * of_all[token]
            )
            assert gradient[row, token].item() == pytest.approx(slope, rel=1e-6, abs=1e-12)


def test_top_k_kl_of_equal_policies_is_zero() -> None:
    policy = torch.tensor([[0.5, 0.25, 0.25]], dtype=torch.float64).log()
    assert top_k_kl(policy, policy).item() == pytest.approx(0, abs=1e-12)
    assert top_k_kl(policy[:, :2], policy[:, :2]).item() == pytest.approx(0, abs=1e-12)
