"""What stale data costs, and what the objective and the choice over the bound make of it.

    python benchmarks/staleness.py [--quick] [--part worst-case|over-bound] [--json FILE]

Both parts train a letter-sorting model of 97k parameters through the real controllers and workers.
The learning curve is the accuracy of the policy versions themselves, sampled on held-out prompts
at equal distances; `auc`, the area under it, is its mean. (The curve of the training batches lags
behind by the staleness, and misses the prompts of rejected groups; `batch auc` is its mean.) All
runs of a seed share warm start and prompts, and differences are means over pairs of one seed.

worst-case: generation is held such that version max(0, i - eta) alone samples the batch of version
    i, which is checked. The objective is decoupled PPO; or naive, with the behaviour policy as the
    clipping's centre; or noweight, decoupled without the weight pi_prox / pi_behav.
over-bound: nothing is held, and lengths have a heavy tail. Decoding a token takes a fixed time, as
    on an accelerator: a fifth of a training step, which is measured beforehand. An answer of mean
    length then takes about two training steps, and a long one spans several weight updates. `auc
    in time` is the mean of the curve over the time that the fastest of the four choices took.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

import report
from letter_sort_job import (
    Lengths,
    LetterSortJob,
    ModelShape,
    PacedWorkflow,
    say,
    training_steps,
)
from letter_sort_task import letter_sort_reward
from staleness_run import Evaluations, Run, measure

from areal_sc import GRPOConfig, SingleTurnWorkflow

OBJECTIVES: dict[str, dict[str, object]] = {
    "decoupled": {},
    "naive": {"actor__ppo__clip_center": "behavior"},
    "noweight": {"actor__ppo__use_behavior_weight": False},
}
CHOICES = ("train", "mask", "wait", "regenerate")
MODEL = ModelShape(hidden_size=64, num_layers=2, ffn_size=160, num_heads=4)
LENGTHS = Lengths(median_letters=7.0, sigma_letters=0.6)
HEAVY_TAIL = Lengths(median_letters=7.0, sigma_letters=0.9)
TRAINING_STEPS_PER_TOKEN = 0.2
TOKENS_PER_PIECE = 3

Metrics = dict[str, tuple[float, str]]
Runs = Mapping[tuple[int, str], Sequence[Run]]
"""(eta, objective or choice) -> one run a seed."""


@dataclass(frozen=True)
class Scale:
    """How much is measured."""

    seeds: range
    over_bound_seeds: range
    worst_case_etas: tuple[int, ...]
    worst_case_steps: int
    over_bound_etas: tuple[int, ...]
    over_bound_steps: int
    evaluations: Evaluations
    batch_groups: int
    num_warm_steps: int
    calibration_steps: int


FULL = Scale(
    seeds=range(3),
    over_bound_seeds=range(2),
    worst_case_etas=(0, 4, 8, 16),
    worst_case_steps=60,
    over_bound_etas=(1, 4),
    over_bound_steps=30,
    evaluations=Evaluations(every_steps=3, num_prompts=256, num_final_prompts=1024),
    batch_groups=32,
    num_warm_steps=600,
    calibration_steps=8,
)
QUICK = Scale(
    seeds=range(1),
    over_bound_seeds=range(1),
    worst_case_etas=(0, 2),
    worst_case_steps=4,
    over_bound_etas=(1,),
    over_bound_steps=4,
    evaluations=Evaluations(every_steps=2, num_prompts=32, num_final_prompts=32),
    batch_groups=8,
    num_warm_steps=20,
    calibration_steps=2,
)


def worst_case(job: LetterSortJob, scale: Scale) -> Runs:
    """Runs of all staleness bounds and objectives."""
    runs: dict[tuple[int, str], list[Run]] = {}
    workflow = SingleTurnWorkflow(letter_sort_reward)
    for seed, eta, objective in product(scale.seeds, scale.worst_case_etas, OBJECTIVES):
        config = job.config(
            seed=seed,
            total_steps=scale.worst_case_steps,
            actor__optimizer__schedule="constant",
            rollout__train_batch_groups=scale.batch_groups,
            rollout__max_staleness=eta,
            **OBJECTIVES[objective],
        )
        run = measure(job, config, LENGTHS, workflow, scale.evaluations, is_held=True)
        runs.setdefault((eta, objective), []).append(run)
        say(
            f"seed {seed}, eta {eta}, {objective}: auc {run.auc:.3f}, "
            f"final {run.final_accuracy:.3f}, {run.duration_s:.1f} s"
        )
    return runs


def show_worst_case(runs: Runs, scale: Scale) -> None:
    report.print_table(
        "Staleness, worst case",
        {
            "parameters": "97k",
            "steps": scale.worst_case_steps,
            "seeds": len(scale.seeds),
            "batch": f"{scale.batch_groups} groups of 8 in 4 minibatches",
            "lr": "4e-4, constant",
            "lengths": f"median {LENGTHS.median_letters:g}, sigma {LENGTHS.sigma_letters:g}",
        },
        ("eta", "objective", "auc", "auc of each seed", "final accuracy", "batch auc"),
        [
            (
                eta,
                objective,
                _mean(run.auc for run in found),
                " ".join(f"{run.auc:.3f}" for run in found),
                _mean(run.final_accuracy for run in found),
                _mean(run.batch_auc for run in found),
            )
            for (eta, objective), found in runs.items()
        ],
    )


def worst_case_metrics(runs: Runs) -> Metrics:
    """Of every run, and paired differences of the areas."""
    metrics: Metrics = {}
    for (eta, objective), found in runs.items():
        for seed, run in enumerate(found):
            name = f"{objective}_eta{eta}_seed{seed}"
            metrics[f"auc_{name}"] = (run.auc, "accuracy")
            metrics[f"batch_auc_{name}"] = (run.batch_auc, "accuracy")
            metrics[f"final_accuracy_{name}"] = (run.final_accuracy, "accuracy")
    for eta in sorted({eta for eta, _ in runs}):
        for other in ("naive", "noweight"):
            difference = _difference(runs[eta, "decoupled"], runs[eta, other])
            metrics[f"auc_decoupled_minus_{other}_eta{eta}"] = (difference, "accuracy")
        if eta > 0:
            difference = _difference(runs[0, "decoupled"], runs[eta, "decoupled"])
            metrics[f"auc_sync_minus_decoupled_eta{eta}"] = (difference, "accuracy")
    return metrics


def over_bound(job: LetterSortJob, scale: Scale) -> tuple[Runs, float]:
    """Runs of all staleness bounds and choices, and the seconds that decoding a token took."""

    def config_of(seed: int, eta: int, choice: str) -> GRPOConfig:
        return job.config(
            seed=seed,
            total_steps=scale.over_bound_steps,
            actor__optimizer__schedule="constant",
            rollout__train_batch_groups=scale.batch_groups,
            rollout__max_staleness=eta,
            rollout__over_bound=choice,
            rollout__max_running_sequences=512,
        )

    runs: dict[tuple[int, str], list[Run]] = {}
    calibration = config_of(scale.over_bound_seeds[0], max(scale.over_bound_etas), "train")
    seconds_per_token = TRAINING_STEPS_PER_TOKEN * _training_s(
        job, calibration, scale.calibration_steps
    )
    for seed, eta, choice in product(scale.over_bound_seeds, scale.over_bound_etas, CHOICES):
        config = config_of(seed, eta, choice)
        workflow = PacedWorkflow(
            seconds_per_token, TOKENS_PER_PIECE, config.generation.max_new_tokens
        )
        run = measure(job, config, HEAVY_TAIL, workflow, scale.evaluations, is_held=False)
        runs.setdefault((eta, choice), []).append(run)
        say(
            f"seed {seed}, eta {eta}, {choice}: auc {run.auc:.3f}, {run.step_s:.3f} s a step, "
            f"token staleness up to {run.token_staleness_max}"
        )
    return runs, seconds_per_token


def _training_s(job: LetterSortJob, config: GRPOConfig, num_steps: int) -> float:
    """Median seconds of the training phase, with generation at full speed beside it."""
    workflow = SingleTurnWorkflow(letter_sort_reward)
    with job.workers(config) as workers:
        prompts = HEAVY_TAIL.prompts(config.seed)
        steps = list(training_steps(workers, num_steps, prompts, workflow))
    return statistics.median(step.train_s for step in steps[1:])


def over_bound_metrics(runs: Runs, seconds_per_token: float) -> Metrics:
    """Means over the seeds, and what each choice gains over `train`."""
    metrics: Metrics = {"over_bound_s_per_token": (seconds_per_token, "s")}
    for (eta, choice), found in runs.items():
        for name, values, unit in (
            ("auc", [run.auc for run in found], "accuracy"),
            ("auc_in_time", _aucs_in_time(runs, eta, choice), "accuracy"),
            ("final_accuracy", [run.final_accuracy for run in found], "accuracy"),
            ("s_per_step", [run.step_s for run in found], "s"),
            ("masked_share", [run.masked_share for run in found], "share"),
            ("wasted_share", [run.wasted_share for run in found], "share"),
            ("token_staleness_max", [run.token_staleness_max for run in found], "versions"),
            ("group_staleness_max", [run.group_staleness_max for run in found], "versions"),
        ):
            metrics[f"over_bound_{name}_{choice}_eta{eta}"] = (_mean(values), unit)
        if choice != "train":
            difference = _difference(found, runs[eta, "train"])
            metrics[f"over_bound_auc_{choice}_minus_train_eta{eta}"] = (difference, "accuracy")
    return metrics


def show_over_bound(runs: Runs, metrics: Metrics, scale: Scale) -> None:
    columns: tuple[str, ...] = (
        "auc",
        "auc_in_time",
        "final_accuracy",
        "s_per_step",
        "masked_share",
    )
    columns += ("wasted_share", "token_staleness_max", "group_staleness_max")
    report.print_table(
        "Over the staleness bound",
        {
            "parameters": "97k",
            "steps": scale.over_bound_steps,
            "seeds": len(scale.over_bound_seeds),
            "batch": f"{scale.batch_groups} groups of 8 in 4 minibatches",
            "lr": "4e-4, constant",
            "lengths": f"median {HEAVY_TAIL.median_letters:g}, sigma {HEAVY_TAIL.sigma_letters:g}",
            "seconds per token": f"{metrics['over_bound_s_per_token'][0]:.3f}",
        },
        ("eta", "over_bound", *(name.replace("_", " ") for name in columns), "auc of each seed"),
        [
            (
                eta,
                choice,
                *(metrics[f"over_bound_{name}_{choice}_eta{eta}"][0] for name in columns),
                " ".join(f"{run.auc:.3f}" for run in found),
            )
            for (eta, choice), found in runs.items()
        ],
    )


def _aucs_in_time(runs: Runs, eta: int, choice: str) -> list[float]:
    """For each seed the area over the time of the fastest choice."""
    by_seed = zip(*(runs[eta, other] for other in CHOICES), strict=True)
    ends = [min(run.duration_s for run in together) for together in by_seed]
    return [run.auc_until(end_s) for run, end_s in zip(runs[eta, choice], ends, strict=True)]


def _difference(first: Sequence[Run], second: Sequence[Run]) -> float:
    """Mean over the seeds of what the first has more area."""
    return _mean(a.auc - b.auc for a, b in zip(first, second, strict=True))


def _mean(values: Iterable[float]) -> float:
    return float(statistics.mean(values))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    report.add_arguments(parser)
    parser.add_argument("--part", choices=("worst-case", "over-bound"), help="only this one")
    arguments = parser.parse_args()
    scale = QUICK if arguments.quick else FULL
    metrics: Metrics = {}
    with LetterSortJob(MODEL, LENGTHS, scale.num_warm_steps) as job:
        for seed in scale.seeds:
            job.warm_start(seed)
            say(f"seed {seed}: warm start is made")
        if arguments.part != "over-bound":
            runs = worst_case(job, scale)
            metrics |= worst_case_metrics(runs)
            show_worst_case(runs, scale)
        if arguments.part != "worst-case":
            runs, seconds_per_token = over_bound(job, scale)
            metrics |= over_bound_metrics(runs, seconds_per_token)
            show_over_bound(runs, metrics, scale)
    report.write(metrics, arguments.json)


if __name__ == "__main__":
    main()
