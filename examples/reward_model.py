"""A reward model from your own pairs: a file, or a data set of the Hugging Face hub.

    python examples/reward_model.py --config configs/reward_model.yaml \\
        actor.path=<model> task.dataset=<file>

A row has `prompt`, `chosen` and `rejected`. docs/reward-model.md says more.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

from omegaconf import MISSING

from areal_sc import GRPOConfig, RewardModelTrainer, load_config, load_rows, run_script
from areal_sc.config.fields import setting


@dataclass
class Task:
    """The script's own settings."""

    dataset: str = setting(MISSING, "JSONL, JSON, CSV or Parquet file, or a name of the hub")
    subset: str = setting("", "which part, where a data set of the hub has several")
    split: str = setting("train", "of the data set")
    num_held_out: int = setting(16, "last rows, for evaluation", ge=0)
    batch_size: int = setting(32, "pairs a step", ge=1)
    label_smoothing: float = setting(0.0, "share of labels that may be wrong", ge=0, lt=0.5)
    use_chat_template: bool = setting(True, "false for plain texts and a base model")


@dataclass
class Config(GRPOConfig):
    task: Task = setting(Task)  # type: ignore[assignment]  # in place of a dict


def main(argv: list[str]) -> None:
    config = load_config(argv, Config, generates=False)
    task = config.task
    rows, held_out = load_rows(
        task.dataset,
        name=task.subset or None,
        split=task.split,
        num_held_out=task.num_held_out,
    )
    RewardModelTrainer(config).fit(
        rows,
        batch_size=task.batch_size,
        label_smoothing=task.label_smoothing,
        held_out=held_out or None,
        use_chat_template=task.use_chat_template,
    )


if __name__ == "__main__":
    sys.exit(run_script(main))
