"""Computing in bfloat16 on one rank, with float32 parameters.

FSDP does it layer by layer, for ranks that have parts of each. A rank that has all of them needs
none of that, and it costs as much of the host's time as the layers themselves: on an H100 the host
is what a model of half a billion parameters waits for.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn


class RoundedCopies:
    """Copies of a model's parameters, which take their place while it computes.

    Each gradient of a copy is added, in float32, to that of its parameter at once.

    Args:
        model: its parameters have their memory, but need no values yet. Those that are float32 get
            copies.
        layers: its decoder layers; fractions among their inputs are rounded, too.
        others: parameters that stay as they are.
        dtype: of the copies.
    """

    def __init__(
        self,
        model: nn.Module,
        layers: Sequence[nn.Module],
        others: Collection[nn.Parameter],
        dtype: torch.dtype,
    ) -> None:
        self._dtype = dtype
        kept = {id(parameter) for parameter in others}
        self._parameters = [p for p in model.parameters() if id(p) not in kept and p.dtype != dtype]
        self._copies = [
            nn.Parameter(torch.empty_like(p, dtype=dtype), requires_grad=p.requires_grad)
            for p in self._parameters
        ]
        number_of = {id(parameter): number for number, parameter in enumerate(self._parameters)}
        self._places = [
            (module, name, number_of[id(parameter)])
            for module in model.modules()
            for name, parameter in module._parameters.items()
            if parameter is not None and id(parameter) in number_of
        ]
        for number, copy in enumerate(self._copies):
            if copy.requires_grad:
                taker = self._taker(number)
                copy.register_post_accumulate_grad_hook(taker)  # type: ignore[no-untyped-call]
        for layer in layers:
            layer.register_forward_pre_hook(self._round_inputs, with_kwargs=True)

    @property
    def tensors(self) -> Sequence[torch.Tensor]:
        """The copies."""
        return self._copies

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """The model has copies of its parameters as they are now, and these again at the end."""
        if self._copies:
            with torch.no_grad():
                torch._foreach_copy_([*self._copies], [*self._parameters])
        self._put(self._copies)
        try:
            yield
        finally:
            self._put(self._parameters)

    def _put(self, chosen: Sequence[nn.Parameter]) -> None:
        for module, name, number in self._places:
            module._parameters[name] = chosen[number]

    def _taker(self, number: int) -> Any:
        def take_gradient(copy: torch.Tensor) -> None:
            parameter, gradient = self._parameters[number], copy.grad
            copy.grad = None
            if gradient is None:
                return
            if parameter.grad is None:
                parameter.grad = gradient.to(parameter.dtype)
            else:
                parameter.grad.add_(gradient)

        return take_gradient

    def _round_inputs(
        self, _layer: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return self._rounded(arguments), {key: self._rounded(it) for key, it in named.items()}

    def _rounded(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            is_other = value.is_floating_point() and value.dtype != self._dtype
            return value.to(self._dtype) if is_other else value
        if type(value) is tuple:
            return tuple(self._rounded(each) for each in value)
        return value
