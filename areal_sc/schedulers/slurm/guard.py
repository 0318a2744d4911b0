"""A small process beside the script: when that was killed, it cancels the jobs that are left.

consumes     the end of the script, which closes a pipe
waits for    it; then for the next start of the script, for `orphan_timeout_s`, as agents do
unblocked by the script, the next one, the end of the run by the command `stop`, or the clock; then
             by a slurmctld that answers, `PATIENCE_S` at most

A job that runs ends with its agents, unless the node was lost that its script ran on. One that
waits would start at any time, for nobody.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import time
from typing import Final

from msgspec import json

from areal_sc.errors import ArealError, RunFolderError
from areal_sc.log import setup_logging
from areal_sc.run.run_folder import RunFolder
from areal_sc.run.run_owner import Owner
from areal_sc.schedulers.agent_process import agent_environment, start_beside
from areal_sc.schedulers.slurm import commands
from areal_sc.schedulers.slurm.jobs import JobsFile
from areal_sc.system.process import leave_signals_to_script, name_process
from areal_sc.system.waiting import polled

PATIENCE_S: Final = 3600.0
"""For a slurmctld that is away; jobs of which it tells later start for nobody, and end so."""
_LOOK_S: Final = 5.0
_PAUSE_S: Final = 3.0
_LONGEST_PAUSE_S: Final = 60.0

logger = logging.getLogger(__name__)


class JobsGuard:
    """The process, as the script has it.

    Args:
        folder: of the run, which this process has opened.
    """

    def __init__(self, folder: RunFolder, orphan_timeout_s: float) -> None:
        owner = Owner.read(folder.path)
        assert owner is not None, "this process"
        words = str(folder.path), json.encode(owner).decode(), str(orphan_timeout_s)
        command = [sys.executable, "-P", "-m", "areal_sc.schedulers.slurm.guard", *words]
        env = commands.environment(agent_environment(os.environ))
        self._process = start_beside(command, folder.log_path("guard"), env)

    def close(self) -> None:
        """Nothing is left to cancel."""
        self._process.kill()
        self._process.communicate()

    def leave(self) -> None:
        """It does as if this process had ended."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.returncode = 0  # else Popen complains of a child that is left


def main() -> None:
    """The guard as a process."""
    run_dir, owner, orphan_timeout_s = sys.argv[1:]
    leave_signals_to_script()
    setup_logging("guard")
    name_process("guard")
    sys.stdin.read()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # there is no script any more
    watch(RunFolder(run_dir), json.decode(owner, type=Owner), float(orphan_timeout_s))


def watch(folder: RunFolder, gone: Owner, orphan_timeout_s: float) -> None:
    """Returns when the jobs are the next start's, or cancelled.

    Args:
        gone: the script.
    """
    polled(lambda: not _are_left(folder, gone), orphan_timeout_s, _LOOK_S)
    give_up_s, pause_s = time.monotonic() + PATIENCE_S, _PAUSE_S
    while time.monotonic() < give_up_s:
        try:
            if not _cancel(folder, gone):
                return
        except (ArealError, OSError) as error:
            logger.warning("jobs are not cancelled yet: %s", error)
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)


def _are_left(folder: RunFolder, gone: Owner) -> bool:
    """Whether there may be jobs for the next start of the script, which has not come."""
    try:
        return folder.jobs_path.exists() and _is_newest(folder, gone)
    except (RunFolderError, OSError) as error:
        logger.warning("the run folder is not read: %s", error)
        return True


def _is_newest(folder: RunFolder, gone: Owner) -> bool:
    """Whether the script was not started again.

    Terms alone do not tell: they begin again in a folder that was deleted and made anew.
    """
    return Owner.read(folder.path) == gone


def _cancel(folder: RunFolder, gone: Owner) -> bool:
    """Whether there may be more to cancel.

    Raises: SchedulerSilent. ConfigError: SLURM refuses. RunFolderError, OSError: the folder is not
        read.
    """
    known = JobsFile.read(folder)
    if known is None or not _is_newest(folder, gone):
        return False
    states = commands.named_jobs(known.names)
    left = [job for job, state in states.items() if state != "COMPLETING"]
    if left and _is_newest(folder, gone):  # SLURM may have taken long to answer
        logger.warning("jobs=%s are cancelled: their script is gone", left)
        commands.cancel(left)
    # a slurmctld that answers again may have forgotten that, or have a submission still before it
    return bool(left) or commands.is_just_back()


if __name__ == "__main__":
    main()
