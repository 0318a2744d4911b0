"""What the page keeps outside of runs: marks stay, rows at which nobody looks go."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from areal_sc.errors import RunFolderError
from areal_sc.page import page_cache
from areal_sc.page.page_cache import Bookmarks, cache_folder, database_of


def test_marks_stay(tmp_path: Path) -> None:
    marks = Bookmarks(tmp_path / "cache", tmp_path / "run")
    assert marks.read() == {}
    marks.change([(1, 0, 2, 0), (3, 0, 0, 1)], "odd")
    marks.change([(1, 0, 2, 0)], "")
    again = Bookmarks(tmp_path / "cache", tmp_path / "x" / ".." / "run")
    assert again.read() == {(3, 0, 0, 1): "odd", (1, 0, 2, 0): ""}
    assert again.change([(3, 0, 0, 1), (7, 7, 7, 7)], None) == {(1, 0, 2, 0): ""}
    assert Bookmarks(tmp_path / "cache", tmp_path / "other").read() == {}


def test_there_are_so_many_marks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_cache, "MAX_MARKS", 2)
    marks = Bookmarks(tmp_path, tmp_path / "run")
    marks.change([(0, 0, 0, 0), (1, 0, 0, 0)], "")
    with pytest.raises(ValueError, match="at most 2 marked rows"):
        marks.change([(2, 0, 0, 0)], "")
    assert len(marks.read()) == 2


@pytest.mark.parametrize("content", [b"", b"[1]", b"\xff", b'[[[1,2,3],""]]'])
def test_damaged_marks_are_as_if_there_were_none(tmp_path: Path, content: bytes) -> None:
    marks = Bookmarks(tmp_path, tmp_path / "run")
    marks.change([(0, 0, 0, 0)], "")
    (path,) = tmp_path.glob("*.json")
    path.write_bytes(content)
    assert marks.read() == {}
    assert marks.change([(1, 0, 0, 0)], "") == {(1, 0, 0, 0): ""}


def test_marks_that_cannot_be_kept_are_told(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("no folder")
    with pytest.raises(RunFolderError, match="cannot be"):
        Bookmarks(tmp_path / "cache", tmp_path / "run").change([(0, 0, 0, 0)], "")


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
