"""What the engine reads of the model folder: the tokenizer, the ends of sequences, the shapes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from transformers import AutoTokenizer, GenerationConfig, PreTrainedTokenizerBase

from areal_sc.config.model_folder import check_model_folder, read_model_config
from areal_sc.engines.sglang.weights import read_shapes
from areal_sc.errors import ModelError


@dataclass(frozen=True)
class ServedModel:
    """The model that the servers serve.

    Attributes:
        vocab_size: rows of the embedding.
        end_token_ids: that end a sequence: the tokenizer's, and those of the generation config.
        shapes: of every parameter; {} when the folder's files do not tell.
    """

    tokenizer: PreTrainedTokenizerBase
    vocab_size: int
    end_token_ids: tuple[int, ...]
    shapes: dict[str, tuple[int, ...]]

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
            tokenizer, config["vocab_size"], _end_token_ids(tokenizer, path), read_shapes(path)
        )


def _end_token_ids(tokenizer: PreTrainedTokenizerBase, path: str) -> tuple[int, ...]:
    ends: list[int] = []
    sources = [tokenizer.eos_token_id]
    if (Path(path) / "generation_config.json").is_file():
        sources.append(GenerationConfig.from_pretrained(path).eos_token_id)
    for source in sources:
        if source is not None:
            ends += [source] if isinstance(source, int) else source
    return tuple(dict.fromkeys(ends))
