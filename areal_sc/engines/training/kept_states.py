"""Copies of an engine's state in the memory of the nodes, for new lives of the same ranks there.

    keep    the state goes straight into one of two buffers     (training waits for this)
    load    a new life of each rank, on the same node, reads it

    <buffer>/rank-<n>.safetensors              the buffer of rank n, written in place
    <buffer>/rank-<n>-of-<ranks>.<name>.json   its index; without it the buffer holds nothing

A node has what its ranks hold, copies of other nodes' parts as well; so nothing is read over the
network. The two buffers of a rank are mapped, and pinned for a GPU, as long as it lives: filling
fresh memory takes three times as long. Nothing is checked by checksums: this memory is as good as
that of the ranks.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Mapping, Sequence, Set
from pathlib import Path
from typing import Any

import torch
from msgspec.structs import replace

from areal_sc.engines.training.background import FAILURES, BackgroundWriter
from areal_sc.engines.training.snapshot_index import SnapshotIndex, StoredFile, file_name
from areal_sc.engines.training.snapshots import (
    Placed,
    TrainedState,
    copy_state,
    count_updates,
    opened_files,
    random_state,
    read_state,
)
from areal_sc.engines.training.tensor_file import TensorFile
from areal_sc.errors import CheckpointError
from areal_sc.transport.tensor_bytes import ValueType, tensor_over

_OWNER_ONLY_FILE = 0o600


class SharedBuffer:
    """Tensors in a file in memory, which this process fills in place.

    The room of the file is reserved: else a full memory would end the process.

    Args:
        tensors: those that the buffer has room for; their values do not matter.
        is_pinned: GPUs copy into it.

    Attributes:
        tensors: the room of each.
        num_bytes: of the file.
    Raises: OSError: there is no room. RuntimeError: it cannot be pinned.
    """

    def __init__(self, path: Path, tensors: Mapping[str, torch.Tensor], *, is_pinned: bool) -> None:
        layout = TensorFile.lay_out(tensors)
        self.num_bytes = layout.num_bytes
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        descriptor = os.open(path, flags, _OWNER_ONLY_FILE)
        try:
            os.ftruncate(descriptor, self.num_bytes)
            os.posix_fallocate(descriptor, 0, self.num_bytes)
            os.pwrite(descriptor, layout.header, 0)
            mapped = mmap.mmap(descriptor, self.num_bytes)
        except OSError:
            path.unlink()
            raise
        finally:
            os.close(descriptor)
        self.tensors = {
            name: tensor_over(mapped, ValueType(it.dtype), it.nbytes, layout.starts[name]).view(
                it.shape
            )
            for name, it in tensors.items()
        }
        self._pinned_at = tensor_over(mapped, ValueType(torch.uint8), self.num_bytes, 0).data_ptr()
        if not is_pinned:
            self._pinned_at = 0
            return
        cuda: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        outcome = cuda.cudaHostRegister(self._pinned_at, self.num_bytes, 0)
        if int(outcome):
            raise RuntimeError(f"its memory cannot be pinned: {outcome}")

    def close(self) -> None:
        """The memory goes once nothing else reads it."""
        if self._pinned_at:
            cuda: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
            cuda.cudaHostUnregister(self._pinned_at)
        self.tensors.clear()


class KeptStates:
    """Keeps the state of one engine, and restores it. Every rank must get the same calls.

    Args:
        state: what is kept.
        writer: the ranks; what it writes is not waited for by `keep`.
    """

    def __init__(self, state: TrainedState, writer: BackgroundWriter) -> None:
        self._state = state
        self._writer = writer
        self._buffers: dict[Path, SharedBuffer] = {}
        self._names_here: Set[str] | None = None

    def keep(self, folder: Path, name: str, *, beside: str) -> None:
        """Copies the state as it is now into one of two buffers.

        Args:
            folder: in the memory of each rank's node.
            name: of this state.
            beside: name of the state whose buffer is left as it is.
        Raises: CheckpointError: this rank's part cannot be written; its buffer holds nothing then.
        """
        rank, state = self._writer.group.rank, self._state
        buffer = folder / ("1" if self._index_path(folder / "0", beside).exists() else "0")
        path = buffer / file_name(rank)
        placed = state.tensors()
        given = {it: placed[it] for it in self._kept_here(placed)}

        def room(tensor: str, _: Sequence[int], values: torch.Tensor) -> torch.Tensor:
            if path not in self._buffers:
                wanted = {
                    name: torch.empty(its.box.sizes, dtype=its.dtype, device="meta")
                    for name, its in given.items()
                }
                buffer.mkdir(parents=True, exist_ok=True)
                is_pinned = values.device.type == "cuda"
                shared = SharedBuffer(path, wanted | random_state(), is_pinned=is_pinned)
                self._buffers[path] = shared
            return self._buffers[path].tensors[tensor]

        try:
            for earlier in buffer.glob(f"rank-{rank}-of-*.json"):
                earlier.unlink()
            copy_state(state, given, room)
            starts = {it: tensor.box.starts for it, tensor in given.items()}
            stored = StoredFile(self._buffers[path].num_bytes, checksum=0, starts=starts)
            optimizer = state.optimizer
            index = SnapshotIndex(
                state.architecture, optimizer.num_updates, {}, (stored,), optimizer.loss_scale
            )
            self._index_path(buffer, name).write_bytes(index.encode())
        except FAILURES as error:
            raise CheckpointError(
                f"cannot write {path}: {type(error).__name__}: {error}"
            ) from error

    def load(self, folder: Path, name: str) -> None:
        """Restores in place what `keep` took under this name, on the same nodes.

        Raises: CheckpointError: on every rank; no value has changed if one of them has not all that
            it needs.
        """
        self._writer.wait()
        group, state = self._writer.group, self._state
        what = f"cannot read {name} in {folder}"

        def find() -> tuple[str, SnapshotIndex]:
            for number in ("0", "1"):
                path = self._index_path(folder / number, name)
                if path.exists():
                    return number, SnapshotIndex.decode(path)
            raise FileNotFoundError(f"rank {group.rank} has nothing of that name there")

        found = group.together(what, find)
        number, own = found[group.rank]
        index = replace(own, files=tuple(it.files[0] for _, it in found))

        def read() -> None:
            with opened_files(folder / number, group.neighbours) as files:
                read_state(files, index, state, group.rank)

        group.together(what, read)
        count_updates(state, index)

    def forget(self) -> None:
        """The buffers are not used any more; who calls this deletes their files."""
        for buffer in self._buffers.values():
            buffer.close()
        self._buffers.clear()

    def _index_path(self, buffer: Path, name: str) -> Path:
        group = self._writer.group
        return buffer / f"rank-{group.rank}-of-{group.size}.{name}.json"

    def _kept_here(self, placed: Mapping[str, Placed]) -> Set[str]:
        """What this rank keeps so that its node has all that the ranks there hold, once."""
        if self._names_here is None:
            self._writer.wait()  # it may use the same group
            group = self._writer.group
            own = {name: tensor.box for name, tensor in placed.items() if tensor.box.numel}
            held = group.ranks.gather(own)
            before = [held[rank] for rank in group.neighbours if rank < group.rank]
            self._names_here = {
                name for name, box in own.items() if all(one.get(name) != box for one in before)
            }
        return self._names_here
