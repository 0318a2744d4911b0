"""A node that a job lends, and how its agent, or another machine, takes the place of a lost one.

    renew ─► a step on the node ──────────────► the new agent has joined
               │ its job waits for the node, or its first agent has not joined yet
               │ SLURM has put the job back to those that wait: its new agents join by themselves
               │ SLURM has lost the node
               └► another node of the allocation, else a job of one node ─► its agent has joined

consumes     agents that join, and looks at the node's job
waits for    the agent, `startup_timeout_s` at most from when its job runs; for the job, and for a
             slurmctld that does not answer, without a limit
unblocked by the agent
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping, Set
from dataclasses import dataclass, field
from typing import Final

from areal_sc.config.placement import Purpose
from areal_sc.config.schema import SchedulerConfig
from areal_sc.config.slurm_jobs import JobPlan
from areal_sc.errors import ConfigError, SchedulerSilent, WorkerStartError
from areal_sc.log import log_tail
from areal_sc.nodes.spec import Joining, NodeFacts
from areal_sc.run.run_folder import RunFolder
from areal_sc.run.run_status import Wait
from areal_sc.schedulers.base import Node
from areal_sc.schedulers.slurm import commands
from areal_sc.schedulers.slurm.jobs import LOOK_EVERY_S, STEPS_LOG, Job, Jobs, Step, log_of
from areal_sc.system.process import exit_text

_NO_ANSWER: Final = frozenset(number & 0xFF for number in (1001, 1002, 1003, 1004, 5004))
"""`srun` that does not reach a node ends with the last byte of SLURM's number of the error."""
_WANTED_ENDS: Final = frozenset(("CANCELLED", "DEADLINE", "TIMEOUT"))
"""States of jobs that someone has ended, or whose time is over."""
MAX_UNREACHED: Final = 2
"""Steps that did not reach a node, which slurmctld takes for a good one, until that is given up."""

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class LentNode:
    """Where a node of the run is.

    Attributes:
        node: as controllers see it; the same one, whatever machine it is.
        name: SLURM's, of the machine; "": there is none yet.
        job: the one that lends it.
        agent: the newest one; None: none has joined yet.
        is_given_back: nobody needs it any more.
        incarnations: of all its agents.
    """

    node: Node
    name: str
    job: Job
    agent: Joining | None
    one_renews: threading.Lock = field(default_factory=threading.Lock)
    renewal: Renewal | None = None
    is_given_back: bool = False
    incarnations: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.incarnations.add(self.node.facts.incarnation)

    def wait_for(self, job: Job) -> None:
        """The node is on its way, by that job."""
        since = time.time() if self.node.coming is None else self.node.coming.since
        what = f"SLURM's job {job.job_id or job.name}: {job.told}"
        self.node.coming = Wait("a node", what, since)


def lent_nodes(job: Job, agents: Mapping[str, Joining], folder: RunFolder) -> list[LentNode]:
    """The nodes of a job, once all of its agents have joined, in the order of their names.

    Raises: ConfigError: one cannot be used.
    """
    purposes = [purpose for purpose, number in job.plan.shares.items() for _ in range(number)]
    lent = []
    for (name, agent), purpose in zip(sorted(agents.items()), purposes, strict=True):
        facts = usable_facts(agent)
        check_devices(facts.num_devices, job.plan, agent.node)
        node = Node(facts, log_of(agent, folder), purpose=purpose)
        lent.append(LentNode(node, name, job, agent))
    return lent


def coming_node(job: Job, folder: RunFolder) -> LentNode:
    """The node of a job of one, which is on its way."""
    facts = NodeFacts(
        host=job.name,
        token=job.name,
        num_devices=job.plan.request.gpus_per_node,
        memory_root="",
        address="",
        incarnation="",
    )
    [purpose] = job.plan.shares
    lent = LentNode(Node(facts, folder.log_path(STEPS_LOG), purpose=purpose), "", job, None)
    lent.wait_for(job)
    return lent


