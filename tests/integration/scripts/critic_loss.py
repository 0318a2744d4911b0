"""A critic's loss that reads the rows' rewards; workers find it beside the script."""

from __future__ import annotations

import torch

from areal_sc.algorithms.loss_tokens import LossTokens
from areal_sc.algorithms.losses import Metric, Metrics


def to_rewards(tokens: LossTokens) -> tuple[torch.Tensor, Metrics]:
    """Mean over the tokens of (value - reward of the row)^2; `moved` since the field was made."""
    values = tokens.predicted_values
    squares = (values - tokens.rows.spread(tokens.rows.reward)).square()
    moved = (values - tokens.fields["values"]).abs()
    return tokens.mean(squares), {"error": Metric.mean(squares), "moved": Metric.max(moved)}
