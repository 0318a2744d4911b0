"""`stop RUN_DIR`: ends a run from outside, from any machine that sees its folder."""

from __future__ import annotations

import argparse
import asyncio
import math
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Final

from areal_sc.commands.arguments import add_run_dir, run_folder
from areal_sc.errors import TransportError, WaitTimeout
from areal_sc.nodes.joining import read_address
from areal_sc.nodes.spec import STOP_RUN
from areal_sc.run.agent_files import AgentFile, living_agents
from areal_sc.run.run_folder import RunFolder
from areal_sc.run.run_owner import Owner
from areal_sc.schedulers.agent_calls import UnseenAgents
from areal_sc.schedulers.slurm.taken_jobs import end_left_jobs
from areal_sc.system.telling import Outlet
from areal_sc.transport.rpc.codec import ANY_INCARNATION
from areal_sc.transport.rpc.transport import ZmqTransport
from areal_sc.transport.security.curve import CurveClient
from areal_sc.transport.security.keys import RunKeys

TIMEOUT_S: Final = 300.0
CALL_LIMIT_S: Final = 10.0
POLL_S: Final = 0.1
ASK_AGAIN_S: Final = 1.0
"""Between calls of a script that has the folder, and does not listen yet."""

COMMAND: Final = dict(
    help="end a run",
    description="Ends a run as Ctrl-C in its script does; where its script is gone, ends the "
    "workers and the jobs that it has left. Returns when nothing of the run is left. Works on "
    "any machine that sees the run's folder and reaches its script and its workers.",
    epilog="Exit code 0: nothing of the run is left; 2: this is not the folder of a run, or "
    "its script is gone and has left jobs, and SLURM's commands are not here; 3 or 11: another "
    "script has taken the folder meanwhile, and is left alone; 4: its keys or its workers "
    "cannot be reached; 9: it has not ended in time.",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments."""
    add_run_dir(parser)
    parser.add_argument(
        "--timeout",
        type=_seconds,
        default=TIMEOUT_S,
        metavar="SECONDS",
        help=f"how long to wait for the end (default {TIMEOUT_S:g})",
    )


def run(arguments: argparse.Namespace) -> None:
    """Raises: CommandError: this is not the folder of a run. TransportError: its keys cannot be
    read, or its agents not be reached. RunFolderError: another script has taken its folder since.
    ConfigError: its script has left jobs, and SLURM's commands are not here. SchedulerSilent.
    WaitTimeout: it has not ended in time."""
    folder = run_folder(arguments)
    run, owner = _LivingRun(folder), Owner.read(folder.path)
    who = "its script" if owner is None else f"process {owner.pid} on {owner.host}"
    if folder.is_taken and owner is not None and owner.go_on():
        _say(f"{who} was stopped by a signal, and goes on now")
    had_agents, unseen = run.has_agents, UnseenAgents(folder)
    run.ask()
    if run.is_heard:
        _say(f"asked {who} to stop, as Ctrl-C does; waiting for its end")
    elif had_agents:
        _say("no script of the run is heard; its workers end")
    elif folder.is_taken:
        _say(f"{who} has no workers, or none any more; waiting for its end")
    has_lived = run.is_heard or had_agents or folder.is_taken
    run.wait(arguments.timeout)
    with folder:  # a script that began now would lose what is ended and deleted here
        folder.hold(Owner.read(folder.path) if run.is_heard else owner)
        ended = [] if run.is_heard else unseen.end(arguments.timeout)
        if ended:
            _say(f"agents that were left of it have ended: on {', '.join(ended)}")
        cancelled = end_left_jobs(folder, are_told=had_agents)
        if cancelled:
            _say(f"jobs that were left of it are cancelled: {', '.join(cancelled)}")
    if unseen.silent:
        _say(
            f"agents on {', '.join(unseen.silent)} do not answer; if they live, they end by "
            "themselves after scheduler.orphan_timeout_s"
        )
    elif has_lived or ended or cancelled:
        _say("stopped: nothing of the run is left")
    else:
        how = "is finished" if folder.summary_path.exists() else "has ended before it was finished"
        _say(f"nothing to stop: the run in {folder.path} {how}")


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 <= seconds < math.inf:
        raise argparse.ArgumentTypeError(f"expected a number of seconds, got {text!r}")
    return seconds


class _LivingRun:
    """What lives of a run: it is asked to end until a script hears that, and waited for.

    A script whose agents are on other machines is asked itself: its jobs may still wait. Of agents
    one is enough, as each of them would tell the script, for which a second time is an order;
    unless it has just died, which they do not know yet.

    Attributes:
        is_heard: a script has been told.
    """

    def __init__(self, folder: RunFolder) -> None:
        self.is_heard = False
        self._folder = folder
        self._has_lock = folder.is_taken  # else it may be the kernel's of another machine
        self._asked: set[str] = set()
        self._asked_s = float("-inf")
        # they take their files away just before they end
        files = living_agents(folder.path)
        self._processes = [process for file in files if (process := file.process())]

    @property
    def has_agents(self) -> bool:
        return bool(living_agents(self._folder.path))

    def ask(self) -> None:
        """Asks those that were not asked yet.

        Raises: TransportError: the keys cannot be read, or an agent does not answer.
        """
        if self.is_heard:
            return
        living, script = living_agents(self._folder.path), self._script_address()
        agents = [agent for agent in living if agent.address not in self._asked]
        if agents or script:
            self.is_heard = asyncio.run(self._ask(script, agents))

    def wait(self, timeout_s: float) -> None:
        """Waits for the end of script and agents, and asks those that come.

        Raises: WaitTimeout: something of the run still lives. TransportError: see `ask`.
        """
        give_up_s = time.monotonic() + timeout_s
        while self._is_left():
            if time.monotonic() > give_up_s:
                agents, is_taken = living_agents(self._folder.path), self._folder.is_taken
                left = [f"agent {agent.pid} on {agent.host}" for agent in agents]
                owner = Owner.read(self._folder.path) if is_taken or not agents else None
                if owner is not None:
                    left.append(str(owner))
                raise WaitTimeout(
                    f"the run in {self._folder.path} has not ended within {timeout_s:g} s: "
                    f"{'; '.join(left)}; wait for it, or end these processes by `kill`"
                )
            time.sleep(POLL_S)
            self.ask()

    def _is_left(self) -> bool:
        folder = self._folder
        is_far = self.is_heard and not self._has_lock  # it deletes its address when it ends
        return (
            bool(living_agents(folder.path))
            or folder.is_taken
            or not all(process.has_ended for process in self._processes)
            or (is_far and folder.join_path.exists())
        )

    def _script_address(self) -> str:
        """Where the script is to be asked now; "": it is not."""
        address = read_address(self._folder.join_path)
        is_first = address not in self._asked
        is_late = time.monotonic() > self._asked_s + ASK_AGAIN_S
        return address if is_first or (is_late and self._folder.is_taken) else ""

    async def _ask(self, script: str, agents: Sequence[AgentFile]) -> bool:
        """Whether a script hears it. Raises: the errors of `ask`."""
        if not agents and not self._folder.keys_path.exists():
            return False  # the script begins, or has ended
        keys = RunKeys.read(self._folder.keys_path)
        transport = ZmqTransport(client=CurveClient.of_controller(keys))
        try:
            if script:
                self._asked.add(script)
                self._asked_s = time.monotonic()
                key = keys.controller.public.decode()
                place = script, "scheduler", ANY_INCARNATION
                connection = transport.connect(*place, server_key=key)
                with suppress(TransportError):
                    return await connection.call(STOP_RUN, None, timeout_s=CALL_LIMIT_S)
            # agents take it for alive for some seconds more; so each is to end by itself
            is_gone = not self._folder.is_taken and (bool(script) or self._has_died)
            for agent in agents:
                self._asked.add(agent.address)
                if await self._ask_agent(transport, agent) and not is_gone:
                    return True
        finally:
            await transport.close()
        return False

    @property
    def _has_died(self) -> bool:
        """Whether the script is known to have ended: it was on this machine."""
        owner = Owner.read(self._folder.path)
        return owner is not None and not owner.may_live

    async def _ask_agent(self, transport: ZmqTransport, agent: AgentFile) -> bool:
        """Whether it hears a script. Raises: TransportError: it does not answer."""
        connection = transport.connect(
            agent.address, "agent", agent.incarnation, server_key=agent.key
        )
        try:
            return await connection.call(STOP_RUN, None, timeout_s=CALL_LIMIT_S)
        except TransportError as error:
            if agent not in living_agents(self._folder.path):
                return False
            raise TransportError(
                f"the agent of the run does not answer at {agent.address}: {error}; end it "
                f"by `kill {agent.pid}` on {agent.host}, and its workers end with it"
            ) from error


def _say(text: str) -> None:
    """Nobody may read it, or the disk be full: the run is ended all the same."""
    outlet = Outlet(sys.stdout)
    outlet.write(f"{text}\n")
    outlet.give_up_rest()
