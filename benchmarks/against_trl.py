"""This project beside TRL's `GRPOTrainer`: the same model, prompts and rows a step, in pairs.

    benchmarks/peers/install_trl.sh
    python benchmarks/against_trl.py --workload letter_sort
    python benchmarks/against_trl.py --workload sums --model .venv-models/SmolLM2-135M-Instruct

The runs of a pair begin with the same model and seed, one after the other; the order turns from
pair to pair. Both sides use the same prompts, each once, in an order of their own; the same reward
(`trl_tasks.py`), chat template, temperature and end of answers; the same number of updates a step,
AdamW with a constant rate, gradient clip, clip of the ratio, group advantages, mean over the tokens
of a minibatch, and float32. They differ in what is their own:

- Ours generates the next batch while it trains (`rollout.max_staleness=1`) and corrects for that.
  It has one thread for each, and keeps snapshots, records and a ledger, as is its default.
- TRL generates and trains in turn, with `--trl-threads` threads, and saves nothing.

Seconds and CPU seconds a step are those of all processes, without the first `--skip` steps. `first`
and `to_target` are seconds from the start of the program: to the end of its first step, and to the
step at which the mean reward of the last WINDOW batches reaches that of the workload. `peak` is the
largest memory of all processes together, sampled twice a second: each one's own, pages that n
processes share counted as 1/n, and by what shared memory has grown, mapped or not. A `ratio` is
ours over TRL's: the median over the pairs, with its 95 % interval.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

import report
from against_checkout import ROOT, adopt_orphans, ratio_metrics, used_at_step
from processes import peak_memory

sys.path.insert(0, str(ROOT / "examples"))

from letter_sort_task import LetterSortPrompts  # an example

TRL: Final = ROOT / ".venv-trl" / "bin" / "python"
MODEL: Final = ROOT / ".venv-models" / "SmolLM2-135M-Instruct"
WINDOW: Final = 4
"""A step's reward is noisy: accuracies are means over so many steps."""

_END_LIMIT_S: Final = 900.0


@dataclass(frozen=True)
class Workload:
    """What both sides train.

    Attributes:
        reward: its name in `trl_tasks.REWARDS`.
        max_tokens: of a prompt and its answer.
        target: mean reward whose time is taken.
        steps: that count, unless others are asked for.
    """

    reward: str
    use_chat_template: bool
    groups: int
    group_size: int
    num_minibatches: int
    lr: float
    max_new_tokens: int
    max_tokens: int
    target: float
    steps: int


WORKLOADS: Final = {
    "letter_sort": Workload("exact_text", False, 32, 8, 4, 4e-4, 32, 64, 0.6, 40),
    "sums": Workload("last_number", True, 8, 8, 2, 1e-5, 16, 96, 0.5, 24),
}


@dataclass(frozen=True)
class Run:
    """One run of a side; `model` is a folder, `rows` a file of prompts and answers."""

    model: Path
    rows: Path
    run_dir: Path
    total_steps: int
    seed: int


def main() -> None:
    parser = report.make_parser(__doc__)
    parser.add_argument("--workload", choices=WORKLOADS, default="letter_sort")
    parser.add_argument(
        "--model", type=Path, default=MODEL, help="folder of the model that learns sums"
    )
    parser.add_argument("--pairs", type=int, default=5, help="runs of each side")
    parser.add_argument("--steps", type=int, help="training steps (default: 40; of sums 24)")
    parser.add_argument("--skip", type=int, default=3, help="first steps that do not count")
    parser.add_argument("--trl-threads", type=int, default=2, help="ours has two in all")
    parser.add_argument("--trl-python", type=Path, default=TRL, metavar="FILE")
    arguments = report.parse(parser, pairs=1, steps=WINDOW, skip=1, trl_threads=1)
    if not arguments.trl_python.is_file():
        parser.error(
            f"no TRL at {arguments.trl_python}: benchmarks/peers/install_trl.sh installs it"
        )
    if arguments.workload == "sums" and not (arguments.model / "config.json").is_file():
        parser.error(f"--model {arguments.model}: expected the folder of a chat model")
    workload = WORKLOADS[arguments.workload]
    steps = arguments.steps or workload.steps
    if not 0 < arguments.skip < steps:
        parser.error(f"--skip: expected 1 to {steps - 1} with {steps} steps, got {arguments.skip}")
    adopt_orphans()
    results: dict[str, list[report.Metrics]] = {"ours": [], "trl": []}
    with TemporaryDirectory(prefix="areal-sc-benchmark-") as name:
        folder, model = Path(name), arguments.model.resolve()
        if arguments.workload == "letter_sort":
            model = folder / "model"
            make_letter_sort_model(model, num_steps=20 if arguments.quick else 600)
        for pair in range(arguments.pairs):
            rows = folder / f"rows-{pair}.jsonl"
            rows.write_text(prompts(arguments.workload, pair, (steps + 1) * workload.groups))
            for side in sorted(results, reverse=bool(pair % 2)):
                run = Run(model, rows, folder / f"{side}-{pair}", steps + 1, pair)
                command = (
                    our_command(workload, run)
                    if side == "ours"
                    else trl_command(workload, run, arguments.trl_python, arguments.trl_threads)
                )
                measured = measure(command, run.run_dir, steps, arguments.skip, workload.target)
                results[side].append(measured)
                said = " ".join(f"{key}={value:.4g}" for key, value in measured.items())
                report.say(f"pair={pair} {side} {said}")
    metrics = metrics_of(results)
    settings = {name: getattr(arguments, name) for name in ("workload", "pairs", "trl_threads")}
    settings |= asdict(workload) | {"steps": steps}
    report.print_metrics("Beside TRL", settings, metrics)
    report.write(metrics, arguments.json)


