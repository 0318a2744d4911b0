"""Where the log records of a process go."""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from unittest.mock import patch

import pytest
from small_disk import small_disk

from areal_sc.log import (
    SHOWN_OF_A_PLACE,
    Screen,
    bound_log,
    earlier_part,
    log_tail,
    logging_to,
    setup_logging,
    take_warnings,
    tell_warning,
)


def test_logging_is_as_it_was_after_a_block(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shown_by = warnings.showwarning
    with logging_to("controller", tmp_path / "log"):
        logging.getLogger("own").info("of the block")
    logging.getLogger("own").warning("of what follows")
    assert warnings.showwarning is shown_by
    assert (tmp_path / "log").read_text().endswith(" INFO controller own: of the block\n")
    assert caplog.messages == ["of the block", "of what follows"]  # pytest's is as a user's


def test_a_log_takes_what_is_no_unicode(tmp_path: Path) -> None:
    with logging_to("script", tmp_path / "log"):
        (handler,) = [it for it in logging.getLogger().handlers if it.formatter is not None][:1]
        record = logging.LogRecord(
            "test", logging.WARNING, "a.py", 1, "rows-\udcff \u2192 %s", ("\u4e2d",), None
        )
        handler.handle(record)  # not by a logger: pytest would show it, and cannot
    text = (tmp_path / "log").read_text(encoding="utf-8")
    assert "WARNING script test: rows-\\udcff \u2192 \u4e2d\n" in text


class Nameless(Exception):
    def __str__(self) -> str:
        raise LookupError("no text")


def test_an_error_whose_text_cannot_be_had_is_shown(tmp_path: Path) -> None:
    shown: list[str] = []
    with logging_to("controller", tmp_path / "log", screen=Screen(shown.append, shown.append)):
        logging.getLogger("own").warning("a tracker failed", exc_info=Nameless())
    assert shown == ["a tracker failed: Nameless: (its text cannot be had: str raised LookupError)"]


def test_the_script_s_log_begins_anew_when_it_is_too_large(tmp_path: Path) -> None:
    path = tmp_path / "controller.log"
    with logging_to("controller", path, max_bytes=1000):
        for number in range(100):
            logging.getLogger("own").info("line %d", number)
    assert path.stat().st_size <= 1000
    assert earlier_part(path).stat().st_size <= 1000
    assert sorted(tmp_path.iterdir()) == [path, earlier_part(path)]
    assert [line.split()[-1] for line in log_tail(path)] == [str(n) for n in range(85, 100)]


def test_a_log_that_others_write_is_cut_and_they_go_on(tmp_path: Path) -> None:
    path = tmp_path / "rollout-0.log"
    with path.open("ab", buffering=0) as log:
        log.write(b"".join(b"line %d\n" % number for number in range(50)))
        path.chmod(0o600)
        bound_log(path, 10_000)
        assert not earlier_part(path).exists(), "it is small enough"
        bound_log(path, 100)
        log.write(b"line 50\nline 51")
    assert path.read_bytes() == b"line 50\nline 51", "without a hole before it"
    assert earlier_part(path).stat().st_mode & 0o777 == 0o600
    assert log_tail(path) == [f"line {number}" for number in range(37, 52)]


def test_a_log_is_cut_also_where_there_is_no_room_for_its_copy(tmp_path: Path) -> None:
    path = tmp_path / "rollout-0.log"
    path.write_bytes(bytes(5000))
    with small_disk(4096), pytest.raises(OSError, match="File too large"):
        bound_log(path, 100)
    assert path.stat().st_size == 0


def test_without_a_log_there_is_no_tail(tmp_path: Path) -> None:
    assert log_tail(tmp_path / "rollout-0.log") == []


def shown_by_run(path: Path, log: Callable[[], None]) -> list[str]:
    """What reaches the screen while a run has the log."""
    told: list[str] = []
    screen = Screen(lambda text: told.append(f"warning: {text}"), told.append)
    with logging_to("controller", path, screen=screen):
        log()
    return told


def test_warnings_reach_the_screen_once(tmp_path: Path) -> None:
    package, user = logging.getLogger("areal_sc.controller.x"), logging.getLogger("task")

    def log() -> None:
        for number in range(30):
            package.info("step %d", number)
            package.warning("a disk is full")
            user.warning("too few rows: %d", number)
            user.info("of the user")
        user.warning("another place")
        user.error("%d of %d", 1)  # a wrong call
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            logging.captureWarnings(True)  # `catch_warnings` has taken it away
            warnings.warn("by `warnings`", UserWarning, stacklevel=1)
        try:
            raise OSError("no such row")
        except OSError:
            user.exception("it failed")

    with patch.object(logging.getLogger(), "handlers", []):  # pytest's raises for a wrong call
        told = shown_by_run(tmp_path / "log", log)
    assert told.count("warning: a disk is full") == 1
    few = [text for text in told if "too few rows" in text]
    assert len(few) == SHOWN_OF_A_PLACE
    assert few[0] == "warning: too few rows: 0"
    assert few[-1].endswith("(further ones like this are in the log alone)")
    assert told[-4:-2] == ["warning: another place", "warning: %d of %d (1,)"]
    assert "by `warnings`" in told[-2]
    assert told[-1] == "warning: it failed: OSError: no such row"
    assert (tmp_path / "log").read_text().count("too few rows") == 30


def test_what_the_user_logs_to_a_terminal_is_shown_and_files_of_the_user_s_go_on(
    tmp_path: Path,
) -> None:
    root = logging.getLogger()
    before, level = root.handlers[:], root.level
    file = logging.FileHandler(tmp_path / "mine.log")
    root.handlers[:] = [logging.StreamHandler(sys.stderr), file]
    root.setLevel(logging.DEBUG)
    try:
        told = shown_by_run(
            tmp_path / "log", lambda: logging.getLogger("task").debug("accuracy %.1f", 0.5)
        )
    finally:
        root.handlers[:] = before
        root.setLevel(level)
        file.close()
    assert told == ["accuracy 0.5"]
    assert (tmp_path / "mine.log").read_text().startswith("accuracy 0.5\n")


def test_a_handler_of_the_user_s_goes_on_and_ends_nothing(tmp_path: Path) -> None:
    class Messenger(logging.Handler):
        """Sends what is logged to a chat, which may be away."""

        def emit(self, record: logging.LogRecord) -> None:
            sent.append(record.getMessage())
            raise ConnectionError("the chat is away")

    sent: list[str] = []
    root, messenger = logging.getLogger(), Messenger(logging.WARNING)
    root.addHandler(messenger)
    try:
        with logging_to("controller", tmp_path / "log"):
            for number in range(2):
                logging.getLogger("task").warning("warning %d", number)
            logging.getLogger("task").info("no warning")
    finally:
        root.removeHandler(messenger)
    assert [text for text in sent if text.startswith("warning")] == ["warning 0", "warning 1"]
    assert (tmp_path / "log").read_text().count("ConnectionError: the chat is away") == 1


def test_a_screen_that_nobody_reads_costs_nothing(tmp_path: Path) -> None:
    def broken(text: str) -> None:
        raise BrokenPipeError

    with logging_to("controller", tmp_path / "log", screen=Screen(broken, broken)):
        logging.getLogger("task").warning("it is in the log")
    assert "it is in the log" in (tmp_path / "log").read_text()


def test_a_worker_keeps_its_warnings_until_it_is_asked() -> None:
    root = logging.getLogger()
    before, level = root.handlers[:], root.level
    try:
        setup_logging("rollout/0")
        for number in (1, 1, 2):
            logging.getLogger("task").warning("slow tool %d", number)
        logging.getLogger("task").info("nothing")
        assert take_warnings() == ("slow tool 1", "slow tool 2")
        logging.getLogger("task").warning("slow tool 2")
        assert take_warnings() == ()
        for number in range(100):
            logging.getLogger("task").warning("row %d has no answer", number)
        for text in ("a tool is gone", "a disk is full", "row 7 is double"):
            tell_warning(text, "a reward process")
        *rows, _, _, double = take_warnings()
        assert len(rows) == SHOWN_OF_A_PLACE
        assert double == "a reward process: row 7 is double"
    finally:
        root.handlers[:] = before
        root.setLevel(level)
        logging.captureWarnings(False)
