"""Folders that `transformers`, SGLang and vLLM load, written while training goes on.

    begin    copies this rank's shards to host memory in the dtype of the files, and returns
    write    rank 0 lays out the files; every rank writes its shards to where they belong in them

A rank's part of a tensor is a box of it, and so some ranges of bytes in a safetensors file. No
rank ever holds more than its own parts, and nothing is sent, if all ranks see the folder; otherwise
they send theirs to rank 0, some rows at a time. The folder gets its name when all is on the disk,
and replaces what had it.
"""

from __future__ import annotations

import copy
import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors import safe_open
from transformers.core_model_loading import revert_weight_conversion

from areal_sc.engines.training.adapters.lora import is_of_adapter
from areal_sc.engines.training.background import (
    FAILURES,
    BackgroundWriter,
    SideGroup,
    replace_folder,
)
from areal_sc.engines.training.parts import Box, Parts
from areal_sc.engines.training.tensor_file import TensorFile
from areal_sc.engines.training.whole_tensors import SENT_BYTES, Values, runs_of_rows
from areal_sc.sizing.model_folder import is_model_folder

MAX_FILE_BYTES = 5 << 30
"""A larger model is split over several files, as its readers expect. One tensor is never split."""

_WEIGHT_SUFFIXES = {
    *(".safetensors", ".bin", ".pt", ".pth", ".h5", ".gguf", ".msgpack", ".onnx", ".onnx_data"),
    *(".ot", ".npz", ".ckpt", ".tflite"),
}
_AS_IN_MEMORY = ".as_in_memory"


@dataclass(frozen=True)
class ModelFiles:
    """How tensors are spread over the files of a model folder.

    Attributes:
        layouts: file name -> layout.
        index: content of `model.safetensors.index.json`; None with a single file.
    """

    layouts: Mapping[str, TensorFile]
    index: dict[str, Any] | None

    @classmethod
    def lay_out(cls, tensors: Mapping[str, torch.Tensor], max_file_bytes: int) -> ModelFiles:
        """Files are filled in the order of `tensors`, which may be `meta`."""
        unfilled = {name: tensor.to("meta") for name, tensor in tensors.items()}
        split = split_torch_state_dict_into_shards(unfilled, max_shard_size=max_file_bytes)
        layouts = {
            file: TensorFile.lay_out({name: unfilled[name] for name in names})
            for file, names in split.filename_to_tensors.items()
        }
        if not split.is_sharded:
            return cls(layouts, None)
        num_parameters = sum(tensor.numel() for tensor in unfilled.values())
        metadata = {"total_parameters": num_parameters, **split.metadata}
        return cls(layouts, {"metadata": metadata, "weight_map": split.tensor_to_filename})

    def create(self, folder: Path) -> None:
        for name, layout in self.layouts.items():
            layout.create(folder / name)
        if self.index is not None:
            text = json.dumps(self.index, indent=2, sort_keys=True) + "\n"
            (folder / "model.safetensors.index.json").write_text(text)


class _WeightsFile(NamedTuple):
    """One file of an export.

    Attributes:
        names: name in memory -> name in the file, of its tensors.
    """

    path: Path
    layout: TensorFile
    names: Mapping[str, str]


