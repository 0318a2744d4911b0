"""A job that lends a run nodes: one that was submitted for it, or the one that it runs in."""

from __future__ import annotations

import logging
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from areal_sc.config.slurm_jobs import JobPlan
from areal_sc.errors import ConfigError
from areal_sc.nodes.spec import Joining
from areal_sc.run.run_folder import RunFolder
from areal_sc.schedulers.slurm.commands import HOPELESS_REASONS, JobState, what_to_change

STEPS_LOG: Final = "slurm-steps"

logger = logging.getLogger(__name__)

Step = subprocess.Popen[bytes]
"""The `srun` of a step, on this machine."""


@dataclass(eq=False)
class Job:
    """What the run knows of it.

    Attributes:
        job_id: SLURM's.
        name: of the job, or of the steps in it, that are the run's.
        plan: what was asked for.
        is_own: it was submitted for the run, and ends with it.
        is_taken: a node of the run is of it, or is to be.
        was_tried: it may have been submitted, with or without an id.
        was_lost: slurmctld, killed before it had saved the job, has forgotten it.
        is_dropped: the run has ended it.
        step: the first one, in a job that is not the run's own.
        runs_since_s: `time.monotonic()` at which it was first seen running; 0: as far as is known,
            it waits.
        told: what SLURM has said of it last; the expected start changes at any look.
    """

    job_id: str
    name: str
    plan: JobPlan
    is_own: bool
    is_taken: bool = False
    was_tried: bool = False
    was_lost: bool = False
    is_dropped: bool = False
    step: Step | None = None
    runs_since_s: float = 0.0
    told: str = "nothing is known of it yet"

    def check_waits(self, state: JobState) -> None:
        """Logs why it waits, when that has changed.

        Raises: ConfigError: it would wait for ever.
        """
        if HOPELESS_REASONS.fullmatch(state.reason):
            raise ConfigError(
                f"SLURM's job {self.job_id} would wait for ever: {state.reason}{what_to_change()}"
            )
        text = state.state
        if state.state == "PENDING" and state.reason not in ("", "None"):
            text += f", reason {state.reason}, expected start "
            if not self.told.startswith(text) or self.told.endswith("N/A") != (
                state.start == "N/A"
            ):
                what = (self.job_id, self.plan.kind, text + state.start)
                logger.warning("job=%s kind=%s waits for its nodes: %s", *what)
            text += state.start
        self.told = text


def log_of(agent: Joining, folder: RunFolder) -> Path:
    """Where its `srun` writes what it says: each agent of a run has a log of its own."""
    again = f"-{agent.restart}" if agent.restart else ""
    return folder.log_path(f"agent/{agent.node}-{agent.job}.{agent.step}{again}")
