"""Snapshots: weights, AdamW state and random state, to go on from with any number of ranks.

    begin    copies this rank's shards to host memory, and returns         (training waits for this)
    write    each rank writes its shards to a file of its own               (training goes on)
    commit   rank 0 writes `snapshot.json` and gives the folder its name

    rank-<n>.safetensors   the shards of rank n, by the names of their tensors, and its random state
    snapshot.json          sizes and checksums of the files; its own

A shard of FSDP is a run of rows, so the shards of all ranks, in their order, are the whole tensor;
a rank reads the rows that it needs from the files that hold them. The copy has 12 bytes a parameter
of the rank, and its memory is kept from one snapshot to the next (pinned for a GPU): filling fresh
memory takes three times as long. The learning rate is no state: the caller names the training step.

Nothing is unpickled, as `torch.distributed.checkpoint` would do: snapshots are given to others, and
one that is damaged or forged must do no more than be wrong.
"""

from __future__ import annotations

import logging
import zlib
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch
from msgspec import Struct
from safetensors import safe_open
from torch import nn

from areal_sc.durable import recover_folder
from areal_sc.engines.fsdp.background import FAILURES, BackgroundWriter, replace_folder
from areal_sc.engines.fsdp.optimizer import ShardedAdamW, first_row, local_part
from areal_sc.engines.fsdp.tensor_file import TensorFile, dtype_code, file_checksum

logger = logging.getLogger(__name__)

FORMAT = 4
INDEX_NAME = "snapshot.json"
_MAX_NAMED = 3  # differences that an error message spells out
_CPU_RANDOM, _CUDA_RANDOM = "random.cpu", "random.cuda"

State = dict[str, torch.Tensor]


class StoredFile(Struct, frozen=True):
    """The file of one rank.

    Attributes:
        checksum: its crc32.
    """

    num_bytes: int
    checksum: int


class SnapshotIndex(Struct, frozen=True):
    """What `snapshot.json` says.

    Attributes:
        architecture: class of the model.
        num_updates: optimizer updates until then.
        files: of all ranks, in their order.
    """

    architecture: str
    num_updates: int
    files: tuple[StoredFile, ...]

    def encode(self) -> bytes:
        content = msgspec.json.encode(self)
        return msgspec.json.encode(_Checked(FORMAT, zlib.crc32(content), msgspec.Raw(content)))

    @classmethod
    def read(cls, folder: Path) -> SnapshotIndex:
        """Reads `snapshot.json` and checks that all files are there with their sizes.

        Raises: ValueError, OSError: it is no snapshot, incomplete, or of another format.
        """
        path = folder / INDEX_NAME
        if not path.is_file():
            raise FileNotFoundError(f"{folder} is no snapshot: it has no {INDEX_NAME}")
        try:
            checked = msgspec.json.decode(path.read_bytes(), type=_Checked)
            if checked.format != FORMAT:
                raise ValueError(f"{path}: expected format {FORMAT}, got {checked.format!r}")
            if checked.checksum != zlib.crc32(checked.content):
                raise ValueError(f"{path}: its checksum is wrong, its content damaged")
            index = msgspec.json.decode(checked.content, type=cls)
        except msgspec.MsgspecError as error:
            raise ValueError(f"{path}: its content is damaged: {error}") from error
        for rank, file in enumerate(index.files):
            stored = folder / _file_name(rank)
            size = stored.stat().st_size
            if size != file.num_bytes:
                raise ValueError(
                    f"{stored}: expected {file.num_bytes} bytes, got {size}; "
                    "it is truncated or not of this snapshot"
                )
        return index


class _Checked(Struct, frozen=True):
    """An index, and the crc32 of its bytes. Other formats have a `format`, too."""

    format: int
    checksum: int = 0
    content: msgspec.Raw = msgspec.Raw()


