"""Whether a node shares the run folder, and what it has in its place."""

from __future__ import annotations

import asyncio
import fcntl
import os
import stat
import time
from pathlib import Path
from typing import Any

import pytest

from areal_sc.config.schema import Device, SchedulerConfig
from areal_sc.errors import ConfigError, TransportError
from areal_sc.nodes.joining import read_address
from areal_sc.nodes.node_folder import NodeFolder, sees_folder
from areal_sc.nodes.spec import Launch, Shipped, Welcome, WorkerOrder
from areal_sc.run.run_folder import RunFolder
from areal_sc.shipping import node_side
from areal_sc.shipping.node_side import FolderInPlace
from areal_sc.system.file_lock import take_lock
from areal_sc.transport.security.keys import RunKeys
from areal_sc.transport.security.passes import Caller, Passes

NONCE = "0123"


def config_of(tmp_path: Path) -> SchedulerConfig:
    return SchedulerConfig(run_dir=str(tmp_path / "run"), node_folder=str(tmp_path / "node"))


def folder_of(tmp_path: Path, run_id: str = "run") -> FolderInPlace:
    return FolderInPlace(config_of(tmp_path), run_id)


def test_who_reads_the_nonce_shares_the_folder(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    folder.path.mkdir()
    folder.nonce_path.write_text(NONCE)
    for nonce in (NONCE, ""):  # an agent on the script's machine is told none
        assert sees_folder(config_of(tmp_path), nonce)
    node = NodeFolder(config_of(tmp_path))
    assert node.is_shared
    assert node.config.run_dir == str(folder.path)
    assert node.shown("/x") == "/x"


@pytest.mark.parametrize("seen", [None, "", "012", "01234", "another start's"])
def test_any_other_node_has_a_folder_of_its_own_until_the_run_ends(
    tmp_path: Path, seen: str | None
) -> None:
    if seen is not None:
        (tmp_path / "run").mkdir()
        RunFolder(tmp_path / "run").nonce_path.write_text(seen)
    assert not sees_folder(config_of(tmp_path), NONCE)
    node = folder_of(tmp_path)
    assert not node.is_shared
    here = Path(node.config.run_dir)
    assert here.is_relative_to(tmp_path / "node")
    assert (here / "sources").is_dir()
    own = tmp_path / "node" / f"areal_sc-{os.geteuid()}"
    assert stat.S_IMODE(own.stat().st_mode) == 0o700
    assert node.shown("/x").endswith(":/x")
    asyncio.run(node.close())
    assert not here.exists()


def test_each_start_of_the_script_says_where_it_is(tmp_path: Path) -> None:
    """Where agent and workers look: they outlive the script that started them."""
    node = folder_of(tmp_path)
    here = RunFolder(node.config.run_dir)
    for number in (1, 2):
        node.note_welcome(Welcome(f"tcp://10.0.0.{number}:1", f"tcp://10.0.0.{number}:2"))
        assert read_address(here.join_path) == f"tcp://10.0.0.{number}:1"
        assert read_address(here.files_path) == f"tcp://10.0.0.{number}:2"
    asyncio.run(node.close())
    with pytest.raises(TransportError, match="cannot write"):  # nor can it on a full disk
        node.note_welcome(Welcome("tcp://10.0.0.3:1", "tcp://10.0.0.3:2"))


def test_what_killed_agents_left_goes_and_what_living_ones_have_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    living = folder_of(tmp_path, run_id="living")
    left = Path(living.config.run_dir).with_name("killed-0")
    (left / "logs").mkdir(parents=True)
    trees = tmp_path / "node" / f"areal_sc-{os.geteuid()}" / "trees"
    old_s = 2 * node_side.KEEP_S
    for name, age_s in (("old", old_s), ("used", old_s), ("new", node_side.KEEP_S / 2)):
        (trees / name).mkdir()
        os.utime(trees / name, (0, time.time() - age_s))
    use = take_lock(trees / ".used.use", fcntl.LOCK_SH)
    assert use is not None
    for lock in (".used.use", ".idle.use", ".idle.lock"):
        (trees / lock).touch()
        os.utime(trees / lock, (0, time.time() - old_s))
    other = folder_of(tmp_path, run_id="other")
    assert Path(living.config.run_dir).is_dir()
    assert not left.exists()
    assert {it.name for it in trees.iterdir()} == {"new", "used", ".used.use"}
    use.close()
    monkeypatch.setattr(node_side, "_END_LIMIT_S", 0.1)
    with pytest.raises(ConfigError, match="another agent of this run is on this node"):
        folder_of(tmp_path, run_id="living")
    for node in (living, other):
        asyncio.run(node.close())


def test_a_folder_that_cannot_be_had_is_named_with_its_setting(tmp_path: Path) -> None:
    (tmp_path / "node").write_text("a file")
    with pytest.raises(ConfigError, match=r"set scheduler\.node_folder to a folder"):
        folder_of(tmp_path)


def order_of(**engine_config: Any) -> WorkerOrder:
    return WorkerOrder("train", 0, "FSDPPPOActor", engine_config, Device.cpu, 1)


@pytest.mark.parametrize(("folder", "is_refused"), [("w", True), ("/r/w", True), ("/all/w", False)])
async def test_weights_do_not_go_by_a_folder_that_only_one_node_sees(
    tmp_path: Path, folder: str, is_refused: bool
) -> None:
    node, keys = folder_of(tmp_path), [Passes(RunKeys.create()).issue("train/0", Caller.train)]
    node.script_config.run_dir = "/r"
    node.note_welcome(Welcome("tcp://127.0.0.1:2", "tcp://127.0.0.1:1"))
    orders = [order_of(weight_update={"method": "disk", "folder": folder})]
    launch = Launch(orders, keys, timeout_s=1.0)
    if is_refused:
        with pytest.raises(ConfigError, match="set that to a folder that all nodes see"):
            await node.bring_first(launch)
    else:
        assert await node.bring_first(launch) == Shipped("/r")
    await node.close()
