"""Where the log records of a process go."""

from __future__ import annotations

import logging
import warnings
from pathlib import Path

import pytest
from small_disk import small_disk

from areal_sc.log import bound_log, earlier_part, log_tail, logging_to


def test_logging_is_as_it_was_after_a_block(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shown_by = warnings.showwarning
    with logging_to("controller", tmp_path / "log"):
        logging.getLogger("own").info("of the block")
    logging.getLogger("own").warning("of what follows")
    assert warnings.showwarning is shown_by
    assert (tmp_path / "log").read_text().endswith(" INFO controller own: of the block\n")
    assert [record.getMessage() for record in caplog.records] == ["of what follows"]


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
