"""The jobs of a run that no script has any more, for the command that ends it."""

from __future__ import annotations

from areal_sc.errors import RunFolderError
from areal_sc.run.run_folder import RunFolder
from areal_sc.schedulers.slurm import commands
from areal_sc.schedulers.slurm.ending import end_jobs
from areal_sc.schedulers.slurm.jobs_file import JobsFile
from areal_sc.schedulers.slurm.taken_jobs import GRACE_S


def end_left_jobs(folder: RunFolder, *, are_told: bool) -> list[str]:
    """Returns when SLURM has nothing of the run any more; its files tell of no jobs then.

    Args:
        folder: held.
        are_told: the agents of the run were told to end.
    Returns: ids of the jobs that waited or ran.
    Raises: ConfigError: SLURM's commands are not here. SchedulerSilent: slurmctld does not answer.
        RunFolderError: the jobs do not end, or what the folder says of them is damaged. StaleTerm:
        they are those of another script.
    """
    folder.check_term()
    known = JobsFile.read(folder)
    if known is None:
        return []
    names = [job.name for job in known.jobs if job.is_own]
    around = [job for job in known.jobs if not job.is_own]
    states = commands.look_at([job.job_id for job in around])
    steps = [(job.job_id, job.name) for job in around if not states[job.job_id].has_ended]
    left = list(commands.named_jobs(names))
    if not end_jobs(names, steps, GRACE_S, are_told=are_told):
        raise RunFolderError(
            f"run folder {folder.path}: jobs of its run do not end: {', '.join(names)}; end them "
            "by `scancel --name`"
        )
    folder.check_term()
    for path in (folder.jobs_path, folder.join_path, folder.joined_path):
        path.unlink(missing_ok=True)
    return left
