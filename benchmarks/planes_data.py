"""The data plane against what the machine allows, by shard size, and one row at a time."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import report
from planes_payloads import ROW_BYTES
from planes_role import Role
from planes_statistics import ratio

SIZES = {"64 KiB": 64 << 10, "1 MiB": 1 << 20, "16 MiB": 16 << 20, "256 MiB": 256 << 20}
LARGE = ("16 MiB", "256 MiB")
REPETITION_BYTES = 256 << 20
MAX_PULLS = 512
"""Shards moved in one repetition: as many as make `REPETITION_BYTES`, but not more than these."""
NUM_FIRST_PULLS = 5
MAX_INFLIGHT_ROWS = 64

LIMITS = ("memcpy", "socket", "zmq", "zmq-tuned")
PULLERS = ("tcp", "tcp-fresh", "tcp-encrypted", "map")
PUT = "put"
LABELS = {
    "memcpy": "memcpy",
    "socket": "plain recv_into",
    "zmq": "bare pyzmq + copy",
    "zmq-tuned": "the same, glibc tuned",
    "tcp": "pull over TCP, pooled",
    "tcp-fresh": "pull over TCP, fresh",
    "tcp-encrypted": "pull over TCP, encrypted",
    "map": "same host, copied out",
    PUT: "put into the store",
}

_HERE = Path(__file__).parent
_LIMITS, _WORKERS = _HERE / "planes_limits.py", _HERE / "planes_workers.py"
_OWNERS = {"tcp": "owner", "tcp-fresh": "owner", "tcp-encrypted": "owner-encrypted", "map": "owner"}


class DataSides:
    """A process for each end of each way to move a shard."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        def limit(name: str) -> Role:
            return stack.enter_context(Role(name, _LIMITS, [name]))

        def worker(name: str) -> Role:
            return stack.enter_context(Role(name, _WORKERS, [name, str(folder)]))

        # all are started before the first is waited for: each takes seconds to import torch
        self.owners = {name: worker(name) for name in ("owner", "owner-encrypted")}
        self.pullers = {name: worker(name) for name in PULLERS}
        self.limits = {"memcpy": limit("memcpy")}
        self.limit_owners = {}
        for name in ("socket", "zmq", "zmq-tuned"):
            self.limit_owners[name] = limit(f"{name}-owner")
            self.limits[name] = limit(f"{name}-puller")
        for name, owner in self.limit_owners.items():
            self.limits[name].call("connect", address=owner.call("address"))

    def owner_of(self, puller: str) -> Role:
        return self.owners[_OWNERS[puller]]

    def ends_of(self, side: str) -> list[Role]:
        """The processes that work when the side moves a shard."""
        if side == PUT:
            return [self.owners["owner"]]
        if side in PULLERS:
            return [self.owner_of(side), self.pullers[side]]
        return [self.limits[side], *filter(None, [self.limit_owners.get(side)])]

    def move(self, side: str, size: str, count: int) -> float:
        """Seconds to move `count` shards, one after the other."""
        if side in PULLERS:
            method = "pull_copied" if side == "map" else "pull"
            return float(self.pullers[side].call(method, name=size, count=count))
        if side == PUT:
            return float(self.owners["owner"].call("put", num_bytes=SIZES[size], count=count))
        return float(self.limits[side].call("pull", num_bytes=SIZES[size], count=count))


@dataclass
class Throughput:
    """What the rounds gave, by shard size and side.

    Attributes:
        rates: GB/s of every round.
        cpu_s_per_gb: of every round, both ends together, user and system.
        wire_bytes: on the puller's TCP connections, for each byte of payload.
        first_pull_s: of shards in shared memory that were never pulled before.
        first_copy_s: of copying those out.
    """

    rates: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    cpu_s_per_gb: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    wire_bytes: dict[str, dict[str, float]] = field(default_factory=dict)
    first_pull_s: dict[str, list[float]] = field(default_factory=dict)
    first_copy_s: dict[str, list[float]] = field(default_factory=dict)


