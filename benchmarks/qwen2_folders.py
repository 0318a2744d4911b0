"""Model folders of Qwen2's architecture with random weights, in sizes by name."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM
from transformers.utils import logging as transformers_logging


@dataclass(frozen=True)
class Shape:
    """The numbers that make a model's size."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    vocabulary: int


SHAPES = {
    "1m": Shape(128, 384, 4, 4, 2, 2048),
    "10m": Shape(256, 1024, 9, 4, 2, 4096),
    "50m": Shape(640, 2560, 7, 10, 5, 8192),
    "0.5b": Shape(896, 4864, 24, 14, 2, 151936),  # Qwen2-0.5B
}
"""Embeddings are tied, as in the small models of the family."""

NUM_WORDS = 512
"""Prompts are of these tokens."""

_END = "<end>"


def write_folder(folder: Path, size: str, dtype: torch.dtype, max_context_tokens: int) -> int:
    """Writes model and tokenizer; completions end by length alone. Returns the parameters' number.

    Args:
        size: a name of `SHAPES`.
    """
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    shape = SHAPES[size]
    config = Qwen2Config(
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        max_position_embeddings=2 * max_context_tokens,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
        dtype=dtype,
    )
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(config).to(dtype)
    model.save_pretrained(folder)
    vocabulary = {f"t{i}": i for i in range(NUM_WORDS)}
    vocabulary[_END] = shape.vocabulary  # the model cannot sample it
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="t0"))
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token=_END).save_pretrained(folder)
    return model.num_parameters()
