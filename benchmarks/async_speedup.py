"""Asynchronous against synchronous training of the same job on the same cores.

    python benchmarks/async_speedup.py [--quick] [--slots N] [--json FILE]

The letter-sorting job with heavy-tailed lengths and the quickstart's model. Both sides have one
train worker, one rollout worker and the same decode slots. They differ in `max_staleness`, and in
threads: asynchronous workers have one each; the synchronous side, whose workers never compute at
the same time, takes the better of one and two for each phase, measured beforehand.

The workload is chosen such that generation and training take CPU time of the same order; elsewhere
there is less to gain. With g and t CPU seconds a step, a synchronous step takes g + t, and an
asynchronous one at least max(g, t), and at least the CPU time of all processes divided by the
cores: that is `floor`.

Seconds per step are the mean over a run's steps once the first batches of full staleness are
through, with generation going on until the end. Both sides run alternately, and the medians over
the runs count. The time to an accuracy is that from the start of the loop until the mean of four
consecutive batches reaches it. An asynchronous batch was sampled up to `max_staleness` versions
before, so this puts that side at a disadvantage.
"""

from __future__ import annotations

import argparse
import os
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import report
from letter_sort_job import Lengths, LetterSortJob, ModelShape, Step, say, training_steps
from letter_sort_task import letter_sort_reward

from areal_sc import GRPOConfig, SingleTurnWorkflow

MODEL = ModelShape(hidden_size=96, num_layers=3, ffn_size=256, num_heads=8)
LENGTHS = Lengths(median_letters=7.0, sigma_letters=0.8)
MAX_STALENESS = 4
TARGETS = {"050": 0.5, "088": 0.88}
ACCURACY_BATCHES = 4
CALIBRATION_S = 20.0
"""Two threads are many times slower than one where other processes want the cores."""


@dataclass(frozen=True)
class Run:
    """What one run measured.

    Attributes:
        step_s: seconds per step; this and what follows is of the window of full staleness.
        shares: of the time, by `wait` (for a batch), `train` and `sync` (publication).
        cpu_s: CPU seconds per step of each process.
        generated_tokens: per second.
        steps: all steps of the run.
        num_wasted_tokens: in the whole run.
    """

    step_s: float
    shares: dict[str, float]
    cpu_s: dict[str, float]
    generated_tokens: float
    steps: list[Step]
    num_wasted_tokens: int

    @property
    def floor_s(self) -> float:
        """What an asynchronous step takes at least with the CPU time of this run."""
        return max(*self.cpu_s.values(), sum(self.cpu_s.values()) / (os.cpu_count() or 1))

    @property
    def accuracy(self) -> float:
        """Of the last batches."""
        return statistics.mean(step.accuracy for step in self.steps[-ACCURACY_BATCHES:])

    @property
    def num_masked_tokens(self) -> int:
        return sum(step.staleness.num_tokens_masked for step in self.steps)

    @property
    def token_staleness_max(self) -> int:
        return max(step.staleness.token_max for step in self.steps)

    def time_to(self, accuracy: float) -> float | None:
        """Seconds until the mean of consecutive batches was that high; None: never."""
        for last in range(ACCURACY_BATCHES - 1, len(self.steps)):
            batches = self.steps[last + 1 - ACCURACY_BATCHES : last + 1]
            if statistics.mean(step.accuracy for step in batches) >= accuracy:
                return batches[-1].ended_s
        return None


def measure(job: LetterSortJob, config: GRPOConfig) -> Run:
    """One run of `total_steps` steps."""
    num_first = config.rollout.max_staleness + 1
    prompts = LENGTHS.prompts(config.seed)
    workflow = SingleTurnWorkflow(letter_sort_reward)
    steps: list[Step] = []
    with job.workers(config) as workers:
        for step in training_steps(workers, config.total_steps, prompts, workflow):
            steps.append(step)
            if len(steps) == num_first:
                cpu_before, tokens_before = workers.cpu_s(), workers.num_generated_tokens()
        cpu_after, tokens_after = workers.cpu_s(), workers.num_generated_tokens()
        num_wasted_tokens = workers.num_wasted_tokens()
    window = steps[num_first:]
    window_s = window[-1].ended_s - steps[num_first - 1].ended_s
    return Run(
        step_s=window_s / len(window),
        shares={
            name: sum(getattr(step, f"{name}_s") for step in window) / window_s
            for name in ("wait", "train", "sync")
        },
        cpu_s={name: (cpu_after[name] - cpu_before[name]) / len(window) for name in cpu_after},
        generated_tokens=(tokens_after - tokens_before) / window_s,
        steps=steps,
        num_wasted_tokens=num_wasted_tokens,
    )


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
            prompts = LENGTHS.prompts(config.seed)
            for step in training_steps(workers, num_steps, prompts, workflow):
                steps.append(step)
                if step.ended_s > CALIBRATION_S:
                    break
        warm = steps[1:] or steps
        train_s[count] = statistics.median(step.train_s for step in warm)
        wait_s[count] = statistics.median(step.wait_s for step in warm)
        say(
            f"sync, {count} threads: generates {wait_s[count]:.3f} s, trains {train_s[count]:.3f} s"
        )
    return min(train_s, key=train_s.__getitem__), min(wait_s, key=wait_s.__getitem__)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    report.add_arguments(parser)
    parser.add_argument("--slots", type=int, default=64, help="decode slots (default 64)")
    arguments = parser.parse_args()
    num_steps, seeds = (7, range(1)) if arguments.quick else (100, range(3))
    batch_groups = 8 if arguments.quick else 32
    num_warm_steps, calibration_steps = (20, 1) if arguments.quick else (600, 8)
    runs: dict[str, list[Run]] = {"async": [], "sync": []}
    with LetterSortJob(MODEL, LENGTHS, num_warm_steps) as job:

        def config_of(seed: int, max_staleness: int, train: int, rollout: int) -> GRPOConfig:
            return job.config(
                seed=seed,
                total_steps=num_steps,
                rollout__train_batch_groups=batch_groups,
                rollout__max_staleness=max_staleness,
                rollout__max_running_sequences=arguments.slots,
                actor__num_threads=train,
                rollout__num_threads=rollout,
            )

        for seed in seeds:
            job.warm_start(seed)
            say(f"seed {seed}: warm start is made")
        threads = better_threads(
            job, lambda count: config_of(seeds[0], 0, count, count), calibration_steps
        )
        for seed in seeds:
            for side, config in (
                ("async", config_of(seed, MAX_STALENESS, 1, 1)),
                ("sync", config_of(seed, 0, *threads)),
            ):
                run = measure(job, config)
                runs[side].append(run)
                say(f"{side}, seed {seed}: {run.step_s:.3f} s a step, accuracy {run.accuracy:.3f}")
    show(runs, threads, num_steps, batch_groups, arguments.slots)
    report.write(metrics_of(runs, threads), arguments.json)


