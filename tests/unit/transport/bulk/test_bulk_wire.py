from __future__ import annotations

import os
from itertools import pairwise
from typing import Any

import msgspec
import pytest
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from hypothesis import given
from hypothesis import strategies as st

from areal_sc.errors import MetadataError, ProtocolError, ShardGone, TransportError
from areal_sc.transport.bulk.wire import (
    MAX_REQUEST_BYTES,
    PROTOCOL_VERSION,
    AskedPart,
    Describe,
    Failure,
    Read,
    Sealer,
    decoded_reply,
    decoded_request,
    parse_head,
)

SESSION = bytes(range(16))
KEY = bytes(range(32))
BODY = Read([AskedPart("life1.1", ["ids"], 0, 12, rows=[0])])


@pytest.fixture(params=[False, True], ids=["authenticated", "encrypted"])
def sealer(request: pytest.FixtureRequest) -> Sealer:
    return Sealer(SESSION, KEY, request.param)


def sealed(sealer: Sealer, sequence: int, payload: bytes) -> tuple[bytes, bytes]:
    """Header and payload as they are sent."""
    header, parts = sealer.seal(sequence, BODY, [memoryview(payload)])
    return header, b"".join(parts)


def received(
    sealer: Sealer, sequence: int, header: bytes, payload: bytes, sizes: list[int]
) -> bytes:
    """What lies at destinations of those sizes, together the payload's, when it has come."""
    places = [memoryview(bytearray(size)) for size in sizes]
    if sealer.is_encrypted:
        sealer.decrypt_payload(header, sequence, payload, places)
        return b"".join(places)
    start = 0
    for place in places:
        place[:] = payload[start : start + len(place)]
        start += len(place)
    sealer.check_payload(header, sequence, places)
    return b"".join(places)


def test_headers_come_through(sealer: Sealer) -> None:
    header, payload = sealer.seal(7, BODY)
    assert payload == ()
    assert parse_head(header, MAX_REQUEST_BYTES) == (SESSION, 7)
    assert decoded_request(sealer.open(header, 7)) == BODY


@given(
    st.booleans(),
    st.lists(st.integers(0, 40_000), min_size=1, max_size=6).filter(any),
    st.lists(st.integers(0, 99_999), max_size=8),
)
def test_parts_and_destinations_need_not_agree(
    is_encrypted: bool, sizes: list[int], cuts: list[int]
) -> None:
    total = sum(sizes)
    whole = memoryview(bytes(i % 251 for i in range(total)))
    bounds = [sum(sizes[:number]) for number in range(len(sizes) + 1)]
    parts = [whole[a:b] for a, b in pairwise(bounds)]
    its = Sealer(SESSION, KEY, is_encrypted)
    header, sent = its.seal(3, BODY, parts)
    places = [b - a for a, b in pairwise(sorted({0, total, *(c for c in cuts if c < total)}))]
    assert received(its, 3, header, b"".join(sent), places) == whole


def test_the_tags_are_gmac_as_the_library_computes_it() -> None:
    payload = memoryview(bytearray(50_000))
    header, [sent] = Sealer(SESSION, KEY, False).seal(5, BODY, [payload])
    assert sent is payload  # the very same memory
    number = (5).to_bytes(8, "little")
    of_payload = AESGCM(KEY).encrypt(number + (1).to_bytes(4, "little"), b"", payload)
    head = b"ASB" + bytes([PROTOCOL_VERSION]) + SESSION + number + of_payload
    packed = head + msgspec.msgpack.encode(BODY)
    assert header == packed + AESGCM(KEY).encrypt(number + bytes(4), b"", packed)


def test_encrypted_bytes_show_nothing(sealer: Sealer) -> None:
    header, payload = sealed(sealer, 1, b"secret" * 100)
    assert (b"secret" not in payload) == (b"life1.1" not in header) == sealer.is_encrypted


