"""Models of Qwen2's architecture with random weights, in memory or as folders, in sizes by name."""

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


def build(
    shape: Shape, dtype: torch.dtype = torch.float32, device: str = "cpu"
) -> Qwen2ForCausalLM:
    """The model, for evaluation; the same weights each time."""
    config = Qwen2Config(
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
        dtype=dtype,
    )
    torch.manual_seed(0)
    with torch.device(device):
        return Qwen2ForCausalLM(config).to(dtype).eval()


def build_tokenizer(shape: Shape) -> PreTrainedTokenizerFast:
    """Words are token ids; the model cannot sample the end, so completions end by length alone."""
    vocabulary = {f"t{i}": i for i in range(min(NUM_WORDS, shape.vocabulary))}
    vocabulary[_END] = shape.vocabulary
    words = models.WordLevel(vocabulary, unk_token="t0")
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(words), eos_token=_END)


def write_folder(folder: Path, shape: Shape, dtype: torch.dtype) -> None:
    """Writes model and tokenizer as a Hugging Face folder."""
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    build(shape, dtype).save_pretrained(folder)
    build_tokenizer(shape).save_pretrained(folder)
