"""Models and rows for the benchmark of the training step."""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch
from qwen2_models import SHAPES, Shape, build

from areal_sc.transport.packed_rows import PackedRows

NUM_MINIBATCHES = 2
LEARNING_RATE = 1e-6


@dataclass(frozen=True)
class Workload:
    """A model, rows, and the token budget of a micro-batch.

    Attributes:
        prompt_tokens: of each row; 0: a quarter of it.
    """

    name: str
    shape: Shape
    max_tokens: int
    lengths: tuple[int, ...]
    prompt_tokens: int = 0

    @property
    def num_tokens(self) -> int:
        return sum(self.lengths)

    def prompt_of(self, length: int) -> int:
        return self.prompt_tokens or max(1, length // 4)

    def model_flops(self) -> float:
        """Of one step: log-probabilities forward, the updates forward and backward.

        A token takes 2 N forward and 4 N backward, N parameters of the layers; so does the output
        layer for trained tokens. A row of L tokens takes 2 L^2 * hidden a layer for causal
        attention forward, twice that backward. What is computed twice does not count.
        """
        shape = self.shape
        output = shape.hidden * shape.vocabulary
        layers = sum(p.numel() for p in build(shape, device="meta").parameters()) - output
        num_trained = sum(length - self.prompt_of(length) for length in self.lengths)
        pairs = sum(length**2 for length in self.lengths)
        forward = 2 * (layers * self.num_tokens + output * num_trained)
        return 4.0 * (forward + 2 * pairs * shape.hidden * shape.layers)


def lognormal_lengths(
    count: int, median: float, sigma: float, low: int, high: int
) -> tuple[int, ...]:
    generator = random.Random(0)
    drawn = (int(median * generator.lognormvariate(0, sigma)) for _ in range(count))
    return tuple(min(high, max(low, length)) for length in drawn)


def workloads(*, quick: bool) -> list[Workload]:
    """Those of a CPU: heavy-tailed lengths, the quickstart's model, and long prompts."""
    rows = lognormal_lengths(16 if quick else 96, 150.0, 1.0, 16, 3000)
    letters = lognormal_lengths(64 if quick else 256, 7.0, 0.6, 2, 26)
    letters = tuple(2 * n + 2 for n in letters)
    return [
        Workload("hidden 256", Shape(256, 704, 4, 4, 2, 2048), 6144, rows),
        Workload("letter-sort", Shape(96, 256, 3, 4, 2, 30), 4096, letters),
        # the vocabulary of Qwen2
        Workload("prompt 448, answer 64", Shape(256, 704, 4, 4, 2, 151_936), 2048, (512,) * 8, 448),
    ]


def gpu_workload(*, quick: bool) -> Workload:
    """Half a billion parameters, rows as of answers to school mathematics."""
    rows = lognormal_lengths(64 if quick else 128, 400.0, 0.6, 16, 2048)
    return Workload("Qwen2.5-0.5B", SHAPES["0.5b"], 8192, rows)


def make_rows(workload: Workload) -> PackedRows:
    """Random tokens."""
    generator = torch.Generator().manual_seed(0)
    masks = [torch.arange(length) >= workload.prompt_of(length) for length in workload.lengths]
    vocabulary = workload.shape.vocabulary
    tokens = torch.randint(vocabulary, (workload.num_tokens,), generator=generator)
    likelihood = -torch.tensor(float(vocabulary)).log()
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


def minibatches_of(rows: PackedRows) -> list[range]:
    """The rows of each minibatch follow each other."""
    size = -(-rows.num_rows // NUM_MINIBATCHES)
    return [
        range(start, min(start + size, rows.num_rows)) for start in range(0, rows.num_rows, size)
    ]
