from __future__ import annotations

import os
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import msgpack
import pytest
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from hypothesis import given
from hypothesis import strategies as st

from areal_sc.errors import MetadataError, ProtocolError, ShardGone, TransportError
from areal_sc.transport.bulk.arrival import Arrival
from areal_sc.transport.bulk.buffer_pool import BufferPool
from areal_sc.transport.bulk.wire import (
    MAX_REQUEST_BYTES,
    PROTOCOL_VERSION,
    TAG_BYTES,
    Sealer,
    failure_body,
    failure_of_body,
    parse_head,
)

SESSION = bytes(range(16))
KEY = bytes(range(32))
BODY = [0, ["life1.1", ["ids"], 0, 12, [0]]]


def view(frame: bytes) -> memoryview:
    return memoryview(frame)


@pytest.fixture(params=[False, True], ids=["authenticated", "encrypted"])
def sealer(request: pytest.FixtureRequest) -> Sealer:
    return Sealer(SESSION, KEY, request.param)


def test_headers_and_payload_come_through(sealer: Sealer) -> None:
    header = view(sealer.seal_header(7, BODY))
    assert parse_head(header, MAX_REQUEST_BYTES) == (SESSION, 7)
    assert sealer.open_header(header, 7) == BODY


def sealed(sealer: Sealer, sequence: int, payloads: Sequence[Any]) -> list[bytes]:
    """Payload frames as they are sent."""
    return [
        b"".join(sealer.seal_frame(sequence, number, [memoryview(payload)]))
        for number, payload in enumerate(payloads, 1)
    ]


def received(
    sealer: Sealer, sequence: int, frames: Sequence[bytes], sizes: Sequence[int]
) -> list[bytes]:
    """What lies at destinations of those sizes when the frames have come."""
    places = [bytearray(size) for size in sizes]
    arrival = Arrival(sealer, sequence, map(memoryview, places), BufferPool(1 << 20))
    for frame in frames:
        for part in arrival.places(len(frame)):
            part[:], frame = frame[: len(part)], frame[len(part) :]
        arrival.on_frame()
    arrival.finish()
    return [bytes(place) for place in places]


def test_payload_comes_to_its_places(sealer: Sealer) -> None:
    sent = sealed(sealer, 7, [b"a" * 1000, memoryview(b"bc"), b"x"])
    for sizes in ([1000, 2, 1], [500, 503], [0, 1003], [1001, 0, 1, 1], [1] * 1003, [1003]):
        places = received(sealer, 7, sent, sizes)
        assert b"".join(places) == b"a" * 1000 + b"bc" + b"x"
    with pytest.raises(ProtocolError, match="1 bytes of payload are missing"):
        received(sealer, 7, sent, [1004])
    with pytest.raises(ProtocolError, match="expected 0 more bytes of payload, got 1"):
        received(sealer, 7, sent, [1002])
    arrival = Arrival(sealer, 7, [memoryview(bytearray(1002))], BufferPool(0))
    with pytest.raises(ProtocolError, match="expected 1002 more bytes of payload, got 1003"):
        arrival.places(1003 + TAG_BYTES)


@given(
    st.booleans(),
    st.lists(st.integers(1, 40), min_size=1, max_size=6),
    st.lists(st.integers(0, 40), max_size=8),
)
def test_frames_and_destinations_need_not_agree(
    is_encrypted: bool, sizes: list[int], cuts: list[int]
) -> None:
    total = sum(sizes)
    payload = bytes(i % 251 for i in range(total))
    frames, start = [], 0
    for size in sizes:
        frames.append(payload[start : start + size])
        start += size
    bounds = sorted({0, total, *(cut for cut in cuts if cut < total)})
    its = Sealer(SESSION, KEY, is_encrypted)
    sent = sealed(its, 3, frames)
    places = received(its, 3, sent, [b - a for a, b in pairwise(bounds)])
    assert b"".join(places) == payload


def test_the_tag_is_gmac_as_the_library_computes_it() -> None:
    header = Sealer(SESSION, KEY, False).seal_header(5, BODY)
    packed = b"ASB" + bytes([PROTOCOL_VERSION]) + SESSION + (5).to_bytes(8, "little")
    packed += msgpack.packb(BODY)
    nonce = (5).to_bytes(8, "little") + bytes(4)
    assert header == packed + AESGCM(KEY).encrypt(nonce, b"", packed)


