"""The one place where tensors become bytes and bytes become tensors.

Values travel as they lie in memory (little-endian on every supported machine) beside the name of
their dtype; numpy, which knows neither bfloat16 nor float8, only ever sees bytes.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import torch

from areal_sc.errors import MetadataError

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
        raise MetadataError(f"tensors on the wire have one of the dtypes {DTYPE_NAMES}, not {name}")
    return _DTYPES[name]


def tensor_over(memory: Any, dtype: torch.dtype, num_bytes: int, start: int) -> torch.Tensor:
    """The values in a buffer, which begin at byte `start`, [numel]; nothing is copied."""
    if not num_bytes:
        return torch.empty(0, dtype=dtype)
    count = num_bytes // dtype.itemsize
    return torch.frombuffer(memory, dtype=dtype, count=count, offset=start)


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous 1-D CPU tensor, shared and writable."""
    assert tensor.dim() == 1
    assert tensor.is_contiguous()
    return tensor.view(torch.uint8).numpy().data


def copy_to_bytes(tensor: torch.Tensor, buffer: memoryview) -> None:
    """Copies the values of a 1-D tensor, on whatever device, into a buffer of their size."""
    if not buffer.nbytes:
        return
    source = tensor.detach().contiguous().view(torch.uint8)
    if source.device.type == "cpu":
        # beyond some 100 MB twice as fast as torch's copy; both leave the GIL to others
        np.frombuffer(buffer, dtype=np.uint8)[:] = source.numpy()
    else:
        torch.frombuffer(buffer, dtype=torch.uint8).copy_(source)
