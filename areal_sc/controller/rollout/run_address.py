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
import os
import re
import socket
import sys
import time
from asyncio.subprocess import PIPE, Process
from typing import Final

import msgspec

from areal_sc.agents.keys import SessionKeys
from areal_sc.agents.routes import AgentsAt, RouterStart, RouterStarted, Routes
from areal_sc.config.agent_settings import AgentsConfig
from areal_sc.controller.background import Background
from areal_sc.controller.events import StepEvent
from areal_sc.controller.rollout.rollout_workers import RolloutWorkers
from areal_sc.errors import ArealError, ConfigError, WorkerStartError
from areal_sc.fleet.events import FleetEvent, UnitLeft, UnitLost, UnitServes
from areal_sc.fleet.member import Member
from areal_sc.log import log_tail
from areal_sc.run.agents_file import AgentsFile
from areal_sc.run.run_folder import RunFolder
from areal_sc.schedulers.agent_process import agent_environment
from areal_sc.schedulers.base import Scheduler
from areal_sc.system.deaths import Deaths
from areal_sc.system.durable import own_file
from areal_sc.system.process import SAYS, exit_text
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


class RunAddress:
    """The address, and the process that has it.

    Attributes:
        url: for a client of OpenAI; "": it is not open.
    """

    def __init__(
        self,
        config: AgentsConfig,
        scheduler: Scheduler,
        workers: RolloutWorkers,
        background: Background,
    ) -> None:
        self.url = ""
        self._bound = 0
        self._host, self._port = config.bound()
        self._scheduler = scheduler
        self._folder = RunFolder(scheduler.config.run_dir)
        self._workers = workers
        self._background = background
        self._at = dict[str, AgentsAt]()
        self._lost = dict[str, str]()
        self._changed = asyncio.Event()
        self._opening: asyncio.Task[None] | None = None
        self._process: Process | None = None

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
            case UnitLost(unit):
                self._at.pop(unit, None)  # its next life has its sessions
            case UnitLeft(unit):
                self._at.pop(unit, None)
                self._lost[unit] = "it is not wanted any more"
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
        assert process.stdin is not None
        process.stdin.close()
        try:
            async with asyncio.timeout(END_LIMIT_S):
                await process.wait()
        except TimeoutError:
            process.kill()
            await process.wait()

    async def _open(self) -> None:
        before = AgentsFile.read(self._folder.agents_path)
        await self._look()  # before the first request
        await self._start(self._port or (before.port if before else 0))
        self._background.start(self._keep(), "the run's address")

    async def _start(self, port: int) -> None:
        keys = self._scheduler.keys
        assert keys is not None
        path = self._folder.log_path(_LOG)
        log = own_file(str(path), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-P",
                "-m",
                "areal_sc.agents.router",
                stdin=PIPE,
                stdout=PIPE,
                stderr=log,
                env=os.environ | agent_environment(os.environ),
                start_new_session=True,
            )
        finally:
            os.close(log)
        self._process = process
        secret = keys.sessions_secret
        routes = Routes(self._at, self._lost)
        await self._tell(RouterStart(secret.hex(), self._host, port, not self._port, routes))
        if (opened := await _heard(process)) is None:
            what = f"the process of the run's address did not come up in {START_LIMIT_S:g} s"
            raise WorkerStartError.with_log(what, path, log_tail(path))
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
            await first_of(process.wait(), self._changed.wait())
            if process.returncode is not None:
                how = exit_text(process.returncode)
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
            await self._tell(Routes(self._at, self._lost))

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

    async def _tell(self, words: RouterStart | Routes) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(msgspec.json.encode(words) + b"\n")
            await self._process.stdin.drain()
        except (BrokenPipeError, ConnectionResetError):
            pass  # it has ended: who looks after it notices


async def _heard(process: Process) -> RouterStarted | None:
    """What the process says when it listens; None: nothing in time."""
    assert process.stdout is not None
    try:
        async with asyncio.timeout(START_LIMIT_S):
            while line := await process.stdout.readline():
                if found := re.search(re.escape(SAYS) + rb"(.*)\n", line):
                    return msgspec.json.decode(found[1], type=RouterStarted)
    except TimeoutError:
        process.kill()
    return None
