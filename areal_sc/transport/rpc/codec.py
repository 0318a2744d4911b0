"""The wire form of RPC: every message is one msgpack list; a long one takes several ZMQ frames.

    [protocol, kind, request id, ...]           protocol: "ASC" and the version, as one number

Never pickle: decoding a peer's bytes gives plain lists, dicts, strings and numbers, nothing else.
Tuples arrive as lists. What a message may cost is bounded before anything of it is built.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import msgpack
from msgpack import packb, unpackb

from areal_sc.errors import ProtocolError
from areal_sc.transport.socket import FRAME_BYTES, Buffer, Frame

PROTOCOL_VERSION: Final = 3
_MAGIC: Final = int.from_bytes(b"ASC")
_PROTOCOL: Final = _MAGIC << 8 | PROTOCOL_VERSION


class _Kind:
    """What a message is; its first part."""

    REQUEST: Final = 0
    REPLY: Final = 1
    FAILURE: Final = 2
    CANCEL: Final = 3


_REQUEST_PREFIX: Final = b"\x96" + packb(_PROTOCOL) + bytes([_Kind.REQUEST])
"""A list of six parts begins; the request id, the incarnation and the call follow."""

_MAX_UNCHECKED_BYTES: Final = 1 << 10
"""Up to here false lengths cost little: the decoder makes room for what a list claims to hold, at
each level of nesting (at most 1,024), but no claim may be larger than the message."""

_MAX_ERROR_CHARS: Final = 200

ANY_INCARNATION: Final = ""
"""Stands for every life of a server: for calls that change nothing, so that any may answer."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class MessageLimits:
    """What one message may hold; a larger one is refused on either side.

    Attributes:
        max_bytes: of all its frames.
        max_elements: of all its lists and dicts together. An element takes one byte on the wire
            and up to 64 in memory, so this is what bounds the memory that decoding takes.
        max_name_chars: of request ids, incarnations and method names.
    """

    max_bytes: int = 16 << 20
    max_elements: int = 1 << 20
    max_name_chars: int = 256

    @property
    def max_frames(self) -> int:
        """In which a message of `max_bytes` is sent."""
        return -(-self.max_bytes // FRAME_BYTES)


@dataclass(slots=True)
class Request:
    """A call of `method`, meant for one incarnation of the server or for `ANY_INCARNATION`."""

    request_id: str
    incarnation: str
    method: str
    args: dict[str, Any]


@dataclass(slots=True)
class Reply:
    """What the method returned."""

    request_id: str
    value: Any


@dataclass(slots=True)
class Failure:
    """What the method raised.

    Attributes:
        error_type: the exception's class name.
        known_as: nearest class of `areal_sc.errors` that it is an instance of, or "".
        message: its text.
        traceback: as formatted in the server.
        exit_code: that of an ArealError, else 1.
    """

    request_id: str
    error_type: str
    known_as: str
    message: str
    traceback: str
    exit_code: int = 1


@dataclass(slots=True)
class Cancel:
    """Nobody waits any more for the reply to the request."""

    request_id: str
    incarnation: str


Message = Request | Reply | Failure | Cancel


def encode(message: Message, limits: MessageLimits) -> bytes:
    """The bytes of a message.

    Raises: ProtocolError: something is not msgpack-able, or over a limit.
    """
    match message:
        case Request(request_id, incarnation, method, args):
            return encode_request(request_id, incarnation, method, args, limits)
        case Reply(request_id, value):
            return encode_reply(request_id, value, limits)
        case Failure(request_id, error_type, known_as, text, trace, exit_code):
            parts = [request_id, error_type, known_as, text, trace, exit_code]
            return _framed([_PROTOCOL, _Kind.FAILURE, *parts], limits)
        case Cancel(request_id, incarnation):
            return _framed([_PROTOCOL, _Kind.CANCEL, request_id, incarnation], limits)


def encode_request(
    request_id: str, incarnation: str, method: str, args: dict[str, Any], limits: MessageLimits
) -> bytes:
    """The bytes of a `Request`, without making one; raises as `encode`."""
    body = [_PROTOCOL, _Kind.REQUEST, request_id, incarnation, method, args]
    return _framed(body, limits)


def encode_reply(request_id: str, value: Any, limits: MessageLimits) -> bytes:
    """The bytes of a `Reply`, without making one; raises as `encode`."""
    return _framed([_PROTOCOL, _Kind.REPLY, request_id, value], limits)


def pack_call(method: str, args: dict[str, Any]) -> bytes:
    """What all requests that call `method` with these arguments share, for `request_frame`.

    Raises: ProtocolError: the arguments are not msgpack-able.
    """
    return _pack(method) + _pack(args)


def request_frame(request_id: str, incarnation: str, call: bytes, limits: MessageLimits) -> bytes:
    """The bytes of a `Request`, as `encode_request` gives it, around what `pack_call` gave.

    Raises: ProtocolError: it is over a limit.
    """
    frame: bytes = _REQUEST_PREFIX + _pack(request_id) + _pack(incarnation) + call
    if len(frame) > limits.max_elements or len(frame) > limits.max_bytes:
        _check_large(frame, limits)
    return frame


def decode(frames: Sequence[Frame], limits: MessageLimits) -> Message:
    """Inverse of `encode`.

    Raises: ProtocolError: no correct peer of this protocol version sends these frames.
    """
    if not 1 <= len(frames) <= limits.max_frames:
        raise ProtocolError(f"a message has 1 to {limits.max_frames} frames, not {len(frames)}")
    num_bytes = sum(map(len, frames))
    if num_bytes > limits.max_bytes:
        raise _too_large(num_bytes, limits)
    body = unpack(frames[0] if len(frames) == 1 else b"".join(frames), limits.max_elements)
    if type(body) is not list or len(body) < 4 or body[0] != _PROTOCOL:
        raise _not_of_this_protocol(body)
    request_id = body[2]
    if type(request_id) is str and len(request_id) <= limits.max_name_chars:
        message = _message(body, request_id, limits)
        if message is not None:
            return message
    raise ProtocolError("the parts are those of no kind of message, or a name is too long")


def unpack(packed: Buffer, max_elements: int) -> Any:
    """The one msgpack object that the bytes are, in memory bounded by their number.

    Raises: ProtocolError: they are something else, or hold more than `max_elements` elements.
    """
    num_bytes = len(packed)
    try:
        if num_bytes <= _MAX_UNCHECKED_BYTES:
            return unpackb(packed, strict_map_key=False, ext_hook=_refuse_extension, max_ext_len=0)
        # reads over the whole of it and builds nothing: afterwards no length is a lie
        unpacker = msgpack.Unpacker(max_buffer_size=num_bytes)
        unpacker.feed(packed)
        unpacker.skip()
        elements = _ElementCount(max_elements) if num_bytes > max_elements else None
        return unpackb(
            packed,
            strict_map_key=False,
            ext_hook=_refuse_extension,
            max_ext_len=0,
            list_hook=elements and elements.add,
            object_hook=elements and elements.add,
        )
    except (ValueError, TypeError, RecursionError, msgpack.UnpackException) as error:
        # its text alone: the representation of some of them holds the whole input
        text = f"{type(error).__name__}: {error}"
        raise ProtocolError(f"not a msgpack message: {text[:_MAX_ERROR_CHARS]}") from None


class _ElementCount:
    """Stops the decoder between two lists or dicts, once they hold too much in all."""

    def __init__(self, max_elements: int) -> None:
        self._num_left = max_elements

    def add(self, container: T) -> T:
        self._num_left -= len(container)  # type: ignore[arg-type]
        if self._num_left < 0:
            raise ValueError("it has more elements than the limit")
        return container


def _message(body: list[Any], request_id: str, limits: MessageLimits) -> Message | None:
    """The message of these parts; None if there is none.

    What a handler gets has the types that its sender's code says. Written out: every call waits
    twice for what this module does.
    """
    kind, num_parts = body[1], len(body)
    if type(kind) is not int:
        return None
    if kind == _Kind.REPLY and num_parts == 4:
        return Reply(request_id, body[3])
    if kind == _Kind.REQUEST and num_parts == 6:
        _, _, _, incarnation, method, args = body
        if type(incarnation) is not str or type(method) is not str or type(args) is not dict:
            return None
        for name in args:
            if type(name) is not str:
                return None
        if len(method) <= limits.max_name_chars:
            return Request(request_id, incarnation, method, args)
    elif kind == _Kind.FAILURE and num_parts == 8:
        _, _, _, error_type, known_as, text, trace, exit_code = body
        texts = (error_type, known_as, text, trace)
        if all(type(part) is str for part in texts) and type(exit_code) is int:
            return Failure(request_id, error_type, known_as, text, trace, exit_code)
    elif kind == _Kind.CANCEL and num_parts == 4 and type(body[3]) is str:
        return Cancel(request_id, body[3])
    return None


def _framed(body: list[Any], limits: MessageLimits) -> bytes:
    frame = _pack(body)
    if len(frame) > limits.max_elements or len(frame) > limits.max_bytes:
        _check_large(frame, limits)
    return frame


def _pack(value: Any) -> bytes:
    try:
        return packb(value)  # type: ignore[no-any-return]
    except (TypeError, ValueError, OverflowError) as error:
        raise ProtocolError(f"cannot be sent as msgpack: {error}") from error


def _check_large(frame: bytes, limits: MessageLimits) -> None:
    """What the receiver would refuse is refused here: the caller gets no answer from there."""
    if len(frame) > limits.max_bytes:
        raise _too_large(len(frame), limits)
    if len(frame) > limits.max_elements:
        unpack(frame, limits.max_elements)


def _too_large(num_bytes: int, limits: MessageLimits) -> ProtocolError:
    return ProtocolError(f"a message has {num_bytes} bytes, the limit is {limits.max_bytes}")


def _not_of_this_protocol(body: Any) -> ProtocolError:
    match body:
        case [int(protocol), *_] if protocol >> 8 == _MAGIC:
            version = protocol & 0xFF
            if version != PROTOCOL_VERSION:
                return ProtocolError(f"expected protocol version {PROTOCOL_VERSION}, got {version}")
            return ProtocolError("the message has too few parts")
    return ProtocolError("the message is not of this protocol")


def _refuse_extension(code: int, payload: bytes) -> Any:
    raise ValueError(f"msgpack extension type {code}")
