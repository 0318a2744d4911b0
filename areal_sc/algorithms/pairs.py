"""Losses of pairs: two rows of one group, of which the one with the higher reward is chosen."""

from __future__ import annotations

import torch
from torch.nn.functional import logsigmoid

from areal_sc.algorithms.loss_tokens import LossRows, LossTokens
from areal_sc.algorithms.losses import Metric, Metrics


def pairs_of(rows: LossRows) -> tuple[torch.Tensor, torch.Tensor]:
    """The numbers [P] of the chosen rows, and [P] of the rejected ones, pair by pair.

    Raises: ValueError: a group of this micro-batch has not two rows, or two of equal reward.
    """
    order = rows.reward.argsort(stable=True)
    order = order[rows.group[order].argsort(stable=True)]
    groups, counts = torch.unique(rows.group, return_counts=True)
    if (counts != 2).any():
        torn = int((counts != 2).nonzero()[0])
        raise ValueError(
            f"group {int(groups[torn])}: expected a pair, one chosen and one rejected row, "
            f"got {int(counts[torn])} rows in a micro-batch"
        )
    rejected, chosen = order[0::2], order[1::2]
    if not (rows.reward[chosen] > rows.reward[rejected]).all():
        raise ValueError("expected a chosen row with a higher reward than the rejected one of it")
    return chosen, rejected


def dpo(
    tokens: LossTokens, *, beta: float = 0.1, label_smoothing: float = 0.0
) -> tuple[torch.Tensor, Metrics]:
    """Mean over pairs of -(1 - s) log sigmoid(m) - s log sigmoid(-m).

    m = beta (log pi(y_c) / pi_ref(y_c) - log pi(y_r) / pi_ref(y_r)), y_c chosen, y_r rejected.
    Source: DPO, arXiv:2305.18290, eq. 7; s, of labels that may be wrong, E. Mitchell's "A note on
    DPO with noisy preferences" (2023).

    Args:
        tokens: with field `reference_logprobs`; both rows of a pair are in one micro-batch.
        beta: > 0. label_smoothing: s, of [0, 0.5).
    Returns: scalar loss, and the means over pairs `pair_accuracy` (m > 0) and `pair_margin` (m).
    Raises: ValueError: a pair is not whole.
    """
    rows = tokens.rows
    reference = tokens.fields["reference_logprobs"].detach().to(tokens.logprobs.dtype)
    chosen, rejected = pairs_of(rows)
    of_rows = rows.sum(tokens.logprobs - reference)
    return _pair_loss(tokens, beta * (of_rows[chosen] - of_rows[rejected]), label_smoothing)


def bradley_terry(
    tokens: LossTokens, *, label_smoothing: float = 0.0
) -> tuple[torch.Tensor, Metrics]:
    """Mean over pairs of -log sigmoid(s(y_c) - s(y_r)): a reward model's loss.

    The score s of a row is the value behind its last trained token.
    Source: arXiv:2203.02155 (InstructGPT), eq. 1; R. Bradley and M. Terry (1952).

    Args:
        tokens: with `values`; both rows of a pair are in one micro-batch.
        label_smoothing: see `dpo`.
    Returns: what `dpo` returns; the margin is the difference of the scores.
    Raises: ValueError: a pair is not whole, or the model has no value head.
    """
    rows = tokens.rows
    chosen, rejected = pairs_of(rows)
    last = torch.bincount(rows.of_token, minlength=len(rows.num_tokens)).cumsum(0) - 1
    scores = tokens.predicted_values[last]
    return _pair_loss(tokens, scores[chosen] - scores[rejected], label_smoothing)


def _pair_loss(
    tokens: LossTokens, margins: torch.Tensor, label_smoothing: float
) -> tuple[torch.Tensor, Metrics]:
    """Args: margins: [P], > 0 where the chosen row is preferred."""
    losses = -(1 - label_smoothing) * logsigmoid(margins) - label_smoothing * logsigmoid(-margins)
    return losses.sum() / tokens.counts.prompts, {
        "pair_accuracy": Metric.mean(margins > 0),
        "pair_margin": Metric.mean(margins),
    }
