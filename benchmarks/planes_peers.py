"""Other systems and ours on the same payloads: AReaL's RTensor, TransferQueue, Ray.

Every round puts a payload anew and gets it once, as rows and weights are used; what is timed is the
get, and apart from it the put where that copies anything. The peers run in an environment of their
own (peers/install.sh). One that is not there, or fails to start, is reported as missing with its
reason; nothing takes its place.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import report
from planes_data import DataSides
from planes_payloads import PAYLOADS
from planes_role import Role, RoleFailed
from planes_statistics import ratio

MEASURED = ("large", "long", "jagged")
NUM_ROWS = 200
PEER_TIMEOUT_S = 300.0

PYTHON = Path(__file__).parents[1] / ".venv-peers" / "bin" / "python"
_PEERS = Path(__file__).parent / "peers"


@dataclass
class Side:
    """One way to hand a payload over.

    Attributes:
        label: how it is shown.
        cycle: puts the payload and gets it once: {"get_s"}, and "put_s" where that copies.
        one_row: seconds for a number of single-row requests, one after the other.
        map_large: seconds to get every shard of the large payload as a view, where that can be.
        wire_bytes: sent for each byte of the large payload, where the peer's server can tell.
    """

    label: str
    cycle: Callable[[str], Mapping[str, float]]
    one_row: Callable[[int], float] | None = None
    map_large: Callable[[], float] | None = None
    wire_bytes: Callable[[], float] | None = None


@dataclass
class Comparison:
    """What the rounds gave.

    Attributes:
        labels: side -> how it is shown.
        get_rates, put_rates: payload -> side -> GB/s of every round.
        rows_per_s: side -> of every round.
        map_s: side -> of every round.
        wire_bytes: side -> bytes on the wire for each byte of payload.
        missing: peer -> why it was not measured.
    """

    labels: dict[str, str] = field(default_factory=dict)
    get_rates: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    put_rates: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    rows_per_s: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    map_s: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    wire_bytes: dict[str, float] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)


def compare(data: DataSides, rounds: int) -> Comparison:
    """All sides hand each payload over in turn, `rounds` times after a first one to warm up."""
    found = Comparison()
    with ExitStack() as stack:
        sides = _our_sides(data) | {"fresh": _fresh_memory(data)}
        for name, start in (("areal", _areal), ("transferqueue", _transferqueue), ("ray", _ray)):
            try:
                sides |= start(stack)
            except RoleFailed as error:
                found.missing[name] = str(error)
        found.labels = {name: side.label for name, side in sides.items()}
        for payload in MEASURED:
            _measure_payload(found, sides, payload, rounds)
        _measure_rest(found, sides, rounds)
    return found


def _measure_payload(
    found: Comparison, sides: Mapping[str, Side], payload: str, rounds: int
) -> None:
    gigabytes = PAYLOADS[payload]().num_bytes / 1e9
    get_rates = found.get_rates[payload] = defaultdict(list)
    put_rates = found.put_rates[payload] = defaultdict(list)
    for number in range(rounds + 1):
        for name, side in sides.items():
            seconds = side.cycle(payload)
            if number:
                get_rates[name].append(gigabytes / seconds["get_s"])
                if "put_s" in seconds:
                    put_rates[name].append(gigabytes / seconds["put_s"])


def _measure_rest(found: Comparison, sides: Mapping[str, Side], rounds: int) -> None:
    for number in range(rounds + 1):
        for name, side in sides.items():
            if side.one_row is not None:
                rate = NUM_ROWS / side.one_row(NUM_ROWS)
                if number:
                    found.rows_per_s[name].append(rate)
            if side.map_large is not None:
                seconds = side.map_large()
                if number:
                    found.map_s[name].append(seconds)
    for name, side in sides.items():
        if side.wire_bytes is not None:
            found.wire_bytes[name] = side.wire_bytes()


def _our_sides(data: DataSides) -> dict[str, Side]:
    def side(name: str, label: str) -> Side:
        owner, puller = data.owner_of(name), data.pullers[name]

        def cycle(payload: str, method: str = "pull_new") -> dict[str, float]:
            sealed = owner.call("put_payload", payload=payload)
            get_s = puller.call(method, wire=sealed["wire"])
            owner.call("drop", wires=[sealed["wire"]])
            return {"put_s": sealed["put_s"], "get_s": get_s}

        for payload in PAYLOADS:
            sealed = owner.call("put_payload", payload=payload)
            puller.call("know", name=payload, wire=sealed["wire"], payload=payload)
            if payload != "rows":
                owner.call("drop", wires=[sealed["wire"]])
        return Side(
            label,
            cycle,
            one_row=lambda count: puller.call("one_row", name="rows", count=count),
            map_large=(lambda: cycle("large", "map_new")["get_s"]) if name == "map" else None,
        )

    return {
        "tcp-fresh": side("tcp-fresh", "pull over TCP, fresh"),
        "tcp": side("tcp", "pull over TCP, pooled"),
        "map": side("map", "pull on the same host, joined in a pooled place"),
    }


def _fresh_memory(data: DataSides) -> Side:
    """No transfer at all: what bounds every side that is given a fresh place."""

    def cycle(payload: str) -> dict[str, float]:
        num_bytes = PAYLOADS[payload]().num_bytes
        return {"get_s": data.limits["memcpy"].call("touch_fresh", num_bytes=num_bytes)}

    return Side("nothing: fresh memory, written once", cycle)


def _areal(stack: ExitStack) -> dict[str, Side]:
    server, client = _start(stack, "areal", "server"), _start(stack, "areal", "client")
    version = _call(client, "version")
    for payload in PAYLOADS:
        stored = _call(server, "put", payload=payload)
        _call(client, "check", payload=payload, stored=stored)
    rows = stored  # the last payload: it stays

    def cycle(payload: str) -> dict[str, float]:
        stored = _call(server, "put", payload=payload)  # by reference: nothing to time
        get_s = _call(client, "get", stored=stored)
        _call(server, "drop", stored=stored)
        return {"get_s": get_s}

    def wire_bytes() -> float:
        before = _call(server, "bytes_sent")
        cycle("large")
        return float(_call(server, "bytes_sent") - before) / PAYLOADS["large"]().num_bytes

    return {
        "areal": Side(
            f"AReaL {version} RTensor fetch",
            cycle,
            one_row=lambda count: _call(client, "one_row", stored=rows, count=count),
            wire_bytes=wire_bytes,
        )
    }


def _transferqueue(stack: ExitStack) -> dict[str, Side]:
    client = _start(stack, "transferqueue")
    version = _call(client, "version")
    for payload in PAYLOADS:
        _call(client, "check", payload=payload)
    return {
        "transferqueue": Side(
            f"TransferQueue {version} get_data",
            lambda payload: _call(client, "cycle", payload=payload),
            one_row=lambda count: _call(client, "one_row", count=count),
        )
    }


def _ray(stack: ExitStack) -> dict[str, Side]:
    driver = _start(stack, "ray")
    version = _call(driver, "version")
    for payload in PAYLOADS:
        _call(driver, "check", payload=payload)

    def cycle(payload: str, copies: str) -> dict[str, float]:
        return dict(_call(driver, "cycle", payload=payload, copies=copies))

    return {
        "ray": Side(
            f"ray {version} get, copied into a pooled place",
            lambda payload: cycle(payload, "pooled"),
            one_row=lambda count: _call(driver, "one_row", count=count),
            map_large=lambda: cycle("large", "none")["get_s"],
        ),
        "ray-fresh": Side(
            f"ray {version} get, copied into a fresh place", lambda payload: cycle(payload, "fresh")
        ),
    }


def _start(stack: ExitStack, name: str, *arguments: str) -> Role:
    """Raises: RoleFailed: the peers' environment is not there."""
    if not PYTHON.exists():
        raise RoleFailed(f"{PYTHON} is not there; run benchmarks/peers/install.sh")
    return stack.enter_context(Role(name, _PEERS / f"{name}_peer.py", arguments, PYTHON))


