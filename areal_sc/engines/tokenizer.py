"""The tokenizer of a model folder, and the tokens that end a sequence."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

from transformers import AutoConfig, AutoTokenizer, GenerationConfig, PreTrainedTokenizerBase

from areal_sc.config.schema import GenerationConfig as Sampling
from areal_sc.engines.stop_strings import StopStrings
from areal_sc.errors import ConfigError, ModelError


def load_tokenizer(path: str | Path) -> PreTrainedTokenizerBase:
    """Raises: ModelError: the folder has none that can be used."""
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            Path(path).expanduser(), local_files_only=True
        )
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(f"model folder {path}: no usable tokenizer: {error}") from error
    if len(tokenizer) <= 1:  # what transformers makes up where the files are missing
        raise ModelError(f"model folder {path}: no usable tokenizer: it has no vocabulary")
    return tokenizer


def end_token_ids(
    tokenizer: PreTrainedTokenizerBase, generation: GenerationConfig | None, config: Any
) -> tuple[int, ...]:
    """The tokenizer's, and those of the model, each once.

    Every engine takes them from here: a model ends the same way wherever it is served.

    Args:
        generation: of the model's folder; None: it has none, or names no end. The model's config
            tells its ends then.
        config: as transformers reads it; None: it does not know the model.
    Raises: ModelError: they are no numbers.
    """
    of_model = getattr(generation, "eos_token_id", None)
    if of_model is None and config is not None:
        of_model = getattr(config.get_text_config(), "eos_token_id", None)
        of_model = getattr(config, "eos_token_id", None) if of_model is None else of_model
    ends: list[Any] = []
    for source in (tokenizer.eos_token_id, of_model):
        if source is not None:
            ends += source if isinstance(source, list | tuple) else [source]
    if wrong := [end for end in ends if not isinstance(end, int)]:
        raise ModelError(f"eos_token_id of the model: expected numbers of tokens, got {wrong[0]!r}")
    return tuple(dict.fromkeys(ends))


def read_end_token_ids(folder: str | Path, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """The same, where no model of the folder is loaded.

    Raises: ModelError: they are no numbers, or `generation_config.json` cannot be read.
    """
    generation = None
    if (Path(folder) / "generation_config.json").is_file():
        try:
            generation = GenerationConfig.from_pretrained(folder, local_files_only=True)
        except (OSError, ValueError) as error:
            raise ModelError(f"model folder {folder}: {error}") from error
    return end_token_ids(tokenizer, generation, _config_of(folder))


def _config_of(folder: str | Path) -> Any:
    """As transformers reads it; None: it does not know the model."""
    with suppress(OSError, ValueError, KeyError):
        return AutoConfig.from_pretrained(folder, local_files_only=True)
    return None


def check_ends(
    folder: str | Path, tokenizer: PreTrainedTokenizerBase, sampling: Sampling
) -> tuple[int, ...]:
    """Tokens that end an answer of this model, those of the settings too.

    Raises: ConfigError: nothing ends one, and answers are longer than a token; or a stop string can
        never be found. ModelError: see `read_end_token_ids`.
    """
    named = dict.fromkeys((*read_end_token_ids(folder, tokenizer), *sampling.stop_token_ids))
    text_config = getattr(_config_of(folder), "get_text_config", lambda: None)()
    vocab_size = getattr(text_config, "vocab_size", None) or max(named, default=0) + 1
    ends = tuple(token for token in named if 0 <= token < vocab_size)
    if sampling.stop:
        StopStrings(tokenizer, sampling.stop)
    elif not ends and sampling.max_new_tokens > 1:
        why = "its tokenizer has no eos_token, and generation_config.json no eos_token_id"
        if named:
            why = f"the model samples tokens below {vocab_size}, and its end is {list(named)}"
        raise ConfigError(
            f"model folder {folder}: no token ends an answer: {why}; set one of them, "
            "generation.stop or generation.stop_token_ids"
        )
    return ends
