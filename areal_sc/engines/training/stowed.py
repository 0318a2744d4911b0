"""Moves tensors of a device to host memory and back, in place: whoever holds them holds them still.

Views and tied parameters share a storage. It is the storage that is emptied, so an optimizer's
tensors are still those of the model afterwards.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch


class Stowed:
    """Storages that were emptied, and what they held.

    Args:
        tensors: what is moved; those of the host are too, unless they are mapped from a file.
    """

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        storages = {}
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if storage.nbytes() and storage.resizable():
                storages[storage.data_ptr()] = storage
        self._held = [(storage, _copy_of(storage)) for storage in storages.values()]
        for storage, _ in self._held:
            storage.resize_(0)
        _free_cache(self._held)

    def bring_back(self) -> None:
        """The tensors hold again what they held."""
        for storage, copy in self._held:
            storage.resize_(copy.nbytes)
            _bytes_of(storage).copy_(copy, non_blocking=True)
        if any(storage.device.type == "cuda" for storage, _ in self._held):
            torch.cuda.synchronize()
        self._held.clear()


def _copy_of(storage: torch.UntypedStorage) -> torch.Tensor:
    is_cuda = storage.device.type == "cuda"
    copy = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=is_cuda)
    return copy.copy_(_bytes_of(storage))


def _bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    """[nbytes] uint8, in that memory."""
    empty = torch.empty(0, dtype=torch.uint8, device=storage.device)
    return empty.set_(storage, 0, (storage.nbytes(),), (1,))


def _free_cache(held: Iterable[tuple[torch.UntypedStorage, torch.Tensor]]) -> None:
    """Others get what torch's allocator would keep for itself."""
    if any(storage.device.type == "cuda" for storage, _ in held):
        torch.cuda.empty_cache()
