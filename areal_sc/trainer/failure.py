"""How a script ends: its exit code, its run's log, and a failure as one block on standard error."""

from __future__ import annotations

import errno
import os
import shlex
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from datetime import datetime
from pathlib import Path
from types import FrameType
from typing import Any

from rich.console import Console
from rich.text import Text

from areal_sc.errors import (
    ArealError,
    ConfigError,
    RemoteError,
    RunFolderError,
    exit_code_of,
)
from areal_sc.log import Screen, logging_to
from areal_sc.run.run_folder import Opening, RunFolder
from areal_sc.system import interrupts
from areal_sc.system.durable import os_errors_as, own_file
from areal_sc.system.own_addresses import keep_from_proxies
from areal_sc.system.process import (
    SNAPSHOT_SIGNALS,
    STOP_SIGNALS,
    be_deaf,
    name_of_stop,
    open_files_advice,
    refuse_in_worker,
)
from areal_sc.system.telling import (
    Outlet,
    end_outlets,
    leave_closed_terminal,
    tolerate_other_encodings,
)
from areal_sc.user_code import causes_of, describe, first_of, text_of

_NO_WAY_ON = ("--overwrite", "overwrite=true", "resume=never")
"""Arguments with which a command does not go on with a run."""

_NUM_FRAMES = 3
_NUM_NOTE_LINES = 6
_NUM_LOG_LINES = 15


class Terminated(KeyboardInterrupt):
    """One of `STOP_SIGNALS` arrived. Whatever cleans up after Ctrl-C cleans up after this too."""

    def __init__(self, stopped_by: signal.Signals = signal.SIGTERM) -> None:
        super().__init__(stopped_by.name)
        self.stopped_by = stopped_by
        self.exit_code = 128 + stopped_by


def run_script(main: Callable[[list[str]], None], argv: Sequence[str] | None = None) -> int:
    """Runs a script's `main` to its end: `sys.exit(run_script(main))`.

    A failure is shown as one block. `STOP_SIGNALS` (SIGHUP unless it is ignored, as under nohup)
    unwind `main` as Ctrl-C does, once; further ones are ignored, so that the clean-up can finish.
    `SNAPSHOT_SIGNALS` have a meaning while a run trains; elsewhere nothing happens. In another
    thread than the main one no signal is answered; `python -m areal_sc stop` is.

    Args:
        main: takes the command line's arguments.
        argv: None is `sys.argv[1:]`.
    Returns: the process's exit code, 0 when `main` returned.
    """
    refuse_in_worker("run_script")
    keep_from_proxies()
    tolerate_other_encodings()
    try:
        with _stop_signals_raise():
            main(list(sys.argv[1:] if argv is None else argv))
    except SystemExit:
        raise
    except BaseException as error:  # the boundary of the process
        run_dir = getattr(error, "run_dir", None)  # a `Run` that it ended
        with interrupts.deferred(are_dropped=True):  # the script is ending already
            return report_failure(error, run_dir=run_dir)
    finally:
        end_outlets()
    return 0


@contextmanager
def log_of_run(folder: RunFolder, max_bytes: int, screen: Screen) -> Iterator[None]:
    """The script's log is the run's, and the screen shows its warnings, too.

    An error that ends the run tells `run_script` its folder.
    """
    path = folder.log_path("controller")
    with ExitStack() as stack:
        with os_errors_as(RunFolderError, f"cannot write {path}"):
            stack.enter_context(logging_to("controller", path, max_bytes, screen))
        try:
            yield
        except BaseException as error:
            error.run_dir = folder.path  # type: ignore[attr-defined]
            raise


def report_failure(
    error: BaseException, console: Console | None = None, run_dir: Path | None = None
) -> int:
    """Shows why the run ended: what failed, where, the last lines of its log, where to read on.

    An error may carry `log_tail` (lines of the failed worker's log) and `log_path`; notes
    (`add_note`) are shown too. The whole traceback goes to `logs/controller.log` of the run
    folder. Without one, that of an unexpected error is shown whole.

    Args:
        error: what ended the run; of an exception group the first one counts.
        console: None is standard error.
        run_dir: the run's folder, if it has come to that.
    Returns: the exit code that the process should end with.
    """
    block = _TextBlock(console or Console(file=Outlet.of(sys.stderr)))
    if isinstance(error, KeyboardInterrupt):
        stopped_by = error.stopped_by if isinstance(error, Terminated) else signal.SIGINT
        by = name_of_stop(stopped_by)
        if run_dir is not None:
            _append_to_log(run_dir, "INFO", f"stopped by {by}\n")
        with suppress(OSError):  # there may be no terminal any more
            block.text(f"stopped by {by}", style="yellow")
            _show_way_on(block, run_dir, is_stopped=True)
        return exit_code_of(error)
    cause = first_of(error)
    title, text, exit_code = "The run ended with an unexpected error", "", exit_code_of(cause)
    if isinstance(cause, ArealError):
        title, text = cause.title, str(cause)
    block.text(f"ERROR {title}", style="bold red")
    block.text(text or describe(cause), "  ")
    if isinstance(cause, ConfigError):
        return exit_code

    log_path, trace = None, "".join(traceback.format_exception(error))
    if run_dir is not None and not isinstance(cause, RunFolderError):  # it may be another run's
        log_path = _append_to_log(run_dir, "ERROR", f"the run ended with\n{trace}")
    for reason in _reasons(cause):
        block.text(f"because of {reason}", "  ")
    if os.strerror(errno.EMFILE) in f"{trace} {getattr(cause, 'log_tail', '')}":
        block.text(open_files_advice(), "  ")
    _show_place(block, cause, has_log=log_path is not None)
    if log_path is not None:
        block.text(f"full traceback: {log_path}", style="bold")
        block.text(f"logs of the workers: {log_path.parent}", style="bold")
        _show_way_on(block, run_dir, is_stopped=False)
    return exit_code


