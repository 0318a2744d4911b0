"""Other systems and ours on the same payloads: AReaL's RTensor, TransferQueue, Ray.

The peers run in an environment of their own (peers/install.sh). One that is not there, or fails, is
reported as missing with its reason; nothing takes its place.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import report
from planes_data import DataSides
from planes_payloads import PAYLOADS
from planes_role import Role, RoleFailed
from planes_statistics import ratio

MEASURED = ("large", "jagged")
PREPARED = (*MEASURED, "rows")
NUM_ROWS = 200
PEER_TIMEOUT_S = 300.0
MAX_SHARDS_MAPPED = 9

PYTHON = Path(__file__).parents[1] / ".venv-peers" / "bin" / "python"
_PEERS = Path(__file__).parent / "peers"

Get = Callable[[str], float]
"""Seconds to get a payload."""


@dataclass
class Side:
    """One way to get a payload.

    Attributes:
        get: of the whole payload.
        put: the same for putting it; None where nothing is copied or sent.
        one_row: seconds for a number of single-row requests, one after the other.
    """

    label: str
    get: Get
    put: Get | None = None
    one_row: Callable[[int], float] | None = None


@dataclass
class Comparison:
    """What the rounds gave.

    Attributes:
        rates, put_rates: payload -> side -> GB/s of every round.
        rows_per_s: single-row requests, one at a time.
        mapped_s: sides that map the large payload's shards without a copy.
        labels: side -> how it is shown.
        missing: peer -> why it was not measured.
        wire_bytes: bytes that AReaL's server sent for each byte of payload.
    """

    rates: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    put_rates: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    rows_per_s: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    mapped_s: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    labels: dict[str, str] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)
    wire_bytes: float | None = None


def compare(data: DataSides, rounds: int) -> Comparison:
    """All sides get, and put, each payload in turn, `rounds` times."""
    found = Comparison()
    with ExitStack() as stack:
        sides = _our_sides(data)
        mappers: dict[str, Callable[[], float]] = {
            "map": lambda: float(
                data.pullers["map"].call("one_row", name="large", count=MAX_SHARDS_MAPPED)
            )
        }
        areal_bytes: list[Callable[[], float]] = []
        for name, start in (
            ("areal", _areal),
            ("transferqueue", _transferqueue),
            ("ray", _ray),
        ):
            try:
                sides |= start(stack, mappers, areal_bytes)
            except RoleFailed as error:
                found.missing[name] = str(error)
        found.labels = {name: side.label for name, side in sides.items()}
        _measure(found, sides, mappers, rounds)
        for read in areal_bytes:
            found.wire_bytes = read()
    return found


def _measure(
    found: Comparison,
    sides: dict[str, Side],
    mappers: dict[str, Callable[[], float]],
    rounds: int,
) -> None:
    for payload in MEASURED:
        gigabytes = PAYLOADS[payload]().num_bytes / 1e9
        rates, put_rates = defaultdict(list), defaultdict(list)
        for number in range(rounds + 1):
            for name, side in sides.items():
                rate = gigabytes / side.get(payload)
                put_rate = gigabytes / side.put(payload) if side.put else None
                if number:  # the first round warms up
                    rates[name].append(rate)
                    if put_rate is not None:
                        put_rates[name].append(put_rate)
        found.rates[payload], found.put_rates[payload] = rates, put_rates
    for number in range(rounds + 1):
        for name, side in sides.items():
            if side.one_row is not None:
                rate = NUM_ROWS / side.one_row(NUM_ROWS)
                if number:
                    found.rows_per_s[name].append(rate)
        for name, map_all in mappers.items():
            seconds = map_all()
            if number:
                found.mapped_s[name].append(seconds)


def _our_sides(data: DataSides) -> dict[str, Side]:
    sides = {}
    for name, label in (
        ("tcp-fresh", "pull over TCP, fresh"),
        ("tcp", "pull over TCP, pooled"),
        ("map", "pull on the same host, copied out, pooled"),
    ):
        puller = data.pullers[name]
        for payload in PREPARED:
            wire = data.owner_of(name).call("seal_payload", payload=payload)
            puller.call("know", name=payload, wire=wire, payload=payload)
        sides[name] = Side(
            label,
            lambda payload, puller=puller: float(puller.call("pull", name=payload)),
            one_row=lambda count, puller=puller: float(
                puller.call("one_row", name="rows", count=count)
            ),
        )
    sides["map"].put = lambda payload: float(
        data.owners["owner"].call("put_payload", payload=payload)
    )
    return sides


def _areal(
    stack: ExitStack, mappers: dict[str, Any], areal_bytes: list[Callable[[], float]]
) -> dict[str, Side]:
    server = _peer(stack, "areal", "server")
    client = _peer(stack, "areal", "client")
    version = client.call("version", timeout_s=PEER_TIMEOUT_S)
    for payload in PREPARED:
        stored = server.call("prepare", payload=payload, timeout_s=PEER_TIMEOUT_S)
        client.call("prepare", payload=payload, stored=stored, timeout_s=PEER_TIMEOUT_S)

    def wire_bytes() -> float:
        before = server.call("bytes_sent")
        client.call("get", payload="large", timeout_s=PEER_TIMEOUT_S)
        return float(server.call("bytes_sent") - before) / PAYLOADS["large"]().num_bytes

    areal_bytes.append(wire_bytes)
    return {"areal": _side(f"AReaL {version} RTensor fetch", client, "get", puts=False)}


def _transferqueue(stack: ExitStack, *_: Any) -> dict[str, Side]:
    client = _peer(stack, "transferqueue")
    version = client.call("version", timeout_s=PEER_TIMEOUT_S)
    for payload in PREPARED:
        client.call("prepare", payload=payload, timeout_s=PEER_TIMEOUT_S)
    return {"transferqueue": _side(f"TransferQueue {version} get_data", client, "get")}


def _ray(stack: ExitStack, mappers: dict[str, Any], *_: Any) -> dict[str, Side]:
    driver = _peer(stack, "ray")
    version = driver.call("version", timeout_s=PEER_TIMEOUT_S)
    for payload in PREPARED:
        driver.call("prepare", payload=payload, timeout_s=PEER_TIMEOUT_S)
    mappers["ray"] = lambda: float(driver.call("get", payload="large"))
    fresh = _side(f"ray {version} get, copied out, fresh", driver, "get_copied", puts=False)
    fresh.one_row = None  # that of `ray`
    return {
        "ray": _side(f"ray {version} get, copied out, pooled", driver, "get_pooled"),
        "ray-fresh": fresh,
    }


def _peer(stack: ExitStack, name: str, *arguments: str) -> Role:
    """Raises: RoleFailed: the peers' environment is not there."""
    if not PYTHON.exists():
        raise RoleFailed(f"{PYTHON} is not there; run benchmarks/peers/install.sh")
    return stack.enter_context(Role(name, _PEERS / f"{name}_peer.py", arguments, PYTHON))


