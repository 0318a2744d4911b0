"""Snapshots: weights, AdamW state and random state, to go on from with any number of ranks.

    begin    copies this rank's shards to host memory, and returns         (training waits for this)
    write    each rank writes its shards to a file of its own               (training goes on)
    commit   rank 0 writes `snapshot.json` and gives the folder its name

    rank-<n>.safetensors   the parts of rank n, by the names of their tensors, and its random state
    snapshot.json          shapes of the tensors, and where the parts lie in them; sizes and
                           checksums of the files; its own

A rank's part of a tensor is a box of it. Parts that several ranks have are written by the first of
them, so the files together hold each value once; a rank reads from each file what its own box and
the stored one have in common, whatever mesh has written them. The copy has 12 bytes a parameter
of the rank, and its memory is kept from one snapshot to the next (pinned for a GPU): filling fresh
memory takes three times as long. The learning rate is no state: the caller names the training step.

For copies of the state in the memory of nodes see `kept_states`.

Nothing is unpickled, as `torch.distributed.checkpoint` would do: snapshots are given to others, and
one that is damaged or forged must do no more than be wrong.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from safetensors import safe_open

from areal_sc.engines.loss_scale import LossScale
from areal_sc.engines.training.background import FAILURES, BackgroundWriter, replace_folder
from areal_sc.engines.training.parts import Box
from areal_sc.engines.training.snapshot_index import (
    INDEX_NAME,
    SnapshotIndex,
    StoredFile,
    file_name,
)
from areal_sc.engines.training.tensor_file import TensorFile, dtype_code
from areal_sc.system.durable import recover_folder
from areal_sc.system.process import machine_id

logger = logging.getLogger(__name__)

_MAX_NAMED = 3  # differences that an error message spells out
_CPU_RANDOM, _CUDA_RANDOM = "random.cpu", "random.cuda"

State = dict[str, torch.Tensor]


class Placed(NamedTuple):
    """What this rank has of a tensor.

    Attributes:
        shape: of the whole tensor.
        dtype: of its values.
        box: what this rank has of it, which may be nothing.
        is_given: this rank writes it.
    """

    shape: torch.Size
    dtype: torch.dtype
    box: Box
    is_given: bool


class CountsUpdates(Protocol):
    """What is known of an optimizer beside its tensors.

    Attributes:
        num_updates: so far; set by loading.
        loss_scale: of the next update; None: the loss is not scaled. Set by loading, where the
            snapshot has one, too.
    """

    num_updates: int
    loss_scale: LossScale | None


class TrainedState(Protocol):
    """What a snapshot holds of an engine: `parameter.<name>`, and `exp_avg.`, `exp_avg_sq.` and
    `step.` of each, by Hugging Face names; of several adapters beside each other `adapter_ranks`.

    Attributes:
        architecture: class of the Hugging Face model.
    """

    architecture: str

    @property
    def optimizer(self) -> CountsUpdates: ...

    def tensors(self) -> dict[str, Placed]:
        """All of them, of all ranks, in an order that all have; no values."""

    def values(self, given: Iterable[str]) -> Iterator[tuple[str, Box, torch.Tensor]]:
        """The boxes of the tensors that are asked for, each in one or more pieces.

        Of each piece the name of the tensor, the box, and its values in their order; they may be
        live or overwritten by the next, and may have another shape. All ranks must go through all
        pieces together, so getting the next one must not fail on one rank alone.
        """

    def filling(self, name: str) -> AbstractContextManager[torch.Tensor]:
        """This rank's box, to be filled in; at its end the engine has the values."""


