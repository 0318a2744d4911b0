"""One run of the letter-sorting job, with what it cost and how it learned."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import report
from letter_sort_job import LetterSortJob, Step, training_steps
from letter_sort_task import LetterSortPrompts, letter_sort_reward

from areal_sc import GRPOConfig, SingleTurnWorkflow
from areal_sc.system.cgroups import num_cores

TARGETS = {"050": 0.5, "088": 0.88}
ACCURACY_BATCHES = 4


def measure(job: LetterSortJob, config: GRPOConfig, lengths: dict[str, float]) -> report.Metrics:
    """One run of `total_steps` steps.

    Seconds, shares, CPU and tokens a second are those of the window of full staleness, the other
    counts those of the whole run. An accuracy that was never reached has no `time_to`.

    Args:
        lengths: of the prompts.
    """
    num_first = config.rollout.max_staleness + 1
    prompts = LetterSortPrompts(config.seed, **lengths)
    workflow = SingleTurnWorkflow(letter_sort_reward)
    steps: list[Step] = []
    with job.workers(config) as workers:
        for step in training_steps(workers, config.total_steps, prompts, workflow):
            steps.append(step)
            if len(steps) == num_first:
                cpu_before, tokens_before = workers.cpu_s(), workers.num_generated_tokens()
        cpu_after, tokens_after = workers.cpu_s(), workers.num_generated_tokens()
        num_wasted_tokens, mean_running = workers.num_wasted_tokens(), workers.mean_running()
    window = steps[num_first:]
    window_s = window[-1].ended_s - steps[num_first - 1].ended_s
    cpu_s = {name: (cpu_after[name] - cpu_before[name]) / len(window) for name in cpu_after}
    measured = {
        "s_per_step": window_s / len(window),
        # an asynchronous step takes at least so long with the CPU time of this run
        "floor_s_per_step": max(*cpu_s.values(), sum(cpu_s.values()) / num_cores()),
    }
    for name in ("wait", "train", "sync"):
        measured[f"{name}_share"] = sum(getattr(step, f"{name}_s") for step in window) / window_s
    for name, seconds in cpu_s.items():
        measured[f"{name.removesuffix('/0')}_cpu_s_per_step"] = seconds
    measured |= {
        "generated_tokens_per_s": (tokens_after - tokens_before) / window_s,
        "running_answers": mean_running,
        "masked_tokens": sum(step.staleness.num_tokens_masked for step in steps),
        "wasted_tokens": num_wasted_tokens,
        "token_staleness_mean": statistics.mean(step.staleness.token_mean for step in window),
        "token_staleness_max": max(step.staleness.token_max for step in steps),
        "accuracy_auc": mean_accuracy(steps),
        "accuracy": mean_accuracy(steps[-ACCURACY_BATCHES:]),
    }
    for name, target in TARGETS.items():
        reached = [
            steps[end - 1].ended_s
            for end in range(ACCURACY_BATCHES, len(steps) + 1)
            if mean_accuracy(steps[end - ACCURACY_BATCHES : end]) >= target
        ]
        if reached:
            measured[f"time_to_{name}_s"] = reached[0]
    return measured


def mean_accuracy(steps: Sequence[Step]) -> float:
    return statistics.mean(step.accuracy for step in steps)
