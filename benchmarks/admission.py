"""Admission just in time against eager admission, with real workers.

    python benchmarks/admission.py [--quick] [--part PART] [--seeds N] [--json FILE]

The letter-sorting job as it is shipped, 100 steps, `max_staleness` 4. Both sides of a pair have the
same seed, warm start and prompts, and run one after the other; the one that begins changes from
pair to pair. Ratios and differences are medians over pairs.

main-job: as shipped.
over-bound: with each choice of `rollout.over_bound`.
bottleneck: with 32 decode slots in place of 256, so that the trainer waits for generation.
doubling: prompts have 5 letters in the median, and 10 from the middle of the run on. A run has
    adapted when the trainer waits as it does in the last 20 steps: from then on no five steps wait
    for a larger share of their time than any five of those, 5 percentage points allowed.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence

import report
from async_run import mean_accuracy, measure
from letter_sort_job import LetterSortJob, Step, letter_sort_job, training_steps
from letter_sort_task import LetterSortPrompts, letter_sort_reward

from areal_sc import GRPOConfig, SingleTurnWorkflow

SIDES = ("just_in_time", "eager")
CHOICES = ("train", "mask", "wait", "regenerate")
MODEL = dict(hidden_size=96, num_layers=3, ffn_size=256)
LENGTHS = dict(median_letters=7.0, sigma_letters=0.6)
SHORT = dict(median_letters=5.0, sigma_letters=0.4)
LONG = dict(median_letters=10.0, sigma_letters=0.4)
MAX_STALENESS = 4
FEW_SLOTS = 32
AT_ONCE = 5
LAST = 20
WAIT_MARGIN = 0.05

Records = dict[tuple[str, str, int], report.Metrics]
"""(case, side, seed) -> what its run measured."""


def measure_doubling(
    job: LetterSortJob, config: GRPOConfig, lengths: dict[str, float]
) -> report.Metrics:
    """A run whose prompts double in the middle.

    Args:
        lengths: unused; those of this part are its own.
    """
    num_half = config.total_steps // 2
    workflow = SingleTurnWorkflow(letter_sort_reward)
    halves: list[list[Step]] = []
    with job.workers(config) as workers:
        for shape in (SHORT, LONG):
            prompts = LetterSortPrompts(config.seed, **shape)
            halves.append(list(training_steps(workers, num_half, prompts, workflow)))
    first, second = halves
    return {
        "s_per_step_before": first[-1].ended_s / num_half,
        "s_per_step": second[-1].ended_s / num_half,
        "steps_to_adapt": steps_to_adapt(second),
        "wait_share": share_of_waiting(second[-LAST:]),
        "token_staleness_mean_before": staleness(first),
        "token_staleness_mean": staleness(second),
        "accuracy_auc": mean_accuracy(first + second),
    }


def steps_to_adapt(steps: Sequence[Step]) -> int:
    """After how many steps the trainer waits as it does in the last of them."""
    ends = range(AT_ONCE, len(steps) + 1)
    shares = [share_of_waiting(steps[end - AT_ONCE : end]) for end in ends]
    most = max(shares[AT_ONCE - LAST - 1 :]) + WAIT_MARGIN
    return max((end for end, share in zip(ends, shares, strict=True) if share > most), default=0)


def share_of_waiting(steps: Sequence[Step]) -> float:
    busy_s = sum(step.wait_s + step.train_s + step.sync_s for step in steps)
    return sum(step.wait_s for step in steps) / busy_s


def staleness(steps: Sequence[Step]) -> float:
    return statistics.mean(step.staleness.token_mean for step in steps)


Measure = Callable[[LetterSortJob, GRPOConfig, dict[str, float]], report.Metrics]
Part = tuple[Measure, dict[str, dict[str, object]]]
"""How a run is measured, and the settings of each case."""

PARTS: Mapping[str, Part] = {
    "main-job": (measure, {"as shipped": {}}),
    "over-bound": (measure, {choice: {"rollout__over_bound": choice} for choice in CHOICES}),
    "bottleneck": (measure, {"few slots": {"rollout__max_running_sequences": FEW_SLOTS}}),
    "doubling": (measure_doubling, {"lengths double": {}}),
}


def main() -> None:
    parser = report.make_parser(__doc__)
    parser.add_argument("--part", choices=PARTS, help="all of them if it is not given")
    parser.add_argument("--seeds", type=int, default=5, help="how many pairs of each case")
    arguments = parser.parse_args()
    num_steps, seeds = (12, range(1)) if arguments.quick else (100, range(arguments.seeds))
    batch_groups = 8 if arguments.quick else 32
    names = [arguments.part] if arguments.part else list(PARTS)
    metrics: report.Metrics = {}
    with letter_sort_job(20 if arguments.quick else 600) as job:
        for seed in seeds:
            job.warm_start(seed, MODEL, LENGTHS)
        for name in names:
            run, cases = PARTS[name]
            records: Records = {}
            for seed in seeds:
                for case, settings in cases.items():
                    for side in SIDES if seed % 2 == 0 else reversed(SIDES):
                        config = job.config(
                            seed=seed,
                            total_steps=num_steps,
                            rollout__train_batch_groups=batch_groups,
                            rollout__max_staleness=MAX_STALENESS,
                            rollout__admission=side,
                            **settings,
                        )
                        record = records[case, side, seed] = run(job, config, LENGTHS)
                        report.say(
                            f"{case}, {side}, seed {seed}: {record['s_per_step']:.3f} s a step"
                        )
            report.print_records(
                f"Admission: {name}",
                {"steps": num_steps, "batch": f"{batch_groups} groups of 8"},
                ("case", "side", "seed"),
                records,
            )
            metrics |= of_pairs(records)
    report.write(metrics, arguments.json)


def of_pairs(records: Records) -> report.Metrics:
    """Medians over the pairs of each case."""
    metrics: report.Metrics = {}
    for case in dict.fromkeys(case for case, _, _ in records):
        pairs = [
            (record, records[case, "eager", seed])
            for (of_case, side, seed), record in records.items()
            if (of_case, side) == (case, "just_in_time")
        ]
        prefix = case.replace(" ", "_")
        for name, of in (("step", "s_per_step"), ("staleness", "token_staleness_mean")):
            metrics[f"{prefix}_just_in_time_over_eager_{name}"] = statistics.median(
                ours[of] / theirs[of] for ours, theirs in pairs
            )
        metrics[f"{prefix}_just_in_time_minus_eager_accuracy_auc"] = statistics.median(
            ours["accuracy_auc"] - theirs["accuracy_auc"] for ours, theirs in pairs
        )
        if "steps_to_adapt" in pairs[0][0]:
            for side, number in (("just_in_time", 0), ("eager", 1)):
                metrics[f"{prefix}_{side}_steps_to_adapt"] = statistics.median(
                    pair[number]["steps_to_adapt"] for pair in pairs
                )
    return metrics


if __name__ == "__main__":
    main()