class Renewal:
    """Brings a new agent in the place of one that is lost: `come_closer` until `take` takes it.

    The first one of a node comes in the same way.

    Attributes:
        job: the agent will belong to it.
    """

    def __init__(self, lent: LentNode, jobs: Jobs) -> None:
        self._lent = lent
        self._jobs = jobs
        self._name = lent.name  # where the agent is to be; "": in the job, wherever that is
        self.job = lent.job
        self._step: Step | None = None
        self._waits_for_job = False  # it brings its agents by itself
        self._step_s = self._looked_s = 0.0
        self._num_unreached = 0

    def take(self, known: Set[str]) -> bool:
        """Whether the new agent has joined: it is the node's by then.

        Args:
            known: incarnations of the agents that nodes have, or have had.
        Raises: ConfigError: its node cannot be used.
        """
        joined = self._jobs.joins.joined(self.job.job_id).values()
        for agent in sorted(joined, key=lambda agent: agent.node != self._name):
            is_elsewhere = self._step is not None and agent.node != self._name
            if not is_elsewhere and usable_facts(agent).incarnation not in known:
                self._take(agent)
                return True
        return False

    def come_closer(self, used: Set[str]) -> None:
        """Does what is to be done now so that the agent joins.

        Args:
            used: names of the nodes of the run.
        Raises: WorkerStartError: it did not come up. ConfigError: SLURM refuses another node.
        """
        try:
            if self._step is not None:
                self._look_at_step(self._step, used)
            elif self._waits_for_job or self.job is not self._lent.job:
                self._jobs.check_start(self.job, 0)
                self._lent.wait_for(self.job)
            elif self._is_time_to_look():
                self._begin(used)
        except SchedulerSilent as error:
            what = (self._lent.name, error)
            logger.warning("node=%s waits for SLURM to get a new agent: %s", *what)

    def abandon(self) -> None:
        """It has failed: what was begun for it ends."""
        if self._step is not None:
            self._step.kill()
        if self.job is not self._lent.job or self._lent.agent is None:
            self._jobs.drop(self.job)

    def _take(self, agent: Joining) -> None:
        lent = self._lent
        facts = usable_facts(agent)
        if lent.agent is None:
            check_devices(facts.num_devices, self.job.plan, agent.node)
            logger.info("node=%s has joined", agent.node)
        else:
            self._jobs.joins.refuse(lent.node.facts.incarnation)  # where it lives on, it ends
        lent.node.facts = facts
        lent.incarnations.add(lent.node.facts.incarnation)
        lent.node.found = []
        if lent.agent is not None and agent.node != lent.name:
            logger.warning("node=%s takes the place of node=%s", agent.node, lent.name)
            # a job that was started again counts its steps anew: that number is another agent's now
            if agent.job != lent.agent.job or agent.restart == lent.agent.restart:
                self._jobs.end_step(lent.agent)
        lent.node.log_path = log_of(agent, self._jobs.folder)
        lent.name, lent.job, lent.agent, lent.node.coming = agent.node, self.job, agent, None

    def _begin(self, used: Set[str]) -> None:
        """Raises: SchedulerSilent: where to begin is not known."""
        lent = self._lent
        state = self._jobs.state(lent.job, 0.0 if lent.agent else LOOK_EVERY_S)
        if lent.agent is None:
            self._waits_for_job = not (state.has_ended or lent.job.is_dropped)
            if not self._waits_for_job:
                self._replace_node(used)
            return
        if state.state == "COMPLETING":  # it ends, or is started again
            return
        how = self._jobs.how_lost(lent.job, lent.name)
        if not state.has_ended and self._jobs.is_started_again(lent.job, lent.agent.restart):
            logger.warning("job=%s is started again; its nodes are waited for", lent.job.job_id)
            self._waits_for_job, lent.job.runs_since_s = True, 0.0
        elif how is None and not commands.is_silent(lent.name):
            pid = lent.agent.pid
            kill = f"grep -qs areal:agent /proc/{pid}/comm && kill -9 {pid}; sleep 0.2; "
            self._start_step(lent.name, kill)
        else:
            self._replace_node(used)

    def _replace_node(self, used: Set[str]) -> None:
        """Raises: ConfigError: SLURM refuses another node. WorkerStartError: none is wanted.
        SchedulerSilent.
        """
        lent, job = self._lent, self._lent.job
        state = self._jobs.state(job).state
        if state in _WANTED_ENDS and not is_single(job, self._jobs.config):
            what = f"no node is asked for in place of {lent.name}: its job is {state}"
            raise WorkerStartError(what)
        if not job.is_own:
            others = sorted(self._jobs.state(job).nodes - used)
            spare = next((name for name in others if not commands.is_silent(name)), None)
            if spare is not None:
                self._start_step(spare)
                return
        what = lent.name or f"of job {job.job_id}"
        logger.warning("node=%s is lost; another one is asked for", what)
        self._step = None
        self.job = self._jobs.submit(job.plan.of_one(lent.node.purpose))
        lent.wait_for(self.job)

    def _start_step(self, name: str, before: str = "") -> None:
        job, agent, self._name = self._lent.job, self._lent.agent, name
        restart = agent.restart if agent else 0
        self._step = self._jobs.start_step(job, [name], restart=restart, before=before)
        self._step_s = self._looked_s = time.monotonic()

    def _look_at_step(self, step: Step, used: Set[str]) -> None:
        """Raises: WorkerStartError. SchedulerSilent."""
        code = step.poll()
        is_late = time.monotonic() > self._step_s + self._jobs.config.startup_timeout_s
        if code is None and not is_late and not self._is_time_to_look():
            return
        self._looked_s = time.monotonic()
        how = self._jobs.how_lost(self._lent.job, self._name, 0.0)
        self._num_unreached += code in _NO_ANSWER
        is_gone = how is not None or self._num_unreached >= MAX_UNREACHED
        if is_gone or commands.is_silent(self._name):
            step.kill()
            self._replace_node(used)
        elif code in _NO_ANSWER and not is_late:
            self._step = None  # once more
        elif code is not None or is_late:
            how = "did not join" if code is None else f"ended with {exit_text(code)}"
            path = self._jobs.folder.log_path(STEPS_LOG)
            what = f"the agent of {self._name} {how}"
            raise WorkerStartError.with_log(what, path, log_tail(path))

    def _is_time_to_look(self) -> bool:
        if time.monotonic() <= self._looked_s + LOOK_EVERY_S:
            return False
        self._looked_s = time.monotonic()
        return True


def is_single(job: Job, config: SchedulerConfig) -> bool:
    """Whether its only node joins and leaves the run by itself."""
    return job.is_own and not config.slurm.gang and job.plan.shares == {Purpose.rollout: 1}


def check_devices(num_devices: int, plan: JobPlan, node: str) -> None:
    """Raises: ConfigError: the agent sees fewer than were asked for: workers would do without."""
    wanted = plan.request.gpus_per_node
    if num_devices < wanted:
        raise ConfigError(
            f"node {node}: expected {wanted} CUDA devices (scheduler.slurm.gpus_per_node), got "
            f"{num_devices}: nvidia-smi on the node, within scheduler.slurm.container if there is "
            "one, names no more (apptainer needs --nv)"
        )


def usable_facts(joining: Joining) -> NodeFacts:
    """What an agent tells of its node. Raises: ConfigError: the node cannot be used."""
    if isinstance(joining.facts, str):
        raise ConfigError(f"node {joining.node}: {joining.facts}")
    return joining.facts
