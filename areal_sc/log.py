"""Logging set-up for entry points; every other module only does `logging.getLogger(__name__)`.

A process that fails is explained by the last lines of its log.
"""

from __future__ import annotations

import logging
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

LOG_TAIL_LINES: Final = 15
_LOG_TAIL_BYTES: Final = 64 << 10


class _LogFile(logging.FileHandler):
    """Says once that it cannot be written, in place of a traceback for each record."""

    _has_failed = False

    def handleError(self, record: logging.LogRecord) -> None:
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            super().handleError(record)  # a defect of the call
        elif not self._has_failed:
            self._has_failed = True
            sys.stderr.write(f"the log {self.baseFilename} cannot be written: {error.strerror}\n")

    def close(self) -> None:
        with suppress(OSError):  # of what could not be written before
            super().close()


def setup_logging(role: str, path: Path | None = None) -> None:
    """Sends the process's log records to `path`, or to standard error when it is None.

    Args:
        role: prefix of every line, e.g. `rollout/0` or `controller`.
        path: log file, appended to.
    """
    handler = _LogFile(path) if path else logging.StreamHandler(sys.stderr)
    formatter = logging.Formatter(
        f"%(asctime)s.%(msecs)03d %(levelname)s {role} %(name)s: %(message)s", "%H:%M:%S"
    )
    handler.setFormatter(formatter)
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.INFO)
    logging.captureWarnings(True)


@contextmanager
def logging_to(role: str, path: Path) -> Iterator[None]:
    """`setup_logging` for the block; afterwards records go where they went before."""
    root, shown_by = logging.getLogger(), warnings.showwarning
    handlers, level = root.handlers[:], root.level
    setup_logging(role, path)
    (own,) = root.handlers
    try:
        yield
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)
        own.close()
        if warnings.showwarning is not shown_by:
            logging.captureWarnings(False)


def log_tail(path: Path) -> list[str]:
    """Last lines of a log, [] when there is none."""
    try:
        with path.open("rb") as log:
            log.seek(0, os.SEEK_END)
            log.seek(max(0, log.tell() - _LOG_TAIL_BYTES))
            return log.read().decode(errors="replace").splitlines()[-LOG_TAIL_LINES:]
    except FileNotFoundError:
        return []
