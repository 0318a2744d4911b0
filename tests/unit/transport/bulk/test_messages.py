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
from areal_sc.transport.bulk.messages import (
    FAILURE,
    FAILURES,
    HEAD,
    HELLO,
    READ,
    REQUESTS,
    ROWS,
    MessageCipher,
    PullFailure,
    ShardSlice,
    decoded,
)

KEY = bytes(range(32))
ASKED = ShardSlice("life1.1", {"ids": "int32"}, [0], (3,), 0, 12)
is_encrypted = pytest.mark.parametrize(
    "is_encrypted", [False, True], ids=["authenticated", "encrypted"]
)


def sealed(cipher: MessageCipher, kind: int, content: bytes) -> tuple[bytes, bytes]:
    """(tag, content as it is sent) of the next message."""
    head, *parts = cipher.seal(kind, [memoryview(content)])
    num_bytes, its_kind, tag = HEAD.unpack(head)
    assert (num_bytes, its_kind) == (len(content), kind)
    return tag, b"".join(parts)


def opened(
    cipher: MessageCipher, kind: int, tag: bytes, content: bytes, sizes: list[int] | None = None
) -> bytes:
    """The next message, received in places of those sizes."""
    places, start = [], 0
    for size in [len(content)] if sizes is None else sizes:
        places.append(memoryview(bytearray(content[start : start + size])))
        start += size
    cipher.open(kind, tag, places)
    return b"".join(places)


@given(
    st.booleans(),
    st.lists(st.integers(0, 40_000), min_size=1, max_size=6),
    st.lists(st.integers(0, 99_999), max_size=8),
)
def test_parts_and_places_need_not_agree(
    is_encrypted: bool, sizes: list[int], cuts: list[int]
) -> None:
    total = sum(sizes)
    whole = memoryview(bytes(i % 251 for i in range(total)))
    bounds = [sum(sizes[:number]) for number in range(len(sizes) + 1)]
    parts = [whole[a:b] for a, b in pairwise(bounds)]
    head, *sent = MessageCipher(KEY, is_encrypted).seal(ROWS, parts)
    places = [b - a for a, b in pairwise(sorted({0, total, *(c for c in cuts if c < total)}))]
    tag = HEAD.unpack(head)[2]
    receiver = MessageCipher(KEY, is_encrypted)
    assert opened(receiver, ROWS, tag, b"".join(sent), places) == whole


def test_the_tags_are_gmac_as_the_library_computes_it() -> None:
    content = memoryview(bytearray(50_000))
    cipher = MessageCipher(KEY, False)
    cipher.seal(HELLO, [b"the message before"])
    head, sent = cipher.seal(ROWS, [content])
    assert sent is content  # the very same memory
    nonce = (1).to_bytes(8, "little") + ROWS.to_bytes(4, "little")
    tag = AESGCM(KEY).encrypt(nonce, b"", content)
    assert head == len(content).to_bytes(4, "little") + ROWS.to_bytes(4, "little") + tag


@is_encrypted
def test_encrypted_bytes_show_nothing(is_encrypted: bool) -> None:
    cipher = MessageCipher(KEY, is_encrypted)
    for kind in (READ, ROWS, FAILURE):
        _, content = sealed(cipher, kind, b"secret" * 100)
        assert (b"secret" not in content) == is_encrypted
    _, content = sealed(cipher, HELLO, b"session")  # it tells which key is meant
    assert content == b"session"


@is_encrypted
def test_every_flipped_bit_is_noticed(is_encrypted: bool) -> None:
    tag, content = sealed(MessageCipher(KEY, is_encrypted), ROWS, os.urandom(50))
    for bit in range(8 * (len(tag) + len(content))):
        flipped = bytearray(tag + content)
        flipped[bit // 8] ^= 1 << bit % 8
        receiver = MessageCipher(KEY, is_encrypted)
        with pytest.raises(ProtocolError, match="tag"):
            opened(receiver, ROWS, bytes(flipped[:16]), bytes(flipped[16:]), [20, 30])


@is_encrypted
def test_nothing_fits_elsewhere(is_encrypted: bool) -> None:
    sender = MessageCipher(KEY, is_encrypted)
    first, second = (sealed(sender, READ, b"aaaa") for _ in range(2))

    def receiver(num_messages: int = 0, key: bytes = KEY) -> MessageCipher:
        cipher = MessageCipher(key, is_encrypted)
        cipher._num_messages = num_messages
        return cipher

    assert opened(receiver(), READ, *first) == opened(receiver(1), READ, *second) == b"aaaa"
    for cipher, kind, tag, content in [
        (receiver(0), READ, *second),  # the first was left out
        (receiver(1), READ, *first),  # replayed
        (receiver(0), FAILURE, *first),
        (receiver(0), READ, first[0], first[1] + b"x"),
        (receiver(0), READ, first[0], first[1][:-1]),
        (receiver(0, KEY[::-1]), READ, *first),
    ]:
        with pytest.raises(ProtocolError, match="the tag of a message is wrong"):
            opened(cipher, kind, tag, content)


def test_no_nonce_is_used_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    nonces: list[bytes] = []

    class Noted:
        def encrypt(self, nonce: bytes, data: bytes, associated: Any) -> bytes:
            nonces.append(nonce)
            return bytes(16)

    cipher = MessageCipher(KEY, False)
    monkeypatch.setattr(cipher, "_aead", Noted())
    for start in (0, 1 << 32, 1 << 62):
        cipher._num_messages = start
        for _ in range(300):
            for kind in (HELLO, READ, ROWS, FAILURE):
                cipher.seal(kind, [b"content"])
    assert len(set(nonces)) == len(nonces) == 3 * 300 * 4


def test_requests_and_failures_cross_the_wire() -> None:
    assert decoded(REQUESTS, msgspec.msgpack.encode([ASKED] * 2)) == [ASKED] * 2
    failure = PullFailure(2, "ShardGone", "x")
    assert decoded(FAILURES, msgspec.msgpack.encode(failure)) == failure


@pytest.mark.parametrize(
    "body",
    [
        b"\xc1",
        b"\x92\x01",
        b"\xc7\x01\x05x",
        b"\x91" * 3000,
        b"\xa1\xff",
        b"",
        b"\xdd\xff\xff\xff\xff",  # a list of 2^32 slices that are not there
        msgspec.msgpack.encode([["a", {"x": "int8"}, [0], [1], -1, 0]]),
        msgspec.msgpack.encode([["a", {"x": "int8"}, [-1], [1], 0, 1]]),
        msgspec.msgpack.encode([["a", {"x": "int8"}, [0], [1], 0, 1 << 63]]),
        msgspec.msgpack.encode([["a", {"x": 1}, [0], [1], 0, 1]]),
        msgspec.msgpack.encode(["life1.1"]),
    ],
)
def test_bodies_that_no_member_sends_are_refused(body: bytes) -> None:
    for decoder in (REQUESTS, FAILURES):
        with pytest.raises(ProtocolError, match="not a message of the data plane"):
            decoded(decoder, body)


@pytest.mark.parametrize("error", [ShardGone("a"), MetadataError("b"), ProtocolError("c")])
def test_failures_keep_their_type(error: TransportError | MetadataError) -> None:
    failure = PullFailure.of(error, 3)
    assert failure.slice_number == 3
    assert type(failure.error) is type(error)
    assert str(failure.error) == str(error)
    assert type(PullFailure(0, "SystemExit", "x").error) is TransportError
