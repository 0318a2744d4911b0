"""DPO and a reward model on a tiny task: how many held-out pairs are ordered right.

    python benchmarks/preferences.py              ten seeds; each should order at least 0.9 of them
    python benchmarks/preferences.py --quick      one seed, few steps

Of two answers, the letters in ascending and in descending order, a model of random weights learns
to prefer the first one, over several seeds.
"""

from __future__ import annotations

import random
import string
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))

import report
from letter_sort_task import write_untrained_folder

from areal_sc import DPOTrainer, RewardModelTrainer, load_config


def pairs(seed: int, count: int) -> list[dict[str, str]]:
    rng = random.Random(seed)
    words = ["".join(sorted(rng.sample(string.ascii_lowercase, 5))) for _ in range(count)]
    return [
        {
            "prompt": "".join(rng.sample(word, 5)) + "=",
            "chosen": word,
            "rejected": word[::-1],
        }
        for word in words
    ]


def accuracy(
    trainer: type[DPOTrainer | RewardModelTrainer], seed: int, steps: int, folder: Path
) -> float:
    """The share of 128 held-out pairs that are ordered right after so many steps."""
    model = folder / "untrained"
    if not model.exists():
        write_untrained_folder(model, hidden_size=48, num_layers=2, ffn_size=96, num_heads=4)
    config = load_config(
        {
            "run_dir": str(folder / f"{trainer.__name__}-{seed}"),
            "total_steps": steps,
            "seed": seed,
            "actor.path": str(model),
            "actor.random_init": True,
            "actor.device": "cpu",
            "rollout.device": "cpu",
            "actor.max_tokens_per_micro_batch": 1024,
            "actor.optimizer.lr": 2e-3,
            "rollout.max_context_tokens": 64,
            "generation.max_new_tokens": 16,
        }
    )
    rows = pairs(seed, 640)
    summary = trainer(config).fit(
        rows[:512], batch_size=32, held_out=rows[512:], use_chat_template=False
    )
    assert summary.accuracy_after is not None
    return summary.accuracy_after


def main() -> None:
    parser = report.make_parser(__doc__)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--steps", type=int, default=40)
    arguments = report.parse(parser, seeds=1, steps=5)
    metrics: report.Metrics = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, trainer in (("dpo", DPOTrainer), ("reward_model", RewardModelTrainer)):
            found = [
                accuracy(trainer, seed, arguments.steps, Path(folder))
                for seed in range(arguments.seeds)
            ]
            metrics[f"{name}_ordered_least"] = min(found)
            metrics[f"{name}_ordered_mean"] = sum(found) / len(found)
    settings = {"seeds": arguments.seeds, "steps": arguments.steps}
    report.print_metrics("Held-out pairs that are ordered right", settings, metrics)
    report.write(metrics, arguments.json)


if __name__ == "__main__":
    main()