class Snapshots:
    """Writes and reads the snapshots of one engine. Every rank must get the same calls.

    Args:
        causal_lm: the Hugging Face model, sharded or not.
        optimizer: of its parameters.
        writer: the thread that writes, and the ranks.
    """

    def __init__(
        self, causal_lm: nn.Module, optimizer: ShardedAdamW, writer: BackgroundWriter
    ) -> None:
        self._causal_lm = causal_lm
        self._optimizer = optimizer
        self._writer = writer
        self._staging: State = {}

    def begin(self, folder: Path) -> Future[None]:
        """Takes the state as it is now; it is written to `folder`, which it replaces, afterwards.

        A write that still goes on is waited for first: there is memory for one copy only.

        Returns: a future that is done when the snapshot is on the disk under its name. If a rank
            fails, it fails on all with CheckpointError, and `folder` keeps its former content.
        """
        self._writer.wait()
        group = self._writer.group
        staged: State = {}
        failure: Exception | None = None
        try:
            shards = {name: shard.values for name, shard in self._shards().items()}
            staged = self._stage(shards | _random_state())
        except FAILURES as error:  # for lack of memory; the other ranks must hear of it
            failure = error
        num_updates = self._optimizer.num_updates

        def fill(part: Path) -> None:
            def write() -> StoredFile:
                if failure is not None:
                    raise failure
                layout = TensorFile.lay_out(staged)
                checksum = layout.write_whole(part / _file_name(group.rank), staged)
                return StoredFile(layout.num_bytes, checksum)

            what = f"cannot write {folder}"
            files = tuple(group.together(what, write))

            def finish() -> None:
                if group.rank == 0:
                    index = SnapshotIndex(self._architecture, num_updates, files)
                    (part / INDEX_NAME).write_bytes(index.encode())

            group.together(what, finish)

        return self._writer.begin(lambda: replace_folder(folder, group, fill))

    def load(self, folder: Path) -> None:
        """Restores in place what `begin` took, in as many or other numbers of ranks.

        Everything that can be known beforehand is checked before the first value changes: that
        it is a whole snapshot, of this model, with undamaged files. Random state is restored when
        the number of ranks is the same; with another, ranks go on with the random state they have.

        Raises: CheckpointError: on every rank.
        """
        self._writer.wait()
        group = self._writer.group
        what = f"cannot read the snapshot in {folder}"
        shards = self._shards()

        def recover() -> None:
            if group.rank == 0:
                recover_folder(folder)

        def check() -> SnapshotIndex:
            index = SnapshotIndex.read(folder)
            for rank in range(group.rank, len(index.files), group.size):
                path = folder / _file_name(rank)
                if file_checksum(path) != index.files[rank].checksum:
                    raise ValueError(f"{path}: its checksum is wrong, its content damaged")
            with _opened_files(folder, index) as files:
                _check_same_model(files, index.architecture, shards, self._architecture)
            return index

        group.together(what, recover)
        index = group.together(what, check)[group.rank]
        is_same_size = len(index.files) == group.size

        def read() -> None:
            with _opened_files(folder, index) as files:
                for name, shard in shards.items():
                    _read_shard(files, name, shard)
                if is_same_size:
                    _restore_random_state(files[group.rank])

        group.together(what, read)
        if not is_same_size:
            logger.info(
                "snapshot=%s was written by %d ranks: random state is not restored",
                folder,
                len(index.files),
            )
        self._optimizer.num_updates = index.num_updates

    @property
    def _architecture(self) -> str:
        return type(self._causal_lm).__name__

    def _shards(self) -> dict[str, _Shard]:
        """The live tensors of this rank. AdamW's counters of updates are one number each."""
        shards: dict[str, _Shard] = {}
        parameters = dict(self._causal_lm.named_parameters())
        for name, parameter in parameters.items():
            values = local_part(parameter.detach())
            shards[f"parameter.{name}"] = _Shard(values, first_row(parameter), parameter.shape)
        for name, moments in self._optimizer.moments().items():
            of_parameter = shards[f"parameter.{name}"]
            for kind, values in moments.items():
                shards[f"{kind}.{name}"] = (
                    _Shard(values, 0, values.shape)
                    if kind == "step"
                    else of_parameter._replace(values=values)
                )
        return shards

    def _stage(self, state: State) -> State:
        """Copies in host memory."""
        staged: State = {}
        for name, values in state.items():
            buffer = self._staging.get(name)
            if buffer is None:
                pinned = values.device.type == "cuda"
                buffer = torch.empty(values.shape, dtype=values.dtype, pin_memory=pinned)
                self._staging[name] = buffer
            staged[name] = buffer.copy_(values, non_blocking=True)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return staged


