"""Adapters as files of peft: read to begin from, and written while training goes on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import torch
from safetensors import SafetensorError, safe_open

from areal_sc.config.lora_settings import ADAPTER_CONFIG, LoraConfig
from areal_sc.config.schema import ActorConfig
from areal_sc.engines.training.adapters.adapter_probe import AdapterProbe
from areal_sc.engines.training.adapters.lora import LORA_A, LORA_B
from areal_sc.engines.training.background import BackgroundWriter, replace_folder
from areal_sc.engines.training.tensor_file import TensorFile
from areal_sc.errors import ModelError
from areal_sc.sizing.adapter_folder import (
    ADAPTER_WEIGHTS,
    adapter_config,
    check_adapter,
    rank_and_alpha,
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
    stored = _read_tensors(path)
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


@dataclass(frozen=True, eq=False)
class AdapterLayers:
    """The matrices of an adapter that is not trained here.

    Attributes:
        rank: r.
        scale: of the products, alpha / r.
        matrices: A [r, I] and B [O, r] by the layer's name, on the CPU.
    """

    rank: int
    scale: float
    matrices: dict[str, tuple[torch.Tensor, torch.Tensor]]


def read_layers(
    folder: Path, shapes: Mapping[str, tuple[int, int]], dtype: torch.dtype
) -> AdapterLayers:
    """Any adapter of a model.

    Args:
        shapes: [O, I] of the layers that it may have a part beside, by their names.
        dtype: of the matrices.
    Raises: ModelError: the folder cannot be used, a tensor is of no such layer, or of another
        shape, or holds a value that is not finite in this type.
    """
    name = f"adapter {folder}"
    rank, alpha = rank_and_alpha(folder, name)
    tensors = _read_tensors(folder / ADAPTER_WEIGHTS)
    stored = {key: values.to(dtype) for key, values in tensors.items()}
    expected = {
        _key(f"{layer}.{part}"): shape
        for layer, (num_outputs, num_inputs) in shapes.items()
        for part, shape in ((LORA_A, (rank, num_inputs)), (LORA_B, (num_outputs, rank)))
    }
    for key, values in stored.items():
        if tuple(values.shape) != expected.get(key):
            raise ModelError(
                f"{name}: expected {key} to be {expected.get(key, 'absent')} by its r and by the "
                f"model that is served, got {tuple(values.shape)}"
            )
        if not values.isfinite().all():
            raise ModelError(f"{name}: {key} has values that are not finite")
    matrices = {}
    for layer in shapes:
        a, b = (stored.pop(_key(f"{layer}.{part}"), None) for part in (LORA_A, LORA_B))
        if (a is None) != (b is None):
            raise ModelError(f"{name}: {layer} has only one of {LORA_A} and {LORA_B}")
        if a is not None and b is not None:
            matrices[layer] = a, b
    if not matrices:
        raise ModelError(f"{name}: its {ADAPTER_WEIGHTS} is empty")
    return AdapterLayers(rank, alpha / rank, matrices)


def _read_tensors(path: Path) -> dict[str, torch.Tensor]:
    try:
        with safe_open(path, framework="pt") as file:
            return {key: file.get_tensor(key).float() for key in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{path}: not a whole safetensors file: {error}") from error


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
