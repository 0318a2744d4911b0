"""Whether a model computes finite numbers: looked at before what it computes is compared."""

from __future__ import annotations

from typing import Any

import torch

from areal_sc.errors import ModelError


def require_finite(causal_lm: Any, logprobs: torch.Tensor) -> None:
    """Checks log-probabilities that are the measure of a comparison: NaN differs from everything.

    Args:
        logprobs: of the model's own forward.
    Raises: ModelError: one is NaN or infinite; names a weight that is, among those at hand.
    """
    if bool(logprobs.isfinite().all()):
        return
    parameters = [(name, p) for name, p in causal_lm.named_parameters() if not p.is_meta]
    spoilt = [name for name, p in parameters if not bool(p.isfinite().all())]
    cause = "a weight is not, or what the weights compute overflows"
    if spoilt:
        cause = f"there is NaN or infinity in {', '.join(spoilt[:3])}"
    raise ModelError(
        f"{type(causal_lm).__name__} gives log-probabilities that are not finite: {cause}; "
        "copy the model again, or take an earlier checkpoint of the run that wrote it"
    )