@dataclass(eq=False)
class ModelExport:
    """The weights of a model, on their way to a folder, with config and tokenizer files.

    Every rank makes one, and begins it.

    Attributes:
        causal_lm: the model; of its tensors names, dtypes and buffers count.
        parts: of the model's parameters.
        values: the live ones.
        source: model folder whose other files (tokenizer, generation config) are copied.
        folder: target; replaced as a whole.
        dtype: of the floating-point weights in the files.
    """

    causal_lm: Any
    parts: Parts
    values: Values
    source: Path
    folder: Path
    dtype: torch.dtype
    writer: BackgroundWriter
    max_file_bytes: int = MAX_FILE_BYTES

    def __post_init__(self) -> None:
        self.folder = self.folder.expanduser()
        self._what = f"cannot write {self.folder}"
        self._group = self.writer.group
        self._config = _config_text(self.causal_lm, self.dtype)
        self._tensors = _tensors_to_export(self.causal_lm)
        self._unfilled = {
            name: torch.empty(
                self.parts.shapes.get(name, v.shape),
                dtype=_file_dtype(v, self.dtype),
                device="meta",
            )
            for name, v in self._tensors.items()
        }
        self._names_in_files = _names_in_files(self.causal_lm, self._unfilled)
        self._taken: dict[str, torch.Tensor] = {}
        self._failure: Exception | None = None

    def begin(self, *, is_staged: bool = True, reads_late: bool = False) -> Future[None]:
        """Takes the weights as they are now, and writes them.

        Args:
            is_staged: the weights are copied first. Without it they must not change until the
                future is done, and no memory is needed but for one tensor; all ranks must see the
                folder.
            reads_late: weights that are not staged are read one after the other by the thread that
                writes. It is for an engine whose `values` makes copies, which must not all be there
                at once, and whose tensors are the same while it computes.
        Returns: a future that is done when the folder has its name. It fails with CheckpointError,
            on every rank, when that could not be done.
        """
        self.writer.wait()
        if is_staged or not reads_late:
            self._take(copies=is_staged)
        return self.writer.begin(
            lambda: replace_folder(self.folder, self._group, self._fill, is_common=not is_staged)
        )

    def _take(self, *, copies: bool) -> None:
        """Takes this rank's parts as they are now.

        Args:
            copies: in host memory; otherwise the live tensors.
        """
        try:
            for name in self._unfilled:
                if self._given_by(name, self._group.rank) is not None:
                    part = self._read(name)
                    self._taken[name] = (
                        _in_host_memory(part, self.dtype, copy=True) if copies else part
                    )
        except FAILURES as error:  # for lack of memory; the other ranks hear of it in `_fill`
            self._failure = error

    def _fill(self, folder: Path, is_common: bool) -> None:
        """Writes the model to an empty folder. Called on all ranks.

        Args:
            is_common: all ranks see the folder; otherwise rank 0 alone writes.
        Raises: CheckpointError: on all ranks.
        """
        together = self._group.together
        is_converted = self._names_in_files is None
        target = folder / _AS_IN_MEMORY if is_converted else folder
        names = self._names_in_files or {name: name for name in self._unfilled}
        unfilled = {names[name]: v for name, v in self._unfilled.items()}
        model_files = ModelFiles.lay_out(unfilled, self.max_file_bytes)
        files = [
            _WeightsFile(
                target / file, layout, {n: it for n, it in names.items() if it in layout.starts}
            )
            for file, layout in model_files.layouts.items()
        ]
        scratch = torch.empty(0, dtype=torch.uint8)

        def create() -> None:
            if self._failure is not None:
                raise self._failure
            if self._group.rank == 0:
                if not is_common:
                    scratch.resize_(_largest_piece(unfilled.values()))
                _copy_companions(self.source, folder)
                (folder / "config.json").write_text(self._config)
                target.mkdir(exist_ok=True)
                model_files.create(target)

        together(self._what, create)
        if is_common:
            together(self._what, lambda: self._write_own(files))
        else:
            together(self._what, lambda: self._send_and_write(files, scratch))
        self._taken.clear()
        if is_converted:
            together(
                self._what,
                lambda: _convert(self.causal_lm, self._group, target, folder, self.max_file_bytes),
            )

    def _given_by(self, name: str, rank: int) -> Box | None:
        if name in self.parts.shapes:
            return self.parts.given_by(name, rank)
        # a buffer: all have the same
        return Box.whole(self._tensors[name].shape) if rank == 0 else None

    def _read(self, name: str) -> torch.Tensor:
        return self.values(name) if name in self.parts.shapes else self._tensors[name]

    def _for_file(self, name: str) -> torch.Tensor:
        part = self._taken[name] if name in self._taken else self._read(name)
        return _in_host_memory(part, self.dtype, copy=False)

    def _write_own(self, files: Iterable[_WeightsFile]) -> None:
        """Every rank writes its parts."""
        for file in files:
            given = ((n, self._given_by(n, self._group.rank)) for n in file.names)
            file.layout.write_parts(
                file.path,
                ((file.names[n], box, self._for_file(n)) for n, box in given if box is not None),
            )

    def _send_and_write(self, files: Iterable[_WeightsFile], scratch: torch.Tensor) -> None:
        """Rank 0 alone sees the files; `scratch`: see `_at_rank_0`."""
        failure: Exception | None = None
        for file in files:
            for name, stored in file.names.items():
                given = [self._given_by(name, rank) for rank in range(self._group.size)]
                own, dtype = self._taken.get(name), self._unfilled[name].dtype
                for box, values in _at_rank_0(own, given, dtype, self._group, scratch):
                    try:
                        if failure is None:
                            file.layout.write_parts(file.path, [(stored, box, values)])
                    except FAILURES as error:  # the others still send theirs
                        failure = error
        if failure is not None:
            raise failure


def _tensors_to_export(causal_lm: Any) -> dict[str, torch.Tensor]:
    """Parameters and persistent buffers in the model's order; tied ones once.

    Of tied parameters the name stays that the others are tied to when the model is loaded.
    """
    tied_to_others = set(getattr(causal_lm, "all_tied_weights_keys", None) or ())
    ignored = set(causal_lm._keys_to_ignore_on_save or ())
    names: dict[int, str] = {}
    parameters = dict(causal_lm.named_parameters(remove_duplicate=False))
    ignored |= {name for name in parameters if is_of_adapter(name)}
    for name, parameter in parameters.items():
        if id(parameter) not in names or names[id(parameter)] in tied_to_others:
            names[id(parameter)] = name
    kept = set(names.values())
    return {
        name: values.detach()
        for name, values in causal_lm.state_dict(keep_vars=True).items()
        if (name in kept or name not in parameters) and name not in ignored
    }


