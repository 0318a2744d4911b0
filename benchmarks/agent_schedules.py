"""Episodes of agents on virtual time, whose clients, servers and workers fail.

    python benchmarks/agent_schedules.py               10,000 schedules
    python benchmarks/agent_schedules.py --quick       40

Each seed is an episode with the faults that follow from it; what must hold is in
tests/agent_schedules.py. The first seed in which it does not ends the process, with its number.
"""

from __future__ import annotations

import logging
import sys
from collections import Counter
from pathlib import Path

import report

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

import agent_schedules
import chat_templates as templates

TEMPLATES = (templates.QWEN, templates.QWEN_THINKING)


def main() -> None:
    parser = report.make_parser(__doc__)
    parser.add_argument("--schedules", type=int, default=10_000)
    parser.add_argument("--first", type=int, default=0, help="seed of the first one")
    arguments = report.parse(parser, schedules=40)
    logging.disable(logging.CRITICAL)  # every death is an error in the log
    tokenizers = [templates.tokenizer_for(it) for it in TEMPLATES]
    counts = Counter[str]()
    for seed in range(arguments.first, arguments.first + arguments.schedules):
        try:
            counts += agent_schedules.play(tokenizers[seed % len(tokenizers)], seed)
        except BaseException as error:
            error.add_note(f"seed {seed}")
            raise
    metrics = {name: float(number) for name, number in sorted(counts.items())}
    report.print_metrics("Schedules", {"schedules": arguments.schedules}, metrics)
    report.write(metrics, arguments.json)


if __name__ == "__main__":
    main()
