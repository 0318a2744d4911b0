"""What all benchmarks share: their options, the table they print, the JSON file they write."""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

Metrics = Mapping[str, tuple[float, str]]
"""name -> (value, unit); raw values, no verdicts."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds `--quick` and `--json FILE`. From now on SIGTERM unwinds the program as Ctrl-C does."""
    parser.add_argument(
        "--quick", action="store_true", help="some seconds: a small version, to see that it works"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the metrics to FILE")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))


def add_device(parser: argparse.ArgumentParser) -> None:
    """Adds `--device`, which refuses `cuda` where there is none."""
    parser.add_argument(
        "--device", type=_device, default="cpu", metavar="{cpu,cuda}", help="default cpu"
    )


def write(metrics: Metrics, path: Path | None) -> None:
    """Writes `{metric: {"value": ..., "unit": ...}}`, if there is a path."""
    if path is not None:
        content = {name: {"value": value, "unit": unit} for name, (value, unit) in metrics.items()}
        path.write_text(json.dumps(content, indent=2) + "\n")


def machine() -> str:
    """One line on what the numbers were measured with."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    return (
        f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores, {device}, "
        f"Python {platform.python_version()}, torch {torch.__version__}"
    )


def print_table(
    title: str,
    settings: Mapping[str, object],
    columns: Sequence[str],
    rows: Sequence[Sequence[object]],
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
    rows = [(name, value, unit) for name, (value, unit) in metrics.items()]
    print_table(title, settings, ("metric", "value", "unit"), rows)


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
