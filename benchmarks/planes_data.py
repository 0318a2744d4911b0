"""The data plane against what the machine allows, by shard size, and one row at a time."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from planes_payloads import ROW_BYTES
from planes_role import Role
from planes_samples import Samples
from report import Metrics

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

FIRST = "First pull of a shard on the same host, ms: mapped, and copied out"
RATE = "Data plane: GB/s by shard size, one shard after the other"
CPU = "Data plane: CPU seconds per GB, both processes"
WIRE = "Data plane: bytes on TCP connections for each byte of payload"
ROW = "One row of 8 KiB a request: us, and requests/s of 64 in flight"

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
            puller = self.pullers[side]
            return float(puller.call("pull", name=size, count=count, copies_out=side == "map"))
        if side == PUT:
            return float(self.owners["owner"].call("put", num_bytes=SIZES[size], count=count))
        return float(self.limits[side].call("pull", num_bytes=SIZES[size], count=count))


def measure_throughput(
    sides: DataSides, samples: Samples, rounds: int, sizes: Sequence[str]
) -> None:
    """All sides move shards of a size in turn, `rounds` times; then the next size."""
    for size in sizes:
        num_bytes = SIZES[size]
        count = min(max(REPETITION_BYTES // num_bytes, 1), MAX_PULLS)
        sealed = _seal(sides, size)
        _first_pulls(sides, samples, size)
        for side in ("zmq", "tcp", "tcp-encrypted"):
            samples.add(WIRE, size, side, _wire_bytes(sides, side, size))
        for _ in range(rounds):
            for side in (*LIMITS, *PULLERS, PUT):
                ends = sides.ends_of(side)
                before = sum(end.cpu_s() for end in ends)
                gigabytes = num_bytes * count / 1e9
                samples.add(RATE, size, side, gigabytes / sides.move(side, size, count))
                used = sum(end.cpu_s() for end in ends) - before
                samples.add(CPU, size, side, used / gigabytes)
        for owner, wires in sealed:
            owner.call("drop", wires=wires)


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


def _first_pulls(sides: DataSides, samples: Samples, size: str) -> None:
    """Shards that were never pulled before."""
    owner = sides.owner_of("map")
    for _ in range(NUM_FIRST_PULLS):
        wires = owner.call("seal_shards", num_bytes=SIZES[size], count=1)
        mapped_s, copied_s = sides.pullers["map"].call("first_pull", wire=wires[0])
        owner.call("drop", wires=wires)
        samples.add(FIRST, size, "mapped", 1e3 * mapped_s)
        samples.add(FIRST, size, "copied out", 1e3 * copied_s)


def measure_rows(sides: DataSides, samples: Samples, rounds: int, count: int) -> None:
    """`count` requests of one row: first one at a time, then pipelined; sides in turn."""
    sealed = sides.owner_of("tcp").call("put_payload", payload="rows")
    sides.pullers["tcp"].call("know", name="rows", wire=sealed["wire"], payload="rows")
    ends: dict[str, tuple[Role, dict[str, Any]]] = {
        "zmq": (sides.limits["zmq"], {"num_bytes": ROW_BYTES}),
        "tcp": (sides.pullers["tcp"], {"name": "rows"}),
    }
    for _ in range(rounds):
        for side, (puller, what) in ends.items():
            latencies = puller.call("latencies", count=count, **what)
            samples.add(ROW, "p50", side, 1e6 * latencies["p50_s"])
            samples.add(ROW, "p99", side, 1e6 * latencies["p99_s"])
            seconds = puller.call(
                "pipelined", count=2 * count, max_inflight=MAX_INFLIGHT_ROWS, **what
            )
            samples.add(ROW, "per s", side, 2 * count / seconds)


def throughput_metrics(samples: Samples) -> Metrics:
    """Where a metric is of large shards, it is that of the least favourable size."""
    sizes = samples.cases(RATE)
    large = [size for size in LARGE if size in sizes]

    def worst(one: str, other: str) -> float:
        return min(samples.ratio(RATE, size, one, other) for size in large)

    def cpu(side: str) -> float:
        return max(samples.median(CPU, size, side) for size in large)

    first = {
        size: SIZES[size]
        / 1e6
        / samples.median(FIRST, size, "copied out")
        / samples.median(RATE, size, "memcpy")
        for size in sizes
    }
    found: Metrics = {"same_host_first_vs_memcpy": (min(first[size] for size in large))}
    for size, value in first.items():
        found[f"same_host_first_{_in_name(size)}_vs_memcpy"] = value
    for size in sizes:
        value = samples.ratio(RATE, size, "tcp", "socket")
        found[f"tcp_{_in_name(size)}_vs_recv_into"] = value
    found |= {
        "tcp_vs_bare_pyzmq": worst("tcp", "zmq"),
        "tcp_vs_tuned_pyzmq": worst("tcp", "zmq-tuned"),
        "tcp_fresh_vs_bare_pyzmq": worst("tcp-fresh", "zmq"),
        "tcp_encrypted_vs_bare_pyzmq": worst("tcp-encrypted", "zmq"),
        "tcp_vs_recv_into": worst("tcp", "socket"),
        "same_host_vs_memcpy": worst("map", "memcpy"),
        "same_host_map_ms": max(samples.median(FIRST, size, "mapped") for size in sizes),
        "put_vs_memcpy": worst(PUT, "memcpy"),
        "tcp_cpu_s_per_gb": cpu("tcp"),
        "bare_pyzmq_cpu_s_per_gb": cpu("zmq"),
        "tcp_wire_bytes_per_byte": max(samples.median(WIRE, size, "tcp") for size in large),
    }
    for side in ("tcp", "map", PUT):
        for size in sizes:
            found[f"{side}_{_in_name(size)}_gb_per_s"] = samples.median(RATE, size, side)
    return found


def row_metrics(samples: Samples) -> Metrics:
    return {
        "one_row_pulls_per_s": samples.median(ROW, "per s", "tcp"),
        "one_row_rate_vs_bare": samples.ratio(ROW, "per s", "tcp", "zmq"),
        "one_row_p50_vs_bare": samples.ratio(ROW, "p50", "tcp", "zmq"),
        "one_row_p99_vs_bare": samples.ratio(ROW, "p99", "tcp", "zmq"),
    }


def _in_name(size: str) -> str:
    return size.replace(" ", "").lower()
