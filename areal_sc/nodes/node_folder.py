"""The run folder on a node: the agent's side, and the worker's, where all is there already.

script   writes a nonce into the run folder, and tells it to the agents that it invites
agent    reads it there ──► `NodeFolder`, `WorkerFiles`: the folder is shared, all is there
         does not ──► `shipping.node_side` and `shipping.worker_side` stand in for these two
                      classes, whose methods are all that agents and workers know of shipping
"""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path

from areal_sc.config.schema import SchedulerConfig
from areal_sc.errors import ModelError
from areal_sc.nodes.spec import Launch, Shipped, Welcome, WorkerOrder
from areal_sc.records.record_files import FilesOfProcess, RecordStore
from areal_sc.run.run_folder import RunFolder


def sees_folder(config: SchedulerConfig, nonce: str) -> bool:
    """Whether this machine sees the script's run folder.

    Args:
        nonce: as the script has told it; "": it is on this machine.
    """
    try:
        found = RunFolder(config.run_dir).nonce_path.read_bytes() if nonce else b""
    except OSError:
        return False
    return hmac.compare_digest(found, nonce.encode())


class NodeFolder:
    """The run folder as the agent of a node has it.

    Attributes:
        config: `run_dir` is the one here.
        script_config: `run_dir` is that of the script.
        is_shared: whether these are the same.
    """

    is_shared = True

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = self.script_config = config

    async def bring_first(self, launch: Launch) -> Shipped | None:
        """Returns when what workers begin with is here: model and code.

        Raises: ConfigError: they are too large, or weights would go by a folder that is not shared.
            TransportError. WaitTimeout.
        """
        return None

    def note_welcome(self, welcome: Welcome) -> None:
        """A script says where it is; a folder that is shared says it, too.

        Raises: TransportError: it cannot be noted.
        """

    def shown(self, path: str) -> str:
        """A path of this node, for people elsewhere."""
        return path

    async def close(self) -> None:
        """The run has ended here. Never raises."""


class WorkerFiles:
    """The files of a worker.

    Args:
        run_dir: the run folder here.

    Attributes:
        are_shared: whether they are those of the script.
        loop: on which the worker serves, once it does.
    """

    are_shared = True

    def __init__(self, run_dir: str) -> None:
        self._here = RunFolder(run_dir)
        self.loop = Future[asyncio.AbstractEventLoop]()

    def placed(self, order: WorkerOrder) -> WorkerOrder:
        """What a worker is to do, with paths of this machine."""
        engine_config = dict(order.engine_config)
        if isinstance(path := engine_config.get("path"), str):
            engine_config["path"] = self.place(path)
        engine, folders = order.engine, [self.place(path) for path in order.code_folders]
        if engine.startswith("/"):  # a script, and a class in it
            path, _, name = engine.rpartition(":")
            engine = f"{self.place(path)}:{name}"
        return replace(order, engine=engine, engine_config=engine_config, code_folders=folders)

    def place(self, path: str) -> str:
        """Where a path of the script's machine is on this one."""
        return path

    def script_path(self, path: Path) -> str:
        """Where a path of the run folder here is on the script's machine."""
        return str(path)

    async def bring_source(self, number: int) -> None:
        """Returns when that source of prompts, or workflow, can be built.

        Raises: WorkflowError: it cannot be had.
        """

    async def bring_adapter(self, name: str) -> Path:
        """The folder of an adapter, once it is here.

        Args:
            name: its path below the run folder.
        Raises: ModelError: it is not in the run folder, or cannot be had.
        """
        root = self._here.path
        folder = await asyncio.to_thread((root / name).resolve)
        if not folder.is_relative_to(root.resolve()):
            raise ModelError(f"adapter {name}: expected a folder in the run folder, {root}")
        return folder

    async def bring_snapshot(self, folder: Path) -> None:
        """Returns when a snapshot, if there is one, is in its folder.

        Raises: CheckpointError: it cannot be read. WaitTimeout, ConfigError: that is not known, as
            it did not come in time, or the node has no room for it.
        """

    async def bring_back(self, folder: Path, names: Sequence[str] | None) -> None:
        """Returns when files of a folder are in the run folder of the script.

        So controllers need not know where the worker has written them.

        Args:
            names: None: all of them.
        Raises: CheckpointError.
        """

    def record_store(self, process: str, max_bytes: int) -> RecordStore:
        """Where the worker's records go.

        Args:
            max_bytes: of its files, about.
        """
        return FilesOfProcess(self._here.records, process, max_bytes)