class Snapshots:
    """Writes and reads the snapshots of one engine. Every rank must get the same calls.

    Args:
        state: what is written and read.
        writer: the thread that writes, and the ranks.
    """

    def __init__(self, state: TrainedState, writer: BackgroundWriter) -> None:
        self._state = state
        self._writer = writer
        self._staging: State = {}

    def begin(self, folder: Path) -> Future[None]:
        """Takes the state as it is now; it is written to `folder`, which it replaces, afterwards.

        A write that still goes on is waited for first: there is memory for one copy only.

        Returns: a future that is done when the snapshot is on the disk under its name. If a rank
            fails, it fails on all with CheckpointError, and `folder` keeps its former content.
        """
        self._writer.wait()
        group, state = self._writer.group, self._state
        staged: State = {}
        failure: Exception | None = None
        placed = state.tensors()
        shapes = {name: tuple(tensor.shape) for name, tensor in placed.items()}
        given = {name: tensor for name, tensor in placed.items() if tensor.is_given}
        starts = {name: tensor.box.starts for name, tensor in given.items()}
        try:
            staged = copy_state(state, given, self._buffer)
        except FAILURES as error:  # for lack of memory; the other ranks must hear of it
            failure = error
        num_updates, architecture = state.optimizer.num_updates, state.architecture
        loss_scale = state.optimizer.loss_scale

        def fill(part: Path, _is_common: bool) -> None:
            def write() -> StoredFile:
                if failure is not None:
                    raise failure
                layout = TensorFile.lay_out(staged)
                checksum = layout.write_whole(part / file_name(group.rank), staged)
                return StoredFile(layout.num_bytes, checksum, starts)

            what = f"cannot write {folder}"
            files = tuple(group.together(what, write))

            def finish() -> None:
                if group.rank == 0:
                    index = SnapshotIndex(architecture, num_updates, shapes, files, loss_scale)
                    (part / INDEX_NAME).write_bytes(index.encode())

            group.together(what, finish)

        return self._writer.begin(lambda: replace_folder(folder, group, fill))

    def load(self, folder: Path) -> None:
        """Restores in place what `begin` took, on the same or another mesh.

        Everything that can be known beforehand is checked before the first value changes: that
        it is a whole snapshot, of this model, with undamaged files. Random state is restored when
        the number of ranks is the same; with another, ranks go on with the random state they have.

        Raises: CheckpointError: on every rank.
        """
        self._writer.wait()
        group, state = self._writer.group, self._state
        what = f"cannot read the snapshot in {folder}"
        placed = state.tensors()

        def recover() -> None:
            if group.rank == 0:
                recover_folder(folder)

        def place() -> str:
            """Where the folder is another one than those of the name elsewhere."""
            return "" if all(group.shares_files) else f"{machine_id()} {folder}"

        def check() -> SnapshotIndex:
            index = SnapshotIndex.read(folder)
            written = range(len(index.files))
            index.check_content(folder, written[near.index(group.rank) :: len(near)])
            with opened_files(folder, written) as files:
                check_same_model(files, index, placed, state.architecture)
            return index

        group.together(what, recover)
        places = group.together(what, place)
        near = [rank for rank, it in enumerate(places) if it == places[group.rank]]
        index = group.together(what, check)[group.rank]
        written = range(len(index.files))
        is_same_size = len(written) == group.size

        def read() -> None:
            with opened_files(folder, written) as files:
                read_state(files, index, state, group.rank if is_same_size else None)

        group.together(what, read)
        if not is_same_size:
            logger.info(
                "snapshot=%s was written by %d ranks: random state is not restored",
                folder,
                len(written),
            )
        count_updates(state, index)

    def _buffer(self, name: str, shape: Sequence[int], values: torch.Tensor) -> torch.Tensor:
        """Host memory for the copy of a tensor.

        Args:
            values: of the same dtype; where they are on a GPU, the memory is pinned, and has this
                size if `tell_allocator` has been heard.
        """
        if name not in self._staging:
            pinned = values.device.type != "cpu"
            self._staging[name] = torch.empty(shape, dtype=values.dtype, pin_memory=pinned)
        return self._staging[name]


def copy_state(
    state: TrainedState,
    given: Mapping[str, Placed],
    target_of: Callable[[str, Sequence[int], torch.Tensor], torch.Tensor],
) -> State:
    """Copies tensors of an engine, and the random state, to host memory.

    All ranks go through all pieces, also one that fails: others may wait for its part in them.

    Args:
        target_of: gives the memory for a tensor, from its name, its sizes and some of its values.
    """
    copied: State = {}
    values = state.values(given)
    try:
        for name, box, piece in values:
            own = given[name].box
            copied[name] = target_of(name, own.sizes, piece)
            target = copied[name][box.within(own)]
            target.view(piece.shape).copy_(piece, non_blocking=True)
        for name, numbers in random_state().items():
            copied[name] = target_of(name, numbers.shape, numbers).copy_(numbers)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    except FAILURES:
        for _ in values:
            pass
        raise
    return copied


