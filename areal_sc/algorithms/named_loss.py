"""Losses by name: what a controller and its ranks agree on without importing one. No torch.

A loss is a function of the trained tokens of a micro-batch and of settings of its own. Those of
`BUILT_IN` go by their names, one of the user's own by its import path, `package.module:function`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Final

from areal_sc.config.fields import RANGE, Range
from areal_sc.config.ppo_settings import (
    POLICY_GRADIENT,
    POLICY_LOSSES,
    ROW_FILTER,
    WITH_CROSS_ENTROPY,
    PPOConfig,
    is_row_filter,
)
from areal_sc.config.schema import ActorConfig, ModelHead
from areal_sc.errors import ConfigError
from areal_sc.token_fields import GIVEN_WEIGHTS, TOP_LOGPROBS, TOP_TOKENS
from areal_sc.user_code import folder_of_module, user_function

if TYPE_CHECKING:
    from areal_sc.algorithms.losses import Loss

BUILT_IN: Final = {
    POLICY_GRADIENT: "areal_sc.algorithms.policy_gradient:policy_gradient",
    WITH_CROSS_ENTROPY: "areal_sc.algorithms.given_tokens:policy_gradient_and_cross_entropy",
    "cross_entropy": "areal_sc.algorithms.losses:cross_entropy",
    "dpo": "areal_sc.algorithms.pairs:dpo",
    "bradley_terry": "areal_sc.algorithms.pairs:bradley_terry",
    "reverse_kl": "areal_sc.algorithms.distillation:reverse_kl",
    "top_k_kl": "areal_sc.algorithms.distillation:top_k_kl",
    "value": "areal_sc.algorithms.gae:value_loss",
}
"""Losses by their names, and where they are."""

_FIELDS: Final = {
    "dpo": ("reference_logprobs",),
    "reverse_kl": ("behavior_logprobs", "teacher_logprobs"),
    "top_k_kl": (TOP_LOGPROBS, TOP_TOKENS),
    "value": ("returns", "values"),
}
"""Fields of the rows that a built-in loss reads; the others read none, or what settings say."""

_RANGES: Final[dict[str, Range]] = {
    **{it.name: it.metadata[RANGE] for it in fields(PPOConfig) if RANGE in it.metadata},
    "beta": Range(gt=0),
    "label_smoothing": Range(ge=0, lt=0.5),
    "cross_entropy": Range(ge=0),
    "ratio_cap": Range(ge=1, infinite=True),
    "top_k": Range(ge=1),
    "value_clip": Range(gt=0, infinite=True),
}
"""What the numbers among the settings of built-in losses may be."""

_CHOICES: Final = {
    **{"of_margin": ("sigmoid", "square", "hinge"), "of_row": ("sum", "mean")},
    "direction": ("forward", "reverse"),
}
"""What the names among them may be."""

_READS_SCORES: Final = ("bradley_terry",)
_COMPARES_ROWS: Final = ("dpo", *_READS_SCORES)

_EXPECTED = f"{', '.join(BUILT_IN)} or package.module:function"

TOP_K: Final = 16
"""Most probable tokens of a teacher that `top_k_kl` reads, where nothing else is set."""

_SWITCHES: Final = (
    *("ratio", "gain", "clip_low", "clip_high", "clip_dual", "gate_positive", "gate_negative"),
    *("divergence", "max_divergence", "clip_center", "behavior_weight", "behavior_weight_bound"),
    *("behavior_weight_floor", "behavior_weight_cap", "max_second_moment", "max_behavior_kl"),
    *("row_filter", "aggregation", "aggregation_tokens", "kl_estimator", "entropy_coefficient"),
)
"""Settings of `actor.ppo` that `POLICY_LOSSES` have under the same name."""


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
        """Whether rows of advantage 0 have no gradient, so that no model need see them."""
        terms = ("kl_coefficient", "entropy_coefficient")
        return self.name == POLICY_GRADIENT and not any(map(self.settings.get, terms))

    @property
    def compares_rows(self) -> bool:
        """Whether the loss compares the rows of a group, which one micro-batch holds then."""
        return self.name in _COMPARES_ROWS

    @property
    def reads_scores(self) -> bool:
        """Whether values are those behind a token, of a model that has read it, and not before."""
        return self.name in _READS_SCORES

    @property
    def top_k(self) -> int:
        """Most probable tokens of a teacher that the loss reads; 0: none."""
        return int(self.settings.get("top_k", TOP_K)) if self.name == "top_k_kl" else 0

    @property
    def fields(self) -> tuple[str, ...] | None:
        """Names of the rows' fields that the loss reads, sorted; None: only the user knows."""
        if self.name not in BUILT_IN:
            return None
        if self.name == POLICY_GRADIENT:
            return needed_fields(self.settings)
        if self.name == WITH_CROSS_ENTROPY:
            return tuple(sorted((*needed_fields(self.settings), GIVEN_WEIGHTS)))
        return _FIELDS.get(self.name, ())

    def search_path(self, setting: str = "actor.ppo.loss") -> str:
        """The folder that a process needs on `sys.path` to import the function; "" if none.

        It is found as the caller would import it, that is also beside a script, but not imported.

        Args: setting: that names it.
        Raises: ConfigError: the caller could not import it either.
        """
        return "" if self.name in BUILT_IN else folder_of_module(self.name, setting, _EXPECTED)

    def check(self) -> None:
        """Raises: ConfigError: settings of a built-in loss are impossible, or not together."""
        if self.name not in BUILT_IN:
            return
        for name, value in self.settings.items():
            allowed = _RANGES.get(name)
            numbers = int if name == "top_k" else int | float
            if allowed and not (isinstance(value, numbers) and value in allowed):
                raise ConfigError(
                    f"loss {self.name}, {name}: expected a number {allowed}, got {value!r}"
                )
            if value not in (choices := _CHOICES.get(name, (value,))):
                raise ConfigError(
                    f"loss {self.name}, {name}: expected one of {', '.join(choices)}, got {value!r}"
                )
            is_filter = isinstance(value, Mapping) and is_row_filter(value)
            if name == "row_filter" and value and not is_filter:
                raise ConfigError(f"loss {self.name}, {name}: expected {ROW_FILTER}, got {value!r}")
        of_margin = self.settings.get("of_margin", "sigmoid")
        if self.settings.get("label_smoothing") and of_margin != "sigmoid":
            raise ConfigError(
                f"loss {self.name}, label_smoothing: expected 0 with of_margin {of_margin} (only "
                f"sigmoid reads it), got {self.settings['label_smoothing']!r}"
            )

    def load(self) -> Loss:
        """The function with its settings, from `user_function`. Imports torch.

        Raises: ConfigError: there is no such function, or it has other settings.
        """
        self.check()
        path = BUILT_IN.get(self.name, self.name)
        return user_function(path, "tokens", self.settings, what="loss", expected=_EXPECTED)


