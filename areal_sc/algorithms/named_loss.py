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
from importlib.util import find_spec
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any

from areal_sc.errors import ConfigError, WorkflowError
from areal_sc.user_code import user_code

if TYPE_CHECKING:
    import torch

    from areal_sc.algorithms.losses import Loss, LossTokens, Metrics
    from areal_sc.config.schema import PPOConfig

BUILT_IN = ("decoupled_ppo", "cross_entropy")
_EXPECTED = f"{', '.join(BUILT_IN)} or package.module:function"
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

    def search_path(self) -> str:
        """The folder that a process needs on `sys.path` to import the function; "" if none.

        It is found as the caller would import it, that is also beside a script, but not imported.

        Raises: ConfigError: the caller could not import it either.
        """
        if self.name in BUILT_IN:
            return ""
        found = folder_of_module(self.name)
        if found is None:
            raise ConfigError(
                f"actor.ppo.loss: expected {_EXPECTED}, in a file beside the script or in an "
                f"installed package, got {self.name!r}: there is no module "
                f"{_package_of(self.name)!r}"
            )
        return found

    def load(self) -> Loss:
        """The function with its settings. Imports torch.

        Raises: ConfigError: there is no such function, or it has other settings. The user's own
            function raises a WorkflowError with its line, whatever it raised.
        """
        is_built_in = self.name in BUILT_IN
        path = f"areal_sc.algorithms.losses:{self.name}" if is_built_in else self.name
        try:
            with user_code("its import"):
                found: Callable[..., Any] = resolve_name(path)
            inspect.signature(found).bind("tokens", **self.settings)
        except (WorkflowError, ValueError, TypeError) as error:
            raise ConfigError(f"loss {self.name!r}: {error}; expected {_EXPECTED}") from error
        if is_built_in:
            return partial(found, **self.settings)

        def compute(tokens: LossTokens) -> tuple[torch.Tensor, Metrics]:
            with user_code(f"loss {self.name!r}"):
                returned: tuple[torch.Tensor, Metrics] = found(tokens, **self.settings)
            return returned

        return compute


def folder_of_module(path: str) -> str | None:
    """The folder from which an import path is imported; None: there is no such module."""
    try:
        found = find_spec(_package_of(path))
    except ValueError:  # it is "", or the script itself
        found = None
    if found is None:
        return None
    locations = [*(found.submodule_search_locations or ()), *filter(None, [found.origin])]
    return str(Path(locations[0]).absolute().parent)


def _package_of(path: str) -> str:
    return path.partition(":")[0].partition(".")[0]


def loss_of(config: PPOConfig) -> NamedLoss:
    """The loss that `actor.ppo` names. That of decoupled PPO has its settings in the section."""
    if config.loss != "decoupled_ppo":
        return NamedLoss(config.loss, config.loss_settings)
    names = ("clip_low", "clip_high", "clip_center", "use_behavior_weight", "behavior_weight_cap")
    return NamedLoss(config.loss, {name: getattr(config, name) for name in names})


CROSS_ENTROPY = NamedLoss("cross_entropy")
