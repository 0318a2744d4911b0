"""Valid RPC messages, and what may become of them on the way."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Final

from areal_sc.transport.rpc.codec import Cancel, Failure, Reply, Request, encode
from areal_sc.transport.rpc.method import pack

_PREFIX_BYTES: Final = 6
"""The list and the protocol, with which a message begins."""

SAMPLES: Final = [
    encode(message)
    for message in (
        Request("0123456789abcdef-1f", "a" * 32, "ping", pack({})),
        Request("id", "life1", "sweep", pack({"live": list(range(300)), "acknowledged": 2**40})),
        Request(
            "id", "life1", "run", pack({"rows": [[i, f"g{i}", 0.5, [[3, 7]]] for i in range(40)]})
        ),
        Request(
            "é" * 20, "life1", "π", pack({"nested": {"a": {"b": [None, True, -1.5, b"\xff" * 70]}}})
        ),
        Reply("0123456789abcdef-1f", pack(None)),
        Reply("id", pack({"text": "x" * 2000, "numbers": [2**63, -(2**31), 1e300]})),
        Failure("id", "KeyError", "", "absent", "Traceback ...\n" * 30, 4),
        Cancel("id", "life1"),
    )
]


def flip_bits(rng: random.Random, frame: bytearray) -> None:
    for _ in range(rng.randint(1, 4)):
        frame[rng.randrange(len(frame))] ^= 1 << rng.randrange(8)


def cut(rng: random.Random, frame: bytearray) -> None:
    del frame[rng.randrange(len(frame)) :]


def splice(rng: random.Random, frame: bytearray) -> None:
    other = rng.choice(SAMPLES)
    start, stop = sorted(rng.randrange(len(other) + 1) for _ in range(2))
    at = rng.randrange(len(frame))
    frame[at : at + rng.randrange(40)] = other[start:stop]


def change_type(rng: random.Random, frame: bytearray) -> None:
    """Another msgpack type byte, where one may stand."""
    frame[rng.randrange(_PREFIX_BYTES, len(frame))] = rng.choice(
        b"\x00\x7f\x80\x8f\x90\x9f\xa0\xbf\xc0\xc1\xc3\xc4\xc6\xc7\xc9\xca\xcb\xcf\xd3\xd4\xd9"
        b"\xdb\xdc\xdd\xde\xdf\xe0\xff"
    )


def claim_more(rng: random.Random, frame: bytearray) -> None:
    """A length of up to four bytes, written over what is there."""
    at = rng.randrange(_PREFIX_BYTES, len(frame))
    frame[at : at + 5] = bytes([rng.choice(b"\xc6\xdb\xdd\xdf")]) + rng.randbytes(4)


def repeat(rng: random.Random, frame: bytearray) -> None:
    start, stop = sorted(rng.randrange(_PREFIX_BYTES, len(frame) + 1) for _ in range(2))
    frame[start:start] = frame[start:stop] * rng.randint(1, 20)


MUTATIONS: Final[list[Callable[[random.Random, bytearray], None]]] = [
    flip_bits,
    cut,
    splice,
    change_type,
    claim_more,
    repeat,
]


def mutated(rng: random.Random) -> bytes:
    """A valid message after one or two mutations."""
    frame = bytearray(rng.choice(SAMPLES))
    for _ in range(rng.randint(1, 2)):
        if len(frame) > _PREFIX_BYTES:
            rng.choice(MUTATIONS)(rng, frame)
    return bytes(frame)
