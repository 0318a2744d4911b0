"""The address of a run, at which agents outside find the sessions of all its workers.

A process beside the script has it (`agents.router`), as long as the script lives. The next start of
a script that was killed begins it anew where it was, with the same keys: `agents.json` of the run
folder says where, for whoever may read the folder.

consumes     what becomes of the workers; the end of the process
waits for    its workers' addresses, and for the process to listen
unblocked by both; a process that has died is started again
"""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from contextlib import suppress
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

import msgspec
from msgspec import Struct

from areal_sc.agents.keys import SessionKeys
from areal_sc.agents.routes import AgentsAt, RouterStart, RouterStarted, Routes
from areal_sc.controller.events import StepEvent
from areal_sc.controller.rollout.rollout_workers import RolloutWorkers
from areal_sc.errors import ArealError, ConfigError, RunFolderError, WorkerStartError
from areal_sc.fleet.member import Member
from areal_sc.fleet.worker_life import FleetEvent, UnitLeft, UnitLost, UnitServes
from areal_sc.run.run_folder import RunFolder
from areal_sc.schedulers.agent_process import ProcessBeside
from areal_sc.schedulers.base import Scheduler
from areal_sc.system.deaths import Deaths
from areal_sc.system.durable import os_errors_as, replace_file
from areal_sc.system.waiting import first_of
from areal_sc.transport.sockets.interface import EVERYWHERE, bracketed
from areal_sc.workers.calls import AGENTS_AT

logger = logging.getLogger(__name__)

START_LIMIT_S: Final = 60.0
END_LIMIT_S: Final = 5.0
MAX_DEATHS: Final = 5
"""In a row, of which none had lived for `LONG_LIFE_S`; the next one ends the run."""
LONG_LIFE_S: Final = 600.0
_ASK_AGAIN_S: Final = 1.0
_LOG: Final = "agents"


class AgentsFile(Struct, frozen=True):
    """What `agents.json` of the run folder says, which is for its owner alone.

    Attributes:
        url: of the run's address, as clients of OpenAI take it.
        key: whoever has it claims episodes there.
    """

    url: str
    key: str

    @classmethod
    def read(cls, path: Path) -> AgentsFile | None:
        """None: there is none that can be read."""
        with suppress(OSError, msgspec.MsgspecError, UnicodeDecodeError):
            return msgspec.json.decode(path.read_bytes(), type=cls)
        return None

    @property
    def port(self) -> int:
        """0: it says none."""
        with suppress(ValueError):
            return urlsplit(self.url).port or 0
        return 0

    def write(self, path: Path) -> None:
        """Raises: RunFolderError: it cannot be written."""
        cannot = os_errors_as(RunFolderError, f"cannot write {path}")
        with cannot, replace_file(path, mode=0o600) as file:
            file.write(msgspec.json.encode(self))


class RunAddress:
    """The address, and the process that has it.

    Attributes:
        url: for a client of OpenAI; "": it is not open.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        workers: RolloutWorkers,
    ) -> None:
        self.url = ""
        self._bound = 0
        self._host, self._port = workers.config.agents.bound()
        self._scheduler = scheduler
        self._folder = RunFolder(scheduler.config.run_dir)
        self._workers = workers
        self._background = workers.background
        self._at = dict[str, AgentsAt]()
        self._changed = asyncio.Event()
        self._opening: asyncio.Task[None] | None = None
        self._process: ProcessBeside | None = None
        self._ended: asyncio.Task[str]

    async def open(self) -> None:
        """Returns once it is open.

        Raises: ConfigError: this machine has no such address, or another process has it.
            WorkerStartError: the process does not come up.
        """
        self._opening = self._opening or self._background.hold(self._open(), "the run's address")
        await asyncio.shield(self._opening)

    def note_event(self, event: FleetEvent | StepEvent) -> None:
        """Takes what becomes of workers."""
        match event:
            case UnitLost(unit) | UnitLeft(unit):
                self._at.pop(unit, None)  # a next life has its sessions
            case UnitServes():
                pass
            case _:
                return
        self._changed.set()

    async def close(self) -> None:
        """Ends the process; what it serves is cut off."""
        self._opening = None
        if (process := self._process) is None:
            return
        self._process, self.url = None, ""
        await asyncio.to_thread(process.end, END_LIMIT_S)

    async def _open(self) -> None:
        before = AgentsFile.read(self._folder.agents_path)
        await self._look()  # before the first request
        await self._start(self._port or (before.port if before else 0))
        self._background.start(self._keep(), "the run's address")

    async def _start(self, port: int) -> None:
        keys = self._scheduler.keys
        assert keys is not None
        process = ProcessBeside(self._folder.log_path(_LOG), "areal_sc.agents.router")
        self._process = process
        self._ended = self._background.hold(
            asyncio.to_thread(process.how_it_ended), "the end of the run's address"
        )
        secret = keys.sessions_secret
        start = RouterStart(secret.hex(), self._host, port, not self._port, self._routes)
        process.tell(msgspec.json.encode(start))
        what = "the process of the run's address"
        told = await asyncio.to_thread(process.heard, what, START_LIMIT_S)
        opened = msgspec.json.decode(told, type=RouterStarted)
        if opened.problem:
            where = f"{self._host}, port {port}"
            raise ConfigError(f"agents.bind: {where}, cannot be listened on: {opened.problem}")
        if port and opened.port != port:
            logger.warning("agents.bind: port %d is another process's, so it moves", port)
        self._bound = opened.port
        host = socket.gethostname() if self._host in (*EVERYWHERE, "::") else bracketed(self._host)
        self.url = f"http://{host}:{opened.port}/v1"
        AgentsFile(self.url, SessionKeys(secret).run_key).write(self._folder.agents_path)
        logger.info("agents outside reach the run at %s; its key is in agents.json", self.url)

    async def _keep(self) -> None:
        """Tells the process where workers are, and starts it again if it dies."""
        deaths, began_s = Deaths(MAX_DEATHS), time.monotonic()
        while (process := self._process) is not None:
            await first_of(asyncio.wait([self._ended]), self._changed.wait())
            if self._ended.done():
                how = self._ended.result()
                logger.error("the process of the run's address ended with %s", how)
                if time.monotonic() - began_s >= LONG_LIFE_S:
                    deaths.number = 0
                if (pause_s := deaths.note_death()) is None:
                    what = f"the run's address was lost {deaths.number} times: {how}"
                    raise WorkerStartError(what)
                await asyncio.sleep(pause_s)
                began_s = time.monotonic()
                if self._process is process:  # it was not closed meanwhile
                    await self._start(self._bound)
                continue
            self._changed.clear()
            await self._look()
            process.tell(msgspec.json.encode(self._routes))

    @property
    def _routes(self) -> Routes:
        names = [state.name for state in self._workers.set.states]
        up = {name: self._at[name] for name in names if name in self._at}
        return Routes(up, [name for name in names if name not in up])

    async def _look(self) -> None:
        """Asks the workers that are not known."""
        await asyncio.gather(*map(self._ask, self._workers.up_members))

    async def _ask(self, member: Member) -> None:
        known = self._at.get(member.name)
        if known is not None and known.life == member.worker.incarnation:
            return
        try:
            self._at[member.name] = await self._workers.call_named(member.name, AGENTS_AT, None)
        except ArealError as error:  # it may still live
            logger.warning("worker=%s does not say where its sessions are: %s", member.name, error)
            asyncio.get_running_loop().call_later(_ASK_AGAIN_S, self._changed.set)
