"""Loading a model over several ranks: rank 0 alone reads its files, some tensors at a time.

    rank 0     opens the weights, and computes with them what the ranks are compared with
    all ranks  build the model without values, and take memory for their parts
    rank 0     reads one tensor after the other; every rank gets its part of it

What keeps rank 0 from any of this is raised by all ranks: others would wait for one that is gone.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from transformers.conversion_mapping import get_model_conversion_mapping

from areal_sc.config.schema import ActorConfig
from areal_sc.engines.training.causal_lm import build_without_parameters, loading_error
from areal_sc.engines.training.parts import Parts
from areal_sc.engines.training.process_group import ProcessGroup
from areal_sc.engines.training.stored_weights import ModelWeights, open_weights
from areal_sc.engines.training.whole_tensors import receive_part
from areal_sc.errors import ArealError, ModelError

T = TypeVar("T")


class SharedWeights:
    """The weights of `config.path`, of which every rank gets its parts.

    All ranks make the same calls in the same order.
    """

    def __init__(self, config: ActorConfig, world: ProcessGroup) -> None:
        self._config = config
        self._world = world
        self._weights: ModelWeights | None = None
        self._conversions: Sequence[int] | None = None
        self._error: ArealError | None = None

    def open(self, try_model: Callable[[ModelWeights], T]) -> T:
        """Opens the weights.

        Args:
            try_model: what rank 0 finds out with them; it keeps no more of the model at a time
                than `stream_layers` does, and some hundred rows of logits.
        Returns: what `try_model` gave, on every rank.
        Raises: ModelError, ConfigError: on every rank.
        """
        found: Any = None
        if self._world.rank == 0:
            try:
                self._weights = open_weights(self._config)
                found = try_model(self._weights), self._weights.conversions
            except Exception as failure:  # the other ranks wait
                self._error = loading_error(failure, self._config)
            gc.collect()  # modules refer to each other, and would keep their values
        self.check()
        given, self._conversions = self._world.broadcast(found)
        result: T = given
        return result

    def build(self) -> Any:
        """The Hugging Face model, its parameters on the meta device. Exports have its files' form.

        No exchange.
        """
        causal_lm = build_without_parameters(Path(self._config.path), self._config.head)
        if self._conversions is not None:
            known = get_model_conversion_mapping(causal_lm)
            causal_lm._weight_conversions = [known[index] for index in self._conversions]
        return causal_lm

    def receive(self, name: str, parts: Parts, target: torch.Tensor | None = None) -> torch.Tensor:
        """This rank's box of a parameter; `check` tells if it was not read.

        Args:
            target: gets the values; None: a new tensor in float32, made when rank 0 has read.
        """
        source = self._read(name)
        if target is None:
            target = torch.empty(parts.box(name).sizes, device=self._world.device)
        receive_part(target, source, name, parts, self._world)
        return target

    def fill_buffers(self, causal_lm: Any) -> None:
        """Gives the model the buffers that are stored; `check` as after `receive`."""
        for name, values in causal_lm.named_buffers():
            received: torch.Tensor | None = self._world.broadcast(self._read(name))
            if received is not None:  # others the model makes
                values.copy_(received)

    def check(self) -> None:
        """Raises: ModelError, ConfigError: on every rank: rank 0 could not read something."""
        message = self._world.broadcast(str(self._error) if self._error else None)
        if message is not None:
            raise self._error or ModelError(message)

    def _read(self, name: str) -> torch.Tensor | None:
        if self._weights is not None and self._error is None:
            try:
                return self._weights.read([name]).get(name)
            except Exception as failure:  # the other ranks wait for all tensors
                self._error = loading_error(failure, self._config)
        return None
