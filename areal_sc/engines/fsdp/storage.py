"""How distributed checkpoints (`torch.distributed.checkpoint`, DCP) lie in a snapshot's folder.

    rank-<n>.safetensors   what rank n wrote, each tensor or part of one by its name and position
    snapshot.json          written last: what is where, sizes and checksums of the files; its own

DCP's planners decide who writes and reads which part, for any number of ranks then and now. Its
own file format is not used, because it begins with a pickle (`.metadata`). Unpickling runs
whatever the file says; a run folder is writable only by its owner, but snapshots are also copied
from machine to machine and given to others, and nothing in one should be able to do more than be
wrong. Here it is JSON and safetensors, which hold values only; names of files are not taken from
them. Reading takes the asked rows of a tensor, where DCP's own files need whole tensors.

Any program that uses DCP reads a snapshot by `load(state, storage_reader=SnapshotReader(folder))`.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
)
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from areal_sc.engines.fsdp.tensor_file import TensorFile, file_checksum
from areal_sc.transport.tensor_bytes import dtype_name, dtype_named

FORMAT = 3
INDEX_NAME = "snapshot.json"


@dataclass(frozen=True)
class StoredFile:
    """One rank's file, complete. A rank that has nothing to write leaves none.

    Attributes:
        rank: of the writer; gives the name.
        num_bytes: its size.
        checksum: its crc32.
    """

    rank: int
    num_bytes: int
    checksum: int

    @property
    def name(self) -> str:
        return _file_name(self.rank)


@dataclass(frozen=True)
class SnapshotIndex:
    """What `snapshot.json` says.

    Attributes:
        architecture: class of the model.
        world_size: number of ranks that wrote it.
        num_updates: optimizer updates until then.
        files: those that hold the tensors.
        tensors: name -> dtype, shape, and the parts that it is stored in.
        ranks: name -> the rank that wrote each part.
    """

    architecture: str
    world_size: int
    num_updates: int
    files: tuple[StoredFile, ...]
    tensors: Mapping[str, TensorStorageMetadata]
    ranks: Mapping[str, tuple[int, ...]]

    def to_json(self) -> str:
        content = {
            "architecture": self.architecture,
            "world_size": self.world_size,
            "num_updates": self.num_updates,
            "files": [[f.rank, f.num_bytes, f.checksum] for f in self.files],
            "tensors": {
                name: {
                    "dtype": dtype_name(tensor.properties.dtype),
                    "shape": list(tensor.size),
                    "parts": [
                        [rank, list(part.offsets), list(part.sizes)]
                        for rank, part in zip(self.ranks[name], tensor.chunks, strict=True)
                    ],
                }
                for name, tensor in self.tensors.items()
            },
        }
        return json.dumps({"format": FORMAT, "checksum": _checksum(content), **content})

    @classmethod
    def read(cls, folder: Path) -> SnapshotIndex:
        """Reads `snapshot.json` and checks that all files are there with their sizes.

        Raises: ValueError, OSError: it is no snapshot, incomplete, or of another format.
        """
        path = folder / INDEX_NAME
        if not path.is_file():
            raise FileNotFoundError(f"{folder} is no snapshot: it has no {INDEX_NAME}")
        content = json.loads(path.read_bytes())
        if not isinstance(content, dict) or content.get("format") != FORMAT:
            found = content.get("format") if isinstance(content, dict) else content
            raise ValueError(f"{path}: expected format {FORMAT}, got {found!r}")
        del content["format"]
        if content.pop("checksum", None) != _checksum(content):
            raise ValueError(f"{path}: its checksum is wrong, its content damaged")
        try:
            index = cls._parse(content)
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise ValueError(f"{path}: its content is damaged: {error!r}") from error
        for file in index.files:
            size = (folder / file.name).stat().st_size
            if size != file.num_bytes:
                raise ValueError(
                    f"{folder / file.name}: expected {file.num_bytes} bytes, got {size}; "
                    "it is truncated or not of this snapshot"
                )
        return index

    @classmethod
    def _parse(cls, content: Mapping[str, Any]) -> SnapshotIndex:
        tensors: dict[str, TensorStorageMetadata] = {}
        ranks: dict[str, tuple[int, ...]] = {}
        for name, entry in content["tensors"].items():
            shape = _sizes(entry["shape"])
            parts = [
                ChunkStorageMetadata(_sizes(offsets), _sizes(sizes))
                for _, offsets, sizes in entry["parts"]
            ]
            if sum(prod(part.sizes) for part in parts) != prod(shape) or not all(
                len(part.offsets) == len(part.sizes) == len(shape) for part in parts
            ):
                raise ValueError(f"the parts of {name} do not make its shape {list(shape)}")
            tensors[name] = TensorStorageMetadata(
                TensorProperties(dtype=dtype_named(entry["dtype"])), shape, parts
            )
            ranks[name] = tuple(int(rank) for rank, _, _ in entry["parts"])
        return cls(
            architecture=str(content["architecture"]),
            world_size=int(content["world_size"]),
            num_updates=int(content["num_updates"]),
            files=tuple(StoredFile(*map(int, file)) for file in content["files"]),
            tensors=tensors,
            ranks=ranks,
        )


class SnapshotWriter(StorageWriter):
    """One rank's side of writing to a new folder.

    Args:
        folder: the folder; it exists.
        architecture, world_size, num_updates: see `SnapshotIndex`.
    """

    def __init__(
        self, folder: Path, *, architecture: str, world_size: int, num_updates: int
    ) -> None:
        self._folder = folder
        self._architecture = architecture
        self._world_size = world_size
        self._num_updates = num_updates

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        if checkpoint_id is not None:
            self._folder = Path(checkpoint_id)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        pass

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Tells each rank its number: the name of its file."""
        return [replace(plan, storage_data=rank) for rank, plan in enumerate(plans)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Writes this rank's file."""
        rank = int(plan.storage_data)
        values: dict[str, torch.Tensor] = {}
        for item in plan.items:
            resolved = planner.resolve_data(item)
            assert isinstance(resolved, torch.Tensor), item.index  # nothing else is in a state
            values[_key(item.index)] = resolved
        written: Future[list[WriteResult]] = Future()
        results: list[WriteResult] = []
        if values:
            layout = TensorFile.lay_out({key: (v.dtype, v.shape) for key, v in values.items()})
            checksum = layout.write_whole(self._folder / _file_name(rank), values)
            file = StoredFile(rank, layout.num_bytes, checksum)
            results = [WriteResult(item.index, 0, storage_data=file) for item in plan.items]
        written.set_result(results)
        return written

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Writes `snapshot.json`, on one rank, after all have written."""
        files: dict[MetadataIndex, StoredFile] = {
            result.index: result.storage_data for rank in results for result in rank
        }
        tensors: dict[str, TensorStorageMetadata] = {}
        ranks: dict[str, tuple[int, ...]] = {}
        for name, tensor in metadata.state_dict_metadata.items():
            assert isinstance(tensor, TensorStorageMetadata), name
            tensors[name] = tensor
            ranks[name] = tuple(
                files[MetadataIndex(name, part.offsets)].rank for part in tensor.chunks
            )
        index = SnapshotIndex(
            self._architecture,
            self._world_size,
            self._num_updates,
            files=tuple(sorted(set(files.values()), key=lambda file: file.rank)),
            tensors=tensors,
            ranks=ranks,
        )
        (self._folder / INDEX_NAME).write_text(index.to_json())

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return "://" not in os.fspath(checkpoint_id)


class SnapshotReader(StorageReader):
    """Reads the parts of a snapshot that a plan asks for.

    Args:
        folder: a snapshot's.
        index: what its `snapshot.json` says, where it has been read already.
    """

    def __init__(self, folder: Path, index: SnapshotIndex | None = None) -> None:
        self._folder = folder
        self._index = index

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        if checkpoint_id is not None and Path(checkpoint_id) != self._folder:
            self._folder, self._index = Path(checkpoint_id), None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Raises: ValueError, OSError: see `SnapshotIndex.read`."""
        self._index = self._index or SnapshotIndex.read(self._folder)
        return Metadata(dict(self._index.tensors), storage_meta=StorageMeta(self._folder))

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        pass

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Raises: OSError, SafetensorError: a file is gone or damaged."""
        by_rank: dict[int, list[ReadItem]] = {}
        for item in plan.items:
            by_rank.setdefault(self._rank_of(item.storage_index), []).append(item)
        for rank, items in sorted(by_rank.items()):
            with safe_open(self._folder / _file_name(rank), framework="pt") as file:
                for item in items:
                    target = planner.resolve_tensor(item).detach()
                    target.copy_(_read(file, item))
                    planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _rank_of(self, stored: MetadataIndex) -> int:
        assert self._index is not None, "read_metadata comes first"
        parts = self._index.tensors[stored.fqn].chunks
        position = next(i for i, part in enumerate(parts) if part.offsets == stored.offset)
        return self._index.ranks[stored.fqn][position]

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return "://" not in os.fspath(checkpoint_id)


def verify_checksums(folder: Path, files: Sequence[StoredFile]) -> None:
    """Raises: ValueError: a file is not what was written."""
    for file in files:
        if file_checksum(folder / file.name) != file.checksum:
            raise ValueError(f"{folder / file.name}: its checksum is wrong, its content damaged")


def _checksum(content: Mapping[str, Any]) -> int:
    """crc32 of what an index says, however it is spelled."""
    return zlib.crc32(json.dumps(content, sort_keys=True).encode())


def _file_name(rank: int) -> str:
    return f"rank-{rank}.safetensors"


def _key(index: MetadataIndex) -> str:
    """The name of a part in its file: the tensor's, and where in it the part begins."""
    return f"{index.fqn}@{','.join(map(str, index.offset or ()))}"


def _read(file: Any, item: ReadItem) -> torch.Tensor:
    """The asked part of a stored part."""
    key = _key(item.storage_index)
    if not item.lengths:
        values: torch.Tensor = file.get_tensor(key)
        return values
    asked = tuple(
        slice(offset, offset + length)
        for offset, length in zip(item.storage_offsets, item.lengths, strict=True)
    )
    values = file.get_slice(key)[asked]
    return values


def _sizes(values: Any) -> torch.Size:
    sizes = torch.Size(values)
    if any(size < 0 for size in sizes):
        raise ValueError(f"negative sizes {list(sizes)}")
    return sizes
