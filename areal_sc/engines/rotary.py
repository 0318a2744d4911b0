"""Rotary embeddings whose frequencies depend on the length of a sequence, not on positions alone.

    longrope    one set of frequencies up to a length, another one beyond it
    dynamic     beyond a length, other frequencies for every length

transformers takes the longest sequence of a call for the length of all.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch

LONGROPE = "longrope"
DYNAMIC = "dynamic"


def rope_limits(config: Any) -> dict[str, int]:
    """Up to which length of a row its rotary embeddings depend on positions alone.

    Args:
        config: Hugging Face configuration of a model.
    Returns: the limit of each of the two kinds that its layers have; {} where there is none.
    """
    text_config = config.get_text_config()
    parameters = getattr(text_config, "rope_parameters", None) or {}
    # one set of parameters, or one for each type of layer
    each = [parameters, *(p for p in parameters.values() if isinstance(p, Mapping))]
    limits: dict[str, int] = {}
    for one in each:
        kind = str(one.get("rope_type"))
        if LONGROPE in kind:
            limit = int(one["original_max_position_embeddings"])
            limits[LONGROPE] = min(limit, limits.get(LONGROPE, limit))
        elif DYNAMIC in kind:
            limits[DYNAMIC] = int(text_config.max_position_embeddings)
    return limits


def rotate_rows_by_own_length(model: torch.nn.Module) -> None:
    """Makes longrope follow the length of each row of a packed sequence.

    Rows are told apart by their positions, which restart at 0.
    """
    for module in model.modules():
        types = getattr(module, "rope_type", None)
        if LONGROPE in (types.values() if isinstance(types, Mapping) else (types,)):
            module.forward = functools.partial(_rotation_by_row, module, module.forward)


def _rotation_by_row(
    module: Any,
    rotate: Callable[..., Any],
    hidden: torch.Tensor,
    position_ids: torch.Tensor,
    layer_type: str | None = None,
) -> Any:
    """What `rotate` gives for [B, T] `position_ids`, each row as if it were alone."""
    chosen = {} if layer_type is None else {"layer_type": layer_type}
    parameters = module.config.rope_parameters
    parameters = parameters if layer_type is None else parameters[layer_type]
    if parameters["rope_type"] != LONGROPE:
        return rotate(hidden, position_ids, **chosen)
    rows = (position_ids == 0).cumsum(-1)
    last_positions = torch.zeros(
        rows.shape[0], rows.shape[1] + 1, dtype=position_ids.dtype, device=rows.device
    ).scatter_reduce_(1, rows, position_ids, "amax")
    limit = parameters["original_max_position_embeddings"]
    is_long = last_positions.gather(1, rows) >= limit
    # without positions beyond the limit, all get the frequencies of short rows
    short = rotate(hidden, position_ids.masked_fill(is_long, 0), **chosen)
    long = rotate(hidden, position_ids, **chosen)
    if isinstance(long, torch.Tensor):
        return torch.where(is_long[..., None], long, short)
    return tuple(torch.where(is_long[..., None], *pair) for pair in zip(long, short, strict=True))
