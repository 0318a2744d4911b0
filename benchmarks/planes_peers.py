"""Other systems and ours on the same payloads: AReaL's RTensor, TransferQueue, Ray.

Every round puts a payload anew and gets it once, as rows and weights are used; what is timed is the
get, and apart from it the put where that copies anything. The peers run in an environment of their
own (peers/install.sh). One that is not there, or fails to start, is reported as missing with its
reason; nothing takes its place.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from planes_data import DataSides
from planes_payloads import PAYLOADS
from planes_role import Role, RoleFailed
from planes_samples import Samples
from report import Metrics

MEASURED = ("large", "long", "jagged")
NUM_ROWS = 200
PEER_TIMEOUT_S = 300.0

GET = "Peers: GB/s of getting a payload once that was put anew"
PUT = "Peers: GB/s of putting it, where that copies"
ROWS = "Peers: single rows of 8 KiB, one after the other"
VIEWS = "Peers: all shards of the large payload as views on one host, nothing copied"

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
    """

    label: str
    cycle: Callable[[str], Mapping[str, float]]
    one_row: Callable[[int], float] | None = None
    map_large: Callable[[], float] | None = None


def measure(data: DataSides, samples: Samples, rounds: int) -> dict[str, str]:
    """All sides hand each payload over in turn, `rounds` times after a first one to warm up.

    Returns: how each side is shown.
    """
    with ExitStack() as stack:
        sides = _our_sides(data) | {"fresh": _fresh_memory(data)}
        for name in ("areal", "transferqueue", "ray"):
            try:
                sides[name] = _peer(stack, name)
            except RoleFailed as error:
                print(f"\n{name} was not measured: {error}")
        for payload in MEASURED:
            gigabytes = PAYLOADS[payload]().num_bytes / 1e9
            for number in range(rounds + 1):
                for name, side in sides.items():
                    seconds = side.cycle(payload)
                    if number:
                        samples.add(GET, payload, name, gigabytes / seconds["get_s"])
                    if number and "put_s" in seconds:
                        samples.add(PUT, payload, name, gigabytes / seconds["put_s"])
        for number in range(rounds + 1):
            for name, side in sides.items():
                rate = NUM_ROWS / side.one_row(NUM_ROWS) if side.one_row else None
                views_s = side.map_large() if side.map_large else None
                if number and rate is not None:
                    samples.add(ROWS, "requests/s", name, rate)
                if number and views_s is not None:
                    samples.add(VIEWS, "ms", name, 1e3 * views_s)
        return {name: side.label for name, side in sides.items()}


def _our_sides(data: DataSides) -> dict[str, Side]:
    def side(name: str, label: str) -> Side:
        owner, puller = data.owner_of(name), data.pullers[name]

        def cycle(payload: str, by_row: bool = False) -> dict[str, float]:
            sealed = owner.call("put_payload", payload=payload)
            get_s = puller.call("pull_new", wire=sealed["wire"], by_row=by_row)
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
            one_row=lambda count: puller.call("latencies", name="rows", count=count)["sum_s"],
            map_large=(lambda: cycle("large", by_row=True)["get_s"]) if name == "map" else None,
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


def _peer(stack: ExitStack, name: str) -> Side:
    """Raises: RoleFailed: the peers' environment is not there, or this one fails in it."""
    if not PYTHON.exists():
        raise RoleFailed(f"{PYTHON} is not there; run benchmarks/peers/install.sh")
    role = stack.enter_context(Role(name, _PEERS / f"{name}_peer.py", (), PYTHON))
    call = partial(role.call, timeout_s=PEER_TIMEOUT_S)
    for payload in PAYLOADS:
        call("check", payload=payload)
    return Side(
        call("label"),
        lambda payload: call("cycle", payload=payload),
        one_row=lambda count: call("one_row", count=count),
        map_large=(lambda: call("map", payload="large")) if name == "ray" else None,
    )


def metrics(samples: Samples) -> Metrics:
    """The ratio to a peer is that of the less favourable payload, with destinations alike.

    Except `tcp_pooled_...`: there only ours are used again, as they are by default.
    """
    measured: Metrics = {}
    for name, peer, ours, table in (
        ("tcp_vs_areal", "areal", "tcp-fresh", GET),
        ("tcp_vs_transferqueue", "transferqueue", "tcp-fresh", GET),
        ("tcp_pooled_vs_areal", "areal", "tcp", GET),
        ("tcp_pooled_vs_transferqueue", "transferqueue", "tcp", GET),
        ("same_host_vs_ray", "ray", "map", GET),
        ("put_vs_transferqueue", "transferqueue", "map", PUT),
        ("put_vs_ray", "ray", "map", PUT),
    ):
        if samples.has(table, MEASURED[0], peer):
            ratios = {payload: samples.ratio(table, payload, ours, peer) for payload in MEASURED}
            measured[name] = min(ratios.values())
            for payload, value in ratios.items():
                measured[f"{name}_{payload}"] = value
    for peer, ours in (("areal", "tcp"), ("transferqueue", "tcp"), ("ray", "map")):
        if samples.has(ROWS, "requests/s", peer):
            value = samples.ratio(ROWS, "requests/s", ours, peer)
            measured[f"one_row_vs_{peer}"] = value
    if samples.has(VIEWS, "ms", "ray"):
        measured["same_host_map_vs_ray"] = samples.ratio(VIEWS, "ms", "ray", "map")
    return measured