def _at_rank_0(
    own: torch.Tensor | None,
    given: Sequence[Box | None],
    dtype: torch.dtype,
    group: SideGroup,
    scratch: torch.Tensor,
) -> Iterator[tuple[Box, torch.Tensor]]:
    """Pieces of a tensor, on rank 0, each overwritten by the next. All ranks go through them.

    Args:
        own: this rank's part, in host memory and of the dtype; None: it gives nothing.
        given: by each rank.
        scratch: uint8, of the size of the largest piece on rank 0.
    """
    for giver, box in enumerate(given):
        if box is None:
            continue
        if giver == 0:
            if own is not None and group.rank == 0:
                yield box, own
            continue
        for piece in runs_of_rows(box, SENT_BYTES // dtype.itemsize):
            if own is not None and group.rank == giver:
                sent = own[piece.within(box)].reshape(-1).view(torch.uint8)
                dist.send(sent, group=group.ranks.handle, group_dst=0)
            elif group.rank == 0:
                received = scratch[: piece.numel * dtype.itemsize]
                dist.recv(received, group=group.ranks.handle, group_src=giver)
                yield piece, received.view(dtype).view(piece.sizes)


def _largest_piece(unfilled: Iterable[torch.Tensor]) -> int:
    """Bytes of the largest of those that `_at_rank_0` gives: one row, if that is more than most."""
    rows = [prod(tensor.shape[1:]) * tensor.itemsize for tensor in unfilled]
    return max(SENT_BYTES, *rows)


def _names_in_files(causal_lm: Any, unfilled: Mapping[str, torch.Tensor]) -> dict[str, str] | None:
    """Name in memory -> name in the files; None if values change, too.

    Some models are loaded under other names, or with several tensors (of experts) fused into one;
    their files keep the form that was loaded. Which it is shows on tensors without values.
    """
    reverted = revert_weight_conversion(causal_lm, dict(unfilled))
    in_files = {id(tensor): name for name, tensor in reverted.items()}
    if len(reverted) != len(unfilled) or any(id(t) not in in_files for t in unfilled.values()):
        return None
    return {name: in_files[id(tensor)] for name, tensor in unfilled.items()}


def _convert(
    causal_lm: Any, group: SideGroup, source: Path, target: Path, max_file_bytes: int
) -> None:
    """Rank 0 writes the files again in the form that the model is loaded from."""
    if group.rank != 0:
        return
    tensors: dict[str, torch.Tensor] = {}
    for path in sorted(source.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            tensors |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    tensors = revert_weight_conversion(causal_lm, tensors)
    files = ModelFiles.lay_out(tensors, max_file_bytes)
    files.create(target)
    for name, layout in files.layouts.items():
        whole = ((n, Box.whole(tensors[n].shape), tensors[n]) for n in layout.starts)
        layout.write_parts(target / name, whole)
    shutil.rmtree(source)


def _in_host_memory(values: torch.Tensor, dtype: torch.dtype, *, copy: bool) -> torch.Tensor:
    return values.to("cpu", _file_dtype(values, dtype), copy=copy)


def _file_dtype(values: torch.Tensor, dtype: torch.dtype) -> torch.dtype:
    return dtype if values.is_floating_point() else values.dtype


def _config_text(causal_lm: Any, dtype: torch.dtype) -> str:
    """`config.json` of the model, with the dtype of the files."""
    config = copy.deepcopy(causal_lm.config)
    config.architectures = [type(causal_lm).__name__]
    settings = json.loads(config.to_json_string())
    settings["dtype"] = str(dtype).removeprefix("torch.")
    return json.dumps(settings, indent=2, sort_keys=True) + "\n"


def _copy_companions(source: Path, part: Path) -> None:
    """Copies what a model folder holds beside weights and model config, folders included.

    A folder in it that is a model's own, or hidden, is none of it.
    """
    for entry in sorted(os.scandir(source), key=lambda entry: entry.name):
        path = Path(entry.path)
        if entry.is_dir(follow_symlinks=False):
            if not entry.name.startswith(".") and not is_model_folder(path):
                _copy_companions(path, part / entry.name)
        elif (
            entry.is_file()
            and path.suffix not in _WEIGHT_SUFFIXES
            and not entry.name.endswith(".index.json")
            and entry.name != "config.json"
        ):
            part.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, part / entry.name)
