"""Sampled tokens of a row by the policy gradient, given ones by their cross entropy."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from builders import engines_on, packed_rows

from areal_sc.algorithms.loss_tokens import LossTokens, loss_tokens_of
from areal_sc.algorithms.named_loss import NamedLoss, loss_of
from areal_sc.config.ppo_settings import PPOConfig
from areal_sc.engines.base import Completion
from areal_sc.errors import ConfigError
from areal_sc.workflows.transcript import Transcript

COUNTS = (5, 4, 3)
WEIGHTS = torch.tensor([0, 0, 0.3, 0.3, 0, 0, 0, 0, 0, 2.0, 2.0, 0], dtype=torch.float64)
"""The second row has no given tokens."""
SETTINGS = {"behavior_weight": "sequence", "behavior_weight_cap": 1.1}


def made() -> LossTokens:
    generator = torch.Generator().manual_seed(0)
    num = sum(COUNTS)

    def noise(scale: float) -> torch.Tensor:
        return scale * torch.randn(num, generator=generator, dtype=torch.float64)

    logprobs = (-1 + noise(0.3)).requires_grad_()
    proximal = logprobs.detach() + noise(0.2)
    fields = {
        "advantages": torch.tensor([1.0, -0.5, 2.0])
        .double()
        .repeat_interleave(torch.tensor(COUNTS)),
        "proximal_logprobs": proximal,
        "behavior_logprobs": (proximal + noise(0.2)).masked_fill(WEIGHTS != 0, 0.0),
        "given_weights": WEIGHTS,
    }
    return loss_tokens_of(logprobs, torch.ones(num), fields, COUNTS)


def test_each_token_counts_in_its_own_way() -> None:
    """Against formulas of a row at a time: weights of rows are those of their sampled tokens."""
    tokens = made()
    loss, metrics = NamedLoss("policy_gradient_and_cross_entropy", SETTINGS).load()(tokens)
    parts = (
        tokens.logprobs,
        *(tokens.fields[it] for it in ("proximal_logprobs", "behavior_logprobs")),
    )
    expected = torch.zeros((), dtype=torch.float64)
    for logprobs, proximal, behavior, weights, advantages in zip(
        *(it.split(COUNTS) for it in (*parts, WEIGHTS, tokens.fields["advantages"])), strict=True
    ):
        own = weights == 0
        weight = (proximal - behavior)[own].mean().exp()
        ratio, a = (logprobs - proximal)[own].exp(), advantages[own]
        gains = torch.minimum(ratio * a, ratio.clamp(0.8, 1.2) * a)
        expected = expected - (weight * (weight <= 1.1) * gains).sum() + -(weights * logprobs).sum()
    expected = expected / sum(COUNTS)
    assert loss.item() == pytest.approx(expected.item(), abs=1e-12)
    found, wanted = (torch.autograd.grad(it, tokens.logprobs)[0] for it in (loss, expected))
    assert found.tolist() == pytest.approx(wanted.tolist(), abs=1e-12)
    given = -tokens.logprobs.detach()[WEIGHTS != 0]
    told = metrics["given_cross_entropy"]
    assert told.value.item() == pytest.approx(given.sum().item(), rel=1e-6)
    assert told.weight == len(given)
    assert metrics["behavior_weight"].weight == sum(COUNTS) - len(given)


def test_both_have_one_denominator() -> None:
    found = [
        NamedLoss("policy_gradient_and_cross_entropy", given).load()(made())[0].item()
        for given in ({}, {"aggregation": "constant", "aggregation_tokens": 8})
    ]
    assert found[1] * len(COUNTS) * 8 == pytest.approx(found[0] * sum(COUNTS), rel=1e-12)


def test_without_given_tokens_it_is_the_policy_gradient() -> None:
    tokens = made()
    fields = {**tokens.fields, "given_weights": torch.zeros(sum(COUNTS))}
    tokens = replace(tokens, fields=fields)
    found, expected = (
        loss_of(PPOConfig(loss=name, clip_high=0.1, entropy_coefficient=0.1)).load()(tokens)[0]
        for name in ("policy_gradient_and_cross_entropy", "policy_gradient")
    )
    assert torch.equal(found, expected)
    assert not loss_of(
        PPOConfig(loss="policy_gradient_and_cross_entropy")
    ).is_zero_without_advantage


def test_what_it_reads_and_refuses() -> None:
    loss = loss_of(PPOConfig(loss="policy_gradient_and_cross_entropy"))
    assert set(loss.fields or ()) > {"advantages", "given_weights"}
    with pytest.raises(ConfigError, match="gian"):
        NamedLoss("policy_gradient_and_cross_entropy", {"gian": "clip"}).load()
    per_row = NamedLoss("policy_gradient_and_cross_entropy", {"aggregation": "sequence"})
    with pytest.raises(Exception, match="expected token or constant, got 'sequence'"):
        per_row.load()(made())


def test_a_transcript_knows_its_given_tokens() -> None:
    transcript = Transcript()
    transcript.add_context([1, 2])
    with pytest.raises(ValueError, match="behind a completion"):
        transcript.add_given([3], 0.1)
    transcript.add_completion(Completion([5, 6], [-1.0, -2.0], [3, 4], "stop", 0.7))
    transcript.add_given([7, 8], 0.1)
    transcript.add_context([9])
    transcript.add_completion(Completion([5], [-1.0], [4], "stop", 0.7))
    row = transcript.trajectory(1.0)
    assert row.loss_mask == [False, False, True, True, True, True, False, True]
    assert row.versions == [-1, -1, 3, 4, 4, 4, -1, 4]
    assert row.temperatures == [1.0, 1.0, 0.7, 0.7, 1.0, 1.0, 1.0, 0.7]
    assert row.behavior_logprobs[4:7] == [0.0, 0.0, 0.0]
    assert transcript.given_weights == [0.0, 0.0, 0.0, 0.0, 0.1, 0.1, 0.0, 0.0]


def test_an_engine_learns_given_tokens_and_does_not_call_them_a_mismatch(
    tiny_model_folder: Path,
) -> None:
    rows = packed_rows((6, 5), versions=torch.zeros(11, dtype=torch.int32))
    is_given = torch.arange(11) % 2 == 1
    with engines_on(tiny_model_folder) as build:
        engine = build()
        behavior = engine.forward(rows, "logprobs").masked_fill(is_given, 0.0)
        fields = {"behavior_logprobs": behavior, "given_weights": is_given.float()}
        rows = replace(rows, fields=rows.fields | fields, advantages=(0.0, 0.0))
        loss = NamedLoss("policy_gradient_and_cross_entropy")
        stats = [engine.update([rows], loss, step=step) for step in range(4)]
    surprises = [it["given_cross_entropy"] for it in stats]
    assert surprises == sorted(surprises, reverse=True)
    assert surprises[3] < surprises[0] - 0.01
    assert stats[0]["mismatch"] < 1e-5
