"""A run whose episodes agents outside claim, and which notes each row: see `tiny_run.yaml`."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

from areal_sc import GRPOConfig, OnlineWorkflow, PPOTrainer, load_config, run_script
from areal_sc.workflows.base import EpisodeEngine, Trajectory

NUM_QUESTIONS = 1000


class Booked(OnlineWorkflow):
    """Each line of its book is an episode that has ended: question, tokens, log-probabilities."""

    async def run_episode(self, prompt: dict[str, Any], engine: EpisodeEngine) -> list[Trajectory]:
        rows = await super().run_episode(prompt, engine)
        told = [
            {
                "question": prompt["question"],
                "sampled": [int(i) for i, m in zip(it.input_ids, it.loss_mask, strict=True) if m],
                "logprobs": [
                    float(p) for p, m in zip(it.behavior_logprobs, it.loss_mask, strict=True) if m
                ],
                "reward": it.reward,
            }
            for it in rows
        ]
        await asyncio.to_thread(note, Path(prompt["book"]), told)
        return rows


def note(book: Path, told: list[dict[str, Any]]) -> None:
    with book.open("a") as file:
        file.write(json.dumps(told) + "\n")


def main(argv: list[str]) -> None:
    config = load_config(argv, GRPOConfig)
    book = os.path.abspath(f"{config.run_dir}.book")
    rows = [{"question": f"a{n}", "book": book} for n in range(NUM_QUESTIONS)]
    PPOTrainer(config).fit(Booked(history="keep"), rows)


if __name__ == "__main__":
    sys.exit(run_script(main))
