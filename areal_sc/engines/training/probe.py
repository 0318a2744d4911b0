"""Whether the ranks together compute what one rank alone does: a few tokens, before training."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence

from areal_sc.engines.finite import require_finite
from areal_sc.engines.training.process_group import ProcessGroup
from areal_sc.errors import ModelError

_LENGTHS = (13, 3, 6, 1)

# Relative differences. A wrong mesh differs by more than that even in a model of random weights.
TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 0.05, torch.float16: 0.01}


def probe_rows(vocabulary: int, device: torch.device) -> list[torch.Tensor]:
    """A few rows of tokens, each [T] int64; one of them has a single token."""
    return [
        (torch.arange(length, device=device) * 7 + 3 * index) % vocabulary
        for index, length in enumerate(_LENGTHS)
    ]


@torch.no_grad()
def plain_logprobs(causal_lm: Any, rows: Sequence[torch.Tensor]) -> torch.Tensor:
    """[T] float32, nats: of each token of all rows by the model's own forward.

    The first token of a row has 0. One forward has all rows, so that a model whose layers are read
    when they compute is read once. The shorter ones are padded behind their last token.

    Args:
        causal_lm: Hugging Face model, in float32; what it computes of a token does not depend on
            tokens behind it.
    Raises: ModelError: some are not finite.
    """
    padded = pad_sequence(list(rows), batch_first=True)
    found = []
    for row, logits in zip(rows, causal_lm(input_ids=padded, use_cache=False).logits, strict=True):
        logprobs = logits[: len(row) - 1].log_softmax(-1)
        found += [logprobs.new_zeros(1), logprobs.gather(1, row[1:, None])[:, 0]]
    require_finite(causal_lm, torch.cat(found))
    return torch.cat(found)


def require_agreement(
    measure: Callable[[], float],
    limit: float,
    world: ProcessGroup,
    *,
    quantity: str,
    subject: str,
    advice: str,
) -> None:
    """Every rank measures how far it is from what one rank alone has computed.

    Args:
        measure: this rank's relative difference.
        quantity: what is measured, and relative to what.
        subject: says which model does not compute the same where.
        advice: what to set.
    Raises: ModelError: on every rank: one of them could not measure, or has found too much.
    """
    failure = difference = None
    try:
        difference = measure()
    except (RuntimeError, TypeError, AttributeError) as error:
        failure = f"{type(error).__name__}: {error}"
    outcomes = world.gather((failure, difference))
    # NaN is a difference, too, and max() might pass it over
    differences = [d if d is not None and d == d else math.inf for _, d in outcomes]
    messages = [message for message, _ in outcomes if message is not None]
    worst = max(differences)
    if messages or worst > limit:
        what = f"{quantity}: {worst:.1e}" if worst < math.inf else "values that are not finite"
        what = messages[0] if messages else what
        raise ModelError(f"{subject} ({what}); {advice}")
