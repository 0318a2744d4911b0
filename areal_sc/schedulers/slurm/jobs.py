"""The jobs that lend a run its nodes.

    begin        within an allocation a step of it starts; else a job is submitted for each kind of
                 nodes, or one of which they are components; none if SLURM refuses any of them
    submit       one more: a further node, or one in the place of a lost node
    end_one      a node is given back
    end          what agents, which have been told, do not end by themselves is cancelled

consumes     looks at all jobs together, which are few: slurmctld serves a whole cluster
waits for    nothing, but for the end
unblocked by SLURM, or a limit

Each job is noted in the run's folder before it is submitted. So the next start of a killed script
takes over those that wait, and never submits one twice.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from areal_sc.config.schema import SchedulerConfig
from areal_sc.config.slurm_jobs import (
    JobPlan,
    job_plans,
    merged_plan,
    submissions,
    submitted_id,
)
from areal_sc.config.slurm_script import JOIN_SECRET, RESTART_COUNT, job_script
from areal_sc.errors import ConfigError, SchedulerSilent, WorkerStartError
from areal_sc.ids import random_id
from areal_sc.log import log_tail
from areal_sc.process import exit_text
from areal_sc.run_folder import RunFolder
from areal_sc.schedulers.joining import JoinServer
from areal_sc.schedulers.slurm import commands
from areal_sc.schedulers.slurm.commands import JobState
from areal_sc.schedulers.slurm.ending import end_jobs
from areal_sc.schedulers.slurm.job import Job
from areal_sc.schedulers.slurm.jobs_file import (
    NAME_PREFIX,
    JobRecord,
    JobsFile,
    LentRecord,
    RunJobs,
)
from areal_sc.schedulers.slurm.steps import STEPS_LOG, Steps, log_of
from areal_sc.workers.spec import Joining

LOOK_EVERY_S: Final = 10.0
MAX_RESTARTS: Final = 1000
"""Of a job by SLURM, after which its agents are refused."""
FIRST_LOOK_S: Final = 0.5
"""Between looks after a job was submitted; each further one waits longer."""

logger = logging.getLogger(__name__)


class Jobs:
    """Used from several threads.

    Args:
        known: what of an earlier start goes on.
        variables: further environment of agents.
        joins: invites them.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        folder: RunFolder,
        known: RunJobs,
        variables: Mapping[str, str],
        steps: Steps,
        joins: JoinServer,
    ) -> None:
        self._config = config
        self._folder = folder
        self._run_id = known.run_id
        self._file = JobsFile(folder, known)
        self._variables = variables
        self._steps = steps
        self._joins = joins
        self._one_submits = threading.Lock()
        self._is_closed = False
        self._jobs = [
            Job(it.job_id, it.name, it.plan, is_own=it.is_own, was_tried=True) for it in known.jobs
        ]
        for job in self._jobs:
            if job.is_own:
                self._invite(job)
        self._one_looks = threading.Lock()
        self._states: dict[str, JobState] = {}
        self._looked_s = float("-inf")
        self._pause_s = FIRST_LOOK_S

    def begin(self) -> list[Job]:
        """The jobs that the run begins with, those of an earlier start among them.

        Raises: ConfigError: SLURM refuses one, or is not there. SchedulerSilent.
        """
        plans, around = job_plans(self._config.slurm), os.environ.get("SLURM_JOB_ID", "")
        steps = [job for job in self._jobs if not job.is_own]
        if steps or (around and not self._jobs):
            if any(plan.is_component for plan in plans):
                what = "scheduler.slurm.heterogeneous has no effect in job %s, whose nodes are used"
                logger.warning(what, around)
            return steps or [self._begin_step(around, merged_plan(plans))]
        for together in submissions(plans):
            if not self._free([plan.single for plan in together]):
                script = job_script(self._config, self._folder.path, together)
                commands.check_submission(script, self._variables)
        jobs: list[Job] = []
        for together in submissions(plans):
            for _ in range(together[0].num_jobs):
                jobs += self._submit_together([plan.single for plan in together])
        return jobs

    def has(self, job_id: str) -> bool:
        """Whether it is one of the run's, and was not ended."""
        return any(job.job_id == job_id for job in self._jobs)

    def of(self, job_id: str) -> Job:
        """The one of that id, for a node of the run."""
        job = next(job for job in self._jobs if job.job_id == job_id)
        job.is_taken = True
        return job

    def note_lent(self, lent: Sequence[LentRecord]) -> None:
        """The nodes of the run, for its next start. Raises: RunFolderError: a file has failed."""
        self._file.note_lent(lent)

    def _begin_step(self, around: str, plan: JobPlan) -> Job:
        """Raises: ConfigError: the job around the script lacks nodes, or has them in components."""
        if int(os.environ.get("SLURM_HET_SIZE") or 1) > 1:
            raise ConfigError(
                f"the script runs in the heterogeneous job {around}, whose nodes are not used: "
                "start it in a job of one kind of nodes, or outside of any: then "
                "scheduler.slurm.heterogeneous=true asks for nodes that differ"
            )
        nodes = commands.host_names(os.environ.get("SLURM_JOB_NODELIST", ""))[: plan.num_nodes]
        if len(nodes) < plan.num_nodes:
            raise ConfigError(
                f"scheduler.slurm.nodes: expected at most {len(nodes)}, the nodes of job {around}, "
                f"in which the script runs, got {plan.num_nodes}"
            )
        job = Job(around, self._new_name([plan]), plan, is_own=False)
        self._jobs.append(job)
        self._note()
        count = os.environ.get(RESTART_COUNT, "")
        restart = int(count) if count.isdecimal() else 0
        job.step = self._steps.start(job.job_id, job.name, plan, nodes, restart=restart)
        return job

    def _invite(self, job: Job) -> str:
        num_restarts = MAX_RESTARTS if self._config.slurm.requeue else 0
        return self._joins.invite(job.invitation, job.plan.num_nodes, num_restarts)

    def submit(self, plan: JobPlan, on_named: Callable[[Job], None] = lambda job: None) -> Job:
        """A job that waits for its nodes: a new one, or one of an earlier start that nobody has.

        Args:
            on_named: is called before it is submitted, if it is.
        Raises: ConfigError: SLURM refuses it. SchedulerSilent: slurmctld cannot be reached.
            WorkerStartError: the jobs have ended.
        """
        [job] = self._submit_together([plan], on_named)
        return job

    def _submit_together(
        self, plans: Sequence[JobPlan], on_named: Callable[[Job], None] = lambda job: None
    ) -> list[Job]:
        """By one `sbatch`. Arguments and errors as in `submit`."""
        with self._one_submits:
            self._check_open()
            name = self._new_name(plans)
            jobs = self._free(plans) or [Job("", name, plan, is_own=True) for plan in plans]
            for job in jobs:
                job.is_taken = True
                on_named(job)
            if all(job.job_id for job in jobs):
                return jobs
            if not jobs[0].was_tried:
                self._jobs += jobs
                self._note()
            self._submit(jobs)
        return jobs

    def _submit(self, jobs: Sequence[Job]) -> None:
        """All that have one name. Raises: as `submit`."""
        name, were_tried = jobs[0].name, jobs[0].was_tried
        script = job_script(self._config, self._folder.path, [job.plan for job in jobs])
        variables = {**self._variables, JOIN_SECRET: "\n".join(map(self._invite, jobs))}
        submitted = commands.found_job(name) if were_tried else ""
        for job in jobs:
            job.was_tried = True
        try:
            submitted = submitted or commands.submit(script, name, variables)
        except ConfigError:
            for job in jobs:
                self._jobs.remove(job)
            raise
        except SchedulerSilent:
            for job in jobs:
                job.is_taken = False  # whoever asks next finds out what became of it
            raise
        finally:
            for job in jobs:
                job.job_id = job.plan.job_id(submitted)
            self._note()
        with self._one_looks:
            self._pause_s = FIRST_LOOK_S
        for job in jobs:
            logger.info("job=%s name=%s nodes=%d", job.job_id, name, job.plan.num_nodes)

    def _submit_lost(self, lost: Job) -> None:
        """One that slurmctld has lost, by the same name; once, as it may have ended at once.

        Raises: ConfigError.
        """
        with self._one_submits:
            self._check_open()
            if lost.job_id:
                logger.warning("job=%s was lost by slurmctld: it is submitted again", lost.job_id)
            jobs = [job for job in self._jobs if job.name == lost.name]
            for job in jobs:
                job.was_lost, job.job_id = True, ""
            self._note()  # the next start looks for it by its name
            try:
                self._submit(jobs)
            except SchedulerSilent as error:
                logger.warning("job %s is not submitted yet: %s", lost.name, error)
            for job in jobs:
                job.is_taken = True

    def _check_open(self) -> None:
        """Raises: WorkerStartError: it is closed."""
        if self._is_closed:
            raise WorkerStartError("no job is submitted: the scheduler is closed")

    def _free(self, plans: Sequence[JobPlan]) -> list[Job]:
        """One like each of these, of one submission, that nobody has, as far as is known; []: there
        are none.
        """
        names = dict.fromkeys(job.name for job in self._jobs if job.is_own and not job.is_taken)
        for name in names:
            jobs = [job for job in self._jobs if job.name == name]
            have_ended = any(self._known(job).has_ended for job in jobs)
            if [job.plan for job in jobs] == list(plans) and not have_ended:
                return jobs
        return []

    def check_start(self, job: Job, num_joined: int) -> None:
        """Whether all is well with a job not all of whose agents have joined.

        Raises: ConfigError: it will never start. WorkerStartError: it has ended, or agents do not
            join in time, which begins when it runs.
        """
        missing = f"{job.plan.num_nodes - num_joined} agents have not joined"
        state = self._starting_state(job)
        is_lost = not job.job_id or (state.is_forgotten and not job.was_lost)
        if is_lost and job.is_own and not num_joined:
            self._submit_lost(job)
            return
        if state.has_ended:
            why = f" ({state.reason})" if state.reason not in ("", "None") else ""
            raise self._start_error(job, f"{state.state}{why}; {missing}")
        if job.step is not None and (code := job.step.poll()) is not None:
            raise self._start_error(job, f"its step ended with {exit_text(code)}; {missing}")
        job.check_waits(state)
        if num_joined or state.state == "RUNNING":
            job.runs_since_s = job.runs_since_s or time.monotonic()
            limit_s = self._config.startup_timeout_s
            if time.monotonic() > job.runs_since_s + limit_s:
                what = f"{missing} within scheduler.startup_timeout_s={limit_s:g}"
                raise self._start_error(job, what)

    def how_lost(self, job: Job, node: str, age_s: float = LOOK_EVERY_S) -> str | None:
        """How a node of a job ended, in words that follow "its agent ended with"; None: it did not.

        Args:
            node: SLURM's name of it.
            age_s: of the newest look, at most.
        Raises: SchedulerSilent: that is not known now.
        """
        state = self.state(job, age_s)
        if state.has_ended:
            return f"job {job.job_id}: {state.state}"
        if state.state != "RUNNING" or node in state.nodes:  # else a look from before its start
            return None
        return f"its node: SLURM has taken it from job {job.job_id}"

    def is_started_again(self, job: Job, restart: int) -> bool:
        """Whether SLURM has started a job more often than that, or is about to.

        Raises: SchedulerSilent.
        """
        if not (job.is_own and self._config.slurm.requeue):
            return False
        return commands.num_restarts(job.job_id) > restart

    def state(self, job: Job, age_s: float = LOOK_EVERY_S) -> JobState:
        """At most so old. Raises: SchedulerSilent: it is not known now."""
        with self._one_looks:
            if time.monotonic() > self._looked_s + age_s:
                jobs = [it for it in self._jobs if it.job_id and not self._known(it).has_ended]
                self._states |= commands.look_at([it.job_id for it in jobs])
                self._looked_s = time.monotonic()
            return self._known(job)

    def drop(self, job: Job) -> None:
        """None of its nodes is used any more: it ends, if it is the run's own."""
        job.is_dropped = job.is_own
        if job.is_own and job.job_id:
            try:
                commands.cancel([job.job_id])
            except (ConfigError, SchedulerSilent) as error:
                logger.warning("job=%s is not ended yet: %s", job.job_id, error)

    def end_step(self, agent: Joining) -> None:
        """That of an agent whose machine is lost: its `srun` would wait for it, and the job too."""
        try:
            commands.cancel([f"{agent.job}.{agent.step}"])
        except (ConfigError, SchedulerSilent) as error:
            logger.info("step=%s.%d is not ended: %s", agent.job, agent.step, error)

    def end_one(self, job: Job, grace_s: float, *, are_told: bool) -> None:
        """Returns when it has ended, as far as SLURM says so. Arguments as in `end_jobs`."""
        job.is_dropped = True
        if end_jobs([job.name], [], grace_s, are_told=are_told):
            with self._one_submits:
                if job in self._jobs:  # SLURM may have refused to take it once more
                    self._jobs.remove(job)
                self._note()
        else:
            logger.error("job=%s does not end, or that is not known", job.job_id)

    def end(self, grace_s: float, *, are_told: bool) -> bool:
        """Whether all has ended. Arguments as in `end_jobs`."""
        with self._one_submits:
            self._is_closed = True
            names = [job.name for job in self._jobs if job.is_own]
            steps = [(job.job_id, job.name) for job in self._jobs if not job.is_own]
        have_ended = end_jobs(names, steps, grace_s, are_told=are_told)
        if have_ended:
            self._file.delete()
        else:
            limit_s = self._config.orphan_timeout_s
            logger.error("jobs of the run are left; their agents end in %g s", limit_s)
        self._steps.close(have_ended=have_ended)
        return have_ended

    def _starting_state(self, job: Job) -> JobState:
        """As it was lately; looks get rarer."""
        with self._one_looks:
            pause_s = self._pause_s
            if time.monotonic() <= self._looked_s + pause_s:
                return self._known(job)
            self._pause_s = min(2 * pause_s, LOOK_EVERY_S)
        try:
            return self.state(job, pause_s)
        except SchedulerSilent as error:
            logger.warning("job=%s its state is not known: %s", job.job_id, error)
            with self._one_looks:
                self._looked_s = time.monotonic()  # not at once again
            return self._known(job)

    def _known(self, job: Job) -> JobState:
        return self._states.get(job.job_id, JobState("PENDING"))

    def _note(self) -> None:
        """Raises: RunFolderError: it cannot be written. StaleTerm."""
        lending = self._file.lending
        names = {
            it.name for it in self._jobs if it.job_id in lending or not self._known(it).has_ended
        }
        jobs = [it for it in self._jobs if it.name in names]  # components go together
        self._file.note_jobs([JobRecord(it.name, it.plan, it.is_own, it.job_id) for it in jobs])

    def _new_name(self, plans: Sequence[JobPlan]) -> str:
        kinds = "-".join(plan.kind for plan in plans)
        return f"{NAME_PREFIX}{self._run_id}-{kinds}-{random_id()}"

    def _start_error(self, job: Job, what: str) -> WorkerStartError:
        own_log = f"slurm-{submitted_id(job.job_id)}"
        path = self._folder.log_path(own_log if job.is_own else STEPS_LOG)
        # what an agent has said, or the shell that could not start it, tells more than its srun
        joined = {log_of(it, self._folder) for it in self._joins.joined(job.job_id).values()}
        logs = sorted({*self._folder.logs.glob(f"agent-*-{job.job_id}.*.log")} - joined)
        path = next((log for log in logs if log_tail(log)), path)
        return WorkerStartError.with_log(f"SLURM's job {job.job_id}: {what}", path, log_tail(path))
