"""Telling people how a run goes. What fails in that is said once, in the log, and the run goes on.

Outlet    standard output or standard error, whose reader may leave, or whose disk may be full
tell      calls whoever follows the run
"""

from __future__ import annotations

import errno
import io
import logging
import os
import select
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final, ParamSpec, TextIO, cast

from areal_sc.user_code import describe

_IS_GONE: Final = (errno.EPIPE, errno.EIO, errno.EBADF, errno.ENXIO)
"""Nobody will read there any more: a pipe without a reader, a terminal that was closed."""

P = ParamSpec("P")

logger = logging.getLogger(__name__)
_failed = set[object]()


def tell(listener: Callable[P, object], *args: P.args, **kwargs: P.kwargs) -> None:
    """Calls a listener; what it raises ends nothing, and is logged the first time."""
    try:
        listener(*args, **kwargs)
    except KeyboardInterrupt:
        raise
    except BaseException:  # of a full disk, say, or of user code
        name = getattr(listener, "__qualname__", repr(listener))
        if name not in _failed:
            _failed.add(name)
            logger.exception("%s failed; the run goes on without having told", name)


class _Nowhere(io.StringIO):
    """Takes all, and keeps nothing."""

    def write(self, text: str) -> int:
        return len(text)


class Outlet:
    """A text stream that never fails: what cannot be written is left out.

    The stream may be a class of the user's, a "tee" say, with no more than `write` and `flush`.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._has_failed = False

    @classmethod
    def of(cls, stream: TextIO | None) -> TextIO:
        """Args: stream: None: it was closed before the script began (`>&-`)."""
        return cast("TextIO", cls(_Nowhere() if stream is None else stream))

    def write(self, text: str) -> int:
        try:
            text.encode(self.encoding)
        except UnicodeEncodeError:
            text = text.encode(self.encoding, "backslashreplace").decode(self.encoding)
        self._attempt(lambda: self._stream.write(text))
        return len(text)

    def flush(self) -> None:
        self._attempt(lambda: self._stream.flush())

    @property
    def encoding(self) -> str:
        return getattr(self._stream, "encoding", None) or "utf-8"

    def isatty(self) -> bool:
        try:
            return self._stream.isatty()
        except (AttributeError, ValueError):  # it has no such method, or was closed
            return False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def give_up_rest(self) -> None:
        """What could not be written does no harm when the process ends: no exit code 120."""
        self.flush()
        if self._has_failed:
            self._leave()

    def _attempt(self, act: Callable[[], object]) -> None:
        try:
            act()
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # the stream may be the user's, or closed
            if getattr(error, "errno", None) in _IS_GONE:
                self._leave()
            if not self._has_failed:
                self._has_failed = True
                name = getattr(self._stream, "name", "the output")
                logger.warning("%s cannot be written (%s); the run goes on", name, describe(error))

    def _leave(self) -> None:
        """From now on all that this process writes there goes nowhere."""
        try:
            _lead_nowhere(self._stream.fileno())
            self._stream.flush()
        except (OSError, ValueError, AttributeError):
            return  # it has no file, or is closed: nothing is left to be written


def _lead_nowhere(fd: int) -> None:
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, fd)
    os.close(nowhere)


def leave_closed_terminal() -> None:
    """What is printed to a terminal that was closed goes nowhere from now on, and raises nothing.

    For handlers of signals: no buffer is touched, as the script may write to it just now.
    """
    for stream in filter(None, (sys.stdout, sys.stderr)):
        with suppress(OSError, ValueError, AttributeError):  # it has no file
            look = select.poll()
            look.register(stream.fileno(), 0)
            if any(seen & select.POLLHUP for _, seen in look.poll(0)):
                _lead_nowhere(stream.fileno())


def tolerate_other_encodings() -> None:
    """What standard output and error cannot encode is shown by another sign."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and not stream.closed:
            stream.reconfigure(errors="replace")


def end_outlets() -> None:
    """At the end of a script: what standard output and error could not take is given up."""
    for stream in filter(None, (sys.stdout, sys.stderr)):
        Outlet(stream).give_up_rest()
