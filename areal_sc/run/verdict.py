"""How a run is, from what its folder says: lives, waits, hangs, is dead, or has ended.

Whether the script lives is told by the lock of the run folder, which is the kernel's, and by
`/proc`; both only on the script's machine. Elsewhere only ages tell.
"""

from __future__ import annotations

import json
import signal
import time
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from areal_sc.errors import RunFolderError
from areal_sc.quantities import short_duration
from areal_sc.run.agent_files import AgentFile, living_agents
from areal_sc.run.run_folder import RunFolder, check_is_run
from areal_sc.run.run_status import PAUSE_END, SCRIPT, PauseWish, RoleStatus, RunStatus, read_status
from areal_sc.system.process import (
    GONE,
    STOP_SIGNALS,
    is_stopped,
    machine_id,
    name_of_stop,
    process_state,
)

STALE_AFTER_S: Final = 15.0
"""The file is written every 2 s; a thread that does not come to it for so long stands still."""
QUIET_S: Final = 30.0
HUNG_S: Final = 600.0
"""Without progress: a run waits, or hangs, if the times before were shorter by these factors, too.
"""
_QUIET_FACTOR: Final = 2
_HUNG_FACTOR: Final = 10
_STOPS: Final = tuple(128 + number for number in STOP_SIGNALS)


class State(StrEnum):
    """The state of a run; `unknown`: it cannot be told from this machine."""

    healthy = "healthy"
    paused = "paused"
    waiting = "waiting"
    hung = "hung"
    dead = "dead"
    finished = "finished"
    ended = "ended"
    interrupted = "interrupted"
    failed = "failed"
    unknown = "unknown"


_WITH_SCRIPT: Final = (State.healthy, State.paused, State.waiting, State.hung, State.unknown)


@dataclass(frozen=True)
class Verdict:
    """How a run is.

    Attributes:
        text: why, and what can be done, in sentences.
        status: what the run has said last; None: nothing that can be read.
        agents: process ids of those that live, by incarnation.
        damage: what cannot be read of its files.
    """

    state: State
    text: str
    status: RunStatus | None
    agents: dict[str, int]
    damage: str = ""

    @property
    def have_workers_ended(self) -> bool:
        """No script has the run any more, nor an agent."""
        return not (self.has_script or self.agents or self.damage)

    @property
    def has_script(self) -> bool:
        """A script has the run, as far as can be told from here."""
        return self.state in _WITH_SCRIPT


def verdict(folder: RunFolder, now: float | None = None) -> Verdict:
    """How the run in a folder is; `now` is Unix time.

    Raises: CommandError: it is not the folder of a run.
    """
    now = time.time() if now is None else now
    check_is_run(folder)
    status, agents, damages = None, list[AgentFile](), []
    try:
        status = read_status(folder.status_path)
    except RunFolderError as error:
        damages.append(str(error))
    try:
        agents = living_agents(folder.path)
    except (RunFolderError, OSError) as error:
        damages.append(str(error))
    state, text = _judged(folder, status, bool(agents), now)
    pids = {agent.incarnation: agent.pid for agent in agents}
    return Verdict(state, text, status, pids, "; ".join(damages))


def _judged(
    folder: RunFolder, status: RunStatus | None, has_agents: bool, now: float
) -> tuple[State, str]:
    is_held = _is_held(folder)  # the kernel's word, where this machine has the folder
    is_here = status is not None and status.machine == machine_id()
    if not is_held and (is_here or status is None or status.end is not None):
        return _ended(folder, status, has_agents, now)
    if status is None:
        return State.unknown, "A script has the folder, but has not said anything that can be read."
    if is_here:
        if is_held and _is_of_another(status, now):
            return State.waiting, (
                f"A script has the folder and resumes the run; what is shown was written "
                f"{short_duration(now - status.written)} ago by process {status.pid}, which has "
                "ended."
            )
        return _living(status, now)
    if not is_held and now - status.written > STALE_AFTER_S:
        return State.unknown, (
            f"Nothing was heard for {short_duration(now - status.written)}: the script on "
            f"{status.host} is dead, stopped, or cut off. {_far(status)}"
        )
    state, text = _living(status, now)
    return state, f"{text} {_far(status)}"


def _is_of_another(status: RunStatus, now: float) -> bool:
    """Whether an earlier script wrote this: the one that has the folder has not yet.

    A process that is seen nowhere, but writes, is in a container of its own.
    """
    is_silent = status.end is not None or now - status.written > 2 * status.every_s
    return is_silent and process_state(status.pid) == GONE


def _far(status: RunStatus) -> str:
    return f"Only ages tell, as it runs on {status.host}; the same command there says more."


def _is_held(folder: RunFolder) -> bool:
    try:
        return folder.is_taken
    except OSError:  # not readable for us, or a file system without locks: ages tell
        return False


