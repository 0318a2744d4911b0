"""What the engine reads of the model folder: the tokenizer, the ends of sequences, the shapes."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedTokenizerBase,
)

from areal_sc.config.model_folder import check_model_folder, read_model_config
from areal_sc.engines.servers.sglang.weights import read_shapes
from areal_sc.errors import ModelError

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ServedModel:
    """The model that the servers serve.

    Attributes:
        vocab_size: rows of the embedding.
        end_token_ids: that end a sequence: the tokenizer's, and those of the generation config.
        parameters: name and shape of each, tied ones once, as the trainers publish them; {} when
            the architecture cannot be built here.
        stored: the same of the tensors in the folder's safetensors files; {} when there are none.
    """

    tokenizer: PreTrainedTokenizerBase
    vocab_size: int
    end_token_ids: tuple[int, ...]
    parameters: dict[str, tuple[int, ...]]
    stored: dict[str, tuple[int, ...]]

    @classmethod
    def read(cls, path: str) -> ServedModel:
        """Raises ModelError: something is missing or unreadable; names it and the folder."""
        check_model_folder(path)
        config = read_model_config(Path(path))
        if not config or not isinstance(config.get("vocab_size"), int):
            raise ModelError(f"model folder {path}: config.json does not tell vocab_size")
        try:
            tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True)
        except (OSError, ValueError, KeyError) as error:
            raise ModelError(f"model folder {path}: no usable tokenizer: {error}") from error
        if len(tokenizer) <= 1:  # what transformers makes up where the files are missing
            raise ModelError(f"model folder {path}: no usable tokenizer: it has no vocabulary")
        return cls(
            tokenizer,
            config["vocab_size"],
            _end_token_ids(tokenizer, path),
            _read_parameters(path),
            read_shapes(path),
        )

    @property
    def is_stored_by_other_names(self) -> bool:
        """Whether files name the weights otherwise than memory does, as with fused experts."""
        return bool(self.stored) and not self.parameters.keys() <= self.stored.keys()

    @property
    def shapes_in_folders(self) -> dict[str, tuple[int, ...]]:
        """What a published folder has to hold at least."""
        return self.stored if self.is_stored_by_other_names else self.parameters


def _read_parameters(path: str) -> dict[str, tuple[int, ...]]:
    """Of the model without its values."""
    try:
        config = AutoConfig.from_pretrained(path, local_files_only=True)
        with torch.device("meta"):
            model: Any = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
        model.tie_weights()
    except (OSError, ValueError, KeyError, RuntimeError, NotImplementedError) as error:
        logger.warning("path=%s its parameters are not known: %s", path, error)
        return {}
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}


def _end_token_ids(tokenizer: PreTrainedTokenizerBase, path: str) -> tuple[int, ...]:
    ends: list[int] = []
    sources = [tokenizer.eos_token_id]
    if (Path(path) / "generation_config.json").is_file():
        sources.append(GenerationConfig.from_pretrained(path).eos_token_id)
    for source in sources:
        if source is not None:
            ends += [source] if isinstance(source, int) else source
    return tuple(dict.fromkeys(ends))
