"""Whether a path still names the run's folder, and which of two starts of one moment counts."""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from areal_sc.errors import RunFolderError, StaleTerm
from areal_sc.run import run_owner
from areal_sc.run.run_folder import Opening, RunFolder
from areal_sc.run.run_owner import FolderPlace, Owner, RunTerm
from areal_sc.run.status_board import StatusBoard
from areal_sc.system.durable import write_atomic

CONFIG = "seed: 0\n"


def count_at_the_same_time(run_dir: Path) -> None:
    """Another start gets the number of the newest one, and its file stays."""
    owner = Owner.read(run_dir)
    assert owner is not None
    other = replace(owner, host="elsewhere", pid=7, name="other")
    write_atomic(run_dir / ".term", json.dumps(asdict(other)).encode())


@pytest.mark.parametrize("how", ["moved", "deleted", "made anew", "copied"])
def test_nothing_is_written_to_another_folder_of_the_name(tmp_path: Path, how: str) -> None:
    path, moved, board = tmp_path / "run", tmp_path / "moved", StatusBoard()
    with RunFolder(path) as folder:
        folder.open(config_text=CONFIG)
        folder.begin_lineage()
        folder.snapshot_path(1).mkdir()
        path.rename(moved)
        if how == "copied":
            shutil.copytree(moved, path)
        elif how == "made anew":
            path.mkdir()
        elif how == "deleted":
            shutil.rmtree(moved)
        before = sorted(tmp_path.rglob("*"))
        for write in (
            lambda: folder.write_atomic("a.bin", b"one"),
            lambda: folder.begin_lineage(),
            folder.check_term,
        ):
            with pytest.raises(RunFolderError, match=r"moved or deleted .* Move it back"):
                write()
        board.keep(folder, folder.term, 60.0)
        board.close()
        folder.remove_keys()
        assert sorted(tmp_path.rglob("*")) == before
    if how == "moved":  # once nothing runs, a folder may be moved
        with RunFolder(moved) as folder:
            assert folder.open(config_text=CONFIG) is Opening.resume
            folder.begin_lineage()


def test_a_file_server_that_does_not_answer_has_moved_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = FolderPlace(tmp_path)

    def fail(path: Path) -> None:
        raise OSError(116, "Stale file handle")

    monkeypatch.setattr(Path, "stat", fail)
    place.check()


def test_of_two_starts_with_one_number_the_last_to_write_it_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with RunFolder(tmp_path) as folder:
        folder.open(config_text=CONFIG)
        folder.check_term()
        count_at_the_same_time(tmp_path)
        with pytest.raises(StaleTerm, match=r"\(term 1: process 7 on elsewhere"):
            folder.check_term()

    def write(path: Path, content: bytes) -> None:
        write_atomic(path, content)
        count_at_the_same_time(tmp_path)

    monkeypatch.setattr(run_owner, "write_atomic", write)
    with pytest.raises(StaleTerm, match=r"\(term 2: process 7 on elsewhere"):
        RunTerm.begin(tmp_path)


def test_the_owner_that_an_older_areal_sc_has_written_is_read(tmp_path: Path) -> None:
    with RunFolder(tmp_path) as folder:
        folder.open(config_text=CONFIG)
    content = json.loads((tmp_path / ".term").read_text())
    del content["name"]
    (tmp_path / ".term").write_text(json.dumps(content))
    owner = Owner.read(tmp_path)
    assert owner is not None
    with RunFolder(tmp_path) as folder:  # as `stop` does
        folder.hold(owner)
    with RunFolder(tmp_path) as folder:
        folder.open(config_text=CONFIG)
        assert folder.term is not None
        assert folder.term.number == 2
