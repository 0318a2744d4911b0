"""Where the log records of a process go."""

from __future__ import annotations

import logging
import warnings
from pathlib import Path

import pytest

from areal_sc.log import logging_to


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
