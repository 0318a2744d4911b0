"""The weights of a model folder, read a few tensors at a time.

    files ── transformers' renaming and fusing ──► tensors by their names in memory

Which stored tensors make which one in memory is found out beforehand: transformers converts tensors
that have the shapes of the files, and no values. Reading converts those of the names that are asked
for, so that no more of the model is in memory.
"""

from __future__ import annotations

import json
import logging
import zipfile
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from transformers import core_model_loading as loading
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.modeling_utils import LoadStateDictConfig, load_state_dict
from transformers.utils import logging as hf_logging

from areal_sc.config.schema import ActorConfig, ModelHead
from areal_sc.engines.training.causal_lm import (
    build_unfilled,
    check_all_used,
    differently_tied,
    misfit,
    read_causal_lm,
)
from areal_sc.engines.training.value_head import is_new_head
from areal_sc.errors import ModelError
from areal_sc.sizing.model_folder import check_model_folder

logger = logging.getLogger(__name__)

_WEIGHT_FILES = ("model.safetensors", "pytorch_model.bin")
"""In transformers' order; the first one that is there, or whose index is, counts."""

_FAILURES = (OSError, ValueError, KeyError, RuntimeError, SafetensorError)


class ModelWeights(Protocol):
    """Where the values of a model come from.

    Attributes:
        conversions: those of `get_model_conversion_mapping` that the files need, by their index;
            None: not known.
    """

    @property
    def conversions(self) -> Sequence[int] | None: ...

    def read(self, names: Iterable[str]) -> dict[str, torch.Tensor]:
        """Parameters and buffers by their names in memory; on the CPU, fractions in float32.

        Returns: by name, without buffers that are not stored.
        Raises: ModelError: they cannot be read.
        """


class WeightsInMemory:
    """The weights of a model that is in memory as a whole."""

    def __init__(self, causal_lm: Any) -> None:
        self.conversions = None
        self._values = _named_tensors(causal_lm)

    def read(self, names: Iterable[str]) -> dict[str, torch.Tensor]:
        return {name: self._values[name].detach() for name in names}


def open_weights(config: ActorConfig) -> ModelWeights:
    """The weights of `config.path`, or drawn with `random_init`.

    Drawn ones, and those of files that cannot be read in parts, are in memory as a whole.

    Raises: ModelError: the folder cannot be used.
    """
    folder = Path(config.path)
    if config.random_init:
        return WeightsInMemory(read_causal_lm(config))
    check_model_folder(folder)
    try:
        files = _weight_files(folder)
        if files is not None:
            return StoredWeights(folder, files, config.head)
    except _FAILURES as error:
        raise _unreadable(folder, error) from error
    logger.warning("folder=%s cannot be read in parts: rank 0 has all of its weights", folder)
    return WeightsInMemory(read_causal_lm(config))


