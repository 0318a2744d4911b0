from __future__ import annotations

import math
import pickle
import random
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from types import NoneType

import msgpack
import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from integration.message_mutations import mutated
from msgspec import Raw, Struct

from areal_sc.errors import ProtocolError
from areal_sc.metadata import BatchMetadata, RowMetadata
from areal_sc.transport.rpc.codec import (
    MAX_MESSAGE_BYTES,
    PROTOCOL_VERSION,
    Cancel,
    Failure,
    Message,
    Reply,
    Request,
    decode,
    encode,
)
from areal_sc.transport.rpc.method import Method, pack

PROTOCOL = int.from_bytes(b"SC" + bytes([PROTOCOL_VERSION, 0]))
REQUEST, REPLY, FAILURE, CANCEL = range(4)
PREFIX = msgpack.packb(PROTOCOL + REPLY)

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
messages: st.SearchStrategy[Message] = st.one_of(
    st.builds(Request, names, names, names, st.builds(pack, values)),
    st.builds(Reply, names, st.builds(pack, values)),
    st.builds(Failure, names, names, names, names, names, st.integers(0, 255)),
    st.builds(Cancel, names, names),
)


@contextmanager
def at_most(num_bytes: int) -> Iterator[None]:
    """What happens inside may never hold more memory of its own than so much."""
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] <= num_bytes
    finally:
        tracemalloc.stop()


def decoded(frame: bytes) -> Message:
    return decode([memoryview(frame)])


@given(messages)
def test_messages_come_back_as_they_were(message: Message) -> None:
    arrived = decoded(encode(message))
    assert type(arrived) is type(message)
    assert arrived == message


@settings(max_examples=400)
@given(st.binary(max_size=200))
def test_random_frames_only_ever_raise_protocol_errors(frame: bytes) -> None:
    with pytest.raises(ProtocolError):
        decoded(frame)


@settings(max_examples=400)
@given(st.integers(2, 9), st.integers(0, 4), st.binary(max_size=200))
def test_random_parts_only_ever_raise_protocol_errors(
    num_parts: int, kind: int, parts: bytes
) -> None:
    try:
        message = decoded(bytes([0x90 | num_parts]) + msgpack.packb(PROTOCOL + kind) + parts)
    except ProtocolError:
        return
    assert isinstance(message, Request | Reply | Failure | Cancel)


def test_a_message_may_come_in_several_frames_but_not_in_any_number() -> None:
    message = Reply("id", pack("x" * 1000))
    packed = memoryview(encode(message))
    frames = [packed[start : start + 7] for start in range(0, len(packed), 7)]
    assert decode(frames) == message
    with pytest.raises(ProtocolError, match="not a message of this protocol"):
        decode([packed, packed])
    with pytest.raises(ProtocolError, match="a message has 1 to 512 frames, not 0"):
        decode([])
    with pytest.raises(ProtocolError, match="a message has 1 to 512 frames, not 513"):
        decode([packed[:1]] * 513)


def test_mutated_messages_are_refused_or_well_typed_and_cost_no_memory() -> None:
    rng = random.Random(20)
    refusals: set[str] = set()
    num_refused = 0
    with at_most(8 << 20):
        for _ in range(20_000):
            try:
                arrived = decoded(mutated(rng))
            except ProtocolError as error:
                num_refused += 1
                refusals.add(str(error))
            else:
                assert is_well_typed(arrived)
    assert 10_000 < num_refused < 20_000
    assert max(map(len, refusals)) < 400


def is_well_typed(message: Message) -> bool:
    match message:
        case Request(str(), str(), str(), Raw()):
            return True
        case Reply(str(), Raw()) | Cancel(str(), str()):
            return True
        case Failure(str(), str(), str(), str(), str(), int()):
            return True
    return False


def packed(kind: int, *parts: object) -> bytes:
    """A frame of this protocol with these parts."""
    return msgpack.packb([PROTOCOL + kind, *parts])  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    "frame",
    [
        pytest.param(b"\x91" * 2000 + b"\x00", id="nested 2000 deep"),
        pytest.param(b"\x93" + PREFIX + b"\xa2id" + b"\x91" * 5000, id="nested in a value"),
        pytest.param(b"\xdd\xff\xff\xff\xff" + PREFIX, id="claims 4 G elements"),
        pytest.param(b"\xdf\xff\xff\xff\xff" + PREFIX, id="claims 4 G pairs"),
        pytest.param(b"\x93" + PREFIX + b"\xa2id\xdd\xff\xff\xff\xff", id="a value claims 4 G"),
        pytest.param(b"\x93" + PREFIX + b"\xa2id\xc6\xff\xff\xff\xff", id="claims 4 GB"),
        pytest.param(b"\x93" + PREFIX + b"\xa2id\xdb\xff\xff\xff\xff", id="claims 4 G characters"),
        pytest.param(msgpack.packb([]), id="no parts"),
        pytest.param(packed(REPLY, "id"), id="too few parts"),
        pytest.param(packed(REPLY, "id", 1, 1), id="too many parts"),
        pytest.param(msgpack.packb([True, "id", 1]), id="protocol is a bool"),
        pytest.param(msgpack.packb([float(PROTOCOL + REPLY), "id", 1]), id="protocol is a float"),
        pytest.param(packed(9, "id", 1), id="unknown kind"),
        pytest.param(packed(REPLY, 7, 1), id="request id is a number"),
        pytest.param(packed(REQUEST, "id", b"life", "method", {}), id="incarnation is bytes"),
        pytest.param(packed(REQUEST, "id", "life", None, {}), id="no method"),
        pytest.param(packed(REQUEST, "i" * 257, "life", "method", {}), id="long request id"),
        pytest.param(packed(REQUEST, "id", "life", "m" * 257, {}), id="long method"),
        pytest.param(packed(FAILURE, "id", "a", "b", "c", "d", True), id="exit code is a bool"),
        pytest.param(packed(FAILURE, "id", "a", "b", "c", 4, 1), id="traceback is a number"),
        pytest.param(packed(CANCEL, "id", 3), id="cancels a number"),
        pytest.param(msgpack.packb({PROTOCOL: "id"}), id="a dict"),
        pytest.param(msgpack.packb(PROTOCOL), id="a number"),
        pytest.param(msgpack.packb([str(PROTOCOL + REPLY), "id", 0]), id="protocol is text"),
        pytest.param(packed(REPLY, "id", 0) + b"\x00", id="trailing bytes"),
        pytest.param(packed(REPLY, "id", "x" * 3000) + b"\x00", id="trailing after much"),
        pytest.param(b"\x93" + PREFIX + b"\xa1\xff\x00", id="request id is not UTF-8"),
        pytest.param(pickle.dumps([PROTOCOL + REPLY, "id", 0]), id="pickle"),
        pytest.param(b"", id="nothing"),
    ],
)
def test_frames_of_no_correct_peer_are_refused(frame: bytes) -> None:
    with pytest.raises(ProtocolError):
        decoded(frame)


