"""What this machine has room for: shared memory, and the disk of the run folder."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

from areal_sc.config.follow_settings import KeepRecords
from areal_sc.config.schema import GRPOConfig, WeightUpdateMethod, further_models
from areal_sc.config.slurm_settings import SchedulerType
from areal_sc.config.transport_settings import AUTO, MIN_ROOM_BYTES
from areal_sc.errors import ConfigError
from areal_sc.preflight.plan import plan_ranks
from areal_sc.run.run_folder import RunFolder
from areal_sc.sizing.model_context import num_parameters
from areal_sc.sizing.worker_plan import DTYPE_BYTES, RunPlan, format_bytes
from areal_sc.transport.shards.memory_folder import (
    OFF,
    folder_on_node,
    memory_root,
    user_folder,
)

_RECORD_BYTES: Final = {KeepRecords.all: 3.5, KeepRecords.sample: 3.5 / 16, KeepRecords.none: 0}
"""A token of a row takes so much in the records."""

_VERSIONS: Final = 2
"""Weights that travel by disk: the newest version, and the one before while it is still read."""

_KEPT_MODELS: Final = 2
"""With `checkpoint.keep_best`: the best one, and that of an evaluation that goes on."""

_AT_MOST: Final = ("exports", "records", "shared memory")
"""Parts of which a run may take less than is counted."""

_LESS: Final = {
    "snapshots": "checkpoint.keep=1",
    "models": "no checkpoint.keep_best",
    "exports": "a larger checkpoint.export_every_steps",
    "weights": "weight_update.method=pull",
    "records": "a smaller records.max_bytes",
    "shared memory": "a larger /dev/shm",
}
"""What each part of a disk needs less by."""


def check_disk(config: GRPOConfig, *, generates: bool = True) -> list[str]:
    """Checks the disk of the run folder. With `--dry-run` that was done, and the folder is another.

    Returns: a warning, where the disk is too small if the run keeps the most that it may.
    Raises: ConfigError: it is too small for what the run keeps in any case.
    """
    if config.dry_run:
        return []
    disk = DiskPlan.of(config, generates=generates)
    disk.check()
    return [disk.line()] if disk.is_short else []


def check_named_memory(config: GRPOConfig) -> None:
    """`auto` chooses a folder with enough room; one that is named may have too little.

    Not for a worker that reads its settings again: the run has taken its part by then.

    Raises: ConfigError: workers are on this machine, and the second version of the weights would
        find no room.
    """
    wanted = config.transport.shared_memory
    if wanted in (AUTO, OFF) or config.scheduler.type != SchedulerType.local:
        return
    root = Path(wanted).expanduser()
    needed = sum(rank.store_bytes for rank in plan_ranks(config.actor))
    free = _free_for(needed, root, user_folder(root))
    if free is not None and free < needed:
        raise ConfigError(
            f"transport.shared_memory: expected {format_bytes(needed)} free in {wanted} for two "
            f"versions of the weights, got {format_bytes(free)}; name another folder, or auto"
        )


def shared_memory(config: GRPOConfig, planned: RunPlan) -> tuple[Path, int]:
    """Where the tensor stores of this machine would be, and how much they take at most."""
    run_dir, node_folder = RunFolder(config.run_dir).path, config.scheduler.node_folder
    root = memory_root(
        config.transport.shared_memory,
        run_dir,
        folder_on_node(node_folder),
        needed_bytes=config.transport.shared_memory_bytes or MIN_ROOM_BYTES,
    )
    return root, sum(worker.store_bytes + worker.snapshot_bytes for worker in planned.workers)


def shared_memory_line(root: Path, needed: int) -> str:
    """The same for people, and whether that is too little."""
    line, free = f"shared memory in {root}: up to {format_bytes(needed)}", _free_bytes(root)
    if free is not None:
        line += f" of {format_bytes(free)}"
        if free < needed:
            line += (
                " TOO LITTLE: groups wait for room, and snapshots in memory cannot be taken "
                "(docker run --shm-size, transport.shared_memory, "
                "checkpoint.memory_snapshots=false)"
            )
    return line


@dataclass(frozen=True)
class DiskPlan:
    """What a run keeps on the disk of its folder, at the most; logs are not counted.

    Attributes:
        path: of the run folder, which may not be there yet.
        parts: what for -> bytes; what is not known of a model counts as 0.
        free_bytes: what is free there, or was before the run took of it; None: it is not known.
    """

    path: Path
    parts: dict[str, int]
    free_bytes: int | None

    @classmethod
    def of(cls, config: GRPOConfig, *, generates: bool, shared_memory_bytes: int = 0) -> Self:
        """Counts what the settings say.

        Args:
            generates: as of `check_config`.
            shared_memory_bytes: of stores that are in the run folder.
        Raises: ModelError: as `plan_ranks`.
        """
        checkpoint, rollout, total = config.checkpoint, config.rollout, config.total_steps
        models = (config.actor, *further_models(config).values())
        snapshot_bytes = sum(rank.copy_bytes for model in models for rank in plan_ranks(model))
        num_snapshots = 0
        if every := checkpoint.every_steps:  # a new one is whole before the oldest one goes
            num_snapshots = min(checkpoint.keep + 1, -(-total // every))
        model_bytes = num_parameters(config.actor) * DTYPE_BYTES[config.actor.dtype]
        num_exports = -(-total // (checkpoint.export_every_steps or total)) - 1
        num_models = 1 + (_KEPT_MODELS if checkpoint.keep_best else 0)  # the final one
        parts = {
            "snapshots": num_snapshots * snapshot_bytes,
            "models": num_models * model_bytes,
            "exports": num_exports * model_bytes,
            "shared memory": shared_memory_bytes,
        }
        path = RunFolder(config.run_dir).path
        if generates:
            num_rows = total * rollout.train_batch_groups * rollout.group_size
            recorded = int(_RECORD_BYTES[config.records.keep] * num_rows * rollout.episode_tokens)
            parts["records"] = min(config.records.max_bytes, recorded)
            update = config.weight_update
            is_on_disk = update.method is WeightUpdateMethod.disk
            if is_on_disk and Path(update.folder).absolute().is_relative_to(path):
                parts["weights"] = _VERSIONS * model_bytes
        return cls(path, parts, _free_for(sum(parts.values()), path, path))

    def check(self) -> None:
        """Raises: ConfigError: there is no room for what has a size that is known beforehand."""
        kept = sum(size for what, size in self.parts.items() if what not in _AT_MOST)
        if self.free_bytes is not None and self.free_bytes < kept:
            raise ConfigError(f"the run does not fit on the disk: {self.line()}")

    @property
    def is_short(self) -> bool:
        return self.free_bytes is not None and self.free_bytes < sum(self.parts.values())

    def line(self) -> str:
        """For people; says what to do where it is too little."""
        of = "an unknown amount" if self.free_bytes is None else format_bytes(self.free_bytes)
        needed = format_bytes(sum(self.parts.values()))
        parts = [f"{what} {format_bytes(size)}" for what, size in self.parts.items() if size]
        text = f"disk of {self.path}: up to {needed} of {of} ({', '.join(parts) or 'no model yet'})"
        if self.is_short:
            largest = max(self.parts, key=lambda what: self.parts[what])
            text += f" TOO LITTLE: {_LESS[largest]} needs less; or choose another run_dir"
        return text


def _free_bytes(path: Path) -> int | None:
    """What is free on the file system where a file or folder is, or would be made."""
    with suppress(OSError):
        there = next(folder for folder in (path, *path.absolute().parents) if folder.exists())
        space = os.statvfs(there)
        if not space.f_blocks:  # a file system of users that does not tell
            return None
        return space.f_bavail * space.f_frsize
    return None


def _free_for(needed: int, path: Path, own: Path) -> int | None:
    """The same; where that is too little, with what the run's own folder has already."""
    free = _free_bytes(path)
    if free is None or free >= needed:
        return free
    held = 0
    for folder, _, names in os.walk(own):
        for name in names:
            with suppress(OSError):  # it has just gone
                held += os.lstat(os.path.join(folder, name)).st_size
    return free + held
