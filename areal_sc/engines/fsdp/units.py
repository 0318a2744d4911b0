"""What a model must be like to be cut into units of FSDP: each decoder layer, and the rest."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Sequence

from torch import nn

from areal_sc.errors import ModelError

logger = logging.getLogger(__name__)

_OUTSIDE = -1


def check_units(causal_lm: nn.Module, layers: Sequence[nn.Module]) -> None:
    """Warns of a model that would be a single unit.

    Args:
        layers: its decoder layers.
    Raises: ModelError: a parameter is in several units, of which each would train its own.
    """
    name = type(causal_lm).__name__
    if not layers:
        logger.warning(
            "model=%s does not name its decoder layers: while it computes, each rank has all "
            "parameters and gradients, not those of one layer",
            name,
        )
    layers_of = defaultdict[nn.Module, set[int]](set)
    for number, layer in enumerate(layers):
        for module in layer.modules():
            layers_of[module].add(number)
    units_of = defaultdict[nn.Parameter, set[int]](set)
    for module in causal_lm.modules():
        for parameter in module.parameters(recurse=False):
            units_of[parameter] |= layers_of.get(module, {_OUTSIDE})
    named = list(causal_lm.named_parameters(remove_duplicate=False))
    for parameter, units in units_of.items():
        if len(units) > 1:
            names = [path for path, found in named if found is parameter]
            raise ModelError(
                f"{name} has one parameter in several places, {' and '.join(names)}: FSDP trains "
                "what is in different layers apart; set actor.parallel.data=1, "
                "actor.parallel.sequence=1, actor.dtype=float32 and actor.cpu_offload=false"
            )
