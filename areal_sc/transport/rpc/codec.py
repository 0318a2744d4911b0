"""The wire form of RPC: every message is one msgpack list; a long one takes several ZMQ frames.

    [protocol, request id, ...]       protocol: "SC", the version and the kind of message, a number

Arguments and replies are packed by their `Method`, and lie in the list as they are. Never pickle:
decoding gives the declared types and nothing else. What a message may cost is bounded by its size,
as the decoder trusts no length that a list claims.
"""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from typing import Annotated, Final

import msgspec
from msgspec import Meta, Raw, Struct

from areal_sc import errors
from areal_sc.errors import ArealError, ProtocolError, RemoteError
from areal_sc.system.json_lines import UNDECODABLE
from areal_sc.transport.rpc.method import short_text
from areal_sc.transport.security.passes import MAX_PASS_BYTES
from areal_sc.transport.sockets.zmq_socket import FRAME_BYTES, Buffer, Frame
from areal_sc.user_code import text_of

PROTOCOL_VERSION: Final = 6
_MAGIC: Final = b"SC"
_PROTOCOL: Final = int.from_bytes(_MAGIC + bytes([PROTOCOL_VERSION, 0]))
_UINT32: Final = b"\xce"
"""The msgpack type byte of the protocol number."""

MAX_NAME_CHARS: Final = 256

ANY_INCARNATION: Final = ""
"""Stands for every life of a server: for calls that change nothing, so that any may answer."""

Name = Annotated[str, Meta(max_length=MAX_NAME_CHARS)]
Term = Annotated[int, Meta(ge=0)]


MAX_MESSAGE_BYTES: Final = 16 << 20
"""Most bytes of all frames of a message; a larger one is refused on either side."""

MAX_FRAMES: Final = -(-MAX_MESSAGE_BYTES // FRAME_BYTES)


class Request(Struct, array_like=True, forbid_unknown_fields=True, tag=_PROTOCOL):
    """A call of `method`, meant for one incarnation of the server or for `ANY_INCARNATION`.

    Attributes:
        term: of the controller that calls; 0: a worker does.
        shown_pass: of the worker that calls; b"": the key of its connection says enough.
    """

    request_id: Name
    incarnation: Name
    method: Name
    args: Raw
    term: Term = 0
    shown_pass: Annotated[bytes, Meta(max_length=MAX_PASS_BYTES)] = b""


class Reply(Struct, array_like=True, forbid_unknown_fields=True, tag=_PROTOCOL + 1):
    """What the method returned."""

    request_id: Name
    value: Raw


class Failure(Struct, array_like=True, forbid_unknown_fields=True, tag=_PROTOCOL + 2):
    """What the method raised.

    Attributes:
        error_type: the exception's class name.
        known_as: nearest class of `areal_sc.errors` that it is an instance of, or "".
        message: its text.
        traceback: its text, made in the server.
        exit_code: of an ArealError its own, else 1.
    """

    request_id: Name
    error_type: str
    known_as: str
    message: str
    traceback: str
    exit_code: int = 1


class Cancel(Struct, array_like=True, forbid_unknown_fields=True, tag=_PROTOCOL + 3):
    """Nobody waits any more for the reply to the request."""

    request_id: Name
    incarnation: Name


Message = Request | Reply | Failure | Cancel

_encoder: Final = msgspec.msgpack.Encoder()
_decoder: Final = msgspec.msgpack.Decoder(Message)


_MAX_MESSAGE_CHARS: Final = 4_000
_MAX_TRACEBACK_CHARS: Final = 16_000

# RemoteError is left out: it stands for the exception it carries, and is rebuilt from that
_TYPED: Final = {
    name: cls
    for name, cls in vars(errors).items()
    if isinstance(cls, type) and issubclass(cls, ArealError) and cls is not RemoteError
}


def encode(message: Message) -> bytes:
    """The bytes of a message. Raises: ProtocolError: it is over a limit."""
    frame = _encoder.encode(message)
    _check_size(len(frame))  # the receiver would refuse it, and the caller get no answer
    return frame


def decode(frames: Sequence[Frame]) -> Message:
    """Inverse of `encode`.

    Raises: ProtocolError: no correct peer of this protocol version sends these frames.
    """
    if not 1 <= len(frames) <= MAX_FRAMES:
        raise ProtocolError(f"a message has 1 to {MAX_FRAMES} frames, not {len(frames)}")
    _check_size(sum(map(len, frames)))
    frame = frames[0] if len(frames) == 1 else memoryview(b"".join(frames))
    try:
        message: Message = _decoder.decode(frame)
    except UNDECODABLE as error:
        raise _refusal(frame, error) from None
    return message


def _check_size(num_bytes: int) -> None:
    """Raises: ProtocolError: a message of so many bytes is over the limit."""
    if num_bytes > MAX_MESSAGE_BYTES:
        raise ProtocolError(f"a message has {num_bytes} bytes, the limit is {MAX_MESSAGE_BYTES}")


def _refusal(frame: Buffer, error: Exception) -> ProtocolError:
    if len(frame) > 4 and bytes(frame[1:4]) == _UINT32 + _MAGIC and frame[4] != PROTOCOL_VERSION:
        return ProtocolError(f"expected protocol version {PROTOCOL_VERSION}, got {frame[4]}")
    return ProtocolError(f"not a message of this protocol: {short_text(error)}")


def failure_of(error: BaseException, request_id: str) -> Failure:
    """The wire form of an exception; long texts keep their end, where the cause is."""
    text = text_of(error)
    if len(text) > _MAX_MESSAGE_CHARS:
        text = text[:_MAX_MESSAGE_CHARS] + " …"
    if isinstance(error, RemoteError):
        error_type, trace = error.error_type, error.remote_traceback
    else:
        error_type = type(error).__name__
        trace = "".join(traceback.format_exception(error))
    known_as = next(
        (cls.__name__ for cls in type(error).__mro__ if _TYPED.get(cls.__name__) is cls), ""
    )
    return Failure(
        request_id,
        error_type,
        "" if isinstance(error, RemoteError) else known_as,
        _encodable(text),
        _encodable(trace[-_MAX_TRACEBACK_CHARS:]),
        error.exit_code if isinstance(error, ArealError) else 1,
    )


def error_of(failure: Failure, *, node_id: str, method: str) -> ArealError:
    """The exception to raise for a failure of `method` on `node_id`."""
    typed = _TYPED.get(failure.known_as)
    if typed is not None:
        error = typed(failure.message)
    else:
        error = RemoteError(
            f"{method} on {node_id} raised {failure.error_type}: {failure.message}",
            error_type=failure.error_type,
            remote_traceback=failure.traceback,
            remote_exit_code=failure.exit_code,
        )
    error.add_note(f"raised by {method} on {node_id}:\n{failure.traceback.rstrip()}")
    return error


def _encodable(text: str) -> str:
    """A lone surrogate, as in an undecodable file name, has no UTF-8 form."""
    return text.encode("utf-8", "backslashreplace").decode()
