"""The jobs that lend a run its nodes.

    begin        within an allocation a step of it starts; else a job is submitted for each kind of
                 nodes; none if SLURM refuses any of them
    submit       one more: a further node, or one in the place of a lost node
    end_one      a node is given back
    end          what agents, which have been told, do not end by themselves is cancelled

consumes     looks at all jobs together, which are few: slurmctld serves a whole cluster
waits for    nothing, but for the end
unblocked by SLURM, or a limit

Each job is noted in the run's folder before it is submitted. So the next start of a killed script
takes over those that wait, and never submits one twice.

The run's folder tells the next start of the script what of SLURM the run has.

    .jobs    the jobs, each noted before it is submitted; the nodes, once the run can begin

A job without an id may have been submitted: its name, which no other job has, tells. The file is on
the disk before SLURM is asked for anything, and is deleted when all jobs have ended.
"""

from __future__ import annotations

import hashlib
import logging
import os
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

from msgspec import MsgspecError, json

from areal_sc.config.placement import Purpose
from areal_sc.config.schema import SchedulerConfig
from areal_sc.config.slurm_jobs import JobPlan, job_plans, merged_plan
from areal_sc.config.slurm_script import JOIN_SECRET, RESTART_COUNT, job_script, step_lines
from areal_sc.errors import ConfigError, RunFolderError, SchedulerSilent, WorkerStartError
from areal_sc.ids import random_id
from areal_sc.log import log_tail
from areal_sc.nodes.spec import Joining
from areal_sc.run.run_folder import RunFolder
from areal_sc.schedulers.agent_process import start_beside, wait_or_kill
from areal_sc.schedulers.join_server import JoinServer
from areal_sc.schedulers.open_run import settings_of_agents
from areal_sc.schedulers.slurm import commands
from areal_sc.schedulers.slurm.commands import (
    FORGOTTEN,
    HOPELESS_REASONS,
    JobState,
    end_jobs,
    what_to_change,
)
from areal_sc.system.process import exit_text

logger = logging.getLogger(__name__)

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


LOOK_EVERY_S: Final = 10.0
MAX_RESTARTS: Final = 1000
"""Restarts of a job by SLURM after which its agents are refused."""
FIRST_LOOK_S: Final = 0.5
"""Between looks after a job was submitted; each further one waits longer."""
STEP_END_S: Final = 5.0
"""An `srun` whose step has ended follows it by then."""
STEPS_LOG: Final = "slurm-steps"


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


