"""Weights of a version as what has changed since another one; to the bit.

At the learning rates of RL one to five of a hundred 16-bit values change in a step. What a rank
publishes of a parameter is cut into blocks of 65,536 values, of which the last one may be shorter.
For each block there is a string of bytes:

    uint64     number of values, number of values sent, checksum of the block as it is to be
    values     those that are sent, as they lie in memory
    uint16     their places, if not all are sent
    zeros      up to a multiple of 8

The strings follow each other, also those of several ranks, as their values do in a whole parameter.
"""

from __future__ import annotations

import logging
import zlib
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from areal_sc.errors import ProtocolError, StoreFull
from areal_sc.transport.shards.store import TensorStore

MAX_SHARE: Final = 0.25
"""Changes that take more than this share of the weights' bytes are not sent. An eighth of 16-bit
values have changed then, and memory copies all of them in the time in which they are compared."""

_BLOCK: Final = 1 << 16
"""Values that are compared, or changed, at one time: the caches hold what that needs."""

_WORD: Final = np.dtype(np.uint64)
_PLACE: Final = np.dtype(np.uint16)
_HEADER_BYTES: Final = 3 * _WORD.itemsize
_FACTORS: Final = np.random.PCG64(0).random_raw(_BLOCK) | np.uint64(1)
"""They are the same in all releases of numpy."""

_NUM_LOOKED_AT: Final = 1024
"""Values of a part by which it is guessed how many have changed: that costs nearly nothing."""

Values = npt.NDArray[np.unsignedinteger[Any]]
"""[numel] values of a parameter, of which only the bits count."""

Bytes = npt.NDArray[np.uint8]

logger = logging.getLogger(__name__)


def seal_changes(store: TensorStore, old: str, new: str, num_threads: int) -> str:
    """Seals what has changed between two shards of the same parameters.

    Args:
        num_threads: most threads that compare.
    Returns: the id of the new shard; "": there is too much of it, or no room.
    """
    before, after = store.tensors(old), store.tensors(new)
    pairs = [(values_of(before[name]), values_of(tensor)) for name, tensor in after.items()]
    num_bytes = sum(values.nbytes for _, values in pairs)
    if _guessed_bytes(pairs) > MAX_SHARE * num_bytes:
        return ""
    with ThreadPoolExecutor(num_threads) as threads:
        encoded = list(threads.map(lambda pair: encode(*pair), pairs))
    if sum(map(len, encoded)) > MAX_SHARE * num_bytes:
        return ""
    fields = {name: torch.from_numpy(it) for name, it in zip(after, encoded, strict=True)}
    try:
        return store.put(fields, {name: [len(field)] for name, field in fields.items()})
    except StoreFull as error:
        logger.warning("weights are published without their changes: %s", error)
        return ""


def encode(old: Values, new: Values) -> Bytes:
    """What makes the new values of the old ones, both [numel]."""
    strings = [np.empty(0, np.uint8)]
    for start in range(0, len(new), _BLOCK):
        block = new[start : start + _BLOCK]
        places = np.flatnonzero(old[start : start + _BLOCK] != block).astype(_PLACE)
        sent = block[places]
        if sent.nbytes + places.nbytes >= block.nbytes:
            sent, places = block, places[:0]
        header = np.array([len(block), len(sent), _checksum(block)], _WORD)
        zeros = np.zeros(-(sent.nbytes + places.nbytes) % _WORD.itemsize, np.uint8)
        strings += [it.view(np.uint8) for it in (header, sent, places, zeros)]
    return np.concatenate(strings)


def apply(encoded: Bytes, base: Values, values: Values) -> None:
    """Fills memory with the values of a base, changed; both are of a whole parameter, [numel].

    Raises: ProtocolError: these are no changes of such values, or of others. Some values may be
        there then.
    """
    try:
        while len(encoded):
            numel, num_sent, checksum = map(int, encoded[:_HEADER_BYTES].view(_WORD))
            block, old = values[:numel], base[:numel]
            end = _HEADER_BYTES + num_sent * values.itemsize
            sent = encoded[_HEADER_BYTES:end].view(values.dtype)
            if num_sent == numel:
                block[:] = sent
            else:
                block[:] = old
                places = encoded[end : end + num_sent * _PLACE.itemsize].view(_PLACE)
                block[places] = sent
                end += places.nbytes
            if len(block) != numel or _checksum(block) != checksum:
                raise ProtocolError("changes are of other weights than these: checksums differ")
            values, base = values[numel:], base[numel:]
            encoded = encoded[end + -end % _WORD.itemsize :]
    except (ValueError, IndexError) as error:
        raise ProtocolError(f"changes of weights are malformed: {error}") from error
    if len(values):
        raise ProtocolError(f"changes of weights say nothing of the last {len(values)} values")


def _checksum(block: Values) -> int:
    """Takes two thirds of the time of a CRC-32.

    Each word has a random odd factor. Its upper half goes into the lower one first: a difference in
    the top bits alone would vanish in the sum.
    """
    num_values = len(block) - len(block) % (_WORD.itemsize // block.itemsize)
    words, rest = block[:num_values].view(_WORD), block[num_values:]
    mixed = words ^ (words >> np.uint64(32))
    return int(np.dot(mixed, _FACTORS[: len(words)])) ^ zlib.crc32(rest.tobytes())


def apply_all(
    base: Mapping[str, torch.Tensor],
    changes: Mapping[str, torch.Tensor],
    changed: Mapping[str, memoryview],
    num_threads: int,
) -> None:
    """Fills memory with the changed values of all parameters.

    Args:
        base: of each parameter, [numel].
        changed: where each goes, of its size.
    Raises: ProtocolError: see `apply`; or they are changes of other parameters.
    """
    if base.keys() != changes.keys():
        raise ProtocolError(
            f"changes are of {len(changes)} parameters, and there are {len(base)}, or others"
        )

    def fill(name: str) -> None:
        before = values_of(base[name])
        values = np.frombuffer(changed[name], before.dtype)
        apply(changes[name].view(torch.uint8).numpy(), before, values)

    with ThreadPoolExecutor(num_threads) as threads:
        for _ in threads.map(fill, base):
            pass


def values_of(tensor: torch.Tensor) -> Values:
    """The bits of a tensor's values, [numel], where they lie."""
    return tensor.view(torch.uint8).numpy().view(f"u{tensor.itemsize}")


def _guessed_bytes(pairs: Iterable[tuple[Values, Values]]) -> float:
    guessed = 0.0
    for old, new in (pair for pair in pairs if len(pair[1])):
        step = max(1, len(new) // _NUM_LOOKED_AT) | 1  # odd, as rows are of even lengths
        is_changed = old[::step] != new[::step]
        guessed += float(is_changed.mean()) * len(new) * (new.itemsize + _PLACE.itemsize)
    return guessed
