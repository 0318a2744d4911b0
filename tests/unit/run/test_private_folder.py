"""Who may have put something into a run folder, and can still do so."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from areal_sc.errors import ConfigError, RunFolderError
from areal_sc.log import _LogFile
from areal_sc.run.private_folder import make_private
from areal_sc.run.run_folder import Opening, RunFolder
from areal_sc.schedulers.agent_process import StartedAgent
from areal_sc.shipping.node_side import NodeCache
from areal_sc.system.disk import Disk
from areal_sc.system.json_lines import JsonLines

CONFIG = "seed: 0\n"
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="gives files to another user")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    with RunFolder(tmp_path / "run") as folder:
        folder.open(config_text=CONFIG)
        folder.snapshot_path(1).mkdir()
        (folder.sources / "task.py").touch()
    return folder.path


def mode_of(path: Path) -> int:
    return path.stat().st_mode & 0o7777


def test_permissions_that_are_too_wide_are_taken_back(path: Path) -> None:
    """With those of what lies in a folder that others could write to; reading stays allowed."""
    files = path / "sources" / "task.py", path / "config.yaml"
    folders = path, path / "sources", path / "checkpoints" / "step-000001"
    for file in files:
        file.chmod(0o666)
    for folder in folders:
        folder.chmod(0o2777)
    with RunFolder(path) as again:
        assert again.open(config_text=CONFIG) is Opening.resume
    assert [mode_of(file) for file in files[:1]] == [0o644]
    assert [mode_of(folder) for folder in folders] == [0o2755] * 3


@pytest.mark.parametrize("where", [".", "sources"])
def test_a_link_that_others_may_have_made_ends_the_start(
    path: Path, tmp_path: Path, where: str
) -> None:
    (path / "logs").rmdir()
    (path / where / "logs").symlink_to(tmp_path)
    (path / where).chmod(0o777)
    with pytest.raises(RunFolderError, match=rf"logs is a link to {tmp_path}, in a folder"):
        RunFolder(path).open(config_text=CONFIG)


def test_a_link_of_ones_own_to_a_larger_disk_stays(path: Path, tmp_path: Path) -> None:
    (path / "checkpoints").rename(tmp_path / "large")
    (path / "checkpoints").symlink_to(tmp_path / "large")
    with RunFolder(path) as folder:
        assert folder.open(config_text=CONFIG) is Opening.resume


@needs_root
@pytest.mark.parametrize("name", [".", "logs", "sources", "config.yaml"])
def test_what_belongs_to_another_user_ends_the_start(path: Path, name: str) -> None:
    os.chown(path / name, 4711, 4711, follow_symlinks=False)
    with pytest.raises(RunFolderError, match="belongs to user 4711, and you are user 0"):
        RunFolder(path).open(config_text=CONFIG)
    with pytest.raises(RunFolderError, match="belongs to user 4711"):
        RunFolder(path).lock()
    assert RunFolder(path).marker() is not None, "commands still read it"


def test_a_file_system_that_keeps_its_permissions_is_warned_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    for open_to_all in (tmp_path, folder):
        open_to_all.chmod(0o777)
    monkeypatch.setattr(Path, "chmod", lambda path, mode: None)
    told: list[str] = []
    make_private(folder, told.append)
    assert told == [
        f"{tmp_path}: anybody can put another folder in the place of run",
        f"{folder}: others can write to it, and its file system keeps it so",
    ]


def test_a_nodes_folder_that_others_could_write_to_is_searched(tmp_path: Path) -> None:
    cache = NodeCache(str(tmp_path))
    cache.make()
    (cache.path / "trees" / "planted").symlink_to(tmp_path)
    cache.make()
    (cache.path / "trees").chmod(0o777)
    with pytest.raises(ConfigError, match=r"planted is a link to .*, in a folder that other"):
        cache.make()


def test_no_link_in_the_place_of_a_file_is_written_through(path: Path, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("as it was")
    (link := path / "link").symlink_to(victim)
    for write in (
        lambda: JsonLines(link),
        lambda: Disk().append_to(link),
        lambda: _LogFile(link),
        lambda: StartedAgent(["true"], link, {}, b""),
    ):
        with pytest.raises((OSError, RunFolderError), match="links are not followed"):
            write()
    assert victim.read_text() == "as it was"
