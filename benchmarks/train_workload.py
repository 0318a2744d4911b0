"""Models and rows for the benchmark of the training step."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from areal_sc.algorithms.packing import pack_micro_batches
from areal_sc.transport.packed_rows import PackedRows

NUM_MINIBATCHES = 2


@dataclass(frozen=True)
class Workload:
    """A model, rows, and the token budget of a micro-batch.

    Attributes:
        prompt_tokens: of each row; 0: a quarter of it.
    """

    name: str
    hidden: int
    num_layers: int
    feed_forward: int
    vocabulary: int
    max_tokens: int
    lengths: tuple[int, ...]
    prompt_tokens: int = 0

    @property
    def num_tokens(self) -> int:
        return sum(self.lengths)


def workloads(*, quick: bool) -> list[Workload]:
    def lengths(count: int, median: float, sigma: float, low: int, high: int) -> tuple[int, ...]:
        generator = random.Random(0)
        drawn = (int(median * generator.lognormvariate(0, sigma)) for _ in range(count))
        return tuple(min(high, max(low, length)) for length in drawn)

    rows = lengths(16 if quick else 96, 150.0, 1.0, 16, 3000)
    letters = tuple(2 * n + 2 for n in lengths(64 if quick else 256, 7.0, 0.6, 2, 26))
    return [
        Workload("hidden 256", 256, 4, 704, 2048, 6144, rows),
        Workload("letter-sort", 96, 3, 256, 30, 4096, letters),
        # the vocabulary of Qwen2
        Workload("prompt 448, answer 64", 256, 4, 704, 151_936, 2048, (512,) * 8, 448),
    ]


def save_model(workload: Workload, folder: Path) -> None:
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=workload.vocabulary,
        hidden_size=workload.hidden,
        num_hidden_layers=workload.num_layers,
        intermediate_size=workload.feed_forward,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
    )
    Qwen2ForCausalLM(config).save_pretrained(folder)


def make_rows(workload: Workload) -> PackedRows:
    """Random tokens."""
    generator = torch.Generator().manual_seed(0)
    masks = [
        torch.arange(length) >= (workload.prompt_tokens or max(1, length // 4))
        for length in workload.lengths
    ]
    tokens = torch.randint(workload.vocabulary, (workload.num_tokens,), generator=generator)
    likelihood = -torch.tensor(float(workload.vocabulary)).log()
    noise = 0.05 * torch.randn(workload.num_tokens, generator=generator)
    return PackedRows(
        {
            "input_ids": tokens.int(),
            "loss_mask": torch.cat(masks),
            "behavior_logprobs": likelihood + noise,
            "versions": torch.zeros_like(tokens, dtype=torch.int32),
            "temperatures": torch.ones(workload.num_tokens),
        },
        workload.lengths,
        tuple(torch.randn(len(workload.lengths), generator=generator).tolist()),
    )


def minibatches_of_rank(rows: PackedRows, rank: int, world_size: int) -> list[list[int]]:
    """Rows of each minibatch that the rank gets: an even share of the tokens."""
    minibatches = []
    for first in range(NUM_MINIBATCHES):
        chosen = list(range(first, rows.num_rows, NUM_MINIBATCHES))
        lengths = [rows.lengths[row] for row in chosen]
        shares = pack_micro_batches(lengths, sum(lengths), world_size)
        minibatches.append([chosen[position] for position in shares[rank]])
    return minibatches