def read_state(
    files: Mapping[int, Any], index: SnapshotIndex, state: TrainedState, rank: int | None
) -> None:
    """Restores the tensors of an engine.

    Args:
        rank: whose random state is restored, too; None: nobody's.
    """
    for name, tensor in state.tensors().items():
        if tensor.box.numel:
            with state.filling(name) as values:
                read_box(files, index, name, tensor.box, values)
    if rank is not None:
        _restore_random_state(files[rank])


def count_updates(state: TrainedState, index: SnapshotIndex) -> None:
    """Restores what is known of the optimizer beside its tensors."""
    state.optimizer.num_updates = index.num_updates
    if state.optimizer.loss_scale is not None and index.loss_scale is not None:
        state.optimizer.loss_scale = index.loss_scale


@contextmanager
def opened_files(folder: Path, ranks: Iterable[int]) -> Iterator[dict[int, Any]]:
    """The files of ranks, by their numbers."""
    with ExitStack() as stack:
        paths = {rank: folder / file_name(rank) for rank in ranks}
        opened = {rank: safe_open(path, framework="pt") for rank, path in paths.items()}
        yield {rank: stack.enter_context(file) for rank, file in opened.items()}


def _stored_boxes(
    files: Mapping[int, Any], index: SnapshotIndex, name: str
) -> Iterator[tuple[Any, Box]]:
    """The file, and where in the tensor its part lies, of each that holds one."""
    for rank, file in files.items():
        stored = index.files[rank]
        if name in stored.starts:
            yield file, Box(stored.starts[name], tuple(file.get_slice(name).get_shape()))


def read_box(
    files: Mapping[int, Any], index: SnapshotIndex, name: str, own: Box, values: torch.Tensor
) -> None:
    """Fills in the values of a box with what it has in common with the parts in the files."""
    for file, box in _stored_boxes(files, index, name):
        if not own.sizes:
            values.copy_(file.get_tensor(name))
            return
        common = own.common(box)
        if common is not None:
            values[common.within(own)].copy_(file.get_slice(name)[common.within(box)])


def check_same_model(
    files: Mapping[int, Any],
    index: SnapshotIndex,
    placed: Mapping[str, Placed],
    architecture: str,
) -> None:
    """Compares the files with the engine.

    Raises: ValueError: tensors differ.
    """
    stored = {name: _describe_stored(files, index, name) for name in index.shapes}
    own = {
        name: f"{dtype_code(tensor.dtype)} {list(tensor.shape)}" for name, tensor in placed.items()
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
            f"it holds another model ({index.architecture}) than actor.path ({architecture}): "
            f"{'; '.join(differences[:_MAX_NAMED])}{more}. actor.path must be the model that the "
            "snapshot was made from"
        )


def _describe_stored(files: Mapping[int, Any], index: SnapshotIndex, name: str) -> str:
    """Dtype and shape of a tensor whose parts are in the ranks' files.

    Raises: ValueError: the parts are not the whole tensor.
    """
    shape = index.shapes[name]
    whole, parts = Box.whole(shape), list(_stored_boxes(files, index, name))
    is_inside = all(
        len(box.starts) == len(box.sizes) == len(shape) and (not shape or box.common(whole) == box)
        for _, box in parts
    )
    num_values = sum(box.numel for _, box in parts)  # no parts overlap
    if not parts or not is_inside or (shape and num_values != whole.numel):
        raise ValueError(f"the parts of {name} are not a tensor of {list(shape)}")
    dtypes = {file.get_slice(name).get_dtype() for file, _ in parts}
    return f"{' and '.join(sorted(dtypes))} {list(shape)}"


def random_state() -> State:
    state = {_CPU_RANDOM: torch.get_rng_state()}
    if torch.cuda.is_available():
        state[_CUDA_RANDOM] = torch.cuda.get_rng_state()
    return state


def _restore_random_state(file: Any) -> None:
    torch.set_rng_state(file.get_tensor(_CPU_RANDOM))
    if torch.cuda.is_available() and _CUDA_RANDOM in file.keys():  # noqa: SIM118
        torch.cuda.set_rng_state(file.get_tensor(_CUDA_RANDOM))
