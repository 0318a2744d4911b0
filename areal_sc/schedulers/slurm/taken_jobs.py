"""What an earlier start of the script, which was killed, has left in SLURM.

    .jobs, agents' files ─► who answers, and which jobs have not ended ─► EarlierStart

Jobs that wait go on waiting, and agents that live are taken over with their workers: from another
login node, too. All of that ends, and nothing is taken over, where it was started with other
settings or keys, or where neither an agent lives nor a job of the run's own.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from areal_sc.errors import RunFolderError, SchedulerSilent
from areal_sc.run.run_folder import RunFolder
from areal_sc.schedulers.agent_calls import FoundAgent, find_agents, tell_to_end
from areal_sc.schedulers.slurm import commands
from areal_sc.schedulers.slurm.commands import end_jobs, found_job
from areal_sc.schedulers.slurm.jobs import JobRecord, JobsFile, RunJobs
from areal_sc.transport.security.keys import RunKeys

GRACE_S: Final = 10.0
"""An agent ends its workers in a few seconds."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class EarlierStart:
    """What goes on of it; nothing of all that: the run begins anew.

    Attributes:
        known: what its file tells, without jobs that have ended.
        agents: living ones, of its nodes.
    """

    known: RunJobs
    agents: list[FoundAgent] = field(default_factory=list)


def find_earlier(folder: RunFolder, keys: RunKeys, settings: str) -> EarlierStart:
    """Looks for it; what cannot go on has ended when this returns.

    Args:
        settings: see `RunJobs`.
    Raises: RunFolderError: what it has left cannot be read, or does not end. StaleTerm.
        SchedulerSilent: slurmctld does not say what became of its jobs, and no agent lives.
    """
    new = RunJobs(keys.run_id, settings)
    known = JobsFile.read(folder) or new
    lent = [it.agent for it in known.lent if it.agent]
    agents = find_agents(folder, keys, lent)
    is_like = (known.run_id, known.settings) == (new.run_id, new.settings)
    jobs = _not_ended(_with_ids(known), has_agents=bool(agents))
    if is_like:
        strangers = [agent for agent in agents if not _is_expected(agent, known, jobs)]
        tell_to_end(strangers, keys, folder.term)
        agents = [agent for agent in agents if agent not in strangers]
    if not is_like or not (agents or any(job.is_own for job in jobs)):
        if agents or jobs:
            logger.warning("agents=%d jobs=%d of an earlier start end", len(agents), len(jobs))
        tell_to_end(agents, keys, folder.term)
        if agents or jobs:
            _end(known, folder, are_told=bool(agents))
        return EarlierStart(new)
    logger.info("agents=%d jobs=%d of an earlier start go on", len(agents), len(jobs))
    lent_by = {agent.job for agent in lent}
    ended = [job for job in known.jobs if job.job_id in lent_by and job not in jobs]
    return EarlierStart(RunJobs(new.run_id, settings, [*jobs, *ended], known.lent), agents)


def _with_ids(known: RunJobs) -> list[JobRecord]:
    """The jobs with the ids that SLURM gave those which were being submitted.

    Raises: SchedulerSilent.
    """
    if known.lent:  # all first ones have theirs; a successor that is submitted again is found then
        return known.jobs
    return [job if job.job_id else replace(job, job_id=found_job(job.name)) for job in known.jobs]


def _is_expected(agent: FoundAgent, known: RunJobs, jobs: Sequence[JobRecord]) -> bool:
    lent = [it.agent for it in known.lent if it.agent]
    # others are of jobs whose nodes were on their way
    is_new = agent.joining.job in {job.job_id for job in jobs} - {it.job for it in lent}
    return is_new or agent.place in {(it.job, it.node) for it in lent}


def _not_ended(jobs: Sequence[JobRecord], *, has_agents: bool) -> list[JobRecord]:
    """Jobs that are pending or running, or whose state is unknown.

    Raises: SchedulerSilent: see `find`.
    """
    try:
        # an older areal_sc had jobs such as 17+1: these end by their names, if they have not ended
        ids = [job.job_id for job in jobs if job.job_id.isdecimal()]
        states = commands.look_at(ids, is_patient=not has_agents)
    except SchedulerSilent as error:
        if not has_agents:
            raise
        logger.warning("what became of the run's jobs is not known: %s", error)
        states = {}
    return [job for job in jobs if job.job_id not in states or not states[job.job_id].has_ended]


def _end(known: RunJobs, folder: RunFolder, *, are_told: bool) -> None:
    """Returns when SLURM has nothing of these any more. Raises: RunFolderError: they do not end."""
    if not end_jobs(known.names, known.steps, GRACE_S, are_told=are_told):
        raise RunFolderError(
            f"run folder {folder.path}: jobs of its run do not end: {', '.join(known.names)}; end "
            "them by `scancel --name`"
        )


def end_left_jobs(folder: RunFolder, *, are_told: bool) -> list[str]:
    """Ends the jobs of a run that no script has any more; its files tell of no jobs then.

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
    left = list(commands.named_jobs(known.names))
    for job, name in known.steps:
        commands.steps_of(job, name)  # raises where SLURM cannot be asked
    _end(known, folder, are_told=are_told)
    folder.check_term()
    for path in (folder.jobs_path, folder.join_path, folder.joined_path):
        path.unlink(missing_ok=True)
    return left
