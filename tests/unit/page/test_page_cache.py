"""What the page keeps outside of runs: rows at which nobody looks go."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from areal_sc.page.page_cache import cache_folder, database_of


def test_rows_at_which_nobody_looks_go(tmp_path: Path) -> None:
    old, new = (database_of(tmp_path, tmp_path / name) for name in ("old", "new"))
    for path in (old, new):
        path.write_text("rows")
    month_ago = time.time() - 31 * 86400
    os.utime(old, (month_ago, month_ago))
    assert database_of(tmp_path, tmp_path / "new") == new
    assert not old.exists()
    assert new.exists()


def test_it_is_kept_where_the_user_wants_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/x/y")
    assert cache_folder() == Path("/x/y/areal_sc/page")
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert cache_folder() == Path.home() / ".cache" / "areal_sc" / "page"