def is_tried(config: ActorConfig) -> bool:
    """Whether a model's loss is tried when it starts: it trains, and its settings name its loss.

    A value head has none by default: that of policies says nothing of values.
    """
    names_none = config.head == ModelHead.value and config.ppo.loss == POLICY_GRADIENT
    return not (config.is_frozen or names_none)


def loss_of(ppo: PPOConfig) -> NamedLoss:
    """The loss that `actor.ppo` names; those of `POLICY_LOSSES` have their settings there."""
    if ppo.loss not in POLICY_LOSSES:
        return NamedLoss(ppo.loss, ppo.loss_settings)
    settings = {name: getattr(ppo, name) for name in _SWITCHES}
    return NamedLoss(ppo.loss, settings | {"kl_coefficient": ppo.loss_kl_coefficient})


def needed_fields(settings: Mapping[str, Any]) -> tuple[str, ...]:
    """Names of the fields that `policy_gradient` reads with these settings, sorted."""
    center = settings.get("clip_center", "proximal")
    bounds = (settings.get(name, math.inf) for name in ("max_second_moment", "max_behavior_kl"))
    needs = {
        "advantages": True,
        "behavior_logprobs": min(bounds) < math.inf
        or bool(settings.get("row_filter"))
        or center != "proximal"
        or settings.get("kl_coefficient", 0.0) > 0
        or settings.get("behavior_weight", "token") != "none",
        "proximal_logprobs": center == "proximal",
        "reference_logprobs": settings.get("kl_coefficient", 0.0) > 0,
        "staleness": center == "interpolated",
    }
    return tuple(name for name, is_needed in sorted(needs.items()) if is_needed)


CROSS_ENTROPY = NamedLoss("cross_entropy")
