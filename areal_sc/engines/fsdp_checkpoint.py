"""Saving: folders that transformers loads, and snapshots that training goes on from.

Everything is written into a folder beside the target, flushed to the disk, and renamed into
place, so that a reader sees the former content or the whole new one. If any rank fails, all
raise, and the former content stays.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load as load_distributed
from torch.distributed.checkpoint.state_dict_saver import save as save_distributed
from torch.distributed.tensor import DTensor

from areal_sc.engines.fsdp_optimizer import ShardedAdamW
from areal_sc.engines.process_group import ProcessGroup
from areal_sc.errors import CheckpointError

_FORMAT = 1
_WEIGHT_SUFFIXES = {".safetensors", ".bin", ".pt", ".pth", ".h5", ".gguf", ".msgpack", ".onnx"}
# What writing and reading raise: the system's errors, torch's serialisation, damaged files.
_FAILURES = (
    OSError,
    RuntimeError,
    ValueError,
    KeyError,
    EOFError,
    SafetensorError,
    CheckpointException,  # not an Exception, but how distributed checkpoints report those of ranks
)


def save_hf(
    causal_lm: Any, source: Path, folder: Path, dtype: torch.dtype, group: ProcessGroup
) -> None:
    """Writes weights and config as `transformers` does, and the tokenizer files of `source`.

    Args:
        causal_lm: the Hugging Face model, sharded or not; all ranks take part, rank 0 writes.
        source: model folder whose other files (tokenizer, generation config) are copied.
        folder: target; replaced as a whole.
        dtype: of the weights written.
    Raises: CheckpointError
    """
    weights: dict[str, torch.Tensor] = {}
    for name, values in causal_lm.state_dict().items():
        whole = values.full_tensor() if isinstance(values, DTensor) else values
        if group.rank == 0:
            floating = whole.is_floating_point()
            weights[name] = whole.detach().to("cpu", dtype if floating else whole.dtype)

    def write(part: Path) -> None:
        _copy_companions(source, part)
        causal_lm.save_pretrained(part, state_dict=weights)
        config_path = part / "config.json"
        settings = json.loads(config_path.read_text())
        settings["dtype"] = str(dtype).removeprefix("torch.")
        config_path.write_text(json.dumps(settings, indent=2) + "\n")

    _replace_folder(folder, group, write if group.rank == 0 else None)


def save_snapshot(
    causal_lm: nn.Module, optimizer: ShardedAdamW, folder: Path, group: ProcessGroup
) -> None:
    """Writes weights, AdamW state (float32) and every rank's random state.

    Raises: CheckpointError
    """

    def write(part: Path) -> None:
        with _one_process_is_meant():
            save_distributed(
                _state(causal_lm, optimizer),
                checkpoint_id=part / "state",
                no_dist=group.world_size == 1,
            )
        save_file(_random_state(), part / f"random-{group.rank}.safetensors")
        if group.rank == 0:
            described = {
                "format": _FORMAT,
                "world_size": group.world_size,
                "num_updates": optimizer.num_updates,
                "shapes": _shapes(causal_lm),
            }
            (part / "snapshot.json").write_text(json.dumps(described))

    _replace_folder(folder, group, write)


def load_snapshot(
    causal_lm: nn.Module, optimizer: ShardedAdamW, folder: Path, group: ProcessGroup
) -> None:
    """Restores in place. Random state is restored when the number of ranks is the same.

    Raises: CheckpointError
    """

    def check() -> dict[str, Any]:
        described: dict[str, Any] = json.loads((folder / "snapshot.json").read_text())
        if described["format"] != _FORMAT:
            raise ValueError(f"format is {described['format']}, expected {_FORMAT}")
        expected = json.loads(json.dumps(_shapes(causal_lm)))
        if described["shapes"] != expected:
            raise ValueError("it holds the parameters of another model")
        return described

    def read() -> None:
        state = _state(causal_lm, optimizer)
        with _one_process_is_meant():
            load_distributed(state, checkpoint_id=folder / "state", no_dist=group.world_size == 1)
        random_path = folder / f"random-{group.rank}.safetensors"
        if described["world_size"] == group.world_size:
            _restore_random_state(load_file(random_path))

    described = _together(group, f"cannot read the snapshot in {folder}", check)
    _together(group, f"cannot read the snapshot in {folder}", read)
    optimizer.num_updates = int(described["num_updates"])


@contextlib.contextmanager
def _one_process_is_meant() -> Iterator[None]:
    """Without a process group torch warns that it assumes one process; so it is."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable")
        yield