def _living(status: RunStatus, now: float) -> tuple[State, str]:
    silent_s = now - status.written
    is_here = status.machine == machine_id()
    if is_here and is_stopped(status.pid):
        return State.hung, (
            f"Process {status.pid} is stopped (SIGSTOP, Ctrl-Z or a debugger) since about "
            f"{short_duration(silent_s)}; `kill -CONT {status.pid}` lets it go on."
        )
    if silent_s > STALE_AFTER_S:
        return State.hung, (
            f"Process {status.pid} lives, but has not written for {short_duration(silent_s)}: it "
            f"hangs in a call that holds the interpreter; `py-spy dump --pid {status.pid}` says "
            "where."
        )
    late = [name for name, role in status.roles.items() if now - role.looked > STALE_AFTER_S]
    if late and status.roles[late[0]].workers:
        return State.hung, (
            f"The event loop of its controllers stands still ({', '.join(late)}): no worker hears "
            "of anything."
        )
    if status.wishes.pause is not None:
        return State.paused, _paused(status, status.wishes.pause, now)
    quiet_s, before_s = now - status.progressed, status.longest_quiet_s
    if status.tenants and not any(tenant.num_waiting for tenant in status.tenants):
        return State.healthy, "It serves, and no client waits for anything."
    if quiet_s > QUIET_S and any(role.waits_outside for role in status.roles.values()):
        return State.waiting, (
            f"Nothing was finished for {short_duration(quiet_s)}; its episodes wait for agents "
            "outside, as long as these take."
        )
    if quiet_s > max(HUNG_S, _HUNG_FACTOR * before_s):
        return State.hung, (
            f"Nothing was finished for {short_duration(quiet_s)}; before, that took "
            f"{short_duration(before_s)} at most."
        )
    restarts = (role.restart for role in status.roles.values())
    is_restarting = any(it is not None and it.ended is None for it in restarts)
    if quiet_s > max(QUIET_S, _QUIET_FACTOR * before_s) or is_restarting:
        return State.waiting, f"Nothing was finished for {short_duration(quiet_s)}."
    return State.healthy, f"Something was finished {short_duration(quiet_s)} ago."


def _paused(status: RunStatus, wish: PauseWish, now: float) -> str:
    roles = status.roles.values()
    num_running = sum(role.num_running or 0 for role in roles)
    waits = [{it.what for it in role.waits if it.who == SCRIPT} for role in roles]
    # an evaluation; while another role works, it is one beside a step
    is_waiting = any(waits) and all(PAUSE_END in of_role for of_role in waits if of_role)
    is_still = (is_waiting or any(role.is_held for role in roles)) and not num_running
    runs = f"{num_running} groups run" if num_running else "a step is in progress"
    return (
        f"By {wish.by}, {short_duration(now - wish.since)} ago. "
        f"{'Nothing is computed' if is_still else f'It still ends what goes on: {runs}'}; "
        "`resume` lets it go on."
    )


def _ended(
    folder: RunFolder, status: RunStatus | None, has_agents: bool, now: float
) -> tuple[State, str]:
    if folder.summary_path.exists():
        try:
            steps = json.loads(folder.summary_path.read_bytes())["num_steps"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            return State.finished, f"summary.json is there, but cannot be read: {error!r}."
        return State.finished, f"All of its {steps} steps are done, and the model is written."
    end = None if status is None else status.end
    next_start = _next_start(folder)
    if end is not None:
        ago = f"{short_duration(now - end.at)} ago"
        if end.exit_code == 0:
            return State.ended, f"The script ended without an error, {ago}. {next_start}"
        if end.exit_code in _STOPS:
            by = name_of_stop(signal.Signals(end.exit_code - 128))
            return State.interrupted, f"It was stopped by {by}, {ago}. {next_start}"
        return State.failed, (
            f"It ended with exit code {end.exit_code}, {ago}: {end.cause}. {next_start}"
        )
    if status is None:
        return State.dead, f"No script has the folder. {next_start}"
    silent_s = now - status.written
    return State.dead, (
        f"Process {status.pid} is gone without a word since about {short_duration(silent_s)}, as "
        f"after kill -9. {_orphans(status, has_agents, now)} {next_start}"
    )


def _orphans(status: RunStatus, has_agents: bool, now: float) -> str:
    if not has_agents:
        return "Its workers have ended, too."
    left_s = status.written + status.orphan_timeout_s - now
    if left_s <= 0:
        return "Its workers should have ended by themselves."
    return f"Its workers may live for {short_duration(left_s)} more (scheduler.orphan_timeout_s)."


def _next_start(folder: RunFolder) -> str:
    pause = " It is paused, and stays so until `resume`." if folder.pause_path.exists() else ""
    try:
        return f"The same command would {folder.decide().value}.{pause}"
    except RunFolderError as error:
        return f"The same command would be refused: {error}."


def steps_of(roles: dict[str, RoleStatus]) -> tuple[int, int | None]:
    """Trained steps, and those of the whole run."""
    trained = [role.version for role in roles.values() if role.lineage is not None]
    totals = [role.total_steps for role in roles.values() if role.total_steps]
    return max(trained, default=0), max(totals, default=None)
