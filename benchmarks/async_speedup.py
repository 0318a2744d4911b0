"""Asynchronous against synchronous training of the same job on the same cores.

    python benchmarks/async_speedup.py [--quick] [--slots N] [--json FILE]

The letter-sorting job with heavy-tailed lengths and the quickstart's model. All sides have one
train worker, one rollout worker and the same decode slots. They differ in `max_staleness`, and in
threads: asynchronous workers have one each; the synchronous side, whose workers never compute at
the same time, takes the better of one and two for each phase, measured beforehand. The asynchronous
side is as shipped, with admission just in time; `eager` is the same without.

The workload is chosen such that generation and training take CPU time of the same order; elsewhere
there is less to gain. With g and t CPU seconds a step, a synchronous step takes g + t, and an
asynchronous one at least max(g, t), and at least the CPU time of all processes divided by the
cores: that is `floor`.

Seconds per step are the mean over a run's steps once the first batches of full staleness are
through, with generation going on until the end. The sides run alternately. Medians over the runs
count and, in comparisons, medians over pairs of one seed. The time to an accuracy is that from the
start of the loop until the mean of four consecutive batches reaches it. An asynchronous batch was
sampled up to `max_staleness` versions before, so this puts that side at a disadvantage.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping

import report
from async_run import measure
from letter_sort_job import (
    LetterSortJob,
    Step,
    letter_sort_job,
    training_steps,
)
from letter_sort_task import LetterSortPrompts, letter_sort_reward

from areal_sc import GRPOConfig, SingleTurnWorkflow

MODEL = dict(hidden_size=96, num_layers=3, ffn_size=256, num_heads=8)
LENGTHS = dict(median_letters=7.0, sigma_letters=0.8)
MAX_STALENESS = 4
CALIBRATION_S = 20.0
"""Two threads are many times slower than one where other processes want the cores."""


def better_threads(
    job: LetterSortJob, config_of: Callable[[int], GRPOConfig], num_steps: int
) -> tuple[int, int]:
    """(train, rollout): threads with which the phase of a synchronous step takes less time.

    Args:
        config_of: the synchronous configuration with that many threads a worker.
    """
    train_s, wait_s = {}, {}
    workflow = SingleTurnWorkflow(letter_sort_reward)
    for count in (1, 2):
        config = config_of(count)
        steps: list[Step] = []
        with job.workers(config) as workers:
            prompts = LetterSortPrompts(config.seed, **LENGTHS)
            for step in training_steps(workers, num_steps, prompts, workflow):
                steps.append(step)
                if step.ended_s > CALIBRATION_S:
                    break
        warm = steps[1:] or steps
        train_s[count] = statistics.median(step.train_s for step in warm)
        wait_s[count] = statistics.median(step.wait_s for step in warm)
        report.say(
            f"sync, {count} threads: generates {wait_s[count]:.3f} s, trains {train_s[count]:.3f} s"
        )
    return min(train_s, key=train_s.__getitem__), min(wait_s, key=wait_s.__getitem__)


def main() -> None:
    parser = report.make_parser(__doc__)
    parser.add_argument("--slots", type=int, default=64, help="decode slots")
    parser.add_argument("--seeds", type=int, default=5, help="how many runs of each side")
    arguments = parser.parse_args()
    num_steps, seeds = (7, range(1)) if arguments.quick else (100, range(arguments.seeds))
    batch_groups = 8 if arguments.quick else 32
    num_warm_steps, calibration_steps = (20, 1) if arguments.quick else (600, 8)
    records: dict[tuple[str, int], report.Metrics] = {}
    with letter_sort_job(num_warm_steps) as job:

        def config_of(
            seed: int, max_staleness: int, train: int, rollout: int, **more: object
        ) -> GRPOConfig:
            return job.config(
                seed=seed,
                total_steps=num_steps,
                rollout__train_batch_groups=batch_groups,
                rollout__max_staleness=max_staleness,
                rollout__max_running_sequences=arguments.slots,
                actor__num_threads=train,
                rollout__num_threads=rollout,
                **more,
            )

        for seed in seeds:
            job.warm_start(seed, MODEL, LENGTHS)
        threads = better_threads(
            job, lambda count: config_of(seeds[0], 0, count, count), calibration_steps
        )
        for seed in seeds:
            for side, config in (
                ("async", config_of(seed, MAX_STALENESS, 1, 1)),
                ("eager", config_of(seed, MAX_STALENESS, 1, 1, rollout__admission="eager")),
                ("sync", config_of(seed, 0, *threads)),
            ):
                records[side, seed] = measure(job, config, LENGTHS)
                report.say(f"{side}, seed {seed}: {records[side, seed]['s_per_step']:.3f} s a step")
    settings = {
        "parameters": "336k",
        **LENGTHS,
        "batch": f"{batch_groups} groups of 8",
        "decode slots": arguments.slots,
        "steps": num_steps,
        "max_staleness": f"{MAX_STALENESS} and 0",
        "threads (train, rollout)": f"1, 1 and {threads[0]}, {threads[1]}",
    }
    report.print_records("Asynchronous against synchronous", settings, ("side", "seed"), records)
    report.write(metrics_of(records, threads), arguments.json)


def metrics_of(
    records: Mapping[tuple[str, int], report.Metrics], threads: tuple[int, int]
) -> report.Metrics:
    """Medians over the runs of each side, of what all of its runs have, and over pairs."""
    metrics: report.Metrics = {}
    for side in ("async", "eager", "sync"):
        found = [record for key, record in records.items() if key[0] == side]
        for name in found[0]:
            if all(name in record for record in found):
                metrics[f"{side}_{name}"] = statistics.median(record[name] for record in found)
    for other in ("sync", "eager"):
        pairs = [
            (record, records[other, seed])
            for (side, seed), record in records.items()
            if side == "async"
        ]
        for name in ("s_per_step", "time_to_088_s", "token_staleness_mean"):
            ratios = [
                theirs[name] / ours[name]
                for ours, theirs in pairs
                if theirs.get(name) and ours.get(name)
            ]
            if ratios:
                metrics[f"{other}_over_async_{name}"] = statistics.median(ratios)
        gains = [ours["accuracy_auc"] - theirs["accuracy_auc"] for ours, theirs in pairs]
        metrics[f"async_minus_{other}_accuracy_auc"] = statistics.median(gains)
    metrics["sync_train_threads"], metrics["sync_rollout_threads"] = threads
    return metrics


if __name__ == "__main__":
    main()