class _TextBlock:
    """Lines that stay whole on every width: for grep, and so that a path can be copied."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def text(self, text: str, prefix: str = "", *, style: str = "") -> None:
        for line in text.splitlines():
            plain = Text(Text.from_ansi(line.rstrip()).plain, style=style)
            self._console.print(Text(prefix) + plain, soft_wrap=True)

    def quote(self, heading: str, lines: Sequence[str]) -> None:
        self.text(f"{heading}:", style="bold")
        self.text("\n".join(lines), "  | ", style="dim")


def _show_place(block: _TextBlock, cause: BaseException, *, has_log: bool) -> None:
    """Where it happened: a worker's log, the remote end, or this script's own frames.

    Errors that were raised on purpose say all in their message, so their notes (a remote traceback
    among them) are cut to the first line where the log has the rest.
    """
    is_foreseen = isinstance(cause, ArealError) and not isinstance(cause, RemoteError)
    for note in getattr(cause, "__notes__", ()):
        heading, _, rest = note.partition("\n")
        if rest and not (is_foreseen and has_log):
            block.quote(heading.rstrip(":"), rest.splitlines()[-_NUM_NOTE_LINES:])
        else:
            block.text(heading.rstrip(":"), "  ")
    log_tail = getattr(cause, "log_tail", ())
    if log_tail:
        log_path = getattr(cause, "log_path", None)
        block.quote(f"last lines of {log_path or 'its log'}", log_tail[-_NUM_LOG_LINES:])
    if isinstance(cause, ArealError):
        return
    if has_log:
        frames = [f for f in traceback.extract_tb(cause.__traceback__) if f.filename != __file__]
        innermost = frames[: -_NUM_FRAMES - 1 : -1]
        block.quote(
            "at (innermost first)",
            [f"{f.filename}:{f.lineno} in {f.name}: {f.line or '(no source)'}" for f in innermost],
        )
    else:
        block.quote("traceback", "".join(traceback.format_exception(cause)).splitlines())


def _show_way_on(block: _TextBlock, run_dir: Path | None, *, is_stopped: bool) -> None:
    """Which snapshot an unfinished run has, and how it goes on; a stopped one may have none."""
    if run_dir is None:
        return
    folder = RunFolder(run_dir)
    try:
        opening = folder.decide()
    except RunFolderError:  # it is finished, or was never a run's
        return
    if opening is Opening.restart and is_stopped:
        block.text("there is no snapshot yet: the same command starts again from nothing")
    elif opening in (Opening.resume, Opening.attach) and folder.snapshots():
        block.text(f"newest snapshot: {folder.snapshots()[-1]}; this command goes on from it:")
        kept = (arg for arg in sys.orig_argv if arg.lower() not in _NO_WAY_ON)
        block.text(shlex.join(kept), "  ")


def _reasons(error: BaseException) -> Iterator[str]:
    """The explicit causes below an error whose text it does not contain already."""
    told = text_of(error)
    for cause in causes_of(error)[1:]:
        text = text_of(cause)
        if text and text not in told:
            yield f"{type(cause).__name__}: {text}"
            told += text


def _append_to_log(run_dir: Path, level: str, text: str) -> Path | None:
    """Adds to the run's log; None where that is not possible."""
    path = RunFolder(run_dir).log_path("controller")
    try:
        with open(path, "a", encoding="utf-8", errors="backslashreplace", opener=own_file) as file:
            file.write(f"{datetime.now():%H:%M:%S} {level} controller: {text}")
    except OSError:
        return None  # no such folder, or a full disk: the caller shows it instead
    return path


@contextmanager
def _stop_signals_raise() -> Iterator[None]:
    """While open, `STOP_SIGNALS` raise `Terminated` in the main thread; Ctrl-C is Python's."""
    before: dict[signal.Signals, Any] = {}
    if threading.current_thread() is not threading.main_thread():
        yield  # Python takes handlers in the main thread alone
        return

    def stop(signal_number: int, frame: FrameType | None) -> None:
        for number in before:
            signal.signal(number, signal.SIG_IGN)
        leave_closed_terminal()
        raise Terminated(signal.Signals(signal_number))

    for number in STOP_SIGNALS:
        if number != signal.SIGINT and signal.getsignal(number) != signal.SIG_IGN:
            before[number] = signal.signal(number, stop)
    for number in SNAPSHOT_SIGNALS:
        if signal.getsignal(number) == signal.SIG_DFL:
            before[number] = signal.signal(number, be_deaf)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
