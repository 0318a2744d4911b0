"""Adapters as files of peft: read to begin from, and written while training goes on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from types import MappingProxyType

import torch
from safetensors import SafetensorError, safe_open

from areal_sc.config.lora_settings import ADAPTER_CONFIG, LoraConfig
from areal_sc.config.schema import ActorConfig
from areal_sc.engines.training.adapters.adapter_probe import AdapterProbe
from areal_sc.engines.training.background import BackgroundWriter, replace_folder
from areal_sc.engines.training.tensor_file import TensorFile
from areal_sc.errors import ModelError
from areal_sc.sizing.adapter_folder import (
    ADAPTER_WEIGHTS,
    adapter_config,
    check_adapter,
)


def read_adapter(
    config: ActorConfig, shapes: Mapping[str, Sequence[int]]
) -> dict[str, torch.Tensor]:
    """The adapter in `config.lora.path`, float32.

    Args:
        shapes: of the parameters that it must have, and no others, by their names in the model.
    Raises: ModelError: the folder cannot be used, or has other parameters.
    """
    check_adapter(config.lora)
    path = Path(config.lora.path) / ADAPTER_WEIGHTS
    try:
        with safe_open(path, framework="pt") as file:
            stored = {key: file.get_tensor(key).float() for key in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{path}: not a whole safetensors file: {error}") from error
    expected = {_key(name): tuple(shape) for name, shape in shapes.items()}
    found = {key: tuple(values.shape) for key, values in stored.items()}
    if found != expected:
        key = min(key for key in expected | found if expected.get(key) != found.get(key))
        raise ModelError(
            f"{path}: expected {key} to be {expected.get(key, 'absent')} by actor.lora and "
            f"actor.path={config.path}, got {found.get(key, 'none')}; actor.lora.targets must "
            "name the adapter's layers"
        )
    return {name: stored[_key(name)] for name in shapes}


def write_adapter(
    folder: Path, lora: LoraConfig, base: str, values: Mapping[str, torch.Tensor]
) -> int:
    """Writes an adapter into an empty folder; returns the crc32 of the file with its values.

    Args:
        base: path or name of the model.
        values: whole parameters by their names in the model, on the CPU.
    """
    tensors = {_key(name): whole for name, whole in values.items()}
    text = adapter_config(lora, base, {name.rpartition(".")[0] for name in values})
    (folder / ADAPTER_CONFIG).write_text(text, encoding="utf-8")
    return TensorFile.lay_out(tensors).write_whole(folder / ADAPTER_WEIGHTS, tensors)


def begin_adapter(
    config: ActorConfig,
    values: Mapping[str, torch.Tensor],
    folder: Path,
    writer: BackgroundWriter,
    probe: AdapterProbe | None = None,
    *,
    beside: Mapping[str, Mapping[str, torch.Tensor]] = MappingProxyType({}),
) -> Future[None]:
    """Writes an adapter to a folder, which it replaces; every rank makes the call.

    Args:
        values: copies; see `write_adapter`.
        probe: by which servers show that they serve it.
        beside: further files of tensors, by their names.
    Returns: a future that is done when the folder has its name. It fails with CheckpointError, on
        every rank, when that could not be done.
    """
    group, folder = writer.group, folder.expanduser()

    def fill(part: Path, _is_common: bool) -> None:
        def write() -> None:
            if group.rank == 0:
                write_adapter(part, config.lora, config.path, values)
                if probe is not None:
                    probe.write(part)
                for name, tensors in beside.items():
                    TensorFile.lay_out(tensors).write_whole(part / name, tensors)

        group.together(f"cannot write {folder}", write)

    return writer.begin(lambda: replace_folder(folder, group, fill))


def _key(name: str) -> str:
    """What peft calls a parameter of an adapter."""
    return f"base_model.model.{name}.weight"
