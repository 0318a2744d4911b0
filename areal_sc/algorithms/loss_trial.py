"""A loss is tried on two rows that are made up, before anything is trained by it."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

import torch

from areal_sc.algorithms.loss_tokens import loss_tokens_of
from areal_sc.algorithms.losses import checked
from areal_sc.algorithms.named_loss import NamedLoss
from areal_sc.errors import ConfigError, WorkflowError
from areal_sc.user_code import user_code

_NUM_LOSS_TOKENS: Final = (3, 1)
"""Trained tokens of the rows, which are those of one prompt."""

_NUM_TOKENS: Final = sum(_NUM_LOSS_TOKENS)
_EXPECTED: Final = "a scalar loss that depends on the tokens"


class _MadeUpFields(dict[str, torch.Tensor]):
    """Any field that a loss may ask for: rows have those of the user's own, too."""

    def __missing__(self, name: str) -> torch.Tensor:
        return torch.linspace(-1, 1, _NUM_TOKENS)


def try_loss(loss: NamedLoss) -> None:
    """Calls the loss once.

    Raises: ConfigError: there is no such loss, it raises, or returns something else than a loss.
    """
    compute = loss.load()
    values = torch.linspace(-2, -1, _NUM_TOKENS, requires_grad=True)
    fields = _MadeUpFields(versions=torch.zeros(_NUM_TOKENS, dtype=torch.int32))
    where = f"actor.ppo.loss: {loss.name} with actor.ppo.loss_settings={dict(loss.settings)}"
    try:
        with user_code("it"):
            tokens = loss_tokens_of(
                values * 1,
                -values,
                fields,
                _NUM_LOSS_TOKENS,
                groups=(0, 0),
                rewards=(1.0, 0.0),
            )
            returned = compute(replace(tokens, values=values / 2))
    except WorkflowError as error:
        raise ConfigError(f"{where}: tried on two rows, {error}") from error
    try:
        value, _ = checked(returned)
    except TypeError as error:
        raise ConfigError(f"{where}: {error}") from error
    if not value.requires_grad:
        raise ConfigError(f"{where}: expected {_EXPECTED}, got {returned!r:.200}")
