"""Training runs in virtual time whose workers, agents, connections, files and scripts fail.

    python benchmarks/simulate_faults.py --seeds 10000

Each seed is a run of some steps with the faults that follow from it, and is the same run each time.
The real controllers steer simulated workers; the invariants are those of `FaultRun`, in
tests/simulation. The first violated one ends the process with exit code 1 and the seed. Ctrl-C ends
it with the tables of the seeds so far.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import time
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from simulation import fault_run
from simulation.plants import PLANTS

SEEDS_PER_TASK = 25
PROGRESS_S = 10.0


@dataclass
class Outcome:
    """Of some seeds.

    Attributes:
        struck: (kind of fault, what the controllers were at) -> number of faults.
        num_retreats: times that a script went back in place, to an earlier snapshot.
        ends: how a start of the script ended -> number of them.
        failures: seed -> what went wrong.
    """

    num_runs: int = 0
    num_steps: int = 0
    num_repeated_steps: int = 0
    num_retreats: int = 0
    struck: Counter[tuple[str, str]] = field(default_factory=Counter)
    ends: Counter[str] = field(default_factory=Counter)
    failures: dict[int, str] = field(default_factory=dict)

    def add(self, other: Outcome) -> None:
        self.num_runs += other.num_runs
        self.num_steps += other.num_steps
        self.num_repeated_steps += other.num_repeated_steps
        self.num_retreats += other.num_retreats
        self.struck += other.struck
        self.ends += other.ends
        self.failures |= other.failures


def play_all(seeds: Sequence[int], plant: str | None, stops: bool) -> Outcome:
    """Plays seeds one after the other, up to the first that fails."""
    logging.disable(logging.CRITICAL)  # every fault is a warning
    outcome = Outcome()
    with PLANTS[plant]() if plant else nullcontext():
        for seed in seeds:
            outcome.num_runs += 1
            try:
                run = fault_run.play(seed)
            except KeyboardInterrupt:
                raise
            except BaseException as error:  # whatever it is, the seed has found it
                outcome.failures[seed] = "".join(traceback.format_exception(error))
                if stops:
                    break
                continue
            outcome.num_steps += run.settings.num_steps
            outcome.num_repeated_steps += run.num_repeated_steps
            outcome.num_retreats += run.num_retreats
            outcome.struck += run.faults.struck
            outcome.ends["completed"] += 1
            outcome.ends += run.ends
    return outcome


def outcomes(arguments: argparse.Namespace) -> Iterator[Outcome]:
    seeds = range(arguments.first, arguments.first + arguments.seeds)
    parts = [seeds[i : i + SEEDS_PER_TASK] for i in range(0, len(seeds), SEEDS_PER_TASK)]
    stops = not arguments.all
    if arguments.jobs == 1:
        for part in parts:
            yield play_all(part, arguments.plant, stops)
        return
    with ProcessPoolExecutor(arguments.jobs) as pool:
        tasks = [pool.submit(play_all, part, arguments.plant, stops) for part in parts]
        try:
            for task in tasks:
                yield task.result()
        finally:
            for task in tasks:
                task.cancel()


def table(struck: Counter[tuple[str, str]]) -> str:
    """Kinds of faults in rows, what the controllers were at in columns."""
    kinds = sorted({kind for kind, _ in struck})
    states = sorted({state for _, state in struck})
    rows = [["", *states, "all"]]
    for kind in kinds:
        counts = [struck[kind, state] for state in states]
        rows.append([kind, *map(str, counts), str(sum(counts))])
    totals = [sum(struck[kind, state] for kind in kinds) for state in states]
    rows.append(["all", *map(str, totals), str(sum(totals))])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in rows
    )


def report(total: Outcome, took_s: float) -> dict[str, Any]:
    """All numbers of a table, for a program."""
    return {
        "num_runs": total.num_runs,
        "num_steps": total.num_steps,
        "num_repeated_steps": total.num_repeated_steps,
        "num_retreats": total.num_retreats,
        "num_ends": dict(total.ends),
        "took_s": round(took_s, 1),
        "struck": [[kind, state, number] for (kind, state), number in sorted(total.struck.items())],
        "failures": {str(seed): failure for seed, failure in sorted(total.failures.items())},
    }


def show(total: Outcome, took_s: float) -> None:
    """The tables, and what went wrong."""
    print(table(total.struck))
    ends = ", ".join(f"{number} {end}" for end, number in sorted(total.ends.items()))
    print(
        f"{total.num_runs} runs ({ends}), {total.num_steps} steps and {total.num_repeated_steps} "
        f"repeated ones, {total.num_retreats} times back to a snapshot, {total.struck.total()} "
        f"faults, {took_s:.0f} s"
    )
    for seed, failure in sorted(total.failures.items()):
        print(f"\nseed {seed}: {failure}", file=sys.stderr)
    if total.failures:
        seeds = ", ".join(map(str, sorted(total.failures)))
        again = f"{Path(__file__).name} --seeds 1 --first {min(total.failures)} --jobs 1"
        print(f"failed: seed {seeds}; to see the first again: {again}", file=sys.stderr)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--seeds", type=int, default=1000, help="how many")
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    parser.add_argument("--plant", choices=sorted(PLANTS), help="a bug that must be found")
    parser.add_argument("--all", action="store_true", help="go on after a seed that fails")
    parser.add_argument("--json", action="store_true", help="print the numbers as JSON")
    arguments = parser.parse_args(argv)
    total, began_s, shown_s = Outcome(), time.perf_counter(), 0.0
    is_complete = False
    try:
        for outcome in outcomes(arguments):
            total.add(outcome)
            took_s = time.perf_counter() - began_s
            if took_s - shown_s > PROGRESS_S:
                shown_s = took_s
                progress = f"{total.num_runs} of {arguments.seeds} seeds in {took_s:.0f} s"
                print(f"{progress}, {len(total.failures)} failed", file=sys.stderr, flush=True)
            if total.failures and not arguments.all:
                break
        is_complete = True
    except KeyboardInterrupt:
        print("interrupted: these are the seeds that were played", file=sys.stderr)
    took_s = time.perf_counter() - began_s
    if arguments.json:
        print(json.dumps(report(total, took_s), indent=1))
    else:
        show(total, took_s)
    return 0 if is_complete and not total.failures else 1


if __name__ == "__main__":
    sys.exit(main())
