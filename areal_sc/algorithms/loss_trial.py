"""A loss is tried on two rows that are made up, before anything is trained by it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import product
from typing import Any, Final

import torch

from areal_sc.algorithms.loss_tokens import loss_tokens_of
from areal_sc.algorithms.losses import Metrics, checked
from areal_sc.algorithms.named_loss import NamedLoss
from areal_sc.config.schema import ModelHead
from areal_sc.errors import ConfigError, WorkflowError
from areal_sc.token_fields import TOP_LOGPROBS, TOP_TOKENS
from areal_sc.user_code import user_code

_NUM_LOSS_TOKENS: Final = (3, 1)
"""Trained tokens of the rows, which are those of one prompt."""

_NUM_TOKENS: Final = sum(_NUM_LOSS_TOKENS)

_KINDS: Final = (
    torch.linspace(-1, 1, _NUM_TOKENS),
    torch.zeros(_NUM_TOKENS, dtype=torch.int32),
    torch.linspace(-1, 1, _NUM_TOKENS)[:, None].expand(-1, 2),
    torch.zeros(_NUM_TOKENS, 2, dtype=torch.int32),
)
"""What a field of the user's own may be; the first one in most cases."""
_MOST_UNKNOWN: Final = 3
"""Fields of which all kinds are tried with each other."""


class _MadeUpFields(dict[str, torch.Tensor]):
    """Any field that a loss may ask for: rows have those of the user's own, too."""

    def __init__(self, own: Mapping[str, torch.Tensor]) -> None:
        super().__init__(own, versions=torch.zeros(_NUM_TOKENS, dtype=torch.int32))
        self.asked = set[str]()

    def __missing__(self, name: str) -> torch.Tensor:
        self.asked.add(name)
        return _KINDS[0]


def try_loss(loss: NamedLoss, head: ModelHead) -> Metrics:
    """Calls the loss once; again with fields of other kinds, where it raises and reads some.

    Args:
        head: of the model that it is for.
    Returns: the metrics that it gives; none, where it reads fields of rows, and raises.
    Raises: ConfigError: there is no such loss, it raises, or returns something else than a loss.
    """
    compute = loss.load()
    output = torch.linspace(-2, -1, _NUM_TOKENS, requires_grad=True)
    is_lm = head is ModelHead.lm
    where = f"loss {loss.name} with settings {dict(loss.settings)}"

    def attempt(fields: _MadeUpFields) -> Any:
        with user_code("it"):
            tokens = loss_tokens_of(
                *((output * 1, -output) if is_lm else (torch.zeros(_NUM_TOKENS),) * 2),
                fields,
                _NUM_LOSS_TOKENS,
                groups=(0, 0),
                rewards=(1.0, 0.0),
            )
            top = output[:, None] - torch.arange(1.0, (loss.top_k or 2) + 1)
            fields.update({TOP_LOGPROBS: top.detach(), TOP_TOKENS: torch.zeros_like(top).int()})
            rows, values = replace(tokens.rows, fields=of_rows), None if is_lm else output / 2
            top_logprobs = top if is_lm else None
            return compute(replace(tokens, rows=rows, values=values, top_logprobs=top_logprobs))

    fields, of_rows = _MadeUpFields({}), _MadeUpFields({})
    try:
        returned = attempt(fields)
    except WorkflowError as error:
        for own in _other_kinds(sorted(fields.asked)):
            with suppress(WorkflowError):
                returned = attempt(_MadeUpFields(own))
                break
        else:
            if of_rows.asked:  # these have any shape: nothing that is made up is like them
                return {}
            raise ConfigError(f"{where}: tried on two rows, {error}") from error
    try:
        value, metrics = checked(returned)
    except TypeError as error:
        raise ConfigError(f"{where}: {error}") from error
    if not value.requires_grad:
        what = "log-probabilities or entropies" if is_lm else "values, which the model gives"
        raise ConfigError(
            f"{where}: expected a scalar loss that depends on {what}, got {returned!r:.200}"
        )
    return metrics


def _other_kinds(names: Sequence[str]) -> Iterator[dict[str, torch.Tensor]]:
    if len(names) <= _MOST_UNKNOWN:
        for kinds in product(_KINDS, repeat=len(names)):
            yield dict(zip(names, kinds, strict=True))
