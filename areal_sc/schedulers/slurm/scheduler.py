"""SlurmScheduler: nodes of SLURM's jobs, each with an agent that joins the script over the network.

    make_scheduler   what an earlier start has left goes on (`taken_jobs`); else a job is submitted
                     for each kind of nodes, and for each node that joins singly, or, within an
                     allocation, a step starts
    nodes            the jobs run, and an agent of each node has joined; of nodes that are for
                     generation alone, of one
    renew            one more step, on the node of the agent that is lost; or, where SLURM has lost
                     the node, another one in its place; or the first agent of a node that is on
                     its way (`Renewal`)
    ask_node         one more job, of a node that joins singly
    give_back        its agent is told to end, and with it its job
    close            agents are told to end what is left; scancel ends what does not

waits for    the start of the jobs, which has no limit: its reason is shown when it changes; then
             for the agents, `startup_timeout_s` at most
unblocked by agents that join, and looks at the jobs, which are few: slurmctld serves many

Nodes see the run folder, or are brought what they need of it; none needs the keys in it. If the
script is killed, agents end by themselves after `orphan_timeout_s`, and with them the jobs; a guard
beside it cancels those that wait.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from msgspec import json

from areal_sc.config.placement import Purpose
from areal_sc.config.schema import SchedulerConfig
from areal_sc.config.slurm_jobs import job_plans, single_plan, workers_of_single
from areal_sc.config.slurm_script import AGENT_WORDS
from areal_sc.errors import ArealError, ConfigError, WorkerStartError
from areal_sc.nodes.spec import END, NodeFacts
from areal_sc.run.agent_files import delete_files_of_dead_agents, end_agents
from areal_sc.run.run_folder import RunFolder
from areal_sc.schedulers.agent_calls import AgentAddress, FoundAgent, call_agents
from areal_sc.schedulers.base import Node
from areal_sc.schedulers.open_run import OpenRun
from areal_sc.schedulers.slurm import commands
from areal_sc.schedulers.slurm.guard import JobsGuard
from areal_sc.schedulers.slurm.jobs import Job, Jobs, LentRecord, digest_of, log_of
from areal_sc.schedulers.slurm.lent_node import (
    LentNode,
    Renewal,
    coming_node,
    is_single,
    lent_nodes,
    usable_facts,
)
from areal_sc.schedulers.slurm.taken_jobs import EarlierStart, find_earlier
from areal_sc.transport.sockets.interface import Interface, host_of

JOIN_LOOK_S: Final = 0.1
"""Between looks at who has joined; these ask nobody."""
LONGEST_LOOK_S: Final = 1.0
"""Between those for one node, for which it may be waited for hours."""

logger = logging.getLogger(__name__)


class SlurmScheduler(OpenRun):
    """Runs workers on nodes of a cluster.

    Args:
        config: the `scheduler` section.
        folder: see `make_scheduler`.
    Raises:
        ConfigError: SLURM refuses the job, or is not there.
        SchedulerSilent: slurmctld cannot be reached.
        RunFolderError: another process runs in the folder, or agents of a script that was killed
            do on their nodes, or it cannot be used.
    """

    def __init__(self, config: SchedulerConfig, folder: RunFolder | None = None) -> None:
        self._lent: dict[Node, LentNode] = {}
        self._first_jobs: list[Job] = []  # whose agents have not all joined yet
        self._has_begun = False
        self._one_looks = threading.Lock()
        self._one_takes = threading.Lock()
        self._one_comes = threading.Lock()
        with self._opened(config, folder) as (folder, undo):
            end_agents(folder.path, config.shutdown_timeout_s, but_of_jobs=True)
            earlier = find_earlier(folder, self.keys, digest_of(self._config_of_agents))
            delete_files_of_dead_agents(folder.path)
            self._joins = self._open_joins(self._interface(earlier.agents), folder, undo)
            self._jobs = Jobs(config, folder, earlier.known, self._variables(), self._joins)
            self._guard = JobsGuard(folder, config.orphan_timeout_s)
            undo.callback(self._end)
            self._take_over(earlier)
            for job in [] if self._lent else self._jobs.begin():
                if is_single(job, config):
                    self._add(coming_node(job, folder))
                else:
                    self._first_jobs.append(job)

    async def nodes(self) -> list[Node]:
        while True:
            nodes = await asyncio.to_thread(self._come_closer)
            if nodes is not None:
                return nodes
            await asyncio.sleep(JOIN_LOOK_S)

    async def ended_nodes(self) -> dict[Node, str]:
        return await asyncio.to_thread(self._ended_nodes)

    async def renew(self, node: Node, incarnation: str) -> None:
        lent, pause_s = self._lent[node], JOIN_LOOK_S
        while not await asyncio.to_thread(self._renew_closer, lent, incarnation):
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_LOOK_S)

    async def ask_node(self) -> Node:
        return await asyncio.to_thread(self._ask_node)

    async def give_back(self, node: Node) -> None:
        lent = self._lent.get(node)
        if lent is not None and is_single(lent.job, self.config):
            del self._lent[node]
            await asyncio.to_thread(self._end_node, lent)

    def _interface(self, found: Sequence[FoundAgent]) -> Interface:
        """Where agents reach this process: it may run on one of their nodes itself.

        Args:
            found: agents that were reached already.
        """
        for agent in found:
            host = host_of(usable_facts(agent.joining).address)
            return Interface.of(self.config.transport.bind, host)
        hosts = os.environ.get("SLURM_JOB_NODELIST", "")
        partitions = {plan.request.partition for plan in job_plans(self.config.slurm)}
        addresses = commands.node_addresses(partitions, hosts)
        return Interface.towards(self.config.transport.bind, addresses)

    def _variables(self) -> dict[str, str]:
        """The arguments of agents, of which none is secret."""
        config = json.encode(self._config_of_agents).decode()
        words = self.keys.run_id, config, self._joins.address
        return {f"{AGENT_WORDS}_{number}": word for number, word in enumerate(words)}

    @property
    def _config_of_agents(self) -> SchedulerConfig:
        return replace(self.config, run_dir=str(self.folder.path))

    def _take_over(self, earlier: EarlierStart) -> None:
        """Agents that live have joined; the nodes are those of the earlier start, if it had any."""
        living = {found.place: found for found in self._joins.open(earlier.agents)}
        for record in earlier.known.lent:
            if record.agent is None:
                plan = single_plan(self.config.slurm)
                self._add(coming_node(self._jobs.submit(plan), self.folder))
                continue
            if (job := self._jobs.of(record.agent.job)) is None:
                continue  # it was being given back
            place = record.agent.job, record.agent.node
            agent = living[place].joining if place in living else record.agent
            log_path = log_of(agent, self.folder)
            node = Node(usable_facts(agent), log_path, purpose=record.purpose)
            lent = LentNode(node, agent.node, job, agent)
            if place in living:
                node.found = living[place].described.workers
            else:
                lent.wait_for(lent.job)
            self._add(lent)

    def _add(self, lent: LentNode) -> None:
        if lent.node.purpose is Purpose.rollout and not self.config.slurm.gang:
            lent.node.max_workers = workers_of_single(self.config.slurm)
        self._lent[lent.node] = lent

    def _note_lent(self) -> None:
        if self._has_begun:
            lent = list(self._lent.values())
            self._jobs.file.note(lent=[LentRecord(it.node.purpose, it.agent) for it in lent])

    def _come_closer(self) -> list[Node] | None:
        """The nodes, once the run can begin with them; None: not yet, and nothing is wrong.

        Raises: ConfigError: a job will never start, or a node cannot be used. WorkerStartError.
        """
        with self._one_looks:
            if not self._has_begun:
                self._first_jobs = [job for job in self._first_jobs if not self._has_joined(job)]
                for lent in [it for it in self._lent.values() if not it.node.is_there]:
                    self._renew_closer(lent, lent.node.facts.incarnation)
                self._has_begun = not self._first_jobs and _suffice(list(self._lent))
                self._note_lent()
            return list(self._lent) if self._has_begun else None

    def _has_joined(self, job: Job) -> bool:
        """Whether all agents of a job have joined; its nodes are the run's then.

        Raises: the errors of `check_start` of its jobs.
        """
        agents = self._joins.joined(job.job_id)
        if len(agents) < job.plan.num_nodes:
            self._jobs.check_start(job, len(agents))
            return False
        for lent in lent_nodes(job, agents, self.folder):
            self._add(lent)
        return True

    def _ask_node(self) -> Node:
        """Raises: the errors of `ask_node`."""
        if self.config.slurm.gang:
            raise ConfigError("scheduler.slurm.gang=false lets the run ask SLURM for more nodes")
        named: list[LentNode] = []

        def add(job: Job) -> None:
            """A later start of the script knows the node, whatever becomes of this one."""
            named.append(coming_node(job, self.folder))
            self._add(named[0])
            self._note_lent()

        try:
            self._jobs.submit(single_plan(self.config.slurm), add)
        except ArealError:
            for lent in named:
                del self._lent[lent.node]
            self._note_lent()
            raise
        return named[0].node

    def _end_node(self, lent: LentNode) -> None:
        """One that nobody needs; returns when nothing is left of it, as far as that is known."""
        jobs = {lent.job}
        with lent.one_renews:
            lent.is_given_back = True
            if lent.renewal is not None:
                lent.renewal.abandon()
                jobs.add(lent.renewal.job)
        told = set[str]()
        if lent.agent is not None:
            told = self._tell_to_end([lent.node.facts])
            self._joins.forget(lent.agent)
        logger.info("node=%s job=%s is given back", lent.node.name, lent.job.job_id)
        limit_s = 2 * self.config.shutdown_timeout_s
        for job in jobs:
            self._jobs.end_one(job, limit_s, are_told=bool(told))
        self._note_lent()

    def _tell_to_end(self, agents: Sequence[NodeFacts]) -> set[str]:
        """Incarnations of those that have heard."""
        addresses = map(AgentAddress.of, agents)
        return {it.incarnation for it in call_agents(END, None, addresses, self.keys, self.term)}

    def _ended_nodes(self) -> dict[Node, str]:
        lent = [it for it in list(self._lent.values()) if it.agent is not None]
        ended = {it.node: self._jobs.how_lost(it.job, it.name) for it in lent}
        return {node: how for node, how in ended.items() if how is not None}

    def _renew_closer(self, lent: LentNode, incarnation: str) -> bool:
        """Whether another agent than that one is there. Raises: the errors of `renew`."""
        with lent.one_renews:
            if lent.is_given_back:
                raise WorkerStartError(f"node {lent.node.name} is given back")
            if lent.node.facts.incarnation != incarnation:
                return True
            if lent.renewal is None:
                self.term.check()
                # an agent that nobody needs has deleted them
                self.keys.write(self.folder.keys_path)
                lent.renewal = Renewal(lent, self._jobs)
            past, others = lent.job, list(self._lent.values())
            try:
                with self._one_takes:
                    known = set[str]().union(*(it.incarnations for it in others))
                    is_there = lent.renewal.take(known)
                # one at a time asks SLURM, which may take long to answer
                if not is_there and self._one_comes.acquire(blocking=False):
                    try:
                        lent.renewal.come_closer({it.name for it in others})
                    finally:
                        self._one_comes.release()
            except (ConfigError, WorkerStartError):
                lent.renewal.abandon()
                lent.renewal = None
                raise
            if is_there:
                lent.renewal = None
                self._note_lent()
                if past not in [it.job for it in list(self._lent.values())]:
                    self._jobs.drop(past)
            return is_there

    def _end(self) -> None:
        """Returns when nothing is left, as far as SLURM can be asked."""
        if self.term.is_over:
            self._guard.leave()
            self._jobs.close_steps(have_ended=False)
            return
        facts = [it.facts for it in self._joins.agents() if isinstance(it.facts, NodeFacts)]
        told = self._tell_to_end(facts)
        there = [node for node in list(self._lent) if node.is_there]
        are_told = bool(told) and all(node.facts.incarnation in told for node in there)
        if self._jobs.end(2 * self.config.shutdown_timeout_s, are_told=are_told):
            self._guard.close()
            self.folder.join_path.unlink(missing_ok=True)
        else:
            self._guard.leave()


def _suffice(nodes: Sequence[Node]) -> bool:
    """Whether a run can begin with what is there of these nodes."""
    alone = [node for node in nodes if node.purpose is Purpose.rollout]
    others = set(nodes) - set(alone)
    return all(node.is_there for node in others) and (
        not alone or any(node.is_there for node in alone)
    )