def test_the_parts_of_those_frames_are_otherwise_right() -> None:
    """Or else they would be refused for another reason than the one named."""
    assert decoded(packed(REPLY, "id", 1)) == Reply("id", pack(1))
    request = Request("id", "life", "m", pack({"a": 2}))
    assert decoded(packed(REQUEST, "id", "life", "m", {"a": 2})) == request
    failure = Failure("id", "a", "b", "c", "d", 1)
    assert decoded(packed(FAILURE, "id", "a", "b", "c", "d", 1)) == failure
    assert decoded(packed(CANCEL, "id", "life")) == Cancel("id", "life")


def test_another_protocol_version_is_named() -> None:
    other = msgpack.packb([PROTOCOL + (1 << 8), "id", "life"])
    expected = f"expected protocol version {PROTOCOL_VERSION}, got {PROTOCOL_VERSION + 1}"
    with pytest.raises(ProtocolError, match=expected):
        decoded(other)


def test_a_message_over_the_limit_is_refused_on_both_sides() -> None:
    large = Reply("id", pack("x" * MAX_MESSAGE_BYTES))
    over = rf"a message has {MAX_MESSAGE_BYTES + 14} bytes, the limit is {MAX_MESSAGE_BYTES}"
    with pytest.raises(ProtocolError, match=over):
        encode(large)
    with pytest.raises(ProtocolError, match=over):
        decoded(msgspec.msgpack.encode(large))
    small = Reply("id", pack("x" * (MAX_MESSAGE_BYTES - 14)))
    assert decoded(encode(small)) == small


def test_the_metadata_of_a_large_batch_is_within_the_limits() -> None:
    spans = ((38, 900), (39, 4000), (40, 126_000))
    row = RowMetadata(131_072, 1, 123_456, 0.73125, 41, spans, 7, 0.5)
    batch = BatchMetadata("b", 41, (), (row,) * 50_000)
    message = Request("id", "life", "ppo_update", pack(batch))
    arrived = decoded(encode(message))
    assert isinstance(arrived, Request)
    assert Method("ppo_update", BatchMetadata, NoneType).read_args(arrived.args) == batch


class Nested(Struct, array_like=True):
    """Types with one of each container that can claim a length."""

    numbers: tuple[int, ...] = ()
    pairs: dict[str, int] = {}
    inner: list[Nested] = []


@pytest.mark.parametrize("num_bytes", [1 << 10, 64 << 10, 1 << 20, 4 << 20])
@pytest.mark.parametrize(
    "claim", [b"\xdd", b"\xdf", b"\x93\x90\x80\xdd"], ids=["lists", "dicts", "in"]
)
def test_lists_that_claim_what_they_do_not_hold_cost_no_memory(
    num_bytes: int, claim: bytes
) -> None:
    """A decoder may make room for what a list claims, at each level of nesting."""
    claims = b"".join(
        claim + num_bytes.to_bytes(4, "big") for _ in range(min(1000, num_bytes // 9))
    )
    body = claims + bytes(num_bytes - len(claims))
    declared = Method("m", Nested, Nested)
    with at_most(2 * num_bytes + (2 << 20)):
        with pytest.raises(ProtocolError):
            decoded(b"\x93" + PREFIX + b"\xa2id" + body)
        with pytest.raises(ProtocolError):
            declared.read_args(Raw(body))


def test_an_error_does_not_repeat_the_input() -> None:
    for frame in (b"\xc0" + b"A" * 100_000, b"\x92\xc0\xda\x90\x00" + b"\xff" * 0x9000):
        with pytest.raises(ProtocolError) as refused:
            decoded(frame)
        assert len(str(refused.value)) < 300
        assert refused.value.__cause__ is None


@pytest.mark.parametrize(
    "value",
    [object(), 2**64, "\ud800", math],
    ids=["object", "integer", "surrogate", "module"],
)
def test_what_msgpack_cannot_say_is_refused_by_the_sender(value: object) -> None:
    with pytest.raises(ProtocolError):
        pack(value)
