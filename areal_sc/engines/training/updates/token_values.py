"""What a token function makes of rows."""

from __future__ import annotations

from collections.abc import Callable

import torch

from areal_sc.algorithms.loss_tokens import RowTokens
from areal_sc.engines.training.row_numbers import count_rows
from areal_sc.engines.training.updates.micro_batches import (
    RowFields,
    TokenFields,
    of_tokens,
    trained_tokens,
    with_token_advantages,
)
from areal_sc.errors import WorkflowError
from areal_sc.transport.packed_rows import PackedRows


def token_values(
    rows: PackedRows, function: Callable[[RowTokens], torch.Tensor], name: str
) -> torch.Tensor:
    """[T] float32: the function's value at each trained token but the first of a row, else 0.

    Args:
        rows: fields `loss_mask` and those that the function reads. Numbers of tokens of an episode
            or a group are those in these rows.
        name: of the function, for messages.
    Raises: WorkflowError: the function raised, or did not return a finite number a token.
    """
    known = with_token_advantages(rows)
    trained = trained_tokens(known, None)
    lengths = torch.tensor(rows.lengths, dtype=torch.int64)
    of_token = torch.arange(rows.num_rows).repeat_interleave(lengths)
    starts = torch.tensor(rows.starts, dtype=torch.int64)
    position = torch.arange(rows.num_tokens) - starts.repeat_interleave(lengths)
    places = torch.nonzero(trained & (position > 0)).flatten()
    values = torch.zeros(rows.num_tokens)
    if not len(places):
        return values
    chosen, row_of_token = torch.unique(of_token[places], return_inverse=True)
    ((numbers, _),) = count_rows([known], [trained], 0, lambda own: [own])
    own = RowFields(rows, rows.take_row_fields(chosen.tolist()), values.device)
    of_rows = numbers.take(chosen.tolist()).with_tokens(row_of_token, position[places], own)
    at_tokens = {field: given[places] for field, given in known.fields.items()}
    fields = TokenFields(at_tokens, of_rows, known)
    returns = [tuple(it for it, _ in row.returns) or row.reward for row in rows.metadata or ()]
    of_answers = of_tokens(rows, returns or [0.0] * rows.num_rows)
    found = function(RowTokens(fields, of_rows, of_answers[places]))
    if not isinstance(found, torch.Tensor) or found.shape != places.shape:
        got = tuple(found.shape) if isinstance(found, torch.Tensor) else type(found).__name__
        raise WorkflowError(f"{name}: expected [{len(places)}], a number a token, got {got}")
    if not bool(found.isfinite().all()):
        raise WorkflowError(f"{name}: expected finite numbers, got {found[~found.isfinite()][0]}")
    values[places] = found.detach().float()
    return values