class Jobs:
    """Used from several threads.

    Args:
        known: what of an earlier start goes on.
        variables: further environment of agents.

    Attributes:
        config, folder: of the run.
        file: what the next start of the script knows of them.
        joins: invites agents.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        folder: RunFolder,
        known: RunJobs,
        variables: Mapping[str, str],
        joins: JoinServer,
    ) -> None:
        self.config = config
        self.folder = folder
        self._run_id = known.run_id
        self.file = JobsFile(folder, known)
        self._variables = variables
        self.joins = joins
        self._steps: list[Step] = []
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
        plans, around = job_plans(self.config.slurm), os.environ.get("SLURM_JOB_ID", "")
        steps = [job for job in self._jobs if not job.is_own]
        if steps or (around and not self._jobs):
            return steps or [self._begin_step(around, merged_plan(plans))]
        for plan in plans:
            if self._free(plan.single) is None:
                script = job_script(self.config, self.folder.path, plan)
                commands.check_submission(script, self._variables)
        return [self.submit(plan.single) for plan in plans for _ in range(plan.num_jobs)]

    def of(self, job_id: str) -> Job | None:
        """The one of that id, for a node of the run; None: it is not the run's, or has ended."""
        job = next((job for job in self._jobs if job.job_id == job_id), None)
        if job is not None:
            job.is_taken = True
        return job

    def _begin_step(self, around: str, plan: JobPlan) -> Job:
        """Raises: ConfigError: the job around the script lacks nodes, or has several kinds."""
        if int(os.environ.get("SLURM_HET_SIZE") or 1) > 1:
            raise ConfigError(
                f"the script runs in the heterogeneous job {around}, whose nodes are not used: "
                "start it in a job of one kind of nodes, or outside of any"
            )
        nodes = commands.host_names(os.environ.get("SLURM_JOB_NODELIST", ""))[: plan.num_nodes]
        if len(nodes) < plan.num_nodes:
            raise ConfigError(
                f"scheduler.slurm.nodes: expected at most {len(nodes)}, the nodes of job {around}, "
                f"in which the script runs, got {plan.num_nodes}"
            )
        job = Job(around, self._new_name(plan), plan, is_own=False)
        self._jobs.append(job)
        self._note()
        count = os.environ.get(RESTART_COUNT, "")
        restart = int(count) if count.isdecimal() else 0
        job.step = self.start_step(job, nodes, restart=restart)
        return job

    def start_step(self, job: Job, nodes: Sequence[str], *, restart: int, before: str = "") -> Step:
        """An agent on each of these nodes of a job: the run's own, or the one around the script.

        Args:
            restart: how often SLURM has started the job again.
            before: a shell command that each node runs first.
        """
        flags = [f"--jobid={job.job_id}", "--overlap", f"--job-name={job.name}"]
        lines = step_lines(self.config, self.folder.path, job.plan, nodes, flags, before)
        restarts = {RESTART_COUNT: str(restart)} if restart else {}
        env = commands.environment({**self._variables, **restarts})
        command = ["bash", "-c", "\n".join(lines)]
        step = start_beside(command, self.folder.log_path(STEPS_LOG), env)
        self._steps.append(step)
        assert step.stdin is not None
        with suppress(BrokenPipeError), step.stdin as pipe:  # who waits for the step learns its end
            pipe.write(f"{self.joins.invite(random_id(), len(nodes), restart)}\n".encode())
        return step

    def close_steps(self, *, have_ended: bool) -> None:
        """Nothing of them is left on this machine.

        Args:
            have_ended: SLURM says so; each `srun` follows.
        """
        for step in self._steps:
            wait_or_kill(step, STEP_END_S if have_ended else 0)

    def _invite(self, job: Job) -> str:
        num_restarts = MAX_RESTARTS if self.config.slurm.requeue else 0
        return self.joins.invite(job.name, job.plan.num_nodes, num_restarts)

    def submit(self, plan: JobPlan, on_named: Callable[[Job], None] = lambda job: None) -> Job:
        """A job that waits for its nodes: a new one, or one of an earlier start that nobody has.

        Args:
            on_named: is called before it is submitted, if it is.
        Raises: ConfigError: SLURM refuses it. SchedulerSilent: slurmctld cannot be reached.
            WorkerStartError: the jobs have ended.
        """
        with self._one_submits:
            self._check_open()
            job = self._free(plan) or Job("", self._new_name(plan), plan, is_own=True)
            job.is_taken = True
            on_named(job)
            if not job.was_tried:
                self._jobs.append(job)
                self._note()
            if not job.job_id:
                self._submit(job)
        return job

    def _submit(self, job: Job) -> None:
        """Raises: the errors of `submit`."""
        script = job_script(self.config, self.folder.path, job.plan)
        variables = {**self._variables, JOIN_SECRET: self._invite(job)}
        found = commands.found_job(job.name) if job.was_tried else ""
        job.was_tried = True
        try:
            job.job_id = found or commands.submit(script, job.name, variables)
        except ConfigError:
            self._jobs.remove(job)
            raise
        except SchedulerSilent:
            job.is_taken = False  # whoever asks next finds out what became of it
            raise
        finally:
            self._note()
        with self._one_looks:
            self._pause_s = FIRST_LOOK_S
        logger.info("job=%s name=%s nodes=%d", job.job_id, job.name, job.plan.num_nodes)

    def _submit_lost(self, lost: Job) -> None:
        """One that slurmctld has lost, by the same name; once, as it may have ended at once.

        Raises: ConfigError.
        """
        with self._one_submits:
            self._check_open()
            if lost.job_id:
                logger.warning("job=%s was lost by slurmctld: it is submitted again", lost.job_id)
            lost.was_lost, lost.job_id = True, ""
            self._note()  # the next start looks for it by its name
            try:
                self._submit(lost)
            except SchedulerSilent as error:
                logger.warning("job %s is not submitted yet: %s", lost.name, error)
            lost.is_taken = True

    def _check_open(self) -> None:
        """Raises: WorkerStartError: it is closed."""
        if self._is_closed:
            raise WorkerStartError("no job is submitted: the scheduler is closed")

    def _free(self, plan: JobPlan) -> Job | None:
        """One like this that nobody has, as far as is known; None: there is none."""
        free = (job for job in self._jobs if job.is_own and not job.is_taken and job.plan == plan)
        return next((job for job in free if not self._known(job).has_ended), None)

    def check_start(self, job: Job, num_joined: int) -> None:
        """Whether all is well with a job not all of whose agents have joined.

        Raises: ConfigError: it will never start. WorkerStartError: it has ended, or agents do not
            join in time, which begins when it runs.
        """
        missing = f"{job.plan.num_nodes - num_joined} agents have not joined"
        state = self._starting_state(job)
        is_lost = not job.job_id or (state.reason == FORGOTTEN and not job.was_lost)
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
            limit_s = self.config.startup_timeout_s
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
        if not (job.is_own and self.config.slurm.requeue):
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
        """Ends the step of a lost machine's agent: its `srun`, and the job, would wait for it."""
        try:
            commands.cancel([f"{agent.job}.{agent.step}"])
        except (ConfigError, SchedulerSilent) as error:
            logger.info("step=%s.%d is not ended: %s", agent.job, agent.step, error)

    def end_one(self, job: Job, grace_s: float, *, are_told: bool) -> None:
        """Returns when SLURM says that it has ended. Arguments: see `end_jobs`."""
        job.is_dropped = True
        if end_jobs([job.name], [], grace_s, are_told=are_told):
            with self._one_submits:
                if job in self._jobs:  # SLURM may have refused to take it once more
                    self._jobs.remove(job)
                self._note()
        else:
            logger.error("job=%s does not end, or that is not known", job.job_id)

    def end(self, grace_s: float, *, are_told: bool) -> bool:
        """Whether all has ended. Arguments: see `end_jobs`."""
        with self._one_submits:
            self._is_closed = True
            names = [job.name for job in self._jobs if job.is_own]
            steps = [(job.job_id, job.name) for job in self._jobs if not job.is_own]
        have_ended = end_jobs(names, steps, grace_s, are_told=are_told)
        if have_ended:
            self.file.delete()
        else:
            limit_s = self.config.orphan_timeout_s
            logger.error("jobs of the run are left; their agents end in %g s", limit_s)
        self.close_steps(have_ended=have_ended)
        return have_ended

    def _starting_state(self, job: Job) -> JobState:
        """The job's cached state; SLURM is polled less and less often."""
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
        lending = self.file.lending
        jobs = [it for it in self._jobs if it.job_id in lending or not self._known(it).has_ended]
        self.file.note(jobs=[JobRecord(it.name, it.plan, it.is_own, it.job_id) for it in jobs])

    def _new_name(self, plan: JobPlan) -> str:
        return f"{NAME_PREFIX}{self._run_id}-{plan.kind}-{random_id()}"

    def _start_error(self, job: Job, what: str) -> WorkerStartError:
        path = self.folder.log_path(f"slurm-{job.job_id}" if job.is_own else STEPS_LOG)
        # what an agent has said, or the shell that could not start it, tells more than its srun
        joined = {log_of(it, self.folder) for it in self.joins.joined(job.job_id).values()}
        logs = sorted({*self.folder.logs.glob(f"agent-*-{job.job_id}.*.log")} - joined)
        path = next((log for log in logs if log_tail(log)), path)
        return WorkerStartError.with_log(f"SLURM's job {job.job_id}: {what}", path, log_tail(path))


def log_of(agent: Joining, folder: RunFolder) -> Path:
    """Where its `srun` writes what it says: each agent of a run has a log of its own."""
    again = f"-{agent.restart}" if agent.restart else ""
    return folder.log_path(f"agent/{agent.node}-{agent.job}.{agent.step}{again}")
