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

from collections.abc import Sequence
from contextlib import ExitStack

import planes_control
import planes_data
import planes_ours
import planes_peers
import report
from planes_data import DataSides
from planes_samples import Samples
from report import Metrics

PARTS = ("data", "rows", "control", "peers")
PEER_ROUNDS = 5
FIRST = ("first", "one_row", "1mib")
"""In the names of what is shown first: rows are pulled once, and are small."""


def measure(parts: Sequence[str], *, quick: bool) -> Metrics:
    """Runs the parts, prints their tables, and returns the metrics of all."""
    rounds, count, watch_s = (1, 50, 1.0) if quick else (9, 2000, 20.0)
    sizes = ("64 KiB", "16 MiB") if quick else tuple(planes_data.SIZES)
    fan_outs = planes_control.QUICK_FAN_OUTS if quick else planes_control.FAN_OUTS
    samples = Samples()
    labels = planes_data.LABELS | planes_control.LABELS
    metrics: Metrics = {}
    with planes_ours.run() as folder, ExitStack() as stack:
        data = DataSides(folder, stack)
        if "data" in parts:
            planes_data.measure_throughput(data, samples, rounds, sizes)
            metrics |= planes_data.throughput_metrics(samples)
        if "rows" in parts:
            planes_data.measure_rows(data, samples, rounds, count)
            metrics |= planes_data.row_metrics(samples)
        if "control" in parts:
            zmq_puller = data.limits["zmq"]
            planes_control.measure_calls(
                zmq_puller, samples, folder, rounds, count, watch_s, fan_outs
            )
            planes_control.measure_steps(samples, folder, quick=quick)
            metrics |= planes_control.metrics(samples)
        if "peers" in parts:
            labels |= planes_peers.measure(data, samples, PEER_ROUNDS)
            metrics |= planes_peers.metrics(samples)
    settings = {"rounds": rounds, "of peers": PEER_ROUNDS, "values": "medians"}
    for title, columns, rows in samples.tables(labels):
        report.print_table(title, settings, columns, rows)
    is_later = {name: not any(part in name for part in FIRST) for name in metrics}
    return {name: metrics[name] for name in sorted(metrics, key=is_later.__getitem__)}


def main() -> None:
    parser = report.make_parser(__doc__)
    parser.add_argument("--part", choices=PARTS, nargs="+", default=PARTS)
    arguments = report.parse(parser, part=PARTS[:-1])
    metrics = measure(arguments.part, quick=arguments.quick)
    report.print_metrics("Metrics", {"ratios": "medians over the rounds"}, metrics)
    report.write(metrics, arguments.json)


if __name__ == "__main__":
    main()
