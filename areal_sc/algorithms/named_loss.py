"""Losses by name: what a controller and its ranks agree on without importing one. No torch.

A loss is a function of the trained tokens of a micro-batch and of settings of its own. Those of
`areal_sc.algorithms.losses` go by their names, one of the user's own by its import path,
`package.module:function`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any

from areal_sc.errors import ConfigError

if TYPE_CHECKING:
    from areal_sc.algorithms.losses import Loss
    from areal_sc.config.schema import PPOConfig

BUILT_IN = ("decoupled_ppo", "cross_entropy")
_IS_ZERO_WITHOUT_ADVANTAGE = {"decoupled_ppo"}


@dataclass(frozen=True, slots=True)
class NamedLoss:
    """A loss and its settings, as plain data.

    Attributes:
        name: of `BUILT_IN`, or an import path.
        settings: keyword arguments of the function.
    """

    name: str
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_zero_without_advantage(self) -> bool:
        """Whether tokens of advantage 0 have no gradient, so that no model need see them."""
        return self.name in _IS_ZERO_WITHOUT_ADVANTAGE

    def load(self) -> Loss:
        """The function with its settings. Imports torch.

        Raises: ConfigError: there is no such function, or it has other settings.
        """
        is_built_in = self.name in BUILT_IN
        path = f"areal_sc.algorithms.losses:{self.name}" if is_built_in else self.name
        try:
            found: Callable[..., Any] = resolve_name(path)
            inspect.signature(found).bind("tokens", **self.settings)
        except (ImportError, AttributeError, ValueError, TypeError) as error:
            raise ConfigError(
                f"loss {self.name!r}: {error}; expected {', '.join(BUILT_IN)} or "
                "package.module:function, importable in the workers"
            ) from error
        return partial(found, **self.settings)


def loss_of(config: PPOConfig) -> NamedLoss:
    """The loss that `actor.ppo` names. That of decoupled PPO has its settings in the section."""
    if config.loss != "decoupled_ppo":
        return NamedLoss(config.loss, config.loss_settings)
    names = ("clip_low", "clip_high", "clip_center", "use_behavior_weight", "behavior_weight_cap")
    return NamedLoss(config.loss, {name: getattr(config, name) for name in names})


CROSS_ENTROPY = NamedLoss("cross_entropy")
