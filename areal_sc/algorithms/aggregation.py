"""How the values of tokens become one number: what counts the same as what."""

from __future__ import annotations

import torch

from areal_sc.algorithms.loss_tokens import LossTokens


def aggregate(
    tokens: LossTokens, values: torch.Tensor, over: str, num_tokens: int = 0
) -> torch.Tensor:
    """This micro-batch's part of a mean over the minibatch; the parts add up to it.

    token: sum_t x_t / tokens (DAPO, arXiv:2503.14476, eq. 8). sequence: mean over rows of the mean
    over their tokens (GRPO, arXiv:2402.03300, eq. 3). episode, prompt: the same over these.
    constant: sum_t x_t / (episodes * num_tokens), so that no answer's length matters
    (Dr. GRPO, arXiv:2503.20783).

    Args:
        values: [N], one a trained token.
        over: one of these.
        num_tokens: of `constant`, > 0: the most tokens of an answer, for example.
    Returns: scalar; differentiable.
    Raises: ValueError: `over` is none of these.
    """
    if over == "constant":
        return values.sum() / (tokens.counts.episodes * num_tokens)
    return tokens.mean(values, over)
