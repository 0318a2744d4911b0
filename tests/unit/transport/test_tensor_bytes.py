from __future__ import annotations

import struct

import pytest
import torch

from areal_sc.errors import MetadataError
from areal_sc.transport.tensor_bytes import (
    DTYPE_NAMES,
    bytes_of,
    copy_to_bytes,
    dtype_name,
    dtype_named,
    tensor_over,
    type_named,
)


@pytest.mark.parametrize("name", DTYPE_NAMES)
def test_every_dtype_survives_the_round_trip_bit_by_bit(name: str) -> None:
    dtype = dtype_named(name)
    assert dtype_name(dtype) == name
    values = torch.arange(-3, 8).to(torch.float32).to(dtype)
    buffer = bytearray(values.numel() * dtype.itemsize)
    copy_to_bytes(values, memoryview(buffer))
    arrived = torch.empty(values.numel(), dtype=dtype)
    bytes_of(arrived)[:] = buffer
    assert torch.equal(arrived.view(torch.uint8), values.view(torch.uint8))


def test_bytes_are_the_little_endian_values() -> None:
    buffer = bytearray(8)
    copy_to_bytes(torch.tensor([1.5, -2.0]), memoryview(buffer))
    assert struct.unpack("<2f", buffer) == (1.5, -2.0)
    copy_to_bytes(torch.tensor([1.0, -2.0], dtype=torch.bfloat16), memoryview(buffer)[:4])
    assert struct.unpack("<2H", buffer[:4]) == (0x3F80, 0xC000)


def test_strided_empty_and_gradient_tensors_can_be_copied() -> None:
    buffer = bytearray(12)
    strided = torch.arange(6, dtype=torch.float32).requires_grad_()[::2]
    copy_to_bytes(strided, memoryview(buffer))
    assert struct.unpack("<3f", buffer) == (0.0, 2.0, 4.0)
    copy_to_bytes(torch.empty(0, dtype=torch.bfloat16), memoryview(bytearray()))
    assert len(bytes_of(torch.empty(0, dtype=torch.bfloat16))) == 0


def test_unknown_dtypes_are_refused_by_name() -> None:
    with pytest.raises(MetadataError, match="complex64"):
        dtype_name(torch.complex64)
    with pytest.raises(MetadataError, match="float7"):
        dtype_named("float7")


@pytest.mark.parametrize(
    "name",
    [
        "uint8[999999999x999999999]",
        "float32[" + "x".join(["999999999"] * 8) + "]",
        "uint8[1000000000]",
        "uint8[" + "x".join(["2"] * 9) + "]",
        "uint8[4\u0663]",
        "x" * 1000,
    ],
)
def test_types_that_no_field_has_are_refused_in_a_sentence(name: str) -> None:
    with pytest.raises(MetadataError) as refusal:
        type_named(name)
    assert len(str(refusal.value)) < 300


def test_the_largest_type_can_be_of_no_values() -> None:
    largest = type_named("uint8[1048576x1048576]")
    assert largest.itemsize == 1 << 40
    assert tensor_over(bytearray(), largest, 0, 0).shape == (0, 1 << 20, 1 << 20)
