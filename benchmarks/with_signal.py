"""What it saves to train only groups with signal, and whether that favours short answers.

    python benchmarks/with_signal.py [--quick] [--part target|lengths] [--json FILE] [--seeds 0 1 2]

Sorting letters, where three of five prompts cannot be solved, so that about 70 % of the groups have
no signal at first. `all` trains every group; `kept` those with signal (rollout.keep_groups);
`chosen` takes prompts by what they gave in earlier epochs (rollout.choose_prompts), of 512 in all.

target: trained rows, sampled tokens and seconds until held-out prompts are solved at --target. An
    evaluation takes place every 5 steps, and its seconds count.
lengths: nothing is learned (lr 0). Groups with signal of `all` are cut into quartiles by the tokens
    of their answers, and compared with what `kept` has of each, as a ratio. Each rule has prompts
    of its own, so that a ratio is not 1 by construction.
"""

from __future__ import annotations

import random
from collections import defaultdict
from typing import Any, Final

import numpy as np
import report
from letter_sort_job import HELD_OUT_SEED, LetterSortJob, letter_sort_job, training_steps
from letter_sort_task import LetterSortPrompts, letter_sort_reward

from areal_sc import SingleTurnWorkflow
from areal_sc.metadata import BatchMetadata

MODEL: Final = dict(hidden_size=64, num_layers=2, ffn_size=160, num_heads=4)
LENGTHS: Final = dict(median_letters=7.0, sigma_letters=0.6)
SHARE_UNSOLVABLE: Final = 0.6
NEVER_WRITTEN: Final = "-"
"""No token of the vocabulary; an empty answer is written sooner or later, and pays then."""
NUM_PROMPTS: Final = 512
EVERY_STEPS: Final = 5
RULES: Final[dict[str, dict[str, object]]] = {
    "all": {},
    "kept": {"rollout__keep_groups": "with_signal"},
    "chosen": {"rollout__choose_prompts": "with_signal"},
}


