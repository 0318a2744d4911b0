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
    tokens: LossTokens,
    *,
    beta: float = 0.1,
    label_smoothing: float = 0.0,
    of_margin: str = "sigmoid",
    of_row: str = "sum",
    cross_entropy: float = 0.0,
) -> tuple[torch.Tensor, Metrics]:
    """Mean over pairs of a function of the margin m, and of a cross entropy of the chosen answers.

    m = beta (h(y_c) - h(y_r)), h(y) = log pi(y) / pi_ref(y), y_c chosen, y_r rejected.
    Source: DPO, arXiv:2305.18290, eq. 7; s, of labels that may be wrong, E. Mitchell's "A note on
    DPO with noisy preferences" (2023); `square`: IPO, arXiv:2310.12036, eq. 17; `hinge`: SLiC,
    arXiv:2305.10425; the cross entropy: arXiv:2404.19733, eq. 1.

    Args:
        tokens: with field `reference_logprobs`; both rows of a pair are in one micro-batch.
        beta: > 0. label_smoothing: s, of [0, 0.5); with `sigmoid`.
        of_margin: `sigmoid`: -(1 - s) log sigmoid(m) - s log sigmoid(-m). `square`: (m - 1/2)^2 /
            beta^2. `hinge`: max(0, 1 - m).
        of_row: `sum`: h is the sum over the answer's tokens; `mean`: their mean.
        cross_entropy: >= 0; so many times the mean over pairs of -log pi(y_c) a token is added.
    Returns: scalar loss, and the means over pairs `pair_accuracy` (m > 0) and `pair_margin` (m);
        with a cross entropy its own mean, `chosen_cross_entropy`.
    Raises: ValueError: a pair is not whole.
    """
    rows = tokens.rows
    reference = tokens.fields["reference_logprobs"].detach().to(tokens.logprobs.dtype)
    chosen, rejected = pairs_of(rows)
    log_ratio = tokens.logprobs - reference
    of_rows = rows.sum(log_ratio) if of_row == "sum" else rows.mean(log_ratio)
    margins = beta * (of_rows[chosen] - of_rows[rejected])
    if of_margin == "sigmoid":
        losses = _sigmoid_losses(margins, label_smoothing)
    elif of_margin == "square":
        losses = ((margins - 0.5) / beta).square()
    else:
        losses = (1 - margins).clamp(min=0)
    loss, metrics = _pair_loss(tokens, margins, losses)
    if cross_entropy:
        of_chosen = -rows.mean(tokens.logprobs)[chosen]
        loss = loss + cross_entropy * of_chosen.sum() / tokens.counts.prompts
        metrics["chosen_cross_entropy"] = Metric.mean(of_chosen)
    return loss, metrics


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
    margins = scores[chosen] - scores[rejected]
    return _pair_loss(tokens, margins, _sigmoid_losses(margins, label_smoothing))


def _sigmoid_losses(margins: torch.Tensor, label_smoothing: float) -> torch.Tensor:
    return -(1 - label_smoothing) * logsigmoid(margins) - label_smoothing * logsigmoid(-margins)


def _pair_loss(
    tokens: LossTokens, margins: torch.Tensor, losses: torch.Tensor
) -> tuple[torch.Tensor, Metrics]:
    """Args: margins, losses: [P]; a margin is > 0 where the chosen row is preferred."""
    return losses.sum() / tokens.counts.prompts, {
        "pair_accuracy": Metric.mean(margins > 0),
        "pair_margin": Metric.mean(margins),
    }