class _Shard(NamedTuple):
    """What this rank has of a tensor.

    Attributes:
        values: the live rows; there may be none.
        first_row: of them.
        shape: of the whole tensor.
    """

    values: torch.Tensor
    first_row: int
    shape: torch.Size


@contextmanager
def _opened_files(folder: Path, index: SnapshotIndex) -> Iterator[list[Any]]:
    """The files of all ranks, in their order."""
    with ExitStack() as stack:
        paths = [folder / _file_name(rank) for rank in range(len(index.files))]
        yield [stack.enter_context(safe_open(path, framework="pt")) for path in paths]


def _read_shard(files: Sequence[Any], name: str, shard: _Shard) -> None:
    """Fills in the rows of a shard; the files hold the tensor's rows in the order of the ranks."""
    if not shard.shape:
        shard.values.copy_(files[0].get_tensor(name))
        return
    begin = 0
    for file in files:
        stored = file.get_slice(name)
        end = begin + stored.get_shape()[0]
        low, high = max(shard.first_row, begin), min(shard.first_row + len(shard.values), end)
        if low < high:
            target = shard.values[low - shard.first_row : high - shard.first_row]
            target.copy_(stored[low - begin : high - begin])
        begin = end


def _check_same_model(
    files: Sequence[Any], stored_as: str, shards: Mapping[str, _Shard], architecture: str
) -> None:
    """Raises: ValueError: tensors of the snapshot and of the engine differ."""
    stored = {
        name: _describe_stored([file.get_slice(name) for file in files])
        for name in files[0].keys()  # noqa: SIM118
        if not name.startswith("random.")
    }
    own = {
        name: f"{dtype_code(shard.values.dtype)} {list(shard.shape)}"
        for name, shard in shards.items()
    }
    differences = [
        f"{name} is {stored.get(name, 'absent')} in the snapshot and "
        f"{own.get(name, 'absent')} in the model"
        for name in own | stored
        if stored.get(name) != own.get(name)
    ]
    if differences:
        more = f"; and {len(differences) - _MAX_NAMED} more" if differences[_MAX_NAMED:] else ""
        raise ValueError(
            f"it holds another model ({stored_as}) than the one to be trained "
            f"({architecture}): {'; '.join(differences[:_MAX_NAMED])}{more}. Set actor.path to "
            "the model that the snapshot was made from, or choose another run_dir to start anew"
        )


def _describe_stored(parts: Sequence[Any]) -> str:
    """Dtype and shape of a tensor whose parts are slices of the ranks' files."""
    shape = parts[0].get_shape()
    if shape:
        shape[0] = sum(part.get_shape()[0] for part in parts)
    return f"{parts[0].get_dtype()} {shape}"


def _file_name(rank: int) -> str:
    return f"rank-{rank}.safetensors"


def _random_state() -> State:
    state = {_CPU_RANDOM: torch.get_rng_state()}
    if torch.cuda.is_available():
        state[_CUDA_RANDOM] = torch.cuda.get_rng_state()
    return state


def _restore_random_state(file: Any) -> None:
    torch.set_rng_state(file.get_tensor(_CPU_RANDOM))
    if torch.cuda.is_available() and _CUDA_RANDOM in file.keys():  # noqa: SIM118
        torch.cuda.set_rng_state(file.get_tensor(_CUDA_RANDOM))