def _state(causal_lm: nn.Module, optimizer: ShardedAdamW) -> dict[str, torch.Tensor]:
    """The live tensors by name; AdamW's moments placed as their parameters are."""
    state: dict[str, torch.Tensor] = {}
    parameters = dict(causal_lm.named_parameters())
    for name, parameter in parameters.items():
        state[f"parameter.{name}"] = parameter.detach()
    for name, moments in optimizer.moments().items():
        for kind, values in moments.items():
            if kind != "step":
                values = _placed_like(values, parameters[name])
            state[f"{kind}.{name}"] = values
    return state


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


def _shapes(causal_lm: nn.Module) -> dict[str, list[int]]:
    return {name: list(parameter.shape) for name, parameter in causal_lm.named_parameters()}


def _random_state() -> dict[str, torch.Tensor]:
    state = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def _restore_random_state(state: dict[str, torch.Tensor]) -> None:
    torch.set_rng_state(state["cpu"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


def _copy_companions(source: Path, part: Path) -> None:
    """Copies what a model folder holds beside weights and model config."""
    for path in sorted(source.iterdir()):
        is_weight = path.suffix in _WEIGHT_SUFFIXES or path.name.endswith(".index.json")
        if path.is_file() and not is_weight and path.name != "config.json":
            shutil.copyfile(path, part / path.name)


def _replace_folder(
    folder: Path, group: ProcessGroup, write: Callable[[Path], None] | None
) -> None:
    """Fills a folder beside `folder` on all ranks, then puts it in its place on rank 0."""
    what = f"cannot write {folder}"
    part = folder.with_name(f".{folder.name}.part")
    former = folder.with_name(f".{folder.name}.former")

    def prepare() -> None:
        if group.rank == 0:
            if former.exists() and not folder.exists():
                former.rename(folder)  # an earlier replacement was cut short between its renames
            shutil.rmtree(part, ignore_errors=True)
            shutil.rmtree(former, ignore_errors=True)
            part.mkdir(parents=True)

    def fill() -> None:
        if write is not None:
            write(part)

    def swap() -> None:
        if group.rank == 0:
            _flush(part)
            if folder.exists():
                folder.rename(former)
            part.rename(folder)
            _flush_entry(folder.parent)
            shutil.rmtree(former, ignore_errors=True)

    try:
        _together(group, what, prepare)
        _together(group, what, fill)
        _together(group, what, swap)
    except CheckpointError:
        if group.rank == 0:
            shutil.rmtree(part, ignore_errors=True)
            if former.exists() and not folder.exists():
                former.rename(folder)
        raise


def _together(group: ProcessGroup, what: str, action: Callable[[], Any]) -> Any:
    """Runs `action` on every rank; if it fails anywhere, every rank raises."""
    result = failure = None
    try:
        result = action()
    except _FAILURES as error:
        failure = error
    message = _describe(failure) if failure is not None else None
    for rank, reported in enumerate(group.gather(message)):
        if reported is not None:
            raise CheckpointError(f"{what} (train rank {rank}): {reported}") from failure
    return result


def _describe(failure: BaseException) -> str:
    """One line: the class and message of the cause."""
    if isinstance(failure, CheckpointException) and failure.failures:
        failure = next(iter(failure.failures.values()))[0]  # its text holds whole tracebacks
    # a full disk makes torch's writer fail once more, over what it could not write
    earlier: BaseException | None = failure
    while earlier is not None and not isinstance(earlier, OSError):
        earlier = earlier.__context__
    failure = earlier or failure
    return f"{type(failure).__name__}: {failure}"


def _flush(folder: Path) -> None:
    """Brings all files below `folder`, and their names, to the disk."""
    for path in [*folder.rglob("*"), folder]:
        _flush_entry(path)


def _flush_entry(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
