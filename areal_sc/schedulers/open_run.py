"""What schedulers do alike: they take the run folder, and end what they have begun."""

from __future__ import annotations

import atexit
import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from msgspec import to_builtins

from areal_sc.config.schema import SchedulerConfig
from areal_sc.config.slurm_settings import SchedulerType
from areal_sc.errors import RunFolderError, TransportError
from areal_sc.nodes.spec import CALLS_FORMAT
from areal_sc.run.agent_files import living_agents
from areal_sc.run.run_folder import RunFolder
from areal_sc.run.run_owner import RunTerm
from areal_sc.run.status_board import StatusBoard
from areal_sc.schedulers.join_server import JoinServer
from areal_sc.system import interrupts
from areal_sc.system.process import allow_open_files
from areal_sc.transport.security.keys import RunKeys
from areal_sc.transport.security.passes import Passes
from areal_sc.transport.sockets.interface import Interface

logger = logging.getLogger(__name__)

_OF_SCRIPT = frozenset(
    ["resume", "overwrite", "dry_run", "startup_timeout_s", "hung_after_s", "shutdown_timeout_s"]
)
"""Settings that no agent, and no worker, goes by."""

_OF_ONE_SCHEDULER = frozenset([SchedulerType.slurm.value, SchedulerType.ray.value])
"""Sections that matter only where `type` names them."""


class OpenRun:
    """Base of schedulers, from when they are made until they are closed.

    Attributes:
        config, keys, passes, status, term: see `Scheduler`.
        folder: of the run.
    """

    config: SchedulerConfig
    folder: RunFolder
    keys: RunKeys
    passes: Passes
    status: StatusBoard
    term: RunTerm
    _undo: ExitStack

    @contextmanager
    def _opened(
        self, config: SchedulerConfig, folder: RunFolder | None
    ) -> Iterator[tuple[RunFolder, ExitStack]]:
        """The run folder, which this process has from now on; what the run does is told in it.

        The block begins all else, and says in the stack how `close`, or the end of the script
        without one, ends it; where the block fails, that is done at once. The run has its keys: of
        an earlier start of the script, or new ones.

        Args:
            folder: see `make_scheduler`.
        Raises: RunFolderError: another process runs in the folder, or it cannot be used.
        """
        self.config = config
        allow_open_files()
        with interrupts.deferred(), ExitStack() as undo:
            if folder is None:
                folder = RunFolder(config.run_dir)
                folder.lock(resume=config.resume.value, overwrite=config.overwrite)
                undo.callback(folder.close)
            assert folder.term is not None, "it is open"
            self.folder, self.term, self.status = folder, folder.term, StatusBoard()
            self.status.keep(folder, self.term, config.orphan_timeout_s)
            undo.callback(self.status.close)
            found = keys_of(folder)
            self.keys = found or RunKeys.create()
            self.passes = Passes(self.keys, self.term.number, is_first=found is None)
            yield folder, undo
            self._undo = undo.pop_all()
            atexit.register(self._close_at_exit)

    def _open_joins(self, interface: Interface, folder: RunFolder, undo: ExitStack) -> JoinServer:
        """Where agents of other machines join, as the folder tells them.

        Raises: TransportError: the interface cannot be bound. RunFolderError.
        """
        joins = JoinServer(self.keys, self.passes, interface, folder)
        undo.callback(joins.close)
        self.keys.write(folder.keys_path)
        undo.callback(folder.remove_keys)
        folder.write_atomic(folder.join_path, joins.address.encode())
        return joins

    def close(self) -> None:
        """Ends all agents, and with them every worker that is left."""
        with interrupts.deferred():
            self._undo.close()
            atexit.unregister(self._close_at_exit)

    def _close_at_exit(self) -> None:
        with interrupts.deferred(are_dropped=True):
            self.close()


def keys_of(folder: RunFolder) -> RunKeys | None:
    """The keys of the run, as long as a process of it may live; None: it needs new ones.

    Raises: RunFolderError: they cannot be used, and an agent lives that has them.
    """
    path = folder.keys_path
    try:
        return RunKeys.read(path)
    except TransportError as error:
        agents = living_agents(folder.path)
        if agents:
            where = ", ".join(f"process {agent.pid} on {agent.host}" for agent in agents)
            raise RunFolderError(
                f"run folder {folder.path}: its workers still run (agent: {where}), and cannot be "
                f"reached without their keys: {error}; set the file right, or end the agent by "
                "`kill`, then start the run again: it goes on from its last snapshot"
            ) from error
        if path.exists():
            logger.warning("the run gets new keys: %s", error)
    return None


def settings_of_agents(config: SchedulerConfig, calls_format: int = CALLS_FORMAT) -> dict[str, Any]:
    """What agents and workers go by; other settings are those of the script alone.

    Args:
        calls_format: of the agents.
    """
    settings: dict[str, Any] = {**to_builtins(config), "calls_format": calls_format}
    others = _OF_SCRIPT | (_OF_ONE_SCHEDULER - {config.type})
    return {key: value for key, value in settings.items() if key not in others}