def show(
    runs: dict[str, list[Run]],
    threads: tuple[int, int],
    num_steps: int,
    batch_groups: int,
    num_slots: int,
) -> None:
    settings = {
        "parameters": "336k",
        "lengths": f"median {LENGTHS.median_letters:g}, sigma {LENGTHS.sigma_letters:g}",
        "batch": f"{batch_groups} groups of 8",
        "decode slots": num_slots,
        "steps": num_steps,
        "runs a side": len(runs["sync"]),
        "max_staleness": f"{MAX_STALENESS} and 0",
        "threads (train, rollout)": f"1, 1 and {threads[0]}, {threads[1]}",
    }
    columns: tuple[str, ...] = ("side", "seed", "s/step", "floor", "wait", "train", "sync")
    columns += ("cores train", "cores rollout", "cores script", "generated/s", "max staleness")
    columns += ("masked", "wasted", *(f"s to {target:g}" for target in TARGETS.values()))
    columns += ("accuracy",)
    rows = [
        (
            side,
            seed,
            run.step_s,
            run.floor_s if side == "async" else "-",
            *(f"{share:.0%}" for share in run.shares.values()),
            *(run.cpu_s[name] / run.step_s for name in ("train/0", "rollout/0", "script")),
            run.generated_tokens,
            run.token_staleness_max,
            run.num_masked_tokens,
            run.num_wasted_tokens,
            *(_shown(run.time_to(target)) for target in TARGETS.values()),
            run.accuracy,
        )
        for seed, pair in enumerate(zip(runs["async"], runs["sync"], strict=True))
        for side, run in zip(("async", "sync"), pair, strict=True)
    ]
    report.print_table("Asynchronous against synchronous", settings, columns, rows)


def metrics_of(
    runs: dict[str, list[Run]], threads: tuple[int, int]
) -> dict[str, tuple[float, str]]:
    """Medians over the runs; a time to an accuracy only where every run of the side reached it."""
    metrics: dict[str, tuple[float, str]] = {}
    for side, found in runs.items():
        for name, values, unit in (
            ("s_per_step", [run.step_s for run in found], "s"),
            ("wait_share", [run.shares["wait"] for run in found], "share"),
            ("train_share", [run.shares["train"] for run in found], "share"),
            ("sync_share", [run.shares["sync"] for run in found], "share"),
            ("train_cpu_s_per_step", [run.cpu_s["train/0"] for run in found], "s"),
            ("rollout_cpu_s_per_step", [run.cpu_s["rollout/0"] for run in found], "s"),
            ("script_cpu_s_per_step", [run.cpu_s["script"] for run in found], "s"),
            ("floor_s_per_step", [run.floor_s for run in found], "s"),
            ("generated_tokens_per_s", [run.generated_tokens for run in found], "tokens/s"),
            ("masked_tokens", [run.num_masked_tokens for run in found], "tokens"),
            ("wasted_tokens", [run.num_wasted_tokens for run in found], "tokens"),
            ("token_staleness_max", [run.token_staleness_max for run in found], "versions"),
            ("accuracy", [run.accuracy for run in found], "share"),
        ):
            metrics[f"{side}_{name}"] = (statistics.median(values), unit)
        for name, target in TARGETS.items():
            times = [run.time_to(target) for run in found]
            if None not in times:
                metrics[f"{side}_time_to_{name}_s"] = (_median(times), "s")
    sync_s, async_s = metrics["sync_s_per_step"][0], metrics["async_s_per_step"][0]
    metrics["async_over_sync"] = (sync_s / async_s, "ratio")
    metrics["sync_train_threads"] = (threads[0], "threads")
    metrics["sync_rollout_threads"] = (threads[1], "threads")
    return metrics


def _median(times: Sequence[float | None]) -> float:
    return statistics.median(time for time in times if time is not None)


def _shown(time: float | None) -> float | str:
    return "-" if time is None else time


if __name__ == "__main__":
    main()