def prompts(workload: str, seed: int, count: int) -> str:
    """Lines {"prompt": ..., "answer": ...}."""
    if workload == "letter_sort":
        rows = [LetterSortPrompts(seed, count)[index] for index in range(count)]
    else:
        rng = random.Random(seed)
        rows = []
        for _ in range(count):
            a, b, sign = rng.randint(2, 49), rng.randint(2, 49), rng.choice("+-")
            question = f"What is {a} {sign} {b}? Reply with the number only."
            rows.append({"prompt": question, "answer": str(a + b if sign == "+" else a - b)})
    return "".join(json.dumps(row) + "\n" for row in rows)


def make_letter_sort_model(folder: Path, num_steps: int) -> None:
    """The warm start of `examples/letter_sort.py`, after which it trains one step."""
    settings = {
        "run_dir": folder.parent / "warm_start",
        "actor.path": folder,
        "total_steps": 1,
        "task.warm_start.steps": num_steps,
    }
    command = [sys.executable, "examples/letter_sort.py", "--config", "configs/letter_sort.yaml"]
    with started([*command, *assignments(settings)], folder.parent / "warm_start.txt") as script:
        if script.wait(timeout=_END_LIMIT_S) != 0:
            raise RuntimeError((folder.parent / "warm_start.txt").read_text())


def our_command(workload: Workload, run: Run) -> list[str]:
    settings = {
        "run_dir": run.run_dir,
        "seed": run.seed,
        "total_steps": run.total_steps,
        "generation.max_new_tokens": workload.max_new_tokens,
        "actor.path": run.model,
        "actor.optimizer.lr": workload.lr,
        "actor.ppo.num_minibatches": workload.num_minibatches,
        "actor.ppo.advantage_deviation": "sample",  # as TRL
        "actor.num_threads": 1,
        "rollout.num_threads": 1,
        "rollout.train_batch_groups": workload.groups,
        "rollout.group_size": workload.group_size,
        "rollout.max_running_sequences": workload.groups * workload.group_size,
        "rollout.max_context_tokens": workload.max_tokens,
        "rollout.max_staleness": 1,
        "+task.rows": run.rows,
        "+task.reward": workload.reward,
        "+task.use_chat_template": workload.use_chat_template,
    }
    return [sys.executable, "benchmarks/against_trl_run.py", *assignments(settings)]


def trl_command(workload: Workload, run: Run, python: Path, num_threads: int) -> list[str]:
    settings = {**asdict(workload), **asdict(run), "num_threads": num_threads}
    return [str(python), "benchmarks/peers/trl_peer.py", json.dumps(settings, default=str)]


def assignments(settings: dict[str, object]) -> list[str]:
    return [f"{key}={value}" for key, value in settings.items()]


@contextmanager
def started(command: Sequence[str], out: Path) -> Iterator[subprocess.Popen[bytes]]:
    """The program, whose output goes to the file `out`; it is ended with the block."""
    path = os.pathsep.join((str(ROOT), str(ROOT / "benchmarks")))
    with open(out, "w") as file:
        script = subprocess.Popen(
            command, cwd=ROOT, env={**os.environ, "PYTHONPATH": path}, stdout=file, stderr=file
        )
    try:
        yield script
    finally:
        if script.poll() is None:
            script.terminate()
            script.wait(timeout=_END_LIMIT_S)


def measure(
    command: Sequence[str], run_dir: Path, steps: int, skip: int, target: float
) -> report.Metrics:
    """Runs a side, which trains one step more, so that the last that counts is like the others.

    Raises: RuntimeError: the run failed or stood still; what it wrote.
    """
    out = run_dir.with_suffix(".txt")
    began_s = time.monotonic()
    try:
        with peak_memory() as peak_bytes, started(command, out) as script:
            used = [used_at_step(script, run_dir, step) for step in range(1, steps + 1)]
            memory = peak_bytes()
            if script.wait(timeout=_END_LIMIT_S) != 0:
                raise RuntimeError("the run failed after its last step")
    except (RuntimeError, subprocess.TimeoutExpired) as error:
        raise RuntimeError(f"{error}\n{out.read_text()[-5000:]}") from error
    (begin_cpu_s, begin_s), (end_cpu_s, end_s) = used[skip - 1], used[-1]
    metrics = {
        "s_per_step": (end_s - begin_s) / (steps - skip),
        "cpu_s_per_step": (end_cpu_s - begin_cpu_s) / (steps - skip),
        "first_s": used[0][1] - began_s,
        "peak_bytes": float(memory),
    }
    lines = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    rewards = [line["reward"] for line in lines if line["kind"] == "step"]
    for end in range(WINDOW, steps + 1):
        accuracy = statistics.fmean(rewards[end - WINDOW : end])
        if accuracy >= target:
            metrics.setdefault("to_target_s", used[end - 1][1] - began_s)
        if end % WINDOW == 0:
            metrics[f"to_step_{end}_accuracy"] = accuracy
    return metrics


def metrics_of(results: dict[str, list[report.Metrics]]) -> report.Metrics:
    """Medians of what all runs of a side have, and ratios over the pairs that have it."""
    metrics: report.Metrics = {}
    for side, runs in results.items():
        for name in runs[0]:
            if all(name in run for run in runs):
                metrics[f"{side}_{name}"] = statistics.median(run[name] for run in runs)
    for name in ("s_per_step", "cpu_s_per_step", "first_s", "to_target_s", "peak_bytes"):
        pairs = zip(results["ours"], results["trl"], strict=True)
        both = [(ours[name], trl[name]) for ours, trl in pairs if name in ours and name in trl]
        if both:
            metrics |= ratio_metrics(name, [it[0] for it in both], [it[1] for it in both])
    return metrics


if __name__ == "__main__":
    main()
