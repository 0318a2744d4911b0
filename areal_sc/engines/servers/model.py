"""What the engine reads of model folders: tokenizer, ends of sequences, shapes; and compares."""

from __future__ import annotations

import logging
from bisect import bisect_right
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import accumulate
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import AutoConfig, PreTrainedTokenizerBase
from transformers.core_model_loading import revert_weight_conversion

from areal_sc.engines.picture_processor import PictureProcessor, picture_processor
from areal_sc.engines.rotary import DYNAMIC, LONGROPE, rope_limits
from areal_sc.engines.tokenizer import load_tokenizer, read_end_token_ids
from areal_sc.engines.training.adapters.lora import named_linear
from areal_sc.engines.training.value_head import model_class
from areal_sc.errors import ModelError
from areal_sc.sizing.model_folder import check_model_folder, read_model_config, read_stored_shapes
from areal_sc.weights.published import BucketLayout, check_shapes

if TYPE_CHECKING:
    from areal_sc.weights.group import NamedTensor

logger = logging.getLogger(__name__)

Shape = tuple[int, ...]

_TRIED_SIZE = 4
"""Rows and columns of the small tensors that show how fused ones are taken apart."""


@dataclass(frozen=True)
class StoredNames:
    """What each tensor in memory is called in model files, by the names that servers know.

    transformers fuses the experts of a layer into one tensor when it loads them, and renames
    others. Trainers publish what they have in memory. As a fused tensor is its experts one after
    the other, nothing is copied to take it apart: its bytes get other names and shapes.

    Attributes:
        pieces: name in memory -> names and shapes in the files, in the order of its bytes.
    """

    pieces: Mapping[str, tuple[tuple[str, Shape], ...]]

    @classmethod
    def find(cls, model: Any, stored: Mapping[str, Shape]) -> StoredNames | None:
        """Lets transformers take small tensors apart, and sees where their values go.

        Args:
            model: transformers' model, its values of no interest.
            stored: name and shape of each tensor in the files; {}: not known, as of files that are
                no safetensors.
        Returns: None where a tensor in a file is no run of bytes of one in memory.
        """
        shapes = {name: tuple(value.shape) for name, value in model.named_parameters()}
        stored = stored or shapes
        small = {name: _small(shape) for name, shape in shapes.items()}
        starts = list(accumulate((prod(shape) for shape in small.values()), initial=0))
        numbered = {
            name: torch.arange(start, start + prod(shape)).view(shape)
            for start, (name, shape) in zip(starts, small.items(), strict=False)
        }
        try:
            reverted = revert_weight_conversion(model, numbered)
        except (ValueError, TypeError, KeyError, IndexError, RuntimeError):
            return None  # it depends on sizes
        if not reverted.keys() <= stored.keys() and shapes.keys() <= stored.keys():
            reverted = numbered  # the files have the names of memory after all
        runs = sorted((int(tensor.flatten()[0]), name) for name, tensor in reverted.items())
        names, pieces = list(shapes), {name: list[tuple[str, Shape]]() for name in shapes}
        ends = [start for start, _ in runs[1:]] + starts[-1:]
        for (start, stored_name), end in zip(runs, ends, strict=True):
            values = reverted[stored_name].flatten()
            if not torch.equal(values, torch.arange(start, end)) or stored_name not in stored:
                return None
            owner = names[bisect_right(starts, start) - 1]
            pieces[owner].append((stored_name, stored[stored_name]))
        for name, parts in pieces.items():
            if sum(prod(shape) for _, shape in parts) != prod(shapes[name]):
                return None
        return cls({name: tuple(parts) for name, parts in pieces.items()})

    def split(self, named_tensors: Iterable[NamedTensor]) -> list[NamedTensor]:
        """Views of whole tensors, which may be flat. Raises: KeyError: an unknown name."""
        found: list[NamedTensor] = []
        for name, tensor in named_tensors:
            parts = self.pieces[name]
            values = torch.split(tensor.reshape(-1), [prod(shape) for _, shape in parts])
            found += [(n, v.view(shape)) for (n, shape), v in zip(parts, values, strict=True)]
        return found

    def describe(self, layout: BucketLayout) -> BucketLayout:
        """The same bytes. Raises: KeyError: an unknown name."""
        parts = [
            (stored_name, dtype, shape)
            for name, dtype in zip(layout.names, layout.dtypes, strict=True)
            for stored_name, shape in self.pieces[name]
        ]
        names, dtypes, shapes = zip(*parts, strict=True)
        return BucketLayout(names, dtypes, shapes)


