"""What of SLURM a run has, as its folder tells the next start of the script.

    .jobs    the jobs, each noted before it is submitted; the nodes, once the run can begin

A job without an id may have been submitted: its name, which no other job has, tells. The file is on
the disk before SLURM is asked for anything, and is deleted when all jobs have ended.
"""

from __future__ import annotations

import hashlib
import threading
from dataclasses import dataclass, field, replace
from typing import Final

from msgspec import MsgspecError, json

from areal_sc.config.placement import Purpose
from areal_sc.config.schema import SchedulerConfig
from areal_sc.config.slurm_jobs import JobPlan
from areal_sc.errors import RunFolderError
from areal_sc.nodes.spec import Joining
from areal_sc.run.run_folder import RunFolder
from areal_sc.schedulers.open_run import settings_of_agents

NAME_PREFIX: Final = "areal_sc-"


@dataclass(frozen=True)
class JobRecord:
    """A job of the run, or the one that its script runs in.

    Attributes:
        name: of the job, or of the run's steps in it.
        job_id: SLURM's; "": it may not have been submitted.
    """

    name: str
    plan: JobPlan
    is_own: bool
    job_id: str = ""


@dataclass(frozen=True)
class LentRecord:
    """A node of the run, by its newest agent; None: it was on its way, by a job of one node."""

    purpose: Purpose
    agent: Joining | None = None


@dataclass(frozen=True)
class RunJobs:
    """The file's content.

    Attributes:
        run_id: of the keys that the agents have.
        settings: digest of those that the agents go by.
        lent: all nodes; none: the run had not begun, as agents had not joined.
    """

    run_id: str
    settings: str
    jobs: list[JobRecord] = field(default_factory=list)
    lent: list[LentRecord] = field(default_factory=list)

    @property
    def names(self) -> list[str]:
        """Names of the run's own jobs."""
        return [job.name for job in self.jobs if job.is_own]

    @property
    def steps(self) -> list[tuple[str, str]]:
        """Job and name of the run's steps in jobs that are not its own."""
        return [(job.job_id, job.name) for job in self.jobs if not job.is_own]


class JobsFile:
    """Written by the one process that has the run; used from several threads.

    Args:
        known: what an earlier start has left, if it goes on.
    """

    def __init__(self, folder: RunFolder, known: RunJobs) -> None:
        self._folder = folder
        self._known = known
        self._one_writes = threading.Lock()

    @staticmethod
    def read(folder: RunFolder) -> RunJobs | None:
        """What an earlier start has left; None: nothing.

        Raises: RunFolderError: the file is damaged.
        """
        path = folder.jobs_path
        try:
            return json.decode(path.read_bytes(), type=RunJobs)
        except FileNotFoundError:
            return None
        except (OSError, MsgspecError) as error:
            raise RunFolderError(
                f"{path} cannot be read, which says what jobs the run has in SLURM: {error}; end "
                f"them (`squeue --me` shows them: {NAME_PREFIX}…), then delete the file"
            ) from error

    def note(self, **changes: list[JobRecord] | list[LentRecord]) -> None:
        """Fields of `RunJobs` change. Raises: RunFolderError: it cannot be written. StaleTerm."""
        with self._one_writes:
            known = replace(self._known, **changes)  # type: ignore[arg-type]
            self._folder.write_atomic(self._folder.jobs_path, json.encode(known))
            self._known = known

    @property
    def lending(self) -> set[str]:
        """Ids of the jobs that the nodes are of, or were."""
        return {it.agent.job for it in self._known.lent if it.agent}

    def delete(self) -> None:
        """Nothing of the run is left in SLURM."""
        self._folder.jobs_path.unlink(missing_ok=True)


def digest_of(config: SchedulerConfig) -> str:
    """The same for settings with which agents are the same."""
    text = json.encode(settings_of_agents(config), order="deterministic")
    return hashlib.sha256(text).hexdigest()
