"""The one place where tensors become bytes and bytes become tensors.

Values travel as they lie in memory (little-endian on every supported machine) beside the name of
their dtype; numpy, which knows neither bfloat16 nor float8, only ever sees bytes.
"""

from __future__ import annotations

import math
import re
from functools import lru_cache
from typing import Any, Final, NamedTuple

import numpy as np
import torch

from areal_sc.errors import MetadataError
from areal_sc.token_fields import MAX_TOKEN_BYTES

_DTYPES: Final = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.bool,
        torch.uint8,
        torch.int8,
        torch.int16,
        torch.int32,
        torch.int64,
        torch.float16,
        torch.bfloat16,
        torch.float32,
        torch.float64,
        torch.float8_e4m3fn,
        torch.float8_e5m2,
        torch.float8_e4m3fnuz,
        torch.float8_e5m2fnuz,
    )
}
DTYPE_NAMES: Final = tuple(_DTYPES)


def dtype_name(dtype: torch.dtype) -> str:
    """The name that a dtype has on the wire.

    Raises: MetadataError: values of this dtype are not sent.
    """
    name = str(dtype).removeprefix("torch.")
    dtype_named(name)
    return name


def dtype_named(name: str) -> torch.dtype:
    """Inverse of `dtype_name`.

    Raises: MetadataError: no dtype on the wire has this name.
    """
    if name not in _DTYPES:
        raise MetadataError(
            f"tensors on the wire have one of the dtypes {', '.join(DTYPE_NAMES)}, not {name[:60]}"
        )
    return _DTYPES[name]


class ValueType(NamedTuple):
    """What a field has at each of its places: a tensor of this shape, () of one number."""

    dtype: torch.dtype
    shape: tuple[int, ...] = ()

    @property
    def itemsize(self) -> int:
        """Bytes of all its numbers."""
        return self.dtype.itemsize * math.prod(self.shape)


_TYPE: Final = re.compile(r"(\w+?)(?:\[([1-9]\d{0,8}(?:x[1-9]\d{0,8}){0,7})\])?", re.ASCII)


@lru_cache(maxsize=1024)  # a batch names few
def type_named(name: str) -> ValueType:
    """The type of this name: that of a dtype, or with a shape behind it, `uint8[48x8]`.

    Raises: MetadataError: there is none, or its values are larger than any that is sent.
    """
    found = _TYPE.fullmatch(name)
    dtype = dtype_named(found[1] if found else name)
    named = ValueType(dtype, tuple(map(int, found[2].split("x"))) if found and found[2] else ())
    if named.itemsize > MAX_TOKEN_BYTES:
        raise MetadataError(f"values of type {name[:60]} take more than {MAX_TOKEN_BYTES} bytes")
    return named


def type_name(values: torch.Tensor) -> str:
    """The name of what stands at each place of a tensor [T, *shape]; inverse of `type_named`."""
    shape = "x".join(map(str, values.shape[1:]))
    return f"{dtype_name(values.dtype)}[{shape}]" if shape else dtype_name(values.dtype)


def tensor_over(memory: Any, of: ValueType, num_bytes: int, start: int) -> torch.Tensor:
    """The values in a buffer, which begin at byte `start`, [T, *shape]; nothing is copied."""
    if not num_bytes:
        return torch.empty(0, *of.shape, dtype=of.dtype)
    count = num_bytes // of.dtype.itemsize
    values = torch.frombuffer(memory, dtype=of.dtype, count=count, offset=start)
    return values.view(-1, *of.shape) if of.shape else values


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous 1-D CPU tensor, shared and writable."""
    assert tensor.dim() == 1
    assert tensor.is_contiguous()
    return tensor.view(torch.uint8).numpy().data


def copy_to_bytes(tensor: torch.Tensor, buffer: memoryview) -> None:
    """Copies the values of a tensor, on whatever device, into a buffer of their size."""
    if not buffer.nbytes:
        return
    source = tensor.detach().contiguous().flatten().view(torch.uint8)
    if source.device.type == "cpu":
        # beyond some 100 MB twice as fast as torch's copy; both leave the GIL to others
        np.frombuffer(buffer, dtype=np.uint8)[:] = source.numpy()
    else:
        torch.frombuffer(buffer, dtype=torch.uint8).copy_(source)
