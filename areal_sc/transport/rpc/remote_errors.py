"""How an exception crosses the wire and arrives as its own typed error."""

from __future__ import annotations

import traceback
from typing import Final

from areal_sc import errors
from areal_sc.errors import ArealError, RemoteError
from areal_sc.transport.rpc.codec import Failure

_MAX_MESSAGE_CHARS: Final = 4_000
_MAX_TRACEBACK_CHARS: Final = 16_000

# RemoteError is left out: it stands for the exception it carries, and is rebuilt from that
_TYPED: Final = {
    name: cls
    for name, cls in vars(errors).items()
    if isinstance(cls, type) and issubclass(cls, ArealError) and cls is not RemoteError
}


def failure_of(error: BaseException, request_id: str) -> Failure:
    """The wire form of an exception; long texts keep their end, where the cause is."""
    text = str(error)
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
