"""Weights as what has changed in them: the same bits come out, or an error."""

from __future__ import annotations

import random
import struct
from collections.abc import Sequence

import numpy as np
import pytest
import torch

from areal_sc.errors import ProtocolError
from areal_sc.transport.shards.store import TensorStore
from areal_sc.weights.changes import apply, apply_all, encode, seal_changes, values_of

NUM_VALUES = 600_000


def pair(share: float, dtype: str = "u2", numel: int = NUM_VALUES) -> tuple[np.ndarray, np.ndarray]:
    """Any bits, NaN and both zeros of floats among them, and the same with a share changed."""
    rng = np.random.default_rng(7)
    old = rng.integers(0, np.iinfo(dtype).max, numel, dtype)
    new = old.copy()
    changed = rng.choice(numel, int(share * numel), replace=False)
    new[changed] ^= rng.integers(1, 200, len(changed), dtype)
    return old, new


def decoded(encoded: bytes, old: np.ndarray) -> list[int]:
    """Value by value, as the format's description says."""
    values, at, first = old.tolist(), 0, 0
    while at < len(encoded):
        numel, num_sent, _ = struct.unpack_from("<3Q", encoded, at)
        letter = {2: "H", 4: "I"}[old.itemsize]
        sent = struct.unpack_from(f"<{num_sent}{letter}", encoded, at + 24)
        end = at + 24 + num_sent * old.itemsize
        places: Sequence[int] = range(numel)
        if num_sent != numel:
            places = struct.unpack_from(f"<{num_sent}H", encoded, end)
            end += 2 * num_sent
        for value, place in zip(sent, places, strict=True):
            values[first + place] = value
        at, first = -(-end // 8) * 8, first + numel
    assert first == len(values)
    return values


@pytest.mark.parametrize("dtype", ["u2", "u4"])
@pytest.mark.parametrize("share", [0, 0.0001, 0.01, 0.05, 0.3, 0.65, 0.9, 1])
def test_the_new_bits_come_out(share: float, dtype: str) -> None:
    old, new = pair(share, dtype)
    encoded = encode(old, new)
    assert decoded(encoded.tobytes(), old) == new.tolist()
    values = np.empty_like(old)
    apply(encoded, old, values)
    assert np.array_equal(values, new)
    assert len(encoded) <= 1.001 * new.nbytes, "never much more than the values themselves"


@pytest.mark.parametrize("numel", [0, 1, 2, 255, 256, 257, 511])
def test_parts_of_all_sizes_follow_each_other(numel: int) -> None:
    parts = [pair(0.1, numel=size) for size in (numel, 1000, numel, 3)]
    encoded = np.concatenate([encode(*part) for part in parts])
    old = np.concatenate([old for old, _ in parts])
    values = np.empty_like(old)
    apply(encoded, old, values)
    assert np.array_equal(values, np.concatenate([new for _, new in parts]))


def test_of_5_percent_less_than_15_percent_are_sent() -> None:
    for share, limit in ((0.01, 0.021), (0.05, 0.11)):
        old, new = pair(share)
        assert len(encode(old, new)) < limit * new.nbytes


def test_other_weights_are_noticed() -> None:
    old, new = pair(0.05)
    encoded, other = encode(old, new), old.copy()
    other[np.flatnonzero(old == new)[1]] ^= 1
    with pytest.raises(ProtocolError, match="other weights"):
        apply(encoded, other, np.empty_like(old))
    for places in ((3, 7), (3, 7, 11, 15)):  # highest bits, which no product carries on
        signs = old.copy()
        signs[list(places)] ^= 1 << 15
        with pytest.raises(ProtocolError, match="other weights"):
            apply(encoded, signs, np.empty_like(old))
    with pytest.raises(ProtocolError):
        apply(encoded, old[:-1], np.empty_like(old[:-1]))
    longer = np.append(old, old[:1])
    with pytest.raises(ProtocolError, match="say nothing of the last 1 "):
        apply(encoded, longer, np.empty_like(longer))


def test_whatever_bytes_come_they_make_the_new_bits_or_an_error() -> None:
    old, new = pair(0.05, numel=600)
    sent = encode(old, new).tobytes()
    draw = random.Random(3)
    num_refused = 0
    for _ in range(400):
        damaged = bytearray(sent[: draw.randrange(len(sent) + 1)])
        if damaged and draw.random() < 0.8:
            damaged[draw.randrange(len(damaged))] ^= 1 << draw.randrange(8)
        values = np.empty_like(old)
        try:
            apply(np.frombuffer(bytes(damaged), np.uint8), old, values)
        except ProtocolError:
            num_refused += 1
        else:  # of padding, or none
            assert np.array_equal(values, new)
    assert num_refused > 300


def store() -> TensorStore:
    return TensorStore("train/0", "life", max_bytes=1 << 24)


def sealed(of: TensorStore, values: np.ndarray) -> str:
    tensor = torch.from_numpy(values.view(np.int16)).view(torch.bfloat16)
    return of.put({"w": tensor, "few": tensor[:7]}, {"w": [len(values)], "few": [7]})


def test_sealed_weights_are_changed_as_a_whole() -> None:
    old, new = pair(0.05)
    its = store()
    before, after = sealed(its, old), sealed(its, new)
    changes = its.tensors(seal_changes(its, before, after, 2))
    base, expected = its.tensors(before), its.tensors(after)
    memory = {name: memoryview(bytearray(tensor.nbytes)) for name, tensor in base.items()}
    apply_all(base, changes, memory, 2)
    for name, tensor in expected.items():
        assert memory[name] == values_of(tensor).tobytes()
    with pytest.raises(ProtocolError, match="2 parameters"):
        apply_all({"w": base["w"]}, changes, memory, 2)


@pytest.mark.parametrize("share", [0.2, 0.9, 1])
def test_where_more_than_an_eighth_has_changed_there_are_no_changes(share: float) -> None:
    old, new = pair(share)
    its = store()
    assert seal_changes(its, sealed(its, old), sealed(its, new), 1) == ""


def test_a_full_store_gives_no_changes() -> None:
    old, new = pair(0.05)
    its = store()
    before, after = sealed(its, old), sealed(its, new)
    its.max_bytes = its.num_bytes
    assert seal_changes(its, before, after, 1) == ""
