"""What all benchmarks share: their options, the tables they print, the JSON file they write.

A metric's name ends in its unit, so a metric is a name and a number: `stall_s`, `put_gb_per_s`.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import torch

from areal_sc.system.cgroups import num_cores

Metrics = dict[str, float]
"""name -> value; raw values, no verdicts."""

Records = Mapping[tuple[str | int, ...], Metrics]
"""What was measured of several cases, each named by the values of its keys."""

UNITS = {
    "tokens_per_s": "tokens/s",
    "gb_per_s": "GB/s",
    "s_per_gb": "s/GB",
    "per_s": "1/s",
    "bytes_per_row": "B",
    "bytes_per_byte": "ratio",
    "s_per_step": "s",
    "s_per_token": "s",
    "bytes": "B",
    "percent": "%",
    "share": "share",
    "accuracy": "share",
    "auc": "share",
    "tokens": "tokens",
    "threads": "threads",
    "rows": "rows",
    "frames": "frames",
    "versions": "versions",
    "us": "us",
    "nats": "nats",
    "ms": "ms",
    "s": "s",
}
"""By the end of a metric's name, the longer one first; all others are ratios."""


def make_parser(description: str, *, device: bool = False) -> argparse.ArgumentParser:
    """Parser with `--quick`, `--json FILE` and, if asked for, `--device`.

    From now on SIGTERM unwinds the program as Ctrl-C does.
    """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    parser = argparse.ArgumentParser(
        description=description.splitlines()[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument(
        "--quick", action="store_true", help="some seconds: a small version, to see that it works"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the metrics to FILE")
    if device:
        parser.add_argument(
            "--device", type=_device, default="cpu", metavar="{cpu,cuda}", help="where to compute"
        )
    return parser


def parse(parser: argparse.ArgumentParser, **quick: object) -> argparse.Namespace:
    """The arguments; with `--quick`, those that are not given are as in `quick`."""
    arguments = parser.parse_args()
    if arguments.quick:
        parser.set_defaults(**quick)
        arguments = parser.parse_args()
    return arguments


def unit_of(name: str) -> str:
    """Unit of the metric of this name."""
    return next((unit for end, unit in UNITS.items() if f"_{name}".endswith(f"_{end}")), "ratio")


def write(metrics: Mapping[str, float], path: Path | None) -> None:
    """Writes `{metric: {"value": ..., "unit": ...}}`, if there is a path."""
    if path is not None:
        content = {name: {"value": value, "unit": unit_of(name)} for name, value in metrics.items()}
        path.write_text(json.dumps(content, indent=2) + "\n")


def say(text: str) -> None:
    """A line on the benchmark's progress."""
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


def machine() -> str:
    """One line on what the numbers were measured with."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    return (
        f"{platform.system()} {platform.machine()}, {num_cores()} cores, "
        f"load {os.getloadavg()[0]:.1f}, {device}, "
        f"Python {platform.python_version()}, torch {torch.__version__}"
    )


def print_table(
    title: str,
    settings: Mapping[str, object],
    columns: Sequence[str],
    rows: Iterable[Sequence[object]],
) -> None:
    """Prints a Markdown table under its title, settings and machine; floats with 3 digits."""
    cells = [[_cell(value) for value in row] for row in (columns, *rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(columns))]
    print(f"\n## {title}\n")
    print(", ".join(f"{name} {value}" for name, value in settings.items()))
    print(f"{machine()}\n")
    for i, row in enumerate(cells):
        print("| " + " | ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)) + " |")
        if i == 0:
            print("|" + "|".join("-" * (width + 2) for width in widths) + "|")
    sys.stdout.flush()


def print_metrics(title: str, settings: Mapping[str, object], metrics: Metrics) -> None:
    """Prints all metrics as a table."""
    rows = [(name, value, unit_of(name)) for name, value in metrics.items()]
    print_table(title, settings, ("metric", "value", "unit"), rows)


def print_records(
    title: str, settings: Mapping[str, object], keys: Sequence[str], records: Records
) -> None:
    """Prints a table with one row a case; `-` stands where a case lacks a value."""
    names = list(dict.fromkeys(name for record in records.values() for name in record))
    print_table(
        title,
        settings,
        (*keys, *(name.replace("_", " ") for name in names)),
        [(*key, *(record.get(name, "-") for name in names)) for key, record in records.items()],
    )


def flat(records: Records) -> Metrics:
    """Every value under the names of its case and itself: `pull_stall_s`."""
    return {
        "_".join(map(str, (*key, name))): value
        for key, record in records.items()
        for name, value in record.items()
    }


def _cell(value: object) -> str:
    if not isinstance(value, float):
        return str(value)
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def _device(name: str) -> str:
    if name not in ("cpu", "cuda"):
        raise argparse.ArgumentTypeError(f"expected cpu or cuda, got {name}")
    if name == "cuda" and not torch.cuda.is_available():
        raise argparse.ArgumentTypeError("torch finds no CUDA device here")
    return name
