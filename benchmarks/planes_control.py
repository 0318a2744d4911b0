"""The control plane: no-op calls, fan-out to thousands of workers, heartbeats, bytes a row."""

from __future__ import annotations

import statistics
from collections import defaultdict
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import report
from planes_role import Role
from planes_statistics import ratio

NUM_HOSTS = 8
FAN_OUTS = (16, 64, 256, 1024, 4096)
QUICK_FAN_OUTS = (16, 64, 256)
PING_BYTES = 64
"""About what a no-op call and its reply take on the wire."""

STEP_LENGTHS = (100, 1_000, 8_000, 128_000)
STEP_ROWS = (64, 4096)
USUAL_LENGTH, USUAL_ROWS = 8_000, 512
NUM_STEPS = 3
MIN_FAN_OUT_ROUNDS = 5
NUM_BUSY_FAN_OUTS = 10

_SCRIPT = Path(__file__).parent / "planes_controller.py"


@dataclass
class Calls:
    """What the rounds gave; sides `zmq` and `rpc`.

    Attributes:
        p50_s, p99_s: of no-op calls, one at a time, with no other worker.
        fan_out_cpu_s, fan_out_wall_s: number of workers -> of every round; to all that there are.
        some_of_all_cpu_s: of fan-outs to the second largest number of the largest.
        steady, busy: heartbeats of all workers coming in; nothing else, or fan-outs beside them.
    """

    p50_s: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    p99_s: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    fan_out_cpu_s: dict[int, list[float]] = field(default_factory=lambda: defaultdict(list))
    fan_out_wall_s: dict[int, list[float]] = field(default_factory=lambda: defaultdict(list))
    some_of_all_cpu_s: list[float] = field(default_factory=list)
    steady: dict[str, float] = field(default_factory=dict)
    busy: dict[str, float] = field(default_factory=dict)


@dataclass
class Steps:
    """(rows of a batch, tokens of a row) -> what training steps cost a controller of its own."""

    bytes_per_row: dict[tuple[int, int], float] = field(default_factory=dict)
    resident_bytes: dict[tuple[int, int], float] = field(default_factory=dict)


def measure_calls(
    zmq_puller: Role,
    folder: Path,
    rounds: int,
    count: int,
    watch_s: float,
    fan_outs: tuple[int, ...],
) -> Calls:
    """No-op calls of one worker, then a controller of many of them in a few processes."""
    found = Calls()
    with ExitStack() as stack:
        controller, host = _role(stack, folder, "controller"), _role(stack, folder, "host")
        controller.call("connect", workers=host.call("start", first=0, count=1))
        for _ in range(rounds):
            for side, latencies in (
                ("zmq", zmq_puller.call("latencies", num_bytes=PING_BYTES, count=count)),
                ("rpc", controller.call("latencies", count=count)),
            ):
                found.p50_s[side].append(latencies["p50_s"])
                found.p99_s[side].append(latencies["p99_s"])
    with ExitStack() as stack:
        controller = _role(stack, folder, "controller")
        hosts = [_role(stack, folder, "host") for _ in range(NUM_HOSTS)]
        share = max(fan_outs) // NUM_HOSTS
        for number, host in enumerate(hosts):
            host.begin("start", first=number * share, count=share)
        workers = [worker for host in hosts for worker in host.finish()]
        num_connected = 0
        for num_workers in fan_outs:
            controller.call("connect", workers=workers[num_connected:num_workers])
            num_connected = num_workers
            for _ in range(max(rounds, MIN_FAN_OUT_ROUNDS)):
                spent = controller.call("fan_out", num_workers=num_workers)
                found.fan_out_cpu_s[num_workers].append(spent["cpu_s"])
                found.fan_out_wall_s[num_workers].append(spent["wall_s"])
        for _ in range(max(rounds, MIN_FAN_OUT_ROUNDS)):
            spent = controller.call("fan_out", num_workers=fan_outs[-2])
            found.some_of_all_cpu_s.append(spent["cpu_s"])
        found.steady = controller.call("watch", seconds=watch_s, num_fan_outs=0)
        found.busy = controller.call("watch", seconds=watch_s / 2, num_fan_outs=NUM_BUSY_FAN_OUTS)
    return found


def measure_steps(folder: Path, *, quick: bool) -> Steps:
    """A controller of its own for each case: memory that one has used says nothing of the next."""
    found = Steps()
    lengths = (min(STEP_LENGTHS), max(STEP_LENGTHS)) if quick else STEP_LENGTHS
    cases = [(USUAL_ROWS, length) for length in lengths]
    cases += [(rows, USUAL_LENGTH) for rows in STEP_ROWS]
    with ExitStack() as stack:
        host = _role(stack, folder, "host")
        workers = host.call("start", first=0, count=3)
        for rows, length in cases:
            with ExitStack() as alone:
                controller = _role(alone, folder, "controller")
                controller.call("connect", workers=workers)
                spent = controller.call("steps", num_rows=rows, length=length, count=NUM_STEPS)
            found.bytes_per_row[rows, length] = spent["bytes_per_row"]
            found.resident_bytes[rows, length] = spent["resident_bytes"]
    return found


