"""Snapshots: weights, AdamW state and random state, to go on from with any number of ranks.

    begin    copies this rank's shards to host memory, and returns         (training waits for this)
    write    DCP's plan, agreed on by all ranks; each writes its own file   (training goes on)
    commit   rank 0 writes `snapshot.json` and gives the folder its name

A snapshot therefore holds the step that it was begun at, whatever is trained meanwhile. The copy
has 12 bytes a parameter of the rank, and its memory is kept from one snapshot to the next (pinned
for a GPU): filling fresh memory takes three times as long. If a rank fails, all raise, and the
folder keeps its former content. There is no other state: the learning rate is a function of the
training step, which the caller names at each update.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from concurrent.futures import Future
from pathlib import Path

import torch
from torch import nn
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, WriteItem
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.tensor import DTensor

from areal_sc.durable import recover_folder
from areal_sc.engines.fsdp.background import FAILURES, BackgroundWriter, replace_folder
from areal_sc.engines.fsdp.optimizer import ShardedAdamW, local_part
from areal_sc.engines.fsdp.storage import (
    SnapshotIndex,
    SnapshotReader,
    SnapshotWriter,
    verify_checksums,
)
from areal_sc.transport.tensor_bytes import dtype_name

logger = logging.getLogger(__name__)

_MAX_NAMED = 3  # differences that an error message spells out

State = dict[str, torch.Tensor]


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

        Returns: a future that is done when the snapshot is on the disk under its name. It fails
            with CheckpointError, on every rank, when that could not be done.
        """
        self._writer.wait()
        group = self._writer.group
        state = self._state()
        staged: State = {}
        failure: Exception | None = None
        try:
            staged = self._stage(state)
        except FAILURES as error:  # for lack of memory; the other ranks must hear of it
            failure = error
        storage = SnapshotWriter(
            folder,
            architecture=type(self._causal_lm).__name__,
            world_size=group.world_size,
            num_updates=self._optimizer.num_updates,
        )

        def fill(part: Path) -> None:
            what = f"cannot write {folder}"
            planner = _StagedPlanner(staged)
            storage.reset(part)

            def plan() -> SavePlan:
                if failure is not None:
                    raise failure
                planner.set_up_planner(state, is_coordinator=group.rank == 0)
                return planner.create_local_plan()

            plans = group.together(what, plan)
            metadata = Metadata({})

            def write() -> list[WriteResult]:
                nonlocal metadata
                # Every rank makes the same global plan of all ranks' parts, and follows its own.
                all_plans, metadata = planner.create_global_plan(plans)
                mine = planner.finish_plan(storage.prepare_global_plan(all_plans)[group.rank])
                return storage.write_data(mine, planner).value()

            results = group.together(what, write)

            def finish() -> None:
                if group.rank == 0:
                    storage.finish(metadata, results)

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
        state = self._state()

        def recover() -> None:
            if group.rank == 0:
                recover_folder(folder)

        def check() -> SnapshotIndex:
            index = SnapshotIndex.read(folder)
            _check_same_model(index, state, type(self._causal_lm).__name__)
            verify_checksums(folder, index.files[group.rank :: group.world_size])
            return index

        group.together(what, recover)
        index = group.together(what, check)[group.rank]
        for name in _random_names(group.rank):
            if index.world_size != group.world_size or name not in index.tensors:
                state.pop(name, None)
        if index.world_size != group.world_size:
            logger.info(
                "snapshot=%s was written by %d ranks: random state is not restored",
                folder,
                index.world_size,
            )

        def read() -> None:
            reader = SnapshotReader(folder, index)
            planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
            planner.set_up_planner(state, reader.read_metadata(), group.rank == 0)
            reader.read_data(planner.finish_plan(planner.create_local_plan()), planner)
            _restore_random_state(group.rank, state)

        group.together(what, read)
        self._optimizer.num_updates = index.num_updates

    def _state(self) -> State:
        """The live tensors by name, AdamW's placed as their parameters are; random state copied.

        `step` of a parameter counts its updates, equal on all ranks that hold a part of it; on a
        rank whose part is empty AdamW does not count, so that such a rank must not store it.
        """
        state: State = {}
        parameters = dict(self._causal_lm.named_parameters())
        for name, parameter in parameters.items():
            state[f"parameter.{name}"] = parameter.detach()
        for name, moments in self._optimizer.moments().items():
            for kind, values in moments.items():
                if kind != "step":
                    state[f"{kind}.{name}"] = _placed_like(values, parameters[name])
                elif local_part(parameters[name]).numel():
                    state[f"{kind}.{name}"] = values
        state |= _random_state(self._writer.group.rank)
        return state

    def _stage(self, state: State) -> State:
        """This rank's part of every tensor, copied to host memory."""
        staged: State = {}
        devices = set()
        for name, values in state.items():
            part = local_part(values)
            buffer = self._staging.get(name)
            if buffer is None:
                pinned = part.device.type == "cuda"
                buffer = torch.empty(part.shape, dtype=part.dtype, pin_memory=pinned)
                self._staging[name] = buffer
            staged[name] = buffer.copy_(part, non_blocking=True)
            devices.add(part.device)
        for device in devices:
            if device.type == "cuda":
                torch.cuda.synchronize(device)
        return staged


class _StagedPlanner(DefaultSavePlanner):
    """Plans by the live tensors, which know their place, and hands out the staged values."""

    def __init__(self, staged: State) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._staged = staged

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor:
        return self._staged[write_item.index.fqn]


def _check_same_model(index: SnapshotIndex, state: State, architecture: str) -> None:
    """Raises: ValueError: tensors of the snapshot and of the engine differ."""
    stored = {
        name: _describe(tensor.properties.dtype, tensor.size)
        for name, tensor in index.tensors.items()
    }
    own = {name: _describe(values.dtype, values.shape) for name, values in state.items()}
    differences = [
        f"{name} is {stored.get(name, 'absent')} in the snapshot and "
        f"{own.get(name, 'absent')} in the model"
        for name in [*own, *(name for name in stored if name not in own)]
        if not name.startswith(("random.", "step.")) and stored.get(name) != own.get(name)
    ]
    if differences:
        more = f"; and {len(differences) - _MAX_NAMED} more" if differences[_MAX_NAMED:] else ""
        raise ValueError(
            f"it holds another model ({index.architecture}) than the one to be trained "
            f"({architecture}): {'; '.join(differences[:_MAX_NAMED])}{more}. Set actor.path to "
            "the model that the snapshot was made from, or choose another run_dir to start anew"
        )
    missing = [name for name in own if name.startswith("step.") and name not in stored]
    if missing:
        raise ValueError(f"it has no {missing[0]}")


def _placed_like(values: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    if not isinstance(parameter, DTensor):
        return values
    return DTensor.from_local(
        values,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


def _random_names(rank: int) -> list[str]:
    return [f"random.{rank}.cpu", f"random.{rank}.cuda"]


def _random_state(rank: int) -> State:
    cpu, cuda = _random_names(rank)
    state = {cpu: torch.get_rng_state()}
    if torch.cuda.is_available():
        state[cuda] = torch.cuda.get_rng_state()
    return state


def _restore_random_state(rank: int, state: Mapping[str, torch.Tensor]) -> None:
    cpu, cuda = _random_names(rank)
    if cpu in state:
        torch.set_rng_state(state[cpu])
    if cuda in state:
        torch.cuda.set_rng_state(state[cuda])


def _describe(dtype: torch.dtype, shape: torch.Size) -> str:
    return f"{dtype_name(dtype)} {list(shape)}"
