"""TRL's side of `against_trl.py`, in an environment of its own: one run on the prompts of a file.

    python trl_peer.py SETTINGS

SETTINGS is one JSON object: the fields of `against_trl.Workload`, and those of one run. After each
step the run writes a line to `metrics.jsonl` of its folder, as a run of this project does.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer
from trl_tasks import REWARDS


def main(settings: dict[str, Any]) -> None:
    torch.set_num_threads(settings["num_threads"])
    run_dir = Path(settings["run_dir"])
    run_dir.mkdir()
    rows = [json.loads(line) for line in Path(settings["rows"]).read_text().splitlines()]
    if settings["use_chat_template"]:
        rows = [{**row, "prompt": [{"role": "user", "content": row["prompt"]}]} for row in rows]
    reward = REWARDS[settings["reward"]]
    accuracies: list[float] = []

    def reward_function(completions: list[Any], answer: list[str], **_: Any) -> list[float]:
        """TRL calls it once a step, with all completions of the step."""
        texts = [it if isinstance(it, str) else it[0]["content"] for it in completions]
        rewards = [reward({"answer": a}, text) for a, text in zip(answer, texts, strict=True)]
        accuracies.append(sum(rewards) / len(rewards))
        return rewards

    class StepLines(TrainerCallback):
        def on_step_end(self, _: Any, state: Any, *__: Any, **___: Any) -> None:
            step, rest = divmod(state.global_step, settings["num_minibatches"])  # of its updates
            if rest == 0:
                line = {"kind": "step", "step": step, "reward": accuracies[-1]}
                with open(run_dir / "metrics.jsonl", "a") as file:
                    file.write(json.dumps(line, separators=(",", ":")) + "\n")

    num_rows = settings["groups"] * settings["group_size"]
    config = GRPOConfig(
        output_dir=str(run_dir),
        seed=settings["seed"],
        max_steps=settings["total_steps"] * settings["num_minibatches"],
        per_device_train_batch_size=num_rows // settings["num_minibatches"],
        gradient_accumulation_steps=1,
        steps_per_generation=settings["num_minibatches"],
        num_generations=settings["group_size"],
        max_completion_length=settings["max_new_tokens"],
        shuffle_dataset=False,
        learning_rate=settings["lr"],
        lr_scheduler_type="constant",
        loss_type="bnpo",  # the mean over the tokens of a minibatch
        gradient_checkpointing=False,
        bf16=False,
        use_cpu=True,
        model_init_kwargs={"dtype": "float32"},
        save_strategy="no",
        logging_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    trainer = GRPOTrainer(
        settings["model"],
        reward_function,
        config,
        train_dataset=Dataset.from_list(rows),
        callbacks=[StepLines()],
    )
    trainer.train()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
