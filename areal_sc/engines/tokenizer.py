"""The tokenizer of a model folder, and the tokens that end a sequence."""

from __future__ import annotations

from pathlib import Path

from transformers import AutoConfig, AutoTokenizer, GenerationConfig, PreTrainedTokenizerBase

from areal_sc.config.schema import GenerationConfig as Sampling
from areal_sc.errors import ModelError


def load_tokenizer(path: str | Path) -> PreTrainedTokenizerBase:
    """Raises: ModelError: the folder has none that can be used."""
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            path, local_files_only=True
        )
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(f"model folder {path}: no usable tokenizer: {error}") from error
    if len(tokenizer) <= 1:  # what transformers makes up where the files are missing
        raise ModelError(f"model folder {path}: no usable tokenizer: it has no vocabulary")
    return tokenizer


def end_token_ids(
    tokenizer: PreTrainedTokenizerBase, generation: GenerationConfig | None
) -> tuple[int, ...]:
    """Of the tokenizer and of the model's generation config, each once."""
    ends: list[int] = []
    for source in (tokenizer.eos_token_id, getattr(generation, "eos_token_id", None)):
        if source is not None:
            ends += [source] if isinstance(source, int) else source
    return tuple(dict.fromkeys(ends))


def check_ends(
    folder: str | Path, tokenizer: PreTrainedTokenizerBase, sampling: Sampling
) -> tuple[int, ...]:
    """Tokens that end an answer of this model, those of the settings too.

    Raises: ModelError: there is none, and answers are longer than a token.
    """
    try:
        generation = GenerationConfig.from_pretrained(folder, local_files_only=True)
    except OSError:  # transformers takes them from config.json then
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
        generation = GenerationConfig.from_model_config(config)
    ends = dict.fromkeys((*end_token_ids(tokenizer, generation), *sampling.stop_token_ids))
    if not ends and sampling.max_new_tokens > 1:
        raise ModelError(
            f"model folder {folder}: no token ends an answer: its tokenizer has no eos_token, and "
            "generation_config.json no eos_token_id; set one of them, or generation.stop_token_ids"
        )
    return tuple(ends)
