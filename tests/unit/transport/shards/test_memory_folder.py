from __future__ import annotations

import fcntl
import logging
import os
import stat
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from areal_sc.errors import ConfigError, TransportError
from areal_sc.transport.shards import memory_folder
from areal_sc.transport.shards.arena import block_path
from areal_sc.transport.shards.mapped_file import map_file
from areal_sc.transport.shards.memory_folder import (
    ArenaFolder,
    clean_leftovers,
    memory_root,
    user_folder,
)

UID = os.geteuid()

LIVE_IN_IT = """
import sys
from pathlib import Path
from areal_sc.transport.shards.memory_folder import ArenaFolder
folder = ArenaFolder(Path(sys.argv[1]), sys.argv[2])
files = folder.create("train/0", "life0")
files.link(1, "block-x")
assert "torch" not in sys.modules
print("here", flush=True)
sys.stdin.read()
"""


def start_run(root: Path, run_id: str) -> subprocess.Popen[str]:
    """Another process that lives in a run."""
    process = subprocess.Popen(
        [sys.executable, "-c", LIVE_IN_IT, str(root), run_id],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "here\n"
    return process


def end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.communicate()


def test_everything_is_open_to_its_owner_alone(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        folder = ArenaFolder(tmp_path / "root", "run")
        files = folder.create("train/0", "life1")
        files.reserve("block-1", 8192)
        files.link(7, "block-1")
    finally:
        os.umask(before)
    modes = {
        str(path.relative_to(tmp_path)): stat.S_IMODE(path.lstat().st_mode)
        for path in (tmp_path / "root").rglob("*")
        if not path.is_symlink()
    }
    base = f"root/{user_folder(tmp_path).name}"
    assert base.startswith(f"root/areal-sc-{UID}-")
    run = f"{base}/run"
    assert modes == {
        base: 0o700,
        run: 0o700,
        f"{run}/lock": 0o600,
        f"{run}/train-0.life1": 0o700,
        f"{run}/train-0.life1/lock": 0o600,
        f"{run}/train-0.life1/readers": 0o600,
        f"{run}/train-0.life1/block-1": 0o600,
    }
    assert (files.block_names(), files.sequences()) == ({"block-1"}, [7])
    assert block_path(str(files.path), 7) == f"{files.path}/block-1"
    folder.remove()
    files.close()
    assert list((tmp_path / "root").iterdir()) == []


def test_a_folder_that_others_can_enter_is_closed(tmp_path: Path) -> None:
    base = user_folder(tmp_path)
    base.mkdir()
    base.chmod(0o755)
    folder = ArenaFolder(tmp_path, "run")
    assert stat.S_IMODE(base.stat().st_mode) == 0o700
    folder.remove()


@pytest.mark.parametrize("name", ["", "..", "a/b", "a.b", "a" * 65, "run\n", "läuft"])
def test_names_that_could_be_paths_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="run id"):
        ArenaFolder(tmp_path, name)
    folder = ArenaFolder(tmp_path, "run")
    with pytest.raises(ConfigError, match="incarnation"):
        folder.create("train/0", name)
    if name != "a/b":
        with pytest.raises(ConfigError, match="worker name"):
            folder.create(name, "life1")
    folder.remove()


def test_another_node_of_a_shared_file_system_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("socket.gethostname", lambda: "elsewhere")
        there = ArenaFolder(tmp_path, "run")
        there.create("train/0", "life1").close()
        there.close()
    assert clean_leftovers(tmp_path) == 0
    here = ArenaFolder(tmp_path, "run")
    assert here.by_incarnation() == {}
    assert list(there.by_incarnation()) == ["life1"]
    here.remove()


def test_an_incarnation_has_one_arena(tmp_path: Path) -> None:
    folder = ArenaFolder(tmp_path, "run")
    files = folder.create("train/0", "life1")
    with pytest.raises(TransportError, match=r"train-0\.life1 cannot be made"):
        folder.create("train/0", "life1")
    files.close()
    folder.remove()


def test_what_a_killed_run_left_is_deleted_by_the_next(tmp_path: Path) -> None:
    killed, living = start_run(tmp_path, "killed"), start_run(tmp_path, "living")
    base = user_folder(tmp_path)
    try:
        assert clean_leftovers(tmp_path) == 0
        end(killed)
        mine = ArenaFolder(tmp_path, "mine")
        assert clean_leftovers(tmp_path) == 1
        assert sorted(path.name for path in base.iterdir()) == ["living", "mine"]
        assert os.readlink(base / "living" / "train-0.life0" / "1") == "block-x"
        mine.close()
        assert clean_leftovers(tmp_path) == 1
    finally:
        end(living)
        end(killed)
    assert clean_leftovers(tmp_path) == 1
    assert list(tmp_path.iterdir()) == []
    assert clean_leftovers(tmp_path) == 0


START_AND_CLEAN = """
import os, sys
from pathlib import Path
from areal_sc.transport.shards.memory_folder import ArenaFolder, clean_leftovers
root = Path(sys.argv[1])
for i in range(int(sys.argv[3])):
    folder = ArenaFolder(root, f"{sys.argv[2]}-{i % 3}")
    clean_leftovers(root)
    files = folder.create("train/0", f"life{i}")
    files.link(1, "block-x")
    assert files.sequences() == [1] and folder.by_incarnation() == {f"life{i}": str(files.path)}
    files.remove() if i % 2 else files.close()
    folder.remove() if i % 3 else folder.close()
"""


def test_runs_that_start_and_clean_up_at_once_leave_each_other_alone(tmp_path: Path) -> None:
    command = [sys.executable, "-c", START_AND_CLEAN, str(tmp_path)]
    processes = [
        subprocess.Popen([*command, f"run{i}", "200"], stderr=subprocess.PIPE) for i in range(3)
    ]
    for process in processes:
        _, stderr = process.communicate(timeout=100)
        assert process.returncode == 0, stderr.decode()
    clean_leftovers(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_run_that_starts_while_its_folder_is_deleted_starts_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder is deleted after the lock file was opened, and before it is locked."""
    take = fcntl.flock
    num_deleted = 0

    def delete_first(fd: int, kind: int) -> None:
        nonlocal num_deleted
        if num_deleted == 0 and kind & fcntl.LOCK_SH:
            num_deleted += 1
            num_deleted += clean_leftovers(tmp_path)
        take(fd, kind)

    monkeypatch.setattr(fcntl, "flock", delete_first)
    folder = ArenaFolder(tmp_path, "run")
    assert num_deleted == 2
    assert folder.path.is_dir()
    assert clean_leftovers(tmp_path) == 0
    folder.remove()


def test_a_deletion_that_was_cut_short_is_completed(tmp_path: Path) -> None:
    (user_folder(tmp_path) / ".deleted-0123" / "train-0.life0").mkdir(parents=True)
    assert clean_leftovers(tmp_path) == 0
    assert list(tmp_path.iterdir()) == []


def test_a_link_in_the_place_of_the_own_folder_is_refused(tmp_path: Path) -> None:
    root, elsewhere = tmp_path / "root", tmp_path / "elsewhere"
    for path in (root, elsewhere / "run"):
        path.mkdir(parents=True)
    (user_folder(root)).symlink_to(elsewhere)
    for attempt in (lambda: ArenaFolder(root, "run"), lambda: clean_leftovers(root)):
        with pytest.raises(ConfigError, match=rf"areal-sc-{UID}-.*not a folder"):
            attempt()
    assert (elsewhere / "run").is_dir()


def test_links_are_never_followed(tmp_path: Path) -> None:
    root, elsewhere = tmp_path / "root", tmp_path / "elsewhere"
    base = user_folder(root)
    (elsewhere / "deep").mkdir(parents=True)
    (elsewhere / "deep" / "kept").write_text("kept")
    base.mkdir(parents=True)
    (base / "linked").symlink_to(elsewhere)
    (base / "dead" / "train-0.life0").mkdir(parents=True)
    (base / "dead" / "train-0.life0" / "block-1").symlink_to(elsewhere / "deep" / "kept")
    (base / "dead" / "train-0.life1").symlink_to(elsewhere / "deep")
    (base / "locked").mkdir()
    (base / "locked" / "lock").symlink_to(elsewhere / "deep" / "lock")
    with pytest.raises(ConfigError, match="linked"):
        ArenaFolder(root, "linked")
    with pytest.raises(ConfigError, match="locked"):
        ArenaFolder(root, "locked")
    folder = ArenaFolder(root, "dead")
    assert list(folder.by_incarnation()) == ["life0"]
    (files,) = folder.take_over("train/0")
    with pytest.raises(OSError, match="symbolic links"):
        map_file(files.file_path("block-1"), writable=True)
    folder.close()
    files.close()
    (base / "locked" / "lock").unlink()
    assert clean_leftovers(root) == 2
    assert [path.name for path in base.iterdir()] == ["linked"]
    assert [path.name for path in elsewhere.rglob("*")] == ["deep", "kept"]


@pytest.mark.skipif(UID != 0, reason="only root can give a folder away")
def test_a_folder_of_somebody_else_is_refused(tmp_path: Path) -> None:
    base = user_folder(tmp_path)
    base.mkdir(mode=0o700)
    os.chown(base, 12345, 12345)
    for attempt in (lambda: ArenaFolder(tmp_path, "run"), lambda: clean_leftovers(tmp_path)):
        with pytest.raises(ConfigError, match=r"owned by user 12345"):
            attempt()


def test_a_root_in_which_everybody_may_rename_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    with pytest.raises(ConfigError, match=r"chmod \+t"):
        ArenaFolder(tmp_path, "run")
    tmp_path.chmod(0o1777)
    ArenaFolder(tmp_path, "run").remove()


def test_a_root_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"file/areal-sc.*File exists"):
        ArenaFolder(tmp_path / "file", "run")


def test_arenas_are_taken_over_from_the_dead_alone(tmp_path: Path) -> None:
    folder = ArenaFolder(tmp_path, "run")
    dead, alive = folder.create("train/0", "dead"), folder.create("train/0", "alive")
    folder.create("train/00", "other").close()
    dead.close()
    (taken,) = folder.take_over("train/0")
    assert (taken.incarnation, taken.path) == ("dead", dead.path)
    assert folder.take_over("train/0") == []
    taken.remove()
    assert sorted(folder.by_incarnation()) == ["alive", "other"]
    # who has lost an arena deletes nothing in it
    dead.remove()
    alive.close()
    alive.remove()
    assert sorted(folder.by_incarnation()) == ["alive", "other"]
    folder.remove()


def root_of(run_dir: Path, wanted: str = "auto", **limits: Any) -> Path:
    return memory_root(wanted, run_dir, Path("/node/folder"), **limits)


def test_memory_is_never_on_a_network_file_system(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_network = {tmp_path / "shared_memory", Path("/wanted")}

    def kind(path: Path) -> str:
        return "nfs4" if path in on_network else ""

    monkeypatch.setattr(memory_folder, "network_file_system", kind)
    missing = tmp_path / "missing"
    assert root_of(tmp_path, shared_memory=missing) == Path("/node/folder/shared_memory")
    with pytest.raises(ConfigError, match=r"nfs4.*set transport.shared_memory to a folder on a"):
        root_of(tmp_path, "/wanted")
    on_network.add(Path("/node/folder/shared_memory"))
    with pytest.raises(ConfigError, match=r"nfs4.*set scheduler.node_folder to a folder on a"):
        root_of(tmp_path, shared_memory=missing)


def test_a_root_without_room_is_replaced_with_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    space = os.statvfs(tmp_path)
    free_bytes = space.f_bavail * space.f_frsize
    caplog.set_level(logging.WARNING)
    fallback, root = tmp_path / "shared_memory", partial(root_of, tmp_path)
    assert root(needed_bytes=free_bytes // 2, shared_memory=tmp_path) == tmp_path
    assert root(str(tmp_path / "x"), needed_bytes=1 << 60) == tmp_path / "x"
    assert caplog.records == []
    assert root(needed_bytes=1 << 60, shared_memory=tmp_path) == fallback
    (record,) = caplog.records
    text = record.getMessage()
    for part in (f"{tmp_path} has", f"{(1 << 60) / 2**30:.1f} GiB", "--shm-size=", str(fallback)):
        assert part in text
    missing = tmp_path / "missing"
    assert root(shared_memory=missing) == fallback
    assert "missing cannot be used" in caplog.records[1].getMessage()


def test_a_file_is_no_place_for_shared_memory(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"cannot be kept in .*Not a directory; choose another"):
        clean_leftovers(tmp_path / "file")


def test_who_shares_a_runs_memory_reads_the_same_token(tmp_path: Path) -> None:
    """Also those who come first at the same time; another run, or other memory, has another."""
    run = ArenaFolder(tmp_path / "memory", "run")
    with ThreadPoolExecutor(8) as threads:
        tokens = set(threads.map(lambda _: run.node_token(), range(64)))
    assert len(tokens) == 1
    again = ArenaFolder(tmp_path / "memory", "run")
    others = (ArenaFolder(tmp_path / "memory", "other"), ArenaFolder(tmp_path / "elsewhere", "run"))
    assert again.node_token() in tokens
    assert not tokens & {other.node_token() for other in others}
    assert sorted(p.name for p in run.path.iterdir()) == ["lock", "node"], "nothing else is left"
    for folder in (run, again, *others):
        folder.close()
