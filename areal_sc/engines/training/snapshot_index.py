"""What lies in a snapshot: `snapshot.json`, and the files that it names. No torch."""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from pathlib import Path

import msgspec
from msgspec import Struct

from areal_sc.engines.loss_scale import LossScale

FORMAT = 5
INDEX_NAME = "snapshot.json"
_PIECE_BYTES = 1 << 20


def file_name(rank: int) -> str:
    """Name of the file of a rank."""
    return f"rank-{rank}.safetensors"


class StoredFile(Struct, frozen=True):
    """The file of one rank.

    Attributes:
        checksum: its crc32.
        starts: first index, along each dimension, of what it holds of each tensor.
    """

    num_bytes: int
    checksum: int
    starts: dict[str, tuple[int, ...]]


class SnapshotIndex(Struct, frozen=True):
    """What `snapshot.json` says.

    Attributes:
        architecture: class of the model.
        num_updates: optimizer updates until then.
        shapes: of all tensors, each as a whole.
        files: of all ranks, in their order; each value of a tensor is in one of them.
        loss_scale: of the next update; None: the loss was not scaled.
    """

    architecture: str
    num_updates: int
    shapes: dict[str, tuple[int, ...]]
    files: tuple[StoredFile, ...]
    loss_scale: LossScale | None = None

    def encode(self) -> bytes:
        content = msgspec.json.encode(self)
        return msgspec.json.encode(_Checked(FORMAT, zlib.crc32(content), msgspec.Raw(content)))

    @classmethod
    def read(cls, folder: Path) -> SnapshotIndex:
        """Reads `snapshot.json` and checks that its files are there with their sizes.

        Raises: ValueError, OSError: it is no snapshot, incomplete, or of another format.
        """
        path = folder / INDEX_NAME
        if not path.is_file():
            raise FileNotFoundError(f"{folder} is no snapshot: it has no {INDEX_NAME}")
        index = cls.decode(path)
        for rank, file in enumerate(index.files):
            stored = folder / file_name(rank)
            size = stored.stat().st_size
            if size != file.num_bytes:
                raise ValueError(
                    f"{stored}: expected {file.num_bytes} bytes, got {size}; "
                    "it is truncated or not of this snapshot"
                )
        return index

    @classmethod
    def decode(cls, path: Path) -> SnapshotIndex:
        """What `encode` made, in a file. Raises: ValueError, OSError: see `read`."""
        try:
            checked = msgspec.json.decode(path.read_bytes(), type=_Checked)
            if checked.format != FORMAT:
                raise ValueError(f"{path}: expected format {FORMAT}, got {checked.format!r}")
            if checked.checksum != zlib.crc32(checked.content):
                raise ValueError(f"{path}: its checksum is wrong, its content damaged")
            return msgspec.json.decode(checked.content, type=cls)
        except msgspec.MsgspecError as error:
            raise ValueError(f"{path}: its content is damaged: {error}") from error

    def check_content(self, folder: Path, ranks: Iterable[int]) -> None:
        """Checks the checksums of the files of some ranks.

        Raises: ValueError, OSError: one is damaged, or cannot be read.
        """
        for rank in ranks:
            path, checksum = folder / file_name(rank), 0
            with path.open("rb", buffering=0) as file:
                while piece := file.read(_PIECE_BYTES):
                    checksum = zlib.crc32(piece, checksum)
            if checksum != self.files[rank].checksum:
                raise ValueError(f"{path}: its checksum is wrong, its content damaged")


class _Checked(Struct, frozen=True):
    """An index, and the crc32 of its bytes. Other formats have a `format`, too."""

    format: int
    checksum: int = 0
    content: msgspec.Raw = msgspec.Raw()
