"""The field of rows that holds which experts a model's routers chose, from `config.json` alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from areal_sc.config.schema import RolloutConfig
from areal_sc.errors import ModelError
from areal_sc.hub import local_model
from areal_sc.sizing.model_folder import read_model_config
from areal_sc.sizing.model_formula import first_int
from areal_sc.token_fields import ROUTED_EXPERTS, TensorMetadata

_EXPERTS: Final = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
_PER_TOKEN: Final = ("num_experts_per_tok", "num_experts_per_token", "top_k_experts", "moe_k")
_BYTE_VALUES: Final = 256


@dataclass(frozen=True)
class RoutedExperts:
    """The experts of a model, as far as a token's routes tell of them.

    Attributes:
        num_layers: all decoder layers, also those without experts.
        num_experts: of a layer.
        per_token: that a token goes through in a layer, at least 2.
    """

    num_layers: int
    num_experts: int
    per_token: int

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> RoutedExperts:
        """Raises: ModelError: the decoder's part of a `config.json` tells of no choice of experts,
        or of one expert a token."""
        found = cls(
            first_int(config, "num_hidden_layers") or 0,
            first_int(config, *_EXPERTS) or 0,
            first_int(config, *_PER_TOKEN) or 0,
        )
        if found.num_layers < 1 or not 1 < found.per_token < found.num_experts:
            raise ModelError(
                f"actor.routing_replay: expected a model with experts, at least 2 and not all of "
                f"them a token, got {config.get('model_type')} with {found.num_layers} layers of "
                f"{found.num_experts} experts, {found.per_token} a token"
            )
        return found

    @property
    def field(self) -> TensorMetadata:
        """Of a token: [layers, experts of the token], in the smallest type.

        A layer without experts has zeros, and so has a token whose routes are not known: no
        router chooses an expert twice.
        """
        dtype = "uint8" if self.num_experts <= _BYTE_VALUES else "int16"
        return TensorMetadata((self.num_layers, self.per_token), dtype)


def routes_field(config: RolloutConfig) -> dict[str, TensorMetadata]:
    """The field that rollout workers add to all rows; none without `routing_replay`.

    Raises: ModelError: the model has no experts.
    """
    if not config.routing_replay:
        return {}
    of_model = read_model_config(local_model(config.path)) or {}
    return {ROUTED_EXPERTS: RoutedExperts.of(of_model).field}
