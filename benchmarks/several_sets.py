"""One model before and after synchronous and asynchronous training, on several held-out sets.

    make real-model
    python benchmarks/several_sets.py [--quick] [--steps 30] [--etas 0 2] [--seed 1] [--json FILE]

The training is that of `examples/sums.py`: sums and differences of two numbers below 50. The sets
are others of these, larger numbers, three numbers, and sums in words, 256 prompts each, of which
each is asked once, sampled at temperature 1; an answer that was cut is wrong.
"""

from __future__ import annotations

import json
import random
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import report

ROOT = Path(__file__).resolve().parents[1]
NUM_PROMPTS = 256
ASKED = "What is {} {} {}? Reply with the number only."


def sets() -> dict[str, list[dict[str, str]]]:
    """Name -> rows, the same ones in each run."""
    drawn = random.Random(1)

    def row(prompt: str, answer: int) -> dict[str, str]:
        return {"prompt": prompt, "answer": str(answer)}

    def numbers(low: int, high: int, count: int) -> list[int]:
        return [drawn.randrange(low, high) for _ in range(count)]

    pairs = [numbers(50, 100, 2) for _ in range(NUM_PROMPTS)]
    triples = [numbers(2, 30, 3) for _ in range(NUM_PROMPTS)]
    told = [numbers(2, 50, 2) for _ in range(NUM_PROMPTS)]
    return {
        "larger": [row(ASKED.format(a, "+", b), a + b) for a, b in pairs],
        "three": [row(ASKED.format(a, f"+ {b} +", c), a + b + c) for a, b, c in triples],
        "words": [
            row(
                f"Tom has {a} apples and gets {b} more. How many has he? Reply with a number.",
                a + b,
            )
            for a, b in told
        ],
    }


def run(folder: Path, eta: int, steps: int, seed: int) -> dict[str, Any]:
    """What `summary.json` has of a run."""
    named = []
    for name, rows in sets().items():
        path = folder / f"{name}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        named.append({"name": name, "prompts": str(path)})
    run_dir, config = folder / f"eta{eta}", folder / "sets.yaml"
    shutil.copy(ROOT / "configs" / "sums.yaml", folder)
    config.write_text("defaults: [sums]\n" + json.dumps({"evaluation": {"sets": named}})[1:-1])
    settings = {
        "run_dir": run_dir,
        "total_steps": steps,
        "seed": seed,
        "rollout.max_staleness": eta,
        "evaluation.every_steps": 0,
        "evaluation.greedy": False,
        "checkpoint.every_steps": 0,
    }
    command = [sys.executable, ROOT / "examples" / "sums.py", "--config", config]
    command += [f"{key}={value}" for key, value in settings.items()]
    subprocess.run(command, check=True, cwd=ROOT)
    summary: dict[str, Any] = json.loads((run_dir / "summary.json").read_text())
    return summary


def main() -> None:
    parser = report.make_parser(__doc__)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--etas", type=int, nargs="+", default=[0, 2])
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    records: dict[tuple[str | int, ...], report.Metrics] = {}
    steps = 1 if arguments.quick else arguments.steps
    for eta in arguments.etas:
        with tempfile.TemporaryDirectory() as folder:
            summary = run(Path(folder), eta, steps, arguments.seed)
        report.say(json.dumps(summary))
        for name in ("held_out", *sets()):
            of_set = records.setdefault((name,), {})
            for when, key in (("before", "before"), ("after", f"eta{eta}")):
                of_set[key] = summary["other_evaluations"][f"{name}/{when}"]["accuracy"]
    report.print_records("Several sets", {"steps": steps}, ("set",), records)
    report.write(report.flat(records), arguments.json)


if __name__ == "__main__":
    main()