def _side(label: str, role: Role, method: str, *, puts: bool = True) -> Side:
    def call(what: str, **args: Any) -> float:
        return float(role.call(what, timeout_s=PEER_TIMEOUT_S, **args))

    return Side(
        label,
        lambda payload: call(method, payload=payload),
        (lambda payload: call("put", payload=payload)) if puts else None,
        lambda count: call("one_row", count=count),
    )


def metrics(found: Comparison) -> dict[str, tuple[float, str]]:
    """Ratios are those of the less favourable payload, both sides with the same destinations."""

    def worst(rates: dict[str, dict[str, list[float]]], one: str, other: str) -> float:
        return min(ratio(rates[payload], one, other) for payload in MEASURED)

    measured: dict[str, tuple[float, str]] = {}
    for peer, ours in (("areal", "tcp-fresh"), ("transferqueue", "tcp-fresh"), ("ray", "map")):
        if peer in found.missing:
            continue
        prefix = "same_host" if peer == "ray" else "tcp"
        measured[f"{prefix}_vs_{peer}"] = (worst(found.rates, ours, peer), "ratio")
        for payload in MEASURED:
            measured[f"{prefix}_vs_{peer}_{payload}"] = (
                ratio(found.rates[payload], ours, peer),
                "ratio",
            )
        if peer != "areal":
            measured[f"put_vs_{peer}"] = (worst(found.put_rates, "map", peer), "ratio")
        measured[f"one_row_vs_{peer}"] = (ratio(found.rows_per_s, ours, peer), "ratio")
    if "ray" in found.mapped_s:
        measured["same_host_map_vs_ray"] = (ratio(found.mapped_s, "ray", "map"), "ratio")
    return measured


def print_tables(found: Comparison, rounds: int) -> None:
    for name, reason in found.missing.items():
        print(f"\n{name} was not measured: {reason}")
    report.print_table(
        "Peers: GB/s on the same payloads",
        {
            "rounds": rounds,
            "large": "9 shards of 32 MiB",
            "jagged": "64 groups of 8 rows, 4 fields",
        },
        ["side", "large get", "jagged get", "large put", "jagged put", "one-row requests/s"],
        [
            [
                label,
                *(_median(found.rates[payload].get(side)) for payload in MEASURED),
                *(_median(found.put_rates[payload].get(side)) for payload in MEASURED),
                _median(found.rows_per_s.get(side)),
            ]
            for side, label in found.labels.items()
        ],
    )
    report.print_table(
        "Same host: all shards of the large payload mapped, nothing copied",
        {"rounds": rounds},
        ["side", "ms"],
        [
            [{"map": "pull", "ray": "ray.get"}[side], 1e3 * statistics.median(seconds)]
            for side, seconds in found.mapped_s.items()
        ],
    )
    if found.wire_bytes is not None:
        print(f"\nAReaL sends {found.wire_bytes:.3f} bytes for each byte of the large payload.")


def _median(values: list[float] | None) -> float | str:
    return statistics.median(values) if values else "-"
