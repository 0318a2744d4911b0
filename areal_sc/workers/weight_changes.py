"""Weights of a version as what has changed since another one; to the bit.

At the learning rates of RL one to five of a hundred 16-bit values change in a step. Of each
parameter that a rank publishes a part of there is one string of bytes:

    uint64     number of values, number of values sent, CRC-32 of the part as it is to be
    values     those that are sent, as they lie in memory
    uint8      distance of each from the one before, if not all are sent
    zeros      up to a multiple of 8

A distance fits into one byte, as each 255th value is sent, changed or not. The strings of several
ranks may follow each other, as their parts do in a whole parameter.
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

MAX_SHARE: Final = 0.5
"""Changes that take more than this share of the weights' bytes are not sent. A third of 16-bit
values have changed then."""

_STEP: Final = 255
_AT_A_TIME: Final = 1024 * _STEP
"""Values that are compared, or changed, at one time: the caches hold what that needs."""

_HEADER: Final = np.dtype(np.uint64)
_HEADER_BYTES: Final = 3 * _HEADER.itemsize
_NUM_LOOKED_AT: Final = 1024
"""Values of a part by which it is guessed how many have changed: that costs nearly nothing."""

Values = npt.NDArray[np.unsignedinteger[Any]]
"""[numel] values of a parameter, of which only the bits count."""

Bytes = npt.NDArray[np.uint8]

logger = logging.getLogger(__name__)


def seal_changes(store: TensorStore, old: str, new: str, num_threads: int) -> str:
    """Seals what has changed between two shards of the same parameters.

    Args:
        num_threads: that compare, at the most.
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
    sent, gaps = [new[:0]], [np.empty(0, np.uint8)]
    last = 0
    for start in range(0, len(new), _AT_A_TIME):
        part = new[start : start + _AT_A_TIME]
        is_sent = old[start : start + _AT_A_TIME] != part
        is_sent[::_STEP] = True
        positions = np.flatnonzero(is_sent)
        sent.append(part[positions])
        gaps.append(np.diff(positions, prepend=last - start).astype(np.uint8))
        last = start + int(positions[-1])
    num_sent = sum(map(len, sent))
    if num_sent * (1 + new.itemsize) >= new.nbytes:
        sent, gaps, num_sent = [new], [], len(new)
    header = np.array([len(new), num_sent, zlib.crc32(new.data)], _HEADER)
    strings = [it.view(np.uint8) for it in (header, *sent, *gaps)]
    strings.append(np.zeros(-sum(map(len, strings)) % _HEADER.itemsize, np.uint8))
    return np.concatenate(strings)


def apply(encoded: Bytes, values: Values) -> None:
    """Changes the values of a whole parameter, [numel], in place.

    Raises: ProtocolError: these are no changes of such values, or of others. Some values may have
        changed then.
    """
    left = values
    try:
        while len(encoded):
            numel, num_sent, checksum = map(int, encoded[:_HEADER_BYTES].view(_HEADER))
            part, left = left[:numel], left[numel:]
            num_gaps = num_sent if num_sent != numel else 0
            end = _HEADER_BYTES + num_sent * values.itemsize
            sent = encoded[_HEADER_BYTES:end].view(values.dtype)
            if num_gaps:
                _put(part, sent, encoded[end : end + num_gaps])
            else:
                part[:] = sent
            if len(part) != numel or zlib.crc32(part.data) != checksum:
                raise ProtocolError("changes are of other weights than these: checksums differ")
            end += num_gaps
            encoded = encoded[end + -end % _HEADER.itemsize :]
    except (ValueError, IndexError) as error:
        raise ProtocolError(f"changes of weights are malformed: {error}") from error
    if len(left):
        raise ProtocolError(
            f"changes of weights say nothing of {len(left)} of {len(values)} values"
        )


def _put(values: Values, sent: Values, gaps: Bytes) -> None:
    last = 0
    for start in range(0, len(gaps), _AT_A_TIME):
        positions = np.cumsum(gaps[start : start + _AT_A_TIME], dtype=np.int64)
        positions += last
        values[positions] = sent[start : start + _AT_A_TIME]
        last = int(positions[-1])


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
    Raises: ProtocolError: as `apply`; or they are changes of other parameters.
    """
    if base.keys() != changes.keys():
        raise ProtocolError(
            f"changes are of {len(changes)} parameters, and there are {len(base)}, or others"
        )

    def fill(name: str) -> None:
        before = values_of(base[name])
        values = np.frombuffer(changed[name], before.dtype)
        values[:] = before
        apply(changes[name].view(torch.uint8).numpy(), values)

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
        guessed += float(is_changed.mean()) * len(new) * (1 + new.itemsize)
    return guessed
