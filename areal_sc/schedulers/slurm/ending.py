"""The end of a run's jobs, and of its steps in jobs that go on.

consumes     looks at them, by their names: so also at a job whose id nobody knows
waits for    their end
unblocked by SLURM, or `END_LIMIT_S` after the grace
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import Final

from areal_sc.errors import SchedulerSilent
from areal_sc.schedulers.slurm import commands

END_LIMIT_S: Final = 60.0
"""After the grace; what is left then is left to its agents."""
_LOOK_S: Final = 0.2

logger = logging.getLogger(__name__)


def end_jobs(
    names: Sequence[str],
    steps: Sequence[tuple[str, str]],
    grace_s: float,
    *,
    are_told: bool,
) -> bool:
    """Returns when SLURM says that all has ended; False: it has not, or that is not known.

    Args:
        names: of jobs.
        steps: the job and the name of each step.
        grace_s: after which agents that were told are asked by SIGTERM, or, in a job that goes on,
            killed.
        are_told: all agents were told to end.
    """
    begun_s, num_cancels, is_any_cancelled = time.monotonic(), 0, False
    while time.monotonic() < begun_s + grace_s + END_LIMIT_S:
        is_late = time.monotonic() > begun_s + grace_s
        try:
            states = commands.named_jobs(names)
            running = [it for job, name in steps for it in commands.steps_of(job, name)]
            # slurmctld may hear late of the end of jobs whose agents were told; what had to be
            # cancelled was told nothing, as a job that began meanwhile
            is_known = are_told and is_late and not is_any_cancelled
            are_ending = is_known and set(states.values()) <= {"COMPLETING"}
            if not running and (not states or are_ending):
                return True
            waiting = [job for job, state in states.items() if state == "PENDING"]
            if waiting:
                commands.run_command(["scancel", "--state=PENDING", *waiting])
            elif (num_cancels == 0 and (is_late or not are_told)) or (num_cancels == 1 and is_late):
                # without a signal the tasks of a step are killed at once; a job's are asked
                signal = [] if is_late else ["--signal=TERM"]
                for words in ([*states], [*signal, *running] if running else []):
                    if words:
                        commands.run_command(["scancel", *words])
                num_cancels += 1
                is_any_cancelled |= not set(states.values()) <= {"COMPLETING"}
        except SchedulerSilent as error:
            logger.warning("the end of the run's jobs is not known: %s", error)
        time.sleep(_LOOK_S)
    return False