def _call(role: Role, method: str, **args: Any) -> Any:
    return role.call(method, timeout_s=PEER_TIMEOUT_S, **args)


def metrics(found: Comparison) -> dict[str, tuple[float, str]]:
    """The ratio to a peer is that of the less favourable payload, with destinations alike.

    Except `tcp_pooled_...`: there only ours are used again, as they are by default.
    """
    measured: dict[str, tuple[float, str]] = {}
    for name, peer, ours, what, rates in (
        ("tcp_vs_areal", "areal", "tcp-fresh", MEASURED, found.get_rates),
        ("tcp_vs_transferqueue", "transferqueue", "tcp-fresh", MEASURED, found.get_rates),
        ("tcp_pooled_vs_areal", "areal", "tcp", MEASURED, found.get_rates),
        ("tcp_pooled_vs_transferqueue", "transferqueue", "tcp", MEASURED, found.get_rates),
        ("same_host_vs_ray", "ray", "map", MEASURED, found.get_rates),
        ("put_vs_transferqueue", "transferqueue", "map", MEASURED, found.put_rates),
        ("put_vs_ray", "ray", "map", MEASURED, found.put_rates),
    ):
        if peer not in found.missing:
            of_payload = {payload: ratio(rates[payload], ours, peer) for payload in what}
            measured[name] = (min(of_payload.values()), "ratio")
            for payload, value in of_payload.items():
                measured[f"{name}_{payload}"] = (value, "ratio")
    for peer, ours in (("areal", "tcp"), ("transferqueue", "tcp"), ("ray", "map")):
        if peer not in found.missing:
            measured[f"one_row_vs_{peer}"] = (ratio(found.rows_per_s, ours, peer), "ratio")
    if "ray" in found.map_s:
        measured["same_host_map_vs_ray"] = (ratio(found.map_s, "ray", "map"), "ratio")
    return measured


def print_tables(found: Comparison, rounds: int) -> None:
    for name, reason in found.missing.items():
        print(f"\n{name} was not measured: {reason}")
    columns = [*((found.get_rates[p], f"{p} get") for p in MEASURED)]
    columns += [*((found.put_rates[p], f"{p} put") for p in MEASURED)]
    columns.append((found.rows_per_s, "one-row requests/s"))
    report.print_table(
        "Peers: GB/s on the same payloads, each put anew and got once",
        {
            "rounds": rounds,
            **{name: PAYLOADS[name].__doc__.rstrip(".") for name in MEASURED},
        },
        ["side", *(title for _, title in columns)],
        [
            [label, *(_median(values.get(side)) for values, _ in columns)]
            for side, label in found.labels.items()
        ],
    )
    report.print_table(
        "Same host: all shards of the large payload as views, nothing copied",
        {"rounds": rounds},
        ["side", "ms"],
        [
            [{"map": "pull of each", "ray": "ray.get of all"}[side], 1e3 * _median(seconds)]
            for side, seconds in found.map_s.items()
        ],
    )
    for side, wire_bytes in found.wire_bytes.items():
        print(f"\n{found.labels[side]}: {wire_bytes:.3f} bytes sent for each byte of payload.")


def _median(values: list[float] | None) -> Any:
    return statistics.median(values) if values else "-"
