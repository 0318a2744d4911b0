"""The same model with small windows, chunks and RoPE limits, for trials with short rows."""

from __future__ import annotations

import copy
from typing import Any

from transformers.initialization import no_init_weights

from areal_sc.errors import ModelError

SMALL_LIMIT = 4
"""Tokens; trials have longer rows."""

_LENGTH_LIMITS = (
    *("sliding_window", "sliding_window_size", "window_size", "attention_window_size"),
    *("local_attention", "keep_window_size", "attention_chunk_size"),
    *("floor_scale", "log_scaling_n_floor", "original_max_position_embeddings"),
)
"""Settings. What a model computes may change where a row, or all rows together, are longer."""


def with_small_limits(causal_lm: Any, attention: str, longest_input: int) -> Any:
    """The same weights in a model whose limits are small; `causal_lm` itself if it has none.

    Args:
        attention: its implementation, by transformers' name.
        longest_input: tokens of one call, all rows together, that the model will ever get. Limits
            of at least as many stay as they are.
    Raises: ModelError: the model cannot be built with such settings.
    """
    config = copy.deepcopy(causal_lm.config)
    if not _make_small(vars(config.get_text_config()), longest_input):
        return causal_lm
    try:
        return with_same_weights(causal_lm, config, attention)
    except (ValueError, TypeError, KeyError) as error:
        name = type(causal_lm).__name__
        raise ModelError(f"{name}: rows beyond its limits cannot be tried: {error}") from error


def with_same_weights(causal_lm: Any, config: Any, attention: str) -> Any:
    """Another model of these settings, which become its own, with the same memory for its weights.

    Raises: ValueError, TypeError, KeyError: the model cannot be built with such settings.
    """
    config._attn_implementation = attention
    config.dtype = causal_lm.dtype  # some layers make their buffers by it
    with no_init_weights():
        other = type(causal_lm)(config)
    other.load_state_dict(causal_lm.state_dict(), assign=True)  # shared, not copied
    for module in other.modules():  # buffers that are not stored
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, buffer.to(causal_lm.device))
    return other.eval()


def _make_small(settings: dict[str, Any], longest_input: int) -> bool:
    """Changes the limits in the settings, nested ones too; whether there were any."""
    has_changed = False
    for name, value in settings.items():
        if isinstance(value, dict):
            has_changed |= _make_small(value, longest_input)
        elif name not in _LENGTH_LIMITS or not isinstance(value, int):
            continue
        elif SMALL_LIMIT < value < longest_input:
            settings[name] = SMALL_LIMIT
            has_changed = True
    return has_changed
