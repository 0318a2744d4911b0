from __future__ import annotations

import math
import pickle

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_sc.errors import ProtocolError
from areal_sc.transport.codec import (
    MAGIC,
    PROTOCOL_VERSION,
    Cancel,
    Failure,
    FrameLimits,
    Message,
    Reply,
    Request,
    decode,
    encode,
)

LIMITS = FrameLimits()
PREFIX = MAGIC + bytes([PROTOCOL_VERSION])

names = st.text(st.characters(codec="utf-8"), max_size=40)
values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False)
    | names
    | st.binary(max_size=40),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(names, inner, max_size=4),
    max_leaves=12,
)
payloads = st.lists(st.binary(max_size=64), max_size=4)
messages: st.SearchStrategy[Message] = st.one_of(
    st.builds(Request, names, names, names, st.dictionaries(names, values, max_size=4), payloads),
    st.builds(Reply, names, values, payloads),
    st.builds(Failure, names, names, names, names, names, st.integers(0, 255)),
    st.builds(Cancel, names, names),
)


def views(frames: object) -> list[memoryview]:
    return [memoryview(frame) for frame in frames]  # type: ignore[attr-defined]


@given(messages)
def test_messages_come_back_as_they_were(message: Message) -> None:
    arrived = decode(views(encode(message, LIMITS)), LIMITS)
    assert type(arrived) is type(message)
    for attribute in type(message).__slots__:
        expected, got = getattr(message, attribute), getattr(arrived, attribute)
        assert got == (views(expected) if attribute == "frames" else expected)


@settings(max_examples=400)
@given(st.lists(st.binary(max_size=200), max_size=4))
def test_random_frames_only_ever_raise_protocol_errors(frames: list[bytes]) -> None:
    with pytest.raises(ProtocolError):
        decode(views(frames), LIMITS)


@settings(max_examples=400)
@given(st.binary(max_size=200))
def test_random_bodies_only_ever_raise_protocol_errors(body: bytes) -> None:
    try:
        message = decode([memoryview(PREFIX + body)], LIMITS)
    except ProtocolError:
        return
    assert isinstance(message, Request | Reply | Failure | Cancel)


@settings(max_examples=400)
@given(messages, st.data())
def test_mutated_messages_only_ever_raise_protocol_errors(
    message: Message, data: st.DataObject
) -> None:
    header = bytearray(encode(message, LIMITS)[0])
    for _ in range(data.draw(st.integers(1, 4))):
        header[data.draw(st.integers(0, len(header) - 1))] = data.draw(st.integers(0, 255))
    end = data.draw(st.integers(0, len(header)))
    try:
        arrived = decode([memoryview(header)[:end]], LIMITS)
    except ProtocolError:
        return
    assert isinstance(arrived, Request | Reply | Failure | Cancel)


@pytest.mark.parametrize(
    "body",
    [
        pytest.param(b"\x91" * 2000 + b"\x00", id="nested 2000 deep"),
        pytest.param(b"\xdd\xff\xff\xff\xff", id="claims 4 G elements"),
        pytest.param(msgpack.packb([1, "id", msgpack.ExtType(5, b"x")]), id="extension"),
        pytest.param(msgpack.packb([1, "id", msgpack.Timestamp(1)]), id="timestamp"),
        pytest.param(msgpack.packb([True, "id", 1]), id="kind is a bool"),
        pytest.param(msgpack.packb([9, "id", 1]), id="unknown kind"),
        pytest.param(msgpack.packb([0, "id", "life", "method", [1]]), id="args are no dict"),
        pytest.param(msgpack.packb([0, "id", "life", "method", {1: 2}]), id="args without names"),
        pytest.param(msgpack.packb([0, "i" * 257, "life", "method", {}]), id="long request id"),
        pytest.param(msgpack.packb([0, "id", "life", "m" * 257, {}]), id="long method"),
        pytest.param(msgpack.packb([1, "id", 0]) + b"\x00", id="trailing bytes"),
        pytest.param(b"\x93\x01\xa1\xff\x00", id="request id is not UTF-8"),
        pytest.param(pickle.dumps([1, "id", 0]), id="pickle"),
    ],
)
def test_bodies_of_no_correct_peer_are_refused(body: bytes) -> None:
    with pytest.raises(ProtocolError):
        decode([memoryview(PREFIX + body)], LIMITS)


def test_another_protocol_version_is_named() -> None:
    body = encode(Cancel("id", "life"), LIMITS)[0][len(PREFIX) :]
    other = MAGIC + bytes([PROTOCOL_VERSION + 1]) + body
    with pytest.raises(ProtocolError, match=r"expected protocol version 1, got 2"):
        decode([memoryview(other)], LIMITS)


def test_sizes_are_bounded_on_both_sides() -> None:
    tight = FrameLimits(max_header_bytes=64, max_frame_bytes=100, max_frames=2)
    too_large = {
        "header": Reply("id", "x" * 65),
        "frame": Reply("id", None, [bytes(101)]),
        "in all": Reply("id", None, [b"", b"", b""]),
    }
    for name, message in too_large.items():
        with pytest.raises(ProtocolError, match=name):
            encode(message, tight)
        with pytest.raises(ProtocolError, match=name):
            decode(views(encode(message, LIMITS)), tight)
    decode(views(encode(Reply("id", "x" * 40, [bytes(100)] * 2), tight)), tight)


@pytest.mark.parametrize("value", [{1, 2}, object(), 2**64, "\ud800", math], ids=repr)
def test_what_msgpack_cannot_say_is_refused_by_the_sender(value: object) -> None:
    with pytest.raises(ProtocolError):
        encode(Reply("id", value), LIMITS)


def test_typed_buffers_are_counted_in_bytes() -> None:
    numbers = memoryview(bytes(80)).cast("d")
    frames = encode(Reply("id", None, [numbers]), LIMITS)
    assert len(frames[1]) == 80
