"""What stale data costs, and what the objective and the choice over the bound make of it.

    python benchmarks/staleness.py [--quick] [--part worst-case|over-bound] [--etas ETA ...]
        [--json FILE]

Both parts train a letter-sorting model of 97k parameters through the real controllers and workers.
The learning curve is the accuracy of the policy versions themselves, sampled on held-out prompts
at equal distances; `auc`, the area under it, is its mean. (The curve of the training batches lags
behind by the staleness, and misses the prompts of rejected groups; `batch auc` is its mean.) All
runs of a seed share warm start and prompts, and differences are means over pairs of one seed.

worst-case: generation is held such that version max(0, i - eta) alone samples the batch of version
    i, which is checked. An eta of as many steps as a run has is no bound at all. The objective is
    decoupled PPO; or naive, with the behaviour policy as the clipping's centre; or noweight,
    decoupled without the weight pi_prox / pi_behav.
over-bound: nothing is held, and lengths have a heavy tail. Decoding a token takes a fixed time, as
    on an accelerator: a fifth of a training step, which is measured beforehand. An answer of mean
    length then takes about two training steps, and a long one spans several weight updates. `auc
    in time` is the mean of the curve over the time that the fastest of the four choices took.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product

import report
from letter_sort_job import (
    LetterSortJob,
    PacedWorkflow,
    letter_sort_job,
    training_steps,
)
from letter_sort_task import LetterSortPrompts, letter_sort_reward
from staleness_run import Evaluations, Run, measure

from areal_sc import GRPOConfig, SingleTurnWorkflow

OBJECTIVES: dict[str, dict[str, object]] = {
    "decoupled": {},
    "naive": {"actor__ppo__clip_center": "behavior"},
    "noweight": {"actor__ppo__behavior_weight": "none"},
}
CHOICES = ("train", "mask", "wait", "regenerate")
MODEL = dict(hidden_size=64, num_layers=2, ffn_size=160, num_heads=4)
LENGTHS = dict(median_letters=7.0, sigma_letters=0.6)
HEAVY_TAIL = dict(median_letters=7.0, sigma_letters=0.9)
TRAINING_STEPS_PER_TOKEN = 0.2
TOKENS_PER_PIECE = 3
SETTINGS: dict[str, object] = {
    "parameters": "97k",
    "batch": "groups of 8 in 4 minibatches",
    "lr": "4e-4, constant",
}

Runs = Mapping[tuple[str, int], Sequence[Run]]
"""(objective or choice, eta) -> one run a seed."""


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
    worst_case_etas=(0, 1, 2, 4, 8, 16, 60),
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


def worst_case_runs(job: LetterSortJob, scale: Scale) -> Runs:
    """Runs of all staleness bounds and objectives."""
    runs: dict[tuple[str, int], list[Run]] = {}
    workflow = SingleTurnWorkflow(letter_sort_reward)
    for seed, eta, objective in product(scale.seeds, scale.worst_case_etas, OBJECTIVES):
        config = config_of(
            job,
            scale,
            seed,
            eta,
            scale.worst_case_steps,
            rollout__admission="eager",
            **OBJECTIVES[objective],
        )
        run = measure(job, config, LENGTHS, workflow, scale.evaluations, is_held=True)
        runs.setdefault((objective, eta), []).append(run)
        report.say(
            f"seed {seed}, eta {eta}, {objective}: auc {run.auc:.3f}, {run.duration_s:.1f} s"
        )
    return runs


def over_bound_runs(job: LetterSortJob, scale: Scale) -> tuple[Runs, float]:
    """Runs of all staleness bounds and choices, and the seconds that decoding a token took."""

    def config_of_choice(seed: int, eta: int, choice: str) -> GRPOConfig:
        return config_of(
            job,
            scale,
            seed,
            eta,
            scale.over_bound_steps,
            rollout__over_bound=choice,
            rollout__max_running_sequences=512,
        )

    runs: dict[tuple[str, int], list[Run]] = {}
    calibration = config_of_choice(scale.over_bound_seeds[0], max(scale.over_bound_etas), "train")
    training_s = _training_s(job, calibration, scale.calibration_steps)
    token_s = TRAINING_STEPS_PER_TOKEN * training_s
    for seed, eta, choice in product(scale.over_bound_seeds, scale.over_bound_etas, CHOICES):
        config = config_of_choice(seed, eta, choice)
        workflow = PacedWorkflow(token_s, TOKENS_PER_PIECE, config.generation.max_new_tokens)
        run = measure(job, config, HEAVY_TAIL, workflow, scale.evaluations, is_held=False)
        runs.setdefault((choice, eta), []).append(run)
        report.say(f"seed {seed}, eta {eta}, {choice}: auc {run.auc:.3f}, {run.duration_s:.1f} s")
    return runs, token_s


def config_of(
    job: LetterSortJob, scale: Scale, seed: int, eta: int, num_steps: int, **overrides: object
) -> GRPOConfig:
    return job.config(
        seed=seed,
        total_steps=num_steps,
        actor__optimizer__schedule="constant",
        rollout__train_batch_groups=scale.batch_groups,
        rollout__max_staleness=eta,
        **overrides,
    )


def _training_s(job: LetterSortJob, config: GRPOConfig, num_steps: int) -> float:
    """Median seconds of the training phase, with generation at full speed beside it."""
    workflow = SingleTurnWorkflow(letter_sort_reward)
    with job.workers(config) as workers:
        prompts = LetterSortPrompts(config.seed, **HEAVY_TAIL)
        steps = list(training_steps(workers, num_steps, prompts, workflow))
    return statistics.median(step.train_s for step in steps[1:])


def records_of(runs: Runs) -> dict[tuple[str, str], report.Metrics]:
    """Means over the seeds, and the area of each seed."""
    records = {}
    for (name, eta), found in runs.items():
        each = [run.record() for run in found]
        record = {value: float(statistics.mean(r[value] for r in each)) for value in each[0]}
        for seed, run in enumerate(found):
            record[f"seed{seed}_auc"] = run.auc
        records[name, f"eta{eta}"] = record
    return records


def add_auc_in_time(records: Mapping[tuple[str, str], report.Metrics], runs: Runs) -> None:
    """The area over the time that the fastest choice took, mean over the seeds."""
    for (choice, eta), found in runs.items():
        by_seed = zip(*(runs[other, eta] for other in CHOICES), strict=True)
        ends = [min(run.duration_s for run in together) for together in by_seed]
        areas = [run.auc_until(end_s) for run, end_s in zip(found, ends, strict=True)]
        records[choice, f"eta{eta}"]["in_time_auc"] = statistics.mean(areas)


def difference(first: Sequence[Run], second: Sequence[Run]) -> float:
    """Mean over the seeds of what the first has more area."""
    return statistics.mean(a.auc - b.auc for a, b in zip(first, second, strict=True))


def worst_case(job: LetterSortJob, scale: Scale) -> report.Metrics:
    runs = worst_case_runs(job, scale)
    records = records_of(runs)
    settings = SETTINGS | LENGTHS | {"steps": scale.worst_case_steps}
    report.print_records("Staleness, worst case", settings, ("objective", "eta"), records)
    metrics = report.flat(records)
    for eta in scale.worst_case_etas:
        decoupled = runs["decoupled", eta]
        for other in ("naive", "noweight"):
            name = f"auc_decoupled_minus_{other}_eta{eta}"
            metrics[name] = difference(decoupled, runs[other, eta])
        if eta > 0 and 0 in scale.worst_case_etas:
            sync = runs["decoupled", 0]
            metrics[f"auc_sync_minus_decoupled_eta{eta}"] = difference(sync, decoupled)
    return metrics


def over_bound(job: LetterSortJob, scale: Scale) -> report.Metrics:
    runs, token_s = over_bound_runs(job, scale)
    records = records_of(runs)
    add_auc_in_time(records, runs)
    settings = SETTINGS | HEAVY_TAIL | {"steps": scale.over_bound_steps, "s a token": token_s}
    report.print_records("Over the staleness bound", settings, ("over_bound", "eta"), records)
    metrics = {f"over_bound_{name}": value for name, value in report.flat(records).items()}
    metrics["over_bound_s_per_token"] = token_s
    for (choice, eta), found in runs.items():
        if choice != "train":
            name = f"over_bound_auc_{choice}_minus_train_eta{eta}"
            metrics[name] = difference(found, runs["train", eta])
    return metrics


def main() -> None:
    parser = report.make_parser(__doc__)
    parser.add_argument("--part", choices=("worst-case", "over-bound"), help="only this one")
    parser.add_argument("--etas", type=int, nargs="+", help="of the worst case: these alone")
    arguments = parser.parse_args()
    scale = QUICK if arguments.quick else FULL
    if arguments.etas:
        scale = replace(scale, worst_case_etas=tuple(arguments.etas))
    metrics: report.Metrics = {}
    with letter_sort_job(scale.num_warm_steps) as job:
        for seed in scale.seeds:
            job.warm_start(seed, MODEL, LENGTHS)
        if arguments.part != "over-bound":
            metrics |= worst_case(job, scale)
        if arguments.part != "worst-case":
            metrics |= over_bound(job, scale)
    report.write(metrics, arguments.json)


if __name__ == "__main__":
    main()