def measure_throughput(sides: DataSides, rounds: int, sizes: Sequence[str]) -> Throughput:
    """All sides move shards of a size in turn, `rounds` times; then the next size."""
    found = Throughput()
    for size in sizes:
        num_bytes = SIZES[size]
        count = min(max(REPETITION_BYTES // num_bytes, 1), MAX_PULLS)
        sealed = _seal(sides, size)
        found.wire_bytes[size] = {
            side: _wire_bytes(sides, side, size) for side in ("zmq", "tcp", "tcp-encrypted")
        }
        found.rates[size], found.cpu_s_per_gb[size] = defaultdict(list), defaultdict(list)
        for _ in range(rounds):
            for side in (*LIMITS, *PULLERS, PUT):
                ends = sides.ends_of(side)
                before = sum(end.cpu_s() for end in ends)
                gigabytes = num_bytes * count / 1e9
                found.rates[size][side].append(gigabytes / sides.move(side, size, count))
                used = sum(end.cpu_s() for end in ends) - before
                found.cpu_s_per_gb[size][side].append(used / gigabytes)
        found.first_pull_s[size], found.first_copy_s[size] = _first_pulls(sides, num_bytes)
        for owner, wires in sealed:
            owner.call("drop", wires=wires)
    return found


def _large(throughput: Throughput) -> list[str]:
    return [size for size in LARGE if size in throughput.rates]


def _seal(sides: DataSides, size: str) -> list[tuple[Role, list[Any]]]:
    """Makes a shard of the size known to every puller, and has each check what arrives."""
    sealed = {
        name: owner.call("seal_shards", num_bytes=SIZES[size], count=1)
        for name, owner in sides.owners.items()
    }
    for name, puller in sides.pullers.items():
        puller.call("know", name=size, wire=sealed[_OWNERS[name]][0])
    for side in sides.limits.values():
        side.call("pull", num_bytes=SIZES[size], count=1)
        side.call("check", num_bytes=SIZES[size])
    return [(sides.owners[name], wires) for name, wires in sealed.items()]


def _wire_bytes(sides: DataSides, side: str, size: str) -> float:
    puller = sides.pullers[side] if side in PULLERS else sides.limits[side]
    count = max(1, (16 << 20) // SIZES[size])
    before = sum(puller.call("tcp_bytes"))
    sides.move(side, size, count)
    return float(sum(puller.call("tcp_bytes")) - before) / (count * SIZES[size])


def _first_pulls(sides: DataSides, num_bytes: int) -> tuple[list[float], list[float]]:
    owner = sides.owner_of("map")
    wires = owner.call("seal_shards", num_bytes=num_bytes, count=NUM_FIRST_PULLS)
    measured = sides.pullers["map"].call("first_pulls", wires=wires)
    owner.call("drop", wires=wires)
    return [pull for pull, _ in measured], [copy for _, copy in measured]


@dataclass
class SingleRows:
    """What the rounds gave for rows of 8 KiB; sides `zmq` and `tcp`.

    Attributes:
        p50_s, p99_s: of requests one at a time.
        per_s: with `MAX_INFLIGHT_ROWS` in flight.
    """

    p50_s: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    p99_s: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    per_s: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))


def measure_rows(sides: DataSides, rounds: int, count: int) -> SingleRows:
    """`count` requests of one row: first one at a time, then pipelined; sides in turn."""
    sealed = sides.owner_of("tcp").call("put_payload", payload="rows")
    sides.pullers["tcp"].call("know", name="rows", wire=sealed["wire"], payload="rows")
    found = SingleRows()
    ends: dict[str, tuple[Role, dict[str, Any]]] = {
        "zmq": (sides.limits["zmq"], {"num_bytes": ROW_BYTES}),
        "tcp": (sides.pullers["tcp"], {"name": "rows"}),
    }
    for _ in range(rounds):
        for side, (puller, what) in ends.items():
            latencies = puller.call("latencies", count=count, **what)
            found.p50_s[side].append(latencies["p50_s"])
            found.p99_s[side].append(latencies["p99_s"])
            seconds = puller.call(
                "pipelined", count=2 * count, max_inflight=MAX_INFLIGHT_ROWS, **what
            )
            found.per_s[side].append(2 * count / seconds)
    return found


def throughput_metrics(throughput: Throughput) -> dict[str, tuple[float, str]]:
    """Where a metric is of large shards, it is that of the least favourable size."""

    def worst(one: str, other: str) -> tuple[float, str]:
        return min(
            ratio(throughput.rates[size], one, other) for size in _large(throughput)
        ), "ratio"

    def cpu(side: str) -> tuple[float, str]:
        of_sizes = [
            statistics.median(throughput.cpu_s_per_gb[size][side]) for size in _large(throughput)
        ]
        return max(of_sizes), "s/GB"

    map_s = [statistics.median(seconds) for seconds in throughput.first_pull_s.values()]
    found = {
        "tcp_vs_bare_pyzmq": worst("tcp", "zmq"),
        "tcp_vs_tuned_pyzmq": worst("tcp", "zmq-tuned"),
        "tcp_fresh_vs_bare_pyzmq": worst("tcp-fresh", "zmq"),
        "tcp_encrypted_vs_bare_pyzmq": worst("tcp-encrypted", "zmq"),
        "tcp_vs_recv_into": worst("tcp", "socket"),
        "same_host_vs_memcpy": worst("map", "memcpy"),
        "same_host_first_vs_memcpy": (
            min(_first_rate(throughput, size) for size in _large(throughput)),
            "ratio",
        ),
        "same_host_map_ms": (1e3 * max(map_s), "ms"),
        "put_vs_memcpy": worst(PUT, "memcpy"),
        "tcp_cpu_s_per_gb": cpu("tcp"),
        "bare_pyzmq_cpu_s_per_gb": cpu("zmq"),
        "tcp_wire_bytes_per_byte": (
            max(throughput.wire_bytes[size]["tcp"] for size in _large(throughput)),
            "ratio",
        ),
    }
    for side in ("tcp", "map", PUT):
        for size in throughput.rates:
            name = f"{side}_{size.replace(' ', '').lower()}_gb_per_s"
            found[name] = (statistics.median(throughput.rates[size][side]), "GB/s")
    return found


def _first_rate(throughput: Throughput, size: str) -> float:
    """Rate of pulling a shard for the first time and copying it out, over memcpy's."""
    pulls, copies = throughput.first_pull_s[size], throughput.first_copy_s[size]
    seconds = statistics.median(map(sum, zip(pulls, copies, strict=True)))
    return SIZES[size] / 1e9 / seconds / statistics.median(throughput.rates[size]["memcpy"])


def row_metrics(rows: SingleRows) -> dict[str, tuple[float, str]]:
    return {
        "one_row_pulls_per_s": (statistics.median(rows.per_s["tcp"]), "1/s"),
        "one_row_rate_vs_bare": (ratio(rows.per_s, "tcp", "zmq"), "ratio"),
        "one_row_p50_vs_bare": (ratio(rows.p50_s, "tcp", "zmq"), "ratio"),
        "one_row_p99_vs_bare": (ratio(rows.p99_s, "tcp", "zmq"), "ratio"),
    }


def print_throughput(throughput: Throughput, rounds: int) -> None:
    settings = {
        "rounds": rounds,
        "a repetition": f"{REPETITION_BYTES >> 20} MiB, at most {MAX_PULLS} shards",
        "destinations": "warm unless fresh",
    }
    for title, values in (
        ("Data plane: GB/s by shard size, one shard after the other", throughput.rates),
        ("Data plane: CPU seconds per GB, both processes", throughput.cpu_s_per_gb),
    ):
        report.print_table(
            title,
            settings,
            ["side", *throughput.rates],
            [
                [
                    LABELS[side],
                    *(statistics.median(values[size][side]) for size in throughput.rates),
                ]
                for side in (*LIMITS, *PULLERS, PUT)
            ],
        )
    report.print_table(
        "Data plane: bytes on TCP connections for each byte of payload",
        {"counted by": "the kernel, both directions, without TCP/IP headers"},
        ["side", *throughput.rates],
        [
            [
                LABELS[side],
                *(f"{throughput.wire_bytes[size][side]:.5f}" for size in throughput.rates),
            ]
            for side in ("zmq", "tcp", "tcp-encrypted")
        ],
    )
    report.print_table(
        "Same host: the first pull of a shard, median ms",
        {"shards": NUM_FIRST_PULLS},
        ["what", *throughput.rates],
        [
            [label, *(1e3 * statistics.median(seconds[size]) for size in throughput.rates)]
            for label, seconds in (
                ("mapped", throughput.first_pull_s),
                ("copied out, beyond that", throughput.first_copy_s),
            )
        ],
    )


def print_rows(rows: SingleRows, rounds: int) -> None:
    report.print_table(
        "One row of 8 KiB a request",
        {"rounds": rounds, "in flight for the rate": MAX_INFLIGHT_ROWS},
        ["side", "p50 us", "p99 us", "requests/s"],
        [
            [
                LABELS[side],
                1e6 * statistics.median(rows.p50_s[side]),
                1e6 * statistics.median(rows.p99_s[side]),
                statistics.median(rows.per_s[side]),
            ]
            for side in ("zmq", "tcp")
        ],
    )
