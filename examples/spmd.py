"""The training engine without controllers: torchrun starts the ranks, and each runs this loop.

    torchrun --standalone --nproc-per-node=2 examples/spmd.py \
        --config configs/minimal.yaml actor.parallel.data=2

The engine is the one that `minimal.py` steers from outside. Here the loop is in the process of the
engine: rows, loss and order of work are your own. The model learns the same task, from right
answers; `minimal.py` makes the model that it starts from.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from minimal import PROMPTS

from areal_sc import GRPOConfig, load_config, make_actor, run_script
from areal_sc.algorithms.losses import LossTokens, Metric, Metrics
from areal_sc.engines.tokenizer import load_tokenizer
from areal_sc.transport.packed_rows import PackedRows
from areal_sc.workflows.text import encode_text


def make_rows(tasks: Sequence[dict[str, str]], model: str) -> PackedRows:
    """Prompt and answer of each task, one after the other; trained are the answers' tokens."""
    tokenizer = load_tokenizer(model)
    prompts = [encode_text(tokenizer, task["prompt"]) for task in tasks]
    answers = [encode_text(tokenizer, task["answer"], begins=False) for task in tasks]
    pairs = list(zip(prompts, answers, strict=True))
    fields = {
        "input_ids": torch.tensor([token for pair in pairs for token in (*pair[0], *pair[1])]),
        "loss_mask": torch.tensor([is_answer for p, a in pairs for is_answer in mask_of(p, a)]),
    }
    return PackedRows(fields, tuple(len(prompt) + len(answer) for prompt, answer in pairs))


def mask_of(prompt: list[int], answer: list[int]) -> list[bool]:
    return [False] * len(prompt) + [True] * len(answer)


def focal_loss(tokens: LossTokens) -> tuple[torch.Tensor, Metrics]:
    """Token mean of -(1 - p)^2 log p: what the model knows already counts less."""
    probabilities = tokens.logprobs.exp()
    loss = -((1 - probabilities) ** 2 * tokens.logprobs).sum() / tokens.num_loss_tokens
    return loss, {"probability": Metric.mean(probabilities)}


def main(argv: list[str]) -> None:
    config = load_config(argv, GRPOConfig)
    rows = make_rows(PROMPTS, config.actor.path)
    engine = make_actor(config.actor).build()
    place = engine.initialize()  # meets the other ranks, loads this one's part of the model
    own_rows = rows.take(range(place.data_rank, rows.num_rows, config.actor.parallel.data))
    for step in range(config.total_steps):
        stats = engine.update([own_rows], focal_loss, step=step)
        if place.data_rank == 0 and place.is_head:
            print(f"step={step} loss={stats['loss']:.6f} probability={stats['probability']:.6f}")
    engine.begin_save_hf(Path(config.run_dir) / "spmd_model").result()
    engine.close()


if __name__ == "__main__":
    sys.exit(run_script(main))
