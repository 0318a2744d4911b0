"""Parts of files, as they are read for others."""

from __future__ import annotations

import os
from pathlib import Path

from areal_sc.errors import TransportError
from areal_sc.shipping.calls import PIECE_BYTES
from areal_sc.system.os_errors import os_errors_as


def read_piece(path: Path, offset: int, num_bytes: int, flags: int = 0) -> bytes:
    """A part of a file; at its end there is less. Blocks.

    Args:
        path: checked; see `names`.
        flags: further ones of `os.open`.
    Raises: TransportError: it cannot be read.
    """
    if not 0 <= num_bytes <= PIECE_BYTES or offset < 0:
        raise TransportError(f"a piece has 0 to {PIECE_BYTES} bytes, not {num_bytes}")
    with os_errors_as(TransportError, f"{path} cannot be read"):
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | flags)
        try:
            return os.pread(fd, num_bytes, offset)
        finally:
            os.close(fd)