class MostlyUnsolvable(LetterSortPrompts):
    """Prompts of which SHARE_UNSOLVABLE have an answer that is never written."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        row = super().__getitem__(index)
        is_solvable = random.Random(f"solvable/{self.seed}/{index}").random() >= SHARE_UNSOLVABLE
        return row if is_solvable else row | {"answer": NEVER_WRITTEN}


def until_target(
    job: LetterSortJob, rule: str, seed: int, target: float, max_steps: int
) -> report.Metrics:
    """Trains until held-out prompts are solved at `target`, or for `max_steps` steps."""
    config = job.config(
        seed=seed, total_steps=max_steps, actor__optimizer__schedule="constant", **RULES[rule]
    )
    workflow = SingleTurnWorkflow(letter_sort_reward)
    held_out = LetterSortPrompts(seed + HELD_OUT_SEED, **LENGTHS)
    prompts = MostlyUnsolvable(seed, NUM_PROMPTS, **LENGTHS)
    with_signal: list[bool] = []
    accuracy, num_evaluated, ended_s, num_rows = 0.0, 0.0, 0.0, 0

    def note(batch: BatchMetadata) -> None:
        nonlocal num_rows
        num_rows += batch.total_batch_size
        with_signal.extend(has for _, has in groups_of(batch))

    with job.workers(config) as workers:
        steps = training_steps(workers, max_steps, prompts, workflow, before_publication=note)
        for number, step in enumerate(steps, start=1):
            ended_s = step.ended_s
            if number % EVERY_STEPS == 0:
                workers.rollout.wait_for_weights()
                outcome = workers.rollout.evaluate(held_out, workflow, num_prompts=256)
                accuracy = outcome.reward
                num_evaluated += outcome.num_prompts * outcome.metrics["completion_tokens"]
            if accuracy >= target:
                break
        num_tokens = workers.num_generated_tokens() - num_evaluated
    return {
        "accuracy": accuracy,
        "trained_rows": num_rows,
        "sampled_tokens": num_tokens,
        "run_s": ended_s,
        "trained_with_signal_share": sum(with_signal) / len(with_signal),
    }


def lengths(job: LetterSortJob, rule: str, prompts_seed: int, num_groups: int) -> list[int]:
    """Tokens of the answers of so many trained groups with signal, of one policy."""
    config = job.config(
        seed=0,
        total_steps=100_000,
        actor__optimizer__lr=0.0,
        actor__ppo__num_minibatches=1,
        **RULES[rule],
    )
    found: list[int] = []

    def note(batch: BatchMetadata) -> None:
        found.extend(num_tokens for num_tokens, has_signal in groups_of(batch) if has_signal)

    with job.workers(config) as workers:
        steps = training_steps(
            workers,
            config.total_steps,
            MostlyUnsolvable(prompts_seed, **LENGTHS),
            SingleTurnWorkflow(letter_sort_reward),
            before_publication=note,
        )
        while len(found) < num_groups:
            next(steps)
    return found[:num_groups]


def groups_of(batch: BatchMetadata) -> list[tuple[int, bool]]:
    """Of each group: tokens of its answers, and whether their rewards differ."""
    tokens, rewards = defaultdict[int, int](int), defaultdict[int, set[float]](set)
    for row in batch.rows:
        tokens[row.group_id] += row.num_loss_tokens
        rewards[row.group_id].add(row.reward)
    return [(tokens[group], len(of) > 1) for group, of in rewards.items()]


def quartile_ratios(expected: list[int], found: list[int]) -> report.Metrics:
    """What `found` has of each quartile of `expected`, over a quarter."""
    edges = np.quantile(expected, [0.25, 0.5, 0.75])

    def shares(values: list[int]) -> np.ndarray:
        return np.bincount(np.searchsorted(edges, values), minlength=4) / len(values)

    ratios = shares(found) / shares(expected)
    return {f"quartile_{number}_ratio": float(it) for number, it in enumerate(ratios, start=1)}


def main() -> None:
    parser = report.make_parser(__doc__)
    parser.add_argument("--part", choices=("target", "lengths"), help="one part alone")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="for target")
    parser.add_argument("--target", type=float, default=0.9, help="accuracy")
    parser.add_argument("--steps", type=int, default=400, help="most steps of a run")
    parser.add_argument("--groups", type=int, default=6400, help="with signal, for lengths")
    parser.add_argument("--warm-steps", type=int, default=600)
    arguments = report.parse(parser, seeds=[0], target=0.0, steps=5, groups=32, warm_steps=400)
    metrics: report.Metrics = {}
    with letter_sort_job(arguments.warm_steps) as job:
        records: dict[tuple[str | int, ...], report.Metrics] = {}
        for seed in arguments.seeds if arguments.part != "lengths" else ():
            job.warm_start(seed, MODEL, LENGTHS)
            for rule in RULES:
                found = until_target(job, rule, seed, arguments.target, arguments.steps)
                records[rule, seed] = found
                report.say(", ".join(f"{k} {v:.3f}" for k, v in {"seed": seed, **found}.items()))
        if records:
            settings = {"target": arguments.target, "prompts": NUM_PROMPTS}
            report.print_records("Groups with signal", settings, ("rule", "seed"), records)
            metrics |= report.flat(records)
        if arguments.part != "target":
            if arguments.part == "lengths" or 0 not in arguments.seeds:
                job.warm_start(0, MODEL, LENGTHS)
            rules = enumerate(("all", "kept"))
            expected, kept = (lengths(job, rule, seed, arguments.groups) for seed, rule in rules)
            ratios = quartile_ratios(expected, kept)
            report.print_metrics(
                "Quartiles of length among groups with signal, kept over all",
                {"groups": arguments.groups},
                ratios,
            )
            metrics |= ratios
    report.write(metrics, arguments.json)


if __name__ == "__main__":
    main()
