"""Logging set-up for entry points; every other module only does `logging.getLogger(__name__)`.

A process that fails is explained by the last lines of its log.

Warnings reach the screen, too. Workers and agents keep theirs until the script asks for them
(`take_warnings`); the script shows what is in its own log, and what it was told (`Screen`).

A log that has grown too large becomes `<name>.log.1`, and begins anew. The script does that with
its own, and agents with those of their workers, as whatever these start writes to the same file.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import shutil
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager, suppress
from io import TextIOWrapper
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import Final

from areal_sc.system.durable import own_file
from areal_sc.user_code import describe, text_of

LOG_TAIL_LINES: Final = 15
SHOWN_OF_A_PLACE: Final = 20
"""Different warnings of one line of code that reach the screen; the log has all."""
_PLACE: Final = "areal_sc_place"
_OWN: Final = "areal_sc"
LOOK_AT_LOGS_S: Final = 2.0
_LOG_TAIL_BYTES: Final = 64 << 10

logger = logging.getLogger(__name__)


class _LogFile(RotatingFileHandler):
    """Says once that it cannot be written, in place of a traceback for each record."""

    _has_failed = False

    def _open(self) -> TextIOWrapper:
        how = "backslashreplace"
        return open(self.baseFilename, "a", encoding="utf-8", errors=how, opener=own_file)

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


class _Untold(logging.Handler):
    """Keeps each warning once, and not too many of one place, until the script asks for it."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: dict[str, bool] = {}  # text -> whether it was told
        self._num_kept: Counter[Hashable] = Counter()

    def emit(self, record: logging.LogRecord) -> None:
        place, text = _place_of(record), _text_of(record)
        if text not in self.texts and self._num_kept[place] < SHOWN_OF_A_PLACE:
            self._num_kept[place] += 1
            self.texts[text] = False


class _OfUser(logging.Handler):
    """A handler of the user's, whose errors end nothing."""

    def __init__(self, handler: logging.Handler) -> None:
        super().__init__(handler.level)
        self._handler = handler
        self._has_failed = False

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._handler.handle(record)
        except Exception:  # code of the user's
            if not self._has_failed:
                self._has_failed = True
                logger.exception("%s failed; the run goes on without it", self._handler)


def _is_terminal(handler: logging.Handler) -> bool:
    console = getattr(handler, "console", None)  # of rich
    stream = getattr(handler, "stream", getattr(console, "file", None))
    return stream in (sys.stderr, sys.stdout, sys.__stderr__, sys.__stdout__)


def take_warnings() -> tuple[str, ...]:
    """What this process has warned of, and not told yet."""
    for handler in logging.getLogger().handlers:
        if isinstance(handler, _Untold):
            new = tuple(text for text, is_told in handler.texts.items() if not is_told)
            handler.texts.update(dict.fromkeys(new, True))
            return new
    return ()


class Screen(logging.Handler):
    """Shows warnings while a run has the log: each text once, and not too many of one place.

    Args:
        warn, note: show a text; the second one is for what is no warning.

    Attributes:
        level_of_others: of what shows that is not of this package.
    """

    def __init__(self, warn: Callable[[str], None], note: Callable[[str], None]) -> None:
        super().__init__()
        self._warn = warn
        self._note = note
        self.level_of_others = logging.WARNING
        self._shown = set(shown_before)
        self._num_shown: Counter[Hashable] = Counter()

    def emit(self, record: logging.LogRecord) -> None:
        is_own = record.name.partition(".")[0] == _OWN
        if record.levelno < (logging.WARNING if is_own else self.level_of_others):
            return
        with suppress(OSError):  # nobody reads the screen: the log has it
            if record.levelno < logging.WARNING:
                self._note(_text_of(record))
                return
            place, text = _place_of(record), _text_of(record)
            if text in self._shown or self._num_shown[place] >= SHOWN_OF_A_PLACE:
                return
            self._shown.add(text)
            self._num_shown[place] += 1
            is_last = self._num_shown[place] == SHOWN_OF_A_PLACE
            self._warn(f"{text} (further ones like this are in the log alone)" if is_last else text)


shown_before: Final[set[str]] = set()
"""Warnings that this process has shown before a run had the log."""


def tell_warning(text: str, by: str) -> None:
    """Logs what `take_warnings` gave of another process: one line of code tells those of all."""
    logger.warning("%s: %s", by, text, extra={_PLACE: re.sub(r"\d+", "", text)})