class StoredWeights:
    """`ModelWeights` of files that are read in parts.

    Args:
        folder: of the model.
        files: all that hold weights; they are mapped into memory.
        head: of the model.
    Raises: ModelError: they do not hold the model that `config.json` describes.
    """

    def __init__(self, folder: Path, files: Sequence[Path], head: ModelHead = ModelHead.lm) -> None:
        self._folder = folder
        self._head = head
        self._stored = {key: tensor for file in files for key, tensor in _map_file(file).items()}
        with torch.device("meta"):
            self._model = build_unfilled(folder, head)
        self._unfilled = _named_tensors(self._model)
        same = defaultdict[int, list[str]](list)
        for name, values in self._unfilled.items():
            same[id(values)].append(name)
        self._aliases = {name: same[id(values)] for name, values in self._unfilled.items()}
        self._conversions: list[Any] = get_model_conversion_mapping(self._model)
        self._sources = self._find_sources()
        used = {id(conversion) for conversion in self._model._weight_conversions}
        self.conversions = [i for i, it in enumerate(self._conversions) if id(it) in used]
        self._check_tied()

    def read(self, names: Iterable[str]) -> dict[str, torch.Tensor]:
        stored = {name: self._stored_alias(name) for name in names}
        found = self._read_stored([alias for alias in stored.values() if alias is not None])
        read = {name: found[alias] for name, alias in stored.items() if alias is not None}
        new = [n for n in stored if n not in read and is_new_head(n, self._head)]
        return read | {name: torch.zeros(self._unfilled[name].shape) for name in new}

    def _stored_alias(self, name: str) -> str | None:
        """A name under which this tied parameter is stored, or None."""
        return next((alias for alias in self._aliases[name] if alias in self._sources), None)

    def _read_stored(self, names: Iterable[str]) -> dict[str, torch.Tensor]:
        """Without regard to what is tied. Raises: ModelError."""
        names = list(names)
        keys = {key for name in names for key in self._sources[name]}
        try:
            self._convert({key: self._stored[key] for key in keys}, "cpu")
            found = {name: values.detach() for name, values in _named_tensors(self._model).items()}
            return {name: found[name] for name in names}
        except _FAILURES as error:
            raise _unreadable(self._folder, error) from error
        finally:
            self._drop_values()

    def _convert(self, stored: dict[str, Any], device: str) -> Any:
        """Fills `_model` with what these stored tensors become; what transformers says of it.

        Raises: RuntimeError: they cannot be converted.
        """
        settings = LoadStateDictConfig(
            dtype=torch.float32, weight_mapping=self._conversions, device_map={"": device}
        )
        with _no_progress_bar():
            found, _ = loading.convert_and_load_state_dict_in_model(self._model, stored, settings)
        for name, error in found.conversion_errors.items():
            raise RuntimeError(f"{name}: {error}")
        return found

    def _drop_values(self) -> None:
        for name, values in self._unfilled.items():
            module, _, own_name = name.rpartition(".")
            setattr(self._model.get_submodule(module), own_name, values)

    def _find_sources(self) -> dict[str, list[str]]:
        """Name in memory -> keys of the stored tensors that it is made of.

        Raises: ModelError: a tensor is missing, or has another shape.
        """
        shapes = {
            key: values.shape if isinstance(values, torch.Tensor) else values.get_shape()
            for key, values in self._stored.items()
        }
        expected = self._model.state_dict()
        renamed, converted = dict[str, list[str]](), defaultdict[str, list[str]](list)
        for key in shapes:
            target, changes_values = self._first_target(key, expected)
            if changes_values:
                converted[target].append(key)
            else:
                renamed[target] = [key]
        sources: dict[str, list[str]] = {}
        mismatched, unexpected = set[str](), set[str]()
        for keys in [[key for (key,) in renamed.values()], *converted.values()]:
            unfilled = {key: torch.empty(tuple(shapes[key]), device="meta") for key in keys}
            found = self._convert(unfilled, "meta")
            mismatched |= {str(name) for name, *_ in found.mismatched_keys}
            unexpected |= found.unexpected_keys
            sources |= {n: renamed.get(n, keys) for n in expected.keys() - found.missing_keys}
        self._drop_values()
        missing = {n for n in expected if not any(it in sources for it in self._aliases[n])}
        found.missing_keys, found.unexpected_keys = set(missing), unexpected
        self._model._adjust_missing_and_unexpected_keys(found)
        parameters = dict(self._model.named_parameters())
        # transformers would draw parameters that it allows to be missing
        missing = {name for name in missing if not is_new_head(name, self._head)}
        absent = [n for n in sorted(missing) if n in found.missing_keys or n in parameters]
        if absent or mismatched:
            raise misfit(self._folder, absent + sorted(mismatched))
        check_all_used(self._folder, self._model, found.unexpected_keys, self._head)
        return sources

    def _first_target(self, key: str, expected: dict[str, Any]) -> tuple[str, bool]:
        """The first name in memory of a stored tensor, and whether its values change on the way.

        As in transformers' own loading, names that memory knows as they are win.
        """
        renamings = [it for it in self._conversions if isinstance(it, loading.WeightRenaming)]
        converters = [it for it in self._conversions if isinstance(it, loading.WeightConverter)]
        prefix = self._model.base_model_prefix
        name, pattern = loading.rename_source_key(key, renamings, converters, prefix, expected)
        if name not in expected and key in expected:
            name, pattern = loading.rename_source_key(key, [], [], prefix, expected)
        return name, pattern is not None

    def _check_tied(self) -> None:
        """Raises: ModelError: parameters that are tied are stored with different values."""
        for first, *others in {id(names): names for names in self._aliases.values()}.values():
            for other in (name for name in others if {first, name} <= self._sources.keys()):
                found = self._read_stored([first, other])
                if not torch.equal(found[first], found[other]):
                    raise differently_tied(self._folder, first, other)


def _named_tensors(model: Any) -> dict[str, torch.Tensor]:
    """Parameters and buffers, tied ones under all of their names."""
    return {
        **dict(model.named_parameters(remove_duplicate=False)),
        **dict(model.named_buffers(remove_duplicate=False)),
    }


def _weight_files(folder: Path) -> list[Path] | None:
    """The files that transformers would read; None if they cannot be read in parts."""
    settings = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    if {"quantization_config", "transformers_weights"} & settings.keys():
        return None
    if (folder / "adapter_config.json").exists():
        return None
    for name in _WEIGHT_FILES:
        files, index = [folder / name], folder / f"{name}.index.json"
        if not files[0].is_file() and index.is_file():
            named = json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()
            files = [folder / file for file in sorted(set(named))]
        if files[0].is_file():
            # torch files of before 2020 cannot be mapped
            can_map = name.endswith(".safetensors") or all(map(zipfile.is_zipfile, files))
            return files if can_map else None
    return None


def _map_file(file: Path) -> dict[str, Any]:
    """Key -> tensor, or a slice of it that is read when it is indexed."""
    if file.suffix == ".bin":
        return load_state_dict(file)
    opened: Any = safe_open(file, framework="pt")
    return {key: opened.get_slice(key) for key in opened.keys()}  # noqa: SIM118  # it is no dict


def _unreadable(folder: Path, error: Exception) -> ModelError:
    return ModelError(f"cannot load the model in {folder}: {error}")


@contextmanager
def _no_progress_bar() -> Iterator[None]:
    """It would be one for each few tensors."""
    is_shown = hf_logging.is_progress_bar_enabled()
    hf_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        if is_shown:
            hf_logging.enable_progress_bar()  # type: ignore[no-untyped-call]
