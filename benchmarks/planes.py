"""The data plane and the control plane against the machine's limits, and against other systems.

    python benchmarks/planes.py [--quick] [--json FILE] [--part data|rows|control|peers ...]

Each side has processes of its own, as in use: an owner and a puller, a controller and its workers.
All sides of a table take turns in one run, and a ratio is the median of those of the rounds. Every
side's bytes are compared with what was sent before anything is timed.

- limits: memcpy, a plain TCP socket, bare pyzmq (see planes_limits.py); no authentication.
- ours: workers as a run makes them, keys and all. Bulk chunks carry MACs; `encrypted` encrypts too.
  Over TCP nothing is shared: those pullers know of no arena. On the same host a pull maps the
  arena; where it says `copied out`, the bytes are then copied to a warm place.
- peers: AReaL, TransferQueue and Ray in an environment of their own, which
  `benchmarks/peers/install.sh` makes; left out by `--quick`.

Everything shares the machine: simulated workers and peers take CPU from what is measured, so on few
cores latencies and lags are upper bounds. Controller CPU is that of its process alone.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from contextlib import ExitStack
from typing import Any, NoReturn

import planes_control
import planes_data
import planes_ours
import planes_peers
import report
from planes_data import DataSides

PARTS = ("data", "rows", "control", "peers")


def measure(parts: list[str], *, quick: bool) -> dict[str, tuple[float, str]]:
    """Runs the parts, prints their tables, and returns the metrics of all."""
    rounds, count, watch_s = (1, 50, 1.0) if quick else (9, 2000, 20.0)
    sizes = ("64 KiB", "16 MiB") if quick else tuple(planes_data.SIZES)
    fan_outs = planes_control.QUICK_FAN_OUTS if quick else planes_control.FAN_OUTS
    metrics: dict[str, tuple[float, str]] = {}
    with planes_ours.run() as folder, ExitStack() as stack:
        data = DataSides(folder, stack)
        if "data" in parts:
            throughput = planes_data.measure_throughput(data, rounds, sizes)
            planes_data.print_throughput(throughput, rounds)
            metrics |= planes_data.throughput_metrics(throughput)
        if "rows" in parts:
            rows = planes_data.measure_rows(data, rounds, count)
            planes_data.print_rows(rows, rounds)
            metrics |= planes_data.row_metrics(rows)
        if "control" in parts:
            zmq_puller = data.limits["zmq"]
            calls = planes_control.measure_calls(
                zmq_puller, folder, rounds, count, watch_s, fan_outs
            )
            steps = planes_control.measure_steps(folder, quick=quick)
            planes_control.print_tables(calls, steps, rounds, watch_s)
            metrics |= planes_control.metrics(calls, steps)
        if "peers" in parts:
            compared = planes_peers.compare(data, 5)
            planes_peers.print_tables(compared, 5)
            metrics |= planes_peers.metrics(compared)
    return metrics


def _end(*_: Any) -> NoReturn:
    """SIGTERM unwinds as Ctrl-C does."""
    sys.exit(143)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    report.add_arguments(parser)
    parser.add_argument("--part", choices=PARTS, nargs="+", help="default: all; quick: no peers")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, _end)
    load = os.getloadavg()[0]
    parts = arguments.part or (PARTS[:-1] if arguments.quick else PARTS)
    metrics = measure(list(parts), quick=arguments.quick)
    report.print_table(
        "Metrics",
        {"ratios": "medians over the rounds", "load of the machine beforehand": f"{load:.1f}"},
        ["metric", "value", "unit"],
        [[name, value, unit] for name, (value, unit) in metrics.items()],
    )
    report.write(metrics, arguments.json)


if __name__ == "__main__":
    main()