def metrics(calls: Calls, steps: Steps) -> dict[str, tuple[float, str]]:
    by_length = {
        length: size for (rows, length), size in steps.resident_bytes.items() if rows == USUAL_ROWS
    }
    by_rows = {
        rows: size
        for (rows, length), size in steps.resident_bytes.items()
        if length == USUAL_LENGTH
    }
    fewest, most = min(by_rows), max(by_rows)
    *_, some, all_workers = sorted(calls.fan_out_cpu_s)
    found = {
        "noop_rpc_vs_bare": (ratio(calls.p50_s, "rpc", "zmq"), "ratio"),
        "noop_rpc_p99_vs_bare": (ratio(calls.p99_s, "rpc", "zmq"), "ratio"),
        "noop_rpc_p50_us": (1e6 * statistics.median(calls.p50_s["rpc"]), "us"),
        f"heartbeat_{all_workers}_cpu_percent": (100 * calls.steady["cpu_share"], "%"),
        "loop_lag_p99_ms": (1e3 * calls.steady["p99_s"], "ms"),
        "loop_lag_fanout_p99_ms": (1e3 * calls.busy["p99_s"], "ms"),
        "controller_bytes_per_row": (max(steps.bytes_per_row.values()), "B"),
        "controller_memory_longest_vs_shortest": (
            by_length[max(by_length)] / by_length[min(by_length)],
            "ratio",
        ),
    }
    found["controller_resident_bytes_per_row"] = (
        (by_rows[most] - by_rows[fewest]) / (most - fewest),
        "B",
    )
    for num_workers, seconds in calls.fan_out_cpu_s.items():
        found[f"fanout_{num_workers}_cpu_ms"] = (1e3 * statistics.median(seconds), "ms")
    found[f"fanout_{some}_of_{all_workers}_cpu_ms"] = (
        1e3 * statistics.median(calls.some_of_all_cpu_s),
        "ms",
    )
    return found


def print_tables(calls: Calls, steps: Steps, rounds: int, watch_s: float) -> None:
    *_, some, all_workers = sorted(calls.fan_out_cpu_s)
    report.print_table(
        "No-op call, one at a time",
        {"rounds": rounds, "bare": "no authentication", "RPC": "CurveZMQ, allow-list"},
        ["side", "p50 us", "p99 us"],
        [
            [
                label,
                1e6 * statistics.median(calls.p50_s[side]),
                1e6 * statistics.median(calls.p99_s[side]),
            ]
            for side, label in (("zmq", "bare pyzmq ping-pong"), ("rpc", "RPC"))
        ],
    )
    report.print_table(
        "Fan-out and gather of a no-op",
        {"rounds": rounds, "workers": f"in {NUM_HOSTS} processes on the same cores"},
        ["workers", "controller CPU ms", "wall ms"],
        [
            [
                num_workers,
                1e3 * statistics.median(seconds),
                1e3 * statistics.median(calls.fan_out_wall_s[num_workers]),
            ]
            for num_workers, seconds in calls.fan_out_cpu_s.items()
        ]
        + [
            [
                f"{some} of {all_workers}",
                1e3 * statistics.median(calls.some_of_all_cpu_s),
                "-",
            ]
        ],
    )
    report.print_table(
        f"Heartbeats of {all_workers:,} workers, 8 a node",
        {"seconds": watch_s, "timer": "2 ms"},
        ["beside them", "CPU % of a core", "timer late p50 ms", "p99 ms", "max ms"],
        [
            [
                label,
                100 * watched["cpu_share"] if label == "nothing" else "-",
                1e3 * watched["p50_s"],
                1e3 * watched["p99_s"],
                1e3 * watched["max_s"],
            ]
            for label, watched in (("nothing", calls.steady), ("fan-outs to all", calls.busy))
        ],
    )
    report.print_table(
        "A training step's messages, without tensors",
        {"steps": NUM_STEPS, "ranks": 2, "minibatches": 4, "group": 8},
        ["rows", "tokens a row", "bytes a row", "resident MB"],
        [
            [rows, length, steps.bytes_per_row[rows, length], resident / 1e6]
            for (rows, length), resident in steps.resident_bytes.items()
        ],
    )


def _role(stack: ExitStack, folder: Path, name: str) -> Role:
    return stack.enter_context(Role(name, _SCRIPT, [name, str(folder)]))
