from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from loss_rows import ROW, made_tokens, shapes

from areal_sc.algorithms.distillation import reverse_kl


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
