"""The wire format: one versioned msgpack header frame, then raw payload frames.

    frame 0   magic "ASC", protocol version (1 byte), msgpack list [kind, request id, ...]
    frame 1+  payload bytes, described by the header

Never pickle: decoding a peer's bytes gives plain lists, dicts, strings and numbers, nothing else.
Tuples arrive as lists. Sizes are checked before anything is decoded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Final

import msgpack

from areal_sc.errors import ProtocolError
from areal_sc.transport.socket import Buffer, Frame

MAGIC: Final = b"ASC"
PROTOCOL_VERSION: Final = 1
_PREFIX: Final = MAGIC + bytes([PROTOCOL_VERSION])


class _Kind(IntEnum):
    REQUEST = 0
    REPLY = 1
    FAILURE = 2
    CANCEL = 3


@dataclass(frozen=True, slots=True)
class FrameLimits:
    """What one message may hold; a larger one is refused on either side.

    Attributes:
        max_header_bytes: of the header frame; decoding one may take some 60 times its size.
        max_frame_bytes: of any frame; ZMQ drops the connection of a peer that sends a larger one.
        max_frames: payload frames in one message.
        max_name_chars: of request ids, incarnations and method names.
    """

    max_header_bytes: int = 16 << 20
    max_frame_bytes: int = 64 << 20
    max_frames: int = 1024
    max_name_chars: int = 256


@dataclass(frozen=True, slots=True)
class Request:
    """A call of `method`, meant for one incarnation of the server."""

    request_id: str
    incarnation: str
    method: str
    args: dict[str, Any]
    frames: Sequence[Buffer] = ()


@dataclass(frozen=True, slots=True)
class Reply:
    """What the method returned."""

    request_id: str
    value: Any
    frames: Sequence[Buffer] = ()


@dataclass(frozen=True, slots=True)
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


@dataclass(frozen=True, slots=True)
class Cancel:
    """Nobody waits any more for the reply to the request."""

    request_id: str
    incarnation: str


Message = Request | Reply | Failure | Cancel


def encode(message: Message, limits: FrameLimits) -> list[Buffer]:
    """The frames of a message; payload frames are passed on without a copy.

    Raises: ProtocolError: something is not msgpack-able, or over a limit.
    """
    payload: Sequence[Buffer] = ()
    match message:
        case Request(request_id, incarnation, method, args, payload):
            body: list[Any] = [_Kind.REQUEST, request_id, incarnation, method, args]
        case Reply(request_id, value, payload):
            body = [_Kind.REPLY, request_id, value]
        case Failure(request_id, error_type, known_as, text, remote_traceback, exit_code):
            body = [
                _Kind.FAILURE,
                request_id,
                error_type,
                known_as,
                text,
                remote_traceback,
                exit_code,
            ]
        case Cancel(request_id, incarnation):
            body = [_Kind.CANCEL, request_id, incarnation]
    try:
        header = _PREFIX + msgpack.packb(body, use_bin_type=True)
    except (TypeError, ValueError, OverflowError) as error:
        raise ProtocolError(f"cannot be sent as msgpack: {error}") from error
    frames: list[Buffer] = [header, *map(_as_bytes, payload)]
    _check_sizes(frames, limits)
    return frames


def decode(frames: Sequence[Frame], limits: FrameLimits) -> Message:
    """Inverse of `encode`; payload frames are views of the received ones.

    Raises: ProtocolError: no correct peer of this protocol version sends these frames.
    """
    _check_sizes(frames, limits)
    header = frames[0]
    prefix = bytes(header[: len(_PREFIX)])
    if len(prefix) < len(_PREFIX) or not prefix.startswith(MAGIC):
        raise ProtocolError("the header does not start with the protocol's magic")
    if prefix != _PREFIX:
        raise ProtocolError(f"expected protocol version {PROTOCOL_VERSION}, got {prefix[-1]}")
    try:
        # every length is bounded by the size of the header itself, nesting by the decoder
        body = msgpack.unpackb(
            header[len(_PREFIX) :],
            raw=False,
            strict_map_key=False,
            ext_hook=_refuse_extension,
            max_ext_len=0,
        )
    except (ValueError, TypeError, RecursionError, msgpack.UnpackException) as error:
        raise ProtocolError(f"the header is not msgpack: {error!r}") from error
    match body:
        case [int(kind), *parts] if not isinstance(kind, bool):
            message = _message(kind, parts, frames[1:])
        case _:
            raise ProtocolError("the header is not a list that starts with a message kind")
    _check_names(message, limits)
    return message


def _message(kind: int, parts: list[Any], payload: Sequence[Frame]) -> Message:
    match kind, parts:
        case _Kind.REQUEST, [str(request_id), str(incarnation), str(method), dict(args)]:
            if all(isinstance(name, str) for name in args):
                return Request(request_id, incarnation, method, args, payload)
        case _Kind.REPLY, [str(request_id), value]:
            return Reply(request_id, value, payload)
        case _Kind.FAILURE, [str(a), str(b), str(c), str(d), str(e), int(exit_code)]:
            return Failure(a, b, c, d, e, exit_code)
        case _Kind.CANCEL, [str(request_id), str(incarnation)]:
            return Cancel(request_id, incarnation)
    raise ProtocolError(f"no message has kind {kind} and {len(parts)} parts of these types")


def _as_bytes(buffer: Buffer) -> Buffer:
    """The same memory, counted in bytes."""
    if isinstance(buffer, memoryview) and (buffer.itemsize != 1 or buffer.ndim != 1):
        return buffer.cast("B")
    return buffer


def _check_sizes(frames: Sequence[Buffer], limits: FrameLimits) -> None:
    if not 1 <= len(frames) <= limits.max_frames + 1:
        raise ProtocolError(
            f"expected a header and at most {limits.max_frames} frames, got {len(frames)} in all"
        )
    if len(frames[0]) > limits.max_header_bytes:
        raise ProtocolError(
            f"the header has {len(frames[0])} bytes, the limit is {limits.max_header_bytes}"
        )
    largest = max(map(len, frames))
    if largest > limits.max_frame_bytes:
        raise ProtocolError(f"a frame has {largest} bytes, the limit is {limits.max_frame_bytes}")


def _check_names(message: Message, limits: FrameLimits) -> None:
    names = [message.request_id]
    if isinstance(message, Request):
        names += [message.incarnation, message.method]
    longest = max(map(len, names))
    if longest > limits.max_name_chars:
        raise ProtocolError(f"a name has {longest} characters, limit {limits.max_name_chars}")


def _refuse_extension(code: int, payload: bytes) -> Any:
    raise ValueError(f"msgpack extension type {code}")