def test_every_flipped_bit_is_noticed(sealer: Sealer) -> None:
    header, payload = sealed(sealer, 7, os.urandom(50))
    for bit in range(8 * len(header)):
        flipped = bytearray(header)
        flipped[bit // 8] ^= 1 << bit % 8
        with pytest.raises(ProtocolError):
            sealer.open(flipped, parse_head(flipped, MAX_REQUEST_BYTES)[1])
    for bit in range(8 * len(payload)):
        flipped = bytearray(payload)
        flipped[bit // 8] ^= 1 << bit % 8
        with pytest.raises(ProtocolError, match="payload's tag is wrong"):
            received(sealer, 7, header, bytes(flipped), [20, 30])


def test_nothing_fits_elsewhere(sealer: Sealer) -> None:
    header, payload = sealed(sealer, 7, b"aaaa")
    with pytest.raises(ProtocolError, match="header's tag"):
        sealer.open(header, 8)
    with pytest.raises(ProtocolError, match="payload's tag"):
        received(sealer, 8, header, payload, [4])
    with pytest.raises(ProtocolError, match="payload's tag"):
        received(sealer, 7, sealed(sealer, 8, b"aaaa")[0], payload, [4])
    with pytest.raises(ProtocolError, match="header's tag"):
        Sealer(SESSION, KEY[::-1], sealer.is_encrypted).open(header, 7)


def test_no_nonce_is_used_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither by headers nor by payloads of growing sequence numbers."""
    nonces: list[bytes] = []

    class Noted:
        def encrypt(self, nonce: bytes, data: bytes, associated: Any) -> bytes:
            nonces.append(nonce)
            return data + bytes(16)

    sealer = Sealer(SESSION, KEY, False)
    monkeypatch.setattr(sealer, "_aead", Noted())
    for sequence in [*range(300), 1 << 32, (1 << 32) + 1, 1 << 62]:
        sealer.seal(sequence, BODY, [memoryview(bytes(10))])
    assert len(set(nonces)) == len(nonces) == 2 * 303


@pytest.mark.parametrize(
    ("frame", "message"),
    [
        (b"", "60 to 262144 bytes, got 0"),
        (b"ASB", "60 to 262144 bytes, got 3"),
        (bytes(60), "60 to 262144 bytes, got 60"),
        (bytes(61), "magic"),
        (b"ASC" + bytes(60), "magic"),
        (b"ASB\x01" + bytes(60), "expected protocol version 4, got 1"),
        (b"ASB\xff" + bytes(60), "expected protocol version 4, got 255"),
        (b"ASB\x04" + bytes(1 << 20), "60 to 262144 bytes, got 1048580"),
    ],
)
def test_heads_that_no_member_sends_are_refused(frame: bytes, message: str) -> None:
    with pytest.raises(ProtocolError, match=message):
        parse_head(frame, MAX_REQUEST_BYTES)


@pytest.mark.parametrize(
    "body",
    [
        b"\xc1",
        b"\x92\x01",
        b"\xc7\x01\x05x",
        b"\x91" * 3000,
        b"\xa1\xff",
        b"",
        b"\x92\x00\xdd\xff\xff\xff\xff",  # a list of 2^32 parts that are not there
        msgspec.msgpack.encode([0, [["a", ["x"], -1, 0]]]),
        msgspec.msgpack.encode([0, [["a", ["x"], 0, 1 << 63]]]),
        msgspec.msgpack.encode([9, "life1.1"]),
        msgspec.msgpack.encode(["life1.1"]),
    ],
)
def test_bodies_that_no_member_sends_are_refused(body: bytes) -> None:
    for decoded in (decoded_request, decoded_reply):
        with pytest.raises(ProtocolError, match="not a message of the data plane"):
            decoded(body)


def test_names_that_no_message_can_hold_are_refused() -> None:
    with pytest.raises(ProtocolError, match="cannot be sent"):
        Sealer(SESSION, KEY, False).seal(1, Describe("a\ud800"))


@pytest.mark.parametrize("error", [ShardGone("a"), MetadataError("b"), ProtocolError("c")])
def test_failures_keep_their_type(error: TransportError | MetadataError) -> None:
    failure = Failure.of(error, part=3)
    assert failure.part == 3
    assert type(failure.error) is type(error)
    assert str(failure.error) == str(error)
    assert type(Failure(0, "SystemExit", "x").error) is TransportError