@dataclass(frozen=True)
class ServedModel:
    """The model that the servers serve.

    Attributes:
        vocab_size: rows of the embedding.
        end_token_ids: that end a sequence; see `engines.tokenizer.end_token_ids`.
        parameters: name and shape of each, tied ones once, as the trainers publish them; {} when
            the architecture cannot be built here.
        stored: the same of the tensors in the folder's safetensors files; {} when there are none.
        stored_names: which of those each parameter is; None where that is not known.
        rope_limits: up to which length rotary embeddings depend on positions alone, by their kind.
        adaptable: [O, I] of the layers that an adapter may have a part beside; {} as `parameters`.
        processor: of a model that reads pictures.
    """

    tokenizer: PreTrainedTokenizerBase
    vocab_size: int
    end_token_ids: tuple[int, ...]
    parameters: dict[str, tuple[int, ...]]
    stored: dict[str, tuple[int, ...]]
    stored_names: StoredNames | None
    rope_limits: dict[str, int]
    adaptable: dict[str, tuple[int, int]]
    processor: PictureProcessor | None

    @classmethod
    def read(cls, path: str) -> ServedModel:
        """Raises ModelError: something is missing or unreadable; names it and the folder."""
        check_model_folder(path)
        config = read_model_config(Path(path))
        if not config or not isinstance(config.get("vocab_size"), int):
            raise ModelError(f"model folder {path}: config.json does not tell vocab_size")
        tokenizer = load_tokenizer(path)
        model, stored = _build_unfilled(path), read_stored_shapes(Path(path))
        return cls(
            tokenizer,
            config["vocab_size"],
            read_end_token_ids(path, tokenizer),
            {} if model is None else {n: tuple(p.shape) for n, p in model.named_parameters()},
            stored,
            None if model is None else StoredNames.find(model, stored),
            {} if model is None else rope_limits(model.config),
            {
                name: (layer.out_features, layer.in_features)
                for name, layer in ({} if model is None else named_linear(model)).items()
            },
            picture_processor(path, tokenizer),
        )

    def check_context(self, max_context_tokens: int) -> None:
        """Raises: ModelError: servers would turn keys otherwise than trainers do."""
        if DYNAMIC in self.rope_limits:
            raise ModelError(
                "the model has dynamic rotary embeddings: servers scale them for the longest "
                "context, also those of shorter rows, but trainers do not; use rollout.engine=local"
            )
        limit = self.rope_limits.get(LONGROPE, max_context_tokens)
        if max_context_tokens > limit:
            raise ModelError(
                "the model has longrope rotary embeddings: servers choose one set of frequencies "
                "for all rows of a batch, trainers one for each row; expected "
                f"rollout.max_context_tokens of at most {limit}, got {max_context_tokens}"
            )

    @property
    def shapes_in_folders(self) -> dict[str, tuple[int, ...]]:
        """What a published folder has to hold at least."""
        has_other_names = not self.parameters.keys() <= self.stored.keys()  # as of fused experts
        return self.stored if self.stored and has_other_names else self.parameters


def _build_unfilled(path: str) -> Any:
    """The model without its values; None if it cannot be built."""
    try:
        config = AutoConfig.from_pretrained(path, local_files_only=True)
        with torch.device("meta"):
            model = model_class(Path(path)).from_config(config)
        model.tie_weights()
    except (OSError, ValueError, KeyError, RuntimeError, NotImplementedError) as error:
        logger.warning("path=%s its parameters are not known: %s", path, error)
        return None
    return model


def check_weights_folder(folder: str, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Compares a folder that is to be published with the model that is served.

    Args:
        shapes: of what it has to hold at least; when empty, nothing is compared.
    Raises: ModelError: it holds no model, another one, or a weight file that was cut off.
    """
    check_model_folder(folder)
    if stored := read_stored_shapes(Path(folder)):
        given = {name: shape for name, shape in stored.items() if name in shapes}
        check_shapes(given, shapes, f"the weights in {folder}")


def as_served(
    named_tensors: Iterable[NamedTensor],
    shapes: Mapping[str, tuple[int, ...]],
    stored_names: StoredNames | None,
) -> list[NamedTensor]:
    """Views of tensors that may be flat, by the names and in the shapes that servers know.

    Args:
        shapes: of the parameters; when empty, nothing is known or compared.
    Raises: ModelError: a parameter is missing, unknown, or of another size.
    """
    given = dict(named_tensors)
    check_shapes({name: tuple(t.shape) for name, t in given.items()}, shapes, "the weights")
    if stored_names is not None:
        return stored_names.split(given.items())
    return [
        (name, tensor.reshape(shapes.get(name, tensor.shape))) for name, tensor in given.items()
    ]


def _small(shape: Shape) -> Shape:
    """Experts, the first of three dimensions, keep their number: each has a name."""
    kept = shape[:-2]
    return (*kept, *(min(size, _TRIED_SIZE) for size in shape[len(kept) :]))
