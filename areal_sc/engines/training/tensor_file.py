"""Safetensors files written in place: the layout is known first, then values go where they belong.

`safetensors` itself copies all tensors of a file, holding the interpreter's lock. Here several
ranks can fill one file, nothing is gathered or copied, and other threads go on.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from areal_sc.engines.training.parts import Box
from areal_sc.transport.tensor_bytes import bytes_of

_DTYPE_CODES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_PIECE_BYTES = 4 << 20  # fits the cache, so that the checksum reads what the write has just read
_HEADER_ALIGNMENT = 8


@dataclass(frozen=True)
class TensorFile:
    """The layout of one safetensors file.

    Attributes:
        header: its first bytes.
        starts: position of each tensor's first byte, in the order of the file.
        shapes: of the tensors.
        num_bytes: of the whole file.
    """

    header: bytes
    starts: Mapping[str, int]
    shapes: Mapping[str, torch.Size]
    num_bytes: int

    @classmethod
    def lay_out(cls, tensors: Mapping[str, torch.Tensor]) -> TensorFile:
        """Tensors of wide dtypes come first, so that each starts at a multiple of its width.

        Args:
            tensors: their values do not matter; they may be `meta`.
        Raises: ValueError: a dtype that safetensors does not know.
        """
        entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
        starts: dict[str, int] = {}
        position = 0
        for name, tensor in sorted(tensors.items(), key=lambda item: -item[1].itemsize):
            starts[name], position = position, position + tensor.nbytes
            entries[name] = {
                "dtype": dtype_code(tensor.dtype),
                "shape": list(tensor.shape),
                "data_offsets": [starts[name], position],
            }
        text = json.dumps(entries).encode()
        text += b" " * (-len(text) % _HEADER_ALIGNMENT)
        header = len(text).to_bytes(8, "little") + text
        return cls(
            header,
            {name: len(header) + start for name, start in starts.items()},
            {name: tensors[name].shape for name in starts},
            len(header) + position,
        )

    def create(self, path: Path) -> None:
        """Writes the header and gives the file its size; the values are zero until written."""
        with path.open("xb", buffering=0) as file:
            _write_all(file.fileno(), memoryview(self.header), 0)
            file.truncate(self.num_bytes)

    def write_parts(self, path: Path, parts: Iterable[tuple[str, Box, torch.Tensor]]) -> None:
        """Fills in a part of each named tensor.

        Args:
            path: a file that `create` made, maybe in another process.
            parts: name, where the part lies in the tensor, values on the CPU; each is dropped
                before the next is asked for.
        """
        descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
        try:
            for name, box, values in parts:
                content = _content(values)
                firsts, length = box.runs(self.shapes[name])
                num_bytes = length * values.element_size()
                for number, first in enumerate(firsts):
                    position = self.starts[name] + first * values.element_size()
                    begin = number * num_bytes
                    _write_all(descriptor, content[begin : begin + num_bytes], position)
                del values, content
        finally:
            os.close(descriptor)

    def write_whole(self, path: Path, tensors: Mapping[str, torch.Tensor]) -> int:
        """Writes a new file with all its values, on the CPU; returns its crc32."""
        with path.open("xb", buffering=0) as file:
            descriptor = file.fileno()
            _write_all(descriptor, memoryview(self.header), 0)
            checksum = zlib.crc32(self.header)
            for name, position in self.starts.items():
                content = _content(tensors[name])
                for begin in range(0, len(content), _PIECE_BYTES):
                    piece = content[begin : begin + _PIECE_BYTES]
                    _write_all(descriptor, piece, position + begin)
                    checksum = zlib.crc32(piece, checksum)
        return checksum


def dtype_code(dtype: torch.dtype) -> str:
    """What safetensors calls a dtype.

    Raises: ValueError: it does not know this one.
    """
    if dtype not in _DTYPE_CODES:
        raise ValueError(f"safetensors holds no {dtype}")
    return _DTYPE_CODES[dtype]


def _content(tensor: torch.Tensor) -> memoryview:
    return bytes_of(tensor.detach().contiguous().reshape(-1))


def _write_all(descriptor: int, content: memoryview, position: int) -> None:
    written = 0
    while written < len(content):  # a full disk takes a part, and refuses the rest
        written += os.pwrite(descriptor, content[written:], position + written)
