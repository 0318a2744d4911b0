"""Generation and training in one loop without controllers: torchrun starts the ranks.

    torchrun --standalone --nproc-per-node=2 examples/spmd.py \
        --config configs/minimal.yaml actor.parallel.data=2

Each rank answers its own prompts with an engine of its own, and trains on the answers together with
the others. The engines are those that `minimal.py` steers from outside; here the loop is in their
processes, everything waits for everything, and a rank that dies ends the run. The task is that of
`minimal.py`, which makes the model.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from minimal import PROMPTS, reward

from areal_sc import GRPOConfig, load_config, make_actor, make_generator, run_script
from areal_sc.algorithms.advantages import normalized_advantages
from areal_sc.algorithms.named_loss import loss_of
from areal_sc.engines.base import Completion
from areal_sc.transport.packed_rows import PackedRows
from areal_sc.workflows.text import encode_text

BUCKET_BYTES = 64 << 20


def make_rows(
    prompts: Sequence[list[int]], answers: Sequence[Completion], advantages: Sequence[float]
) -> PackedRows:
    """Each row is a prompt and its answer, one after the other; trained are the answer's tokens."""
    pairs = list(zip(prompts, answers, strict=True))
    lengths = tuple(len(prompt) + len(it.token_ids) for prompt, it in pairs)
    ids = [token for prompt, it in pairs for token in (*prompt, *it.token_ids)]
    nothing = float("nan")
    logprobs = [v for prompt, it in pairs for v in (*[nothing] * len(prompt), *it.logprobs)]
    versions = [v for prompt, it in pairs for v in (*[0] * len(prompt), *it.versions)]
    fields = {
        "input_ids": torch.tensor(ids),
        "loss_mask": ~torch.tensor(logprobs).isnan(),
        "behavior_logprobs": torch.tensor(logprobs),
        "proximal_logprobs": torch.full((len(ids),), nothing),  # of the policy before the update
        "versions": torch.tensor(versions, dtype=torch.int32),
        "temperatures": torch.tensor([it.temperature for _, it in pairs]).repeat_interleave(
            torch.tensor(lengths)
        ),
    }
    return PackedRows(fields, lengths, tuple(advantages))


async def train(config: GRPOConfig) -> None:
    trainer = make_actor(config.actor).build()
    place = trainer.initialize()  # meets the other ranks, loads this one's part of the model
    own_prompts = PROMPTS[place.data_rank :: config.actor.parallel.data]
    rollout = replace(config.rollout, seed=config.seed + place.data_rank)
    generator = make_generator(rollout).build()
    await generator.start()
    asked = [prompt for prompt in own_prompts for _ in range(config.rollout.group_size)]
    prompts = [encode_text(generator.tokenizer, prompt["prompt"]) for prompt in asked]
    loss = loss_of(config.actor.ppo)
    for step in range(config.total_steps):
        answers = await asyncio.gather(
            *(generator.generate(prompt, config.generation) for prompt in prompts)
        )
        texts = [generator.tokenizer.decode(it.token_ids) for it in answers]
        rewards = [reward(prompt, text) for prompt, text in zip(asked, texts, strict=True)]
        advantages = normalized_advantages(rewards, [prompt["prompt"] for prompt in asked])
        rows = make_rows(prompts, answers, advantages.tolist())
        stats = trainer.update([rows], loss, step=step)
        weights = [named for bucket in trainer.gather_weights(BUCKET_BYTES) for named in bucket]

        async def source(weights: list[tuple[str, torch.Tensor]] = weights):
            return weights

        await generator.update_weights(step + 1, source)
        if place.data_rank == 0 and place.is_head:
            mean = sum(rewards) / len(rewards)
            print(f"step={step + 1} accuracy={mean:.3f} loss={stats['loss']:.4f}", flush=True)
    trainer.begin_save_hf(Path(config.run_dir) / "spmd_model").result()
    await generator.close()
    trainer.close()


def main(argv: list[str]) -> None:
    asyncio.run(train(load_config(argv, GRPOConfig)))


if __name__ == "__main__":
    sys.exit(run_script(main))