def _place_of(record: logging.LogRecord) -> Hashable:
    """Warnings of one place are much alike."""
    return getattr(record, _PLACE, (record.pathname, record.lineno))


def _text_of(record: logging.LogRecord) -> str:
    """Its message, with what was raised; a wrong call of the user's is shown as it was made."""
    try:
        text = record.getMessage().rstrip()
    except BaseException:  # of user code; as `Handler.handleError` has it
        text = f"{text_of(record.msg)} {text_of(record.args)}"
    if record.name == "py.warnings":  # its second line is the code
        text = text.partition("\n")[0]
    raised = record.exc_info[1] if record.exc_info else None
    return text if raised is None else f"{text}: {describe(raised)}"


def setup_logging(role: str, path: Path | None = None, max_bytes: int = 0) -> None:
    """Sends the process's log records to `path`, or to standard error when it is None.

    Args:
        role: prefix of every line, e.g. `rollout/0` or `controller`.
        path: log file, appended to.
        max_bytes: after which it begins anew; one earlier part stays. 0: no limit.
    """
    handler: logging.Handler = logging.StreamHandler(sys.stderr)
    if path is not None:
        handler = _LogFile(path, maxBytes=max_bytes, backupCount=1)
    formatter = logging.Formatter(
        f"%(asctime)s.%(msecs)03d %(levelname)s {role} %(name)s: %(message)s", "%H:%M:%S"
    )
    handler.setFormatter(formatter)
    root = logging.getLogger()
    root.handlers[:] = [handler, _Untold()] if path is None else [handler]
    root.setLevel(logging.INFO)
    logging.captureWarnings(True)


@contextmanager
def logging_to(
    role: str, path: Path, max_bytes: int = 0, screen: Screen | None = None
) -> Iterator[None]:
    """`setup_logging` for the block; afterwards records go where they went before.

    Meanwhile `screen` stands for what the user had set up for a terminal, at the level set there;
    files and whatever else the user has set up go on.
    """
    root, shown_by = logging.getLogger(), warnings.showwarning
    handlers, level = root.handlers[:], root.level
    setup_logging(role, path, max_bytes)
    (own,) = root.handlers
    root.handlers += [_OfUser(handler) for handler in handlers if not _is_terminal(handler)]
    root.setLevel(min(level, logging.INFO) if handlers and level else logging.INFO)
    if screen is not None:
        if any(map(_is_terminal, handlers)):
            screen.level_of_others = level
        root.addHandler(screen)
    try:
        yield
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)
        own.close()
        if warnings.showwarning is not shown_by:
            logging.captureWarnings(False)


def bound_log(path: Path, max_bytes: int) -> None:
    """Begins a log anew that is larger than this; what was in it is its earlier part.

    Whoever writes to it goes on, if that is by appending (O_APPEND). What is written in the moment
    between the copy and the cut is lost.

    Raises: OSError: there is no log, or no room for the copy; then it is cut all the same.
    """
    if path.stat().st_size <= max_bytes:
        return
    try:
        shutil.copy(path, earlier_part(path))  # with its permissions: servers print keys
    finally:
        os.truncate(path, 0)


async def keep_logs_bounded(folder: Path, max_bytes: int, *, but: str) -> None:
    """Begins logs of a folder anew when they grow too large, until it is cancelled.

    Args:
        but: of this writer alone: its log is left.
    """

    def look() -> None:
        for path in folder.glob("*.log"):
            if path.stem != but:
                try:
                    bound_log(path, max_bytes)
                except OSError as error:
                    logger.warning("log=%s its earlier part is lost: %s", path, error)

    while True:
        await asyncio.sleep(LOOK_AT_LOGS_S)
        await asyncio.to_thread(look)


def earlier_part(path: Path) -> Path:
    """Where the earlier part of a log lies."""
    return path.with_name(f"{path.name}.1")


def log_tail(path: Path) -> list[str]:
    """Last lines of a log, [] when there is none."""
    ends: list[bytes] = []
    for part in (path, earlier_part(path)):
        with suppress(FileNotFoundError), part.open("rb") as log:
            log.seek(0, os.SEEK_END)
            log.seek(max(0, log.tell() - _LOG_TAIL_BYTES + sum(map(len, ends))))
            ends.insert(0, log.read())
    return b"".join(ends).decode(errors="replace").splitlines()[-LOG_TAIL_LINES:]
