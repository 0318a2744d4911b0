"""A model whose layers have values only while they compute: it computes all, and holds little.

Several passes of it that run together read a layer once: each waits before a layer until all have
come to it, or to another one, or have ended. One computes at a time.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextvars import ContextVar
from typing import Any, TypeVar

import torch
from torch import nn

T = TypeVar("T")

Read = Callable[[Iterable[str]], Mapping[str, torch.Tensor]]
"""Parameters and buffers by name; buffers that are not stored are left out."""


class SharedPasses:
    """Passes without gradients that read layers together, each of a streamed model of its own.

    Layers whose values have the same names are read once for all of them, and have one memory.
    """

    def __init__(self) -> None:
        self._turn = threading.Condition()  # who has it computes
        self._threads = list[threading.Thread]()
        self._num_left = 0
        self._waiting = dict[int, tuple[str, ...]]()  # by thread, the names of a layer's values
        self._values: Mapping[str, torch.Tensor] = {}
        self._error: Exception | None = None

    def add(self, compute: Callable[[], T]) -> Future[T]:
        """What the pass will have given, or raised, once they have run."""
        future = Future[T]()

        def run() -> None:
            with self._turn, torch.no_grad():
                _passes.set(self)  # in this thread
                try:
                    future.set_result(compute())
                except BaseException as error:
                    future.set_exception(error)
                finally:
                    self._num_left -= 1
                    self._go_on()

        self._threads.append(threading.Thread(target=run, name="a model's pass", daemon=True))
        return future

    def run(self) -> None:
        """Runs those that were added. Once."""
        self._num_left = len(self._threads)
        for thread in self._threads:
            thread.start()
        for thread in self._threads:
            thread.join()

    def values(self, names: tuple[str, ...], read: Read) -> Mapping[str, torch.Tensor]:
        """Those of a layer, when its turn has come. Raises: what `read` raises, in all passes."""
        thread = threading.get_ident()
        self._waiting[thread] = names
        self._go_on()
        self._turn.wait_for(lambda: thread not in self._waiting)
        if not self._values and self._error is None:
            try:
                self._values = read(names)
            except Exception as error:
                self._error = error
        if self._error is not None:
            raise self._error
        return self._values

    def _go_on(self) -> None:
        """Lets those go on that wait for the same layer as the first one, once all wait."""
        if self._waiting and len(self._waiting) == self._num_left:
            layer, self._values = next(iter(self._waiting.values())), {}
            self._waiting = {it: names for it, names in self._waiting.items() if names != layer}
            self._turn.notify_all()


_passes: ContextVar[SharedPasses | None] = ContextVar("_passes", default=None)


def text_part(causal_lm: Any) -> Any:
    """The decoder of a model that has a vision tower, too; another model itself."""
    has_tower = hasattr(getattr(causal_lm, "config", None), "vision_config")
    return causal_lm.get_decoder() if has_tower else causal_lm


def decoder_layers(causal_lm: nn.Module) -> list[nn.Module]:
    """The repeated blocks in forward order, without blocks inside of blocks.

    Those of a vision tower are none: where no row has a picture, they do not compute.
    """
    whole = text_part(causal_lm)
    names = set(getattr(whole, "_no_split_modules", None) or ())
    blocks = [module for module in whole.modules() if type(module).__name__ in names]
    inner = {id(child) for block in blocks for child in block.modules() if child is not block}
    return [block for block in blocks if id(block) not in inner]


def stream_layers(causal_lm: nn.Module, read: Read, num_ranks: int) -> None:
    """Gives a model its values, those of most layers for the time that they compute.

    What is outside of layers, and what is in several of them, keeps its values. So do the first
    layers: as many as make up the share of one of `num_ranks`, less one, which leaves room for the
    layer that computes. One rank alone keeps all.

    Args:
        causal_lm: its parameters have no values, and are on the meta device; others stay as
            they are.
    """
    layers = decoder_layers(causal_lm)
    num_kept = len(layers) if num_ranks == 1 else max(0, len(layers) // num_ranks - 1)
    names_of = {id(module): name for name, module in causal_lm.named_modules()}
    prefixes = [f"{names_of[id(layer)]}." for layer in layers]
    owners = defaultdict[int, set[int | None]](set)
    aliases = defaultdict[int, list[str]](list)
    for name, parameter in causal_lm.named_parameters(remove_duplicate=False):
        owners[id(parameter)].add(
            next((n for n, p in enumerate(prefixes) if name.startswith(p)), None)
        )
        aliases[id(parameter)].append(name)
    streamed = defaultdict[int, list[str]](list)
    for key, names in aliases.items():
        layer = owners[key].pop() if len(owners[key]) == 1 else None
        if layer is not None and layer >= num_kept:
            streamed[layer] += names
        elif causal_lm.get_parameter(names[0]).is_meta:
            _put(causal_lm, read(names))
    _put(causal_lm, read([name for name, _ in causal_lm.named_buffers(remove_duplicate=False)]))
    for index, names in streamed.items():
        _fill_when_called(causal_lm, layers[index], names, read)


def _fill_when_called(
    causal_lm: nn.Module, layer: nn.Module, names: Sequence[str], read: Read
) -> None:
    unfilled = {name: causal_lm.get_parameter(name) for name in names}

    def fill(*_: Any) -> None:
        shared = _passes.get()
        _put(causal_lm, read(names) if shared is None else shared.values(tuple(names), read))

    def drop(*_: Any) -> None:
        _put(causal_lm, unfilled)

    layer.register_forward_pre_hook(fill)
    layer.register_forward_hook(drop, always_call=True)


def _put(causal_lm: nn.Module, named: Mapping[str, torch.Tensor]) -> None:
    for name, values in named.items():
        path, _, own_name = name.rpartition(".")
        module = causal_lm.get_submodule(path)
        if own_name in module._parameters and not isinstance(values, nn.Parameter):
            values = nn.Parameter(values, requires_grad=False)
        setattr(module, own_name, values)
