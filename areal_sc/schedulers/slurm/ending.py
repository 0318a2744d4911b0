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

from areal_sc.errors import ConfigError, SchedulerSilent
from areal_sc.schedulers.slurm import commands

END_LIMIT_S: Final = 60.0
"""After the grace; what is left then is left to its agents."""
CANCEL_AGAIN_S: Final = 10.0
"""A slurmctld that dies may have forgotten by its next start what it was told last."""
_LOOK_S: Final = 0.2
_LOOK_AGAIN_S: Final = 1.0
"""After a look that has told nothing, or not enough."""

logger = logging.getLogger(__name__)


def end_jobs(
    names: Sequence[str],
    steps: Sequence[tuple[str, str]],
    grace_s: float,
    *,
    are_told: bool,
) -> bool:
    """Returns when SLURM says that all has ended; False: it has not, or that is not known.

    A slurmctld that gives no answer, or refuses, is asked again.

    Args:
        names: of jobs.
        steps: the job and the name of each step.
        grace_s: after which agents that were told are asked by SIGTERM, or, in a job that goes on,
            killed.
        are_told: all agents were told to end.
    """
    begun_s, is_any_cancelled, num_ends = time.monotonic(), False, 0
    grace_end_s = begun_s + grace_s
    cancel_s = grace_end_s if are_told else begun_s  # when what runs is cancelled next
    while time.monotonic() < grace_end_s + END_LIMIT_S:
        is_late = time.monotonic() > grace_end_s
        try:
            states = commands.named_jobs(names)
            running = [it for job, name in steps for it in commands.steps_of(job, name)]
            # slurmctld may hear late of the end of jobs whose agents were told; what had to be
            # cancelled was told nothing, as a job that began meanwhile
            is_known = are_told and is_late and not is_any_cancelled
            are_ending = is_known and set(states.values()) <= {"COMPLETING"}
            has_ended = not running and (not states or are_ending)
            num_ends = num_ends + 1 if has_ended else 0
            # a slurmctld that answers again may still have a submission before it
            if num_ends >= (2 if commands.is_just_back() else 1):
                return True
            waiting = [job for job, state in states.items() if state == "PENDING"]
            if waiting:
                commands.run_command(["scancel", "--state=PENDING", *waiting])
            elif not has_ended and time.monotonic() >= cancel_s:
                # without a signal the tasks of a step are killed at once; a job's are asked
                signal = [] if is_late else ["--signal=TERM"]
                alive = [job for job, state in states.items() if state != "COMPLETING"]
                is_any_cancelled |= bool(alive)  # also if no answer tells so
                for words in (alive, [*signal, *running] if running else []):
                    if words:
                        commands.run_command(["scancel", *words])
                cancel_s = max(grace_end_s, time.monotonic() + CANCEL_AGAIN_S)
        except (ConfigError, SchedulerSilent) as error:
            logger.warning("the end of the run's jobs is not known: %s", error)
            time.sleep(_LOOK_AGAIN_S)
        time.sleep(_LOOK_AGAIN_S if num_ends else _LOOK_S)
    return False
