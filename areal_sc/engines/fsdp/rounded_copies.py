"""Computing in bfloat16 on one rank, with float32 parameters.

FSDP does it layer by layer, for ranks that have parts of each. A rank that has all of them needs
none of that, and it costs as much of the host's time as the layers themselves: on an H100 the host
is what a model of half a billion parameters waits for.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn


class RoundedCopies:
    """Copies of a model's parameters, which take their place while it computes.

    Gradients of the copies are added, in float32, to those of their parameters: those of a layer
    together, as soon as its backward pass is done, by a few operations for all of them.

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
        group_of = {id(p): group for group, it in enumerate(layers) for p in it.parameters()}
        self._groups: list[list[int]] = [[] for _ in range(len(layers) + 1)]
        for number, parameter in enumerate(self._parameters):
            if parameter.requires_grad:
                self._groups[group_of.get(id(parameter), len(layers))].append(number)
        for group, layer in enumerate(layers):
            hook = functools.partial(self._before_layer, group)
            layer.register_forward_pre_hook(hook, with_kwargs=True)

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

    def take_gradients(self) -> None:
        """Adds what is left of the gradients after a backward pass: before the next one begins."""
        for group in range(len(self._groups)):
            self._take_group(group)

    def _take_group(self, group: int) -> None:
        found = list[tuple[nn.Parameter, torch.Tensor]]()
        for number in self._groups[group]:
            gradient, self._copies[number].grad = self._copies[number].grad, None
            if gradient is not None:
                found.append((self._parameters[number], gradient))
        first = [(parameter, gradient) for parameter, gradient in found if parameter.grad is None]
        others = [(total, gradient) for it, gradient in found if (total := it.grad) is not None]
        if first:
            fresh = [torch.empty_like(parameter.detach()) for parameter, _ in first]
            torch._foreach_copy_(fresh, [gradient for _, gradient in first])
            for (parameter, _), total in zip(first, fresh, strict=True):
                parameter.grad = total
        if others:
            _add_each([total for total, _ in others], [gradient for _, gradient in others])

    def _before_layer(
        self, group: int, _layer: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        arguments = self._rounded(arguments)
        named = {key: self._rounded(it) for key, it in named.items()}
        for value in (*arguments, *named.values()):
            if isinstance(value, torch.Tensor) and value.requires_grad and not value.is_leaf:
                # its gradient is the last that the layer's backward pass computes
                value.register_hook(  # type: ignore[no-untyped-call]
                    lambda _: self._take_group(group)
                )
                break
        return arguments, named

    def _rounded(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            is_other = value.is_floating_point() and value.dtype != self._dtype
            return value.to(self._dtype) if is_other else value
        if type(value) is tuple:
            return tuple(self._rounded(each) for each in value)
        return value


def _add_each(totals: list[torch.Tensor], gradients: list[torch.Tensor]) -> None:
    """Adds to each total its gradient. On a GPU all together, for which torch wants one type."""
    if totals[0].device.type != "cpu":
        converted = [torch.empty_like(total) for total in totals]
        torch._foreach_copy_(converted, gradients)
        gradients = converted
    torch._foreach_add_(totals, gradients)