def test_without_encryption_payload_is_the_very_same_memory() -> None:
    payload = memoryview(bytearray(1000))
    sent, tag = Sealer(SESSION, KEY, False).seal_frame(1, 1, [payload])
    assert sent is payload
    nonce = (1).to_bytes(8, "little") + (1).to_bytes(4, "little")
    assert tag == AESGCM(KEY).encrypt(nonce, b"", payload)


def test_encrypted_bytes_show_nothing_of_the_payload() -> None:
    sealer = Sealer(SESSION, KEY, True)
    [sent] = sealed(sealer, 1, [b"secret" * 100])
    assert b"secret" not in sent
    assert b"life1.1" not in sealer.seal_header(1, BODY)


def test_every_flipped_bit_is_noticed(sealer: Sealer) -> None:
    header = sealer.seal_header(7, BODY)
    [sent] = sealed(sealer, 7, [os.urandom(50)])
    for bit in range(8 * len(header)):
        flipped = bytearray(header)
        flipped[bit // 8] ^= 1 << bit % 8
        frame = view(bytes(flipped))
        with pytest.raises(ProtocolError):
            sealer.open_header(frame, parse_head(frame, MAX_REQUEST_BYTES)[1])
    for bit in range(8 * len(sent)):
        flipped = bytearray(sent)
        flipped[bit // 8] ^= 1 << bit % 8
        with pytest.raises(ProtocolError, match="tag of payload frame 1"):
            received(sealer, 7, [bytes(flipped)], [50])


def test_frames_do_not_fit_elsewhere(sealer: Sealer) -> None:
    frames = sealed(sealer, 7, [b"aaaa", b"bbbb"])
    for sequence, moved in [(8, frames), (7, frames[::-1]), (7, frames[1:])]:
        with pytest.raises(ProtocolError, match="tag"):
            received(sealer, sequence, moved, [4 * len(moved)])
    with pytest.raises(ProtocolError, match="tag"):
        Sealer(SESSION, KEY[::-1], False).open_header(view(sealer.seal_header(7, BODY)), 7)


@pytest.mark.parametrize("frame", [b"abc", b"", b"x" * 15])
def test_payload_without_its_tag_is_refused(sealer: Sealer, frame: bytes) -> None:
    with pytest.raises(ProtocolError, match="expected 3 more bytes of payload, got -"):
        received(sealer, 1, [frame], [3])


@pytest.mark.parametrize(
    ("frame", "message"),
    [
        (b"", "44 to 262144 bytes, got 0"),
        (b"ASB", "44 to 262144 bytes, got 3"),
        (bytes(44), "44 to 262144 bytes, got 44"),
        (bytes(45), "magic"),
        (b"ASC" + bytes(45), "magic"),
        (b"ASB\x01" + bytes(45), "expected protocol version 3, got 1"),
        (b"ASB\xff" + bytes(45), "expected protocol version 3, got 255"),
        (b"ASB\x03" + bytes(1 << 20), "44 to 262144 bytes, got 1048580"),
    ],
)
def test_heads_that_no_member_sends_are_refused(frame: bytes, message: str) -> None:
    with pytest.raises(ProtocolError, match=message):
        parse_head(view(frame), MAX_REQUEST_BYTES)


@pytest.mark.parametrize(
    "body", [b"\xc1", b"\x92\x01", b"\xc7\x01\x05x", b"\x91" * 3000, b"\xa1\xff", b""]
)
def test_bodies_that_are_not_msgpack_are_refused(body: bytes) -> None:
    head = b"ASB\x02" + SESSION + (1).to_bytes(8, "little")
    frame = head + body + AESGCM(KEY).encrypt((1).to_bytes(12, "little"), b"", head + body)
    with pytest.raises(ProtocolError, match="not a msgpack message"):
        Sealer(SESSION, KEY, False).open_header(view(frame), 1)


@pytest.mark.parametrize("error", [ShardGone("a"), MetadataError("b"), ProtocolError("c")])
def test_failures_keep_their_type(error: TransportError | MetadataError) -> None:
    status, segment, name, message = failure_body(3, error)
    assert (status, segment) == (1, 3)
    assert type(failure_of_body(name, message)) is type(error)
    assert str(failure_of_body(name, message)) == str(error)
    assert type(failure_of_body("SystemExit", "x")) is TransportError
