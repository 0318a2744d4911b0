"""Folders get their name when they are whole, also where they come from another file system."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from io import FileIO
from pathlib import Path
from typing import Any

import pytest
from small_disk import small_disk

from areal_sc.system.durable import append_or_undo, commit_folder, partial_of, recover_folder

CONTENT = {"config.json": b"{}", "weights/0": b"0" * 100_000, "weights/1": b"1" * 200_000}


@pytest.fixture
def elsewhere(tmp_path: Path) -> Iterator[Path]:
    """A folder on another file system than `tmp_path`."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        if os.stat(folder).st_dev == tmp_path.stat().st_dev:
            pytest.skip("/dev/shm is on the file system of the other temporary files")
        yield Path(folder)


def fill(folder: Path, content: dict[str, bytes] = CONTENT) -> Path:
    for name, data in content.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    return folder


def content_of(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def test_what_had_the_name_is_replaced(tmp_path: Path) -> None:
    final = tmp_path / "final"
    for content in ({"old": b"1"}, CONTENT):
        commit_folder(fill(tmp_path / "partial", content), final)
    assert content_of(final) == CONTENT
    assert list(tmp_path.iterdir()) == [final]
    with pytest.raises(FileNotFoundError):
        commit_folder(tmp_path / "missing", final)
    assert content_of(final) == CONTENT


def test_a_folder_comes_from_another_file_system(tmp_path: Path, elsewhere: Path) -> None:
    final = elsewhere / "deep" / "final"
    partial_of(final).mkdir(parents=True)  # of a process that was killed meanwhile
    for content in ({"old": b"1"}, CONTENT):
        commit_folder(fill(tmp_path / "partial", content), final)
        assert content_of(final) == content
    assert list(final.parent.iterdir()) == [final]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("former", [{}, {"old": b"1"}], ids=["new", "replaced"])
def test_a_copy_that_fails_leaves_nothing_behind(
    former: dict[str, bytes], tmp_path: Path, elsewhere: Path
) -> None:
    final = fill(elsewhere / "final", former)
    partial = fill(tmp_path / "partial")
    with small_disk(150_000), pytest.raises(OSError, match="File too large"):
        commit_folder(partial, final)
    assert content_of(elsewhere) == {f"final/{name}": data for name, data in former.items()}
    assert list(tmp_path.iterdir()) == []


def test_the_name_appears_when_all_is_there(
    tmp_path: Path, elsewhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    final = elsewhere / "final"
    seen: list[bool] = []
    fsync = os.fsync

    def watched(descriptor: int) -> None:
        seen.append(final.exists())
        fsync(descriptor)

    partial = fill(tmp_path / "partial")
    monkeypatch.setattr(os, "fsync", watched)
    commit_folder(partial, final)
    last, *before = reversed(seen)
    assert last, "the name itself is brought to the disk"
    assert len(before) >= len(CONTENT)
    assert not any(before)
    assert content_of(final) == CONTENT


def test_an_interrupted_replacement_is_made_good(tmp_path: Path) -> None:
    """Killed between its two renames."""
    final = fill(tmp_path / "final")
    final.rename(tmp_path / ".final.former")
    recover_folder(final)
    assert content_of(final) == CONTENT
    recover_folder(final)
    assert list(tmp_path.iterdir()) == [final]


class _Interrupted(FileIO):
    """Takes a part of what is written; then the signal handler of a script raises."""

    def write(self, content: Any) -> int:
        super().write(content[:3])
        raise KeyboardInterrupt


def test_an_append_that_is_interrupted_is_undone(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    path.write_bytes(b"whole\n")
    with _Interrupted(path, "ab") as file, pytest.raises(KeyboardInterrupt):
        append_or_undo(file, b"another\n")
    assert path.read_bytes() == b"whole\n"
