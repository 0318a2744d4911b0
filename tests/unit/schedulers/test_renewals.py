"""A new agent takes the place of one that is lost."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from areal_sc.config.schema import SchedulerConfig
from areal_sc.config.slurm_jobs import JobPlan, job_plans
from areal_sc.config.slurm_settings import RolloutNodes, SlurmConfig
from areal_sc.errors import WorkerStartError
from areal_sc.run_folder import RunFolder
from areal_sc.schedulers.base import Node
from areal_sc.schedulers.slurm import commands
from areal_sc.schedulers.slurm.commands import JobState
from areal_sc.schedulers.slurm.job import Job
from areal_sc.schedulers.slurm.lent_node import LentNode, Renewal
from areal_sc.workers.spec import Joining, NodeFacts

CONFIG = SchedulerConfig(
    run_dir="r",
    slurm=SlurmConfig(heterogeneous=True, rollout=RolloutNodes(nodes=1, constraint="other")),
)


def agent_of(job: str, node: str, *, restart: int = 0) -> Joining:
    facts = NodeFacts(
        host=node,
        token=node,
        num_devices=0,
        memory_root="",
        address="",
        incarnation=f"{job} {node} {restart}",
    )
    return Joining(job, node, 1, facts, "key", restart=restart, step=2)


def renewal_of(
    tmp_path: Path, jobs: dict[str, Any], past: Joining, plan: JobPlan, *new: Joining
) -> Renewal:
    """Of the node of an agent that is lost, where others have joined."""
    assert isinstance(past.facts, NodeFacts)
    job = Job(past.job, "name", plan, is_own=True)
    lent = LentNode(Node(past.facts, tmp_path), past.node, job, past)
    joins: Any = SimpleNamespace(
        joined=lambda _: {agent.node: agent for agent in new}, refuse=lambda _: None
    )
    asked: Any = SimpleNamespace(**jobs)
    steps: Any = None
    return Renewal(lent, CONFIG, RunFolder(tmp_path), asked, steps, joins)


@pytest.mark.parametrize("restart", [0, 1])
def test_a_step_of_the_job_before_it_was_started_again_is_not_ended(
    tmp_path: Path, restart: int
) -> None:
    """The job counts its steps anew: that number is the step of an agent that lives."""
    past, new = agent_of("7", "node3"), agent_of("7", "node2", restart=restart)
    ended: list[Joining] = []
    [plan] = job_plans(SlurmConfig())
    renewal = renewal_of(tmp_path, {"end_step": ended.append}, past, plan, new)
    assert renewal.take({f"{past.job} {past.node} 0"})
    assert ended == ([] if restart else [past])


@pytest.mark.parametrize(
    ("state", "is_silent"),
    [(JobState("RUNNING"), True), (JobState("RUNNING"), False), (JobState("NODE_FAIL"), True)],
)
def test_no_node_takes_the_place_of_one_of_a_heterogeneous_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, state: JobState, *, is_silent: bool
) -> None:
    """All of its nodes are about to be lost, as soon as SLURM finds out, or are."""
    monkeypatch.setattr(commands, "is_silent", lambda _: is_silent)
    jobs = {
        "state": lambda *_: state,
        "how_lost": lambda *_: None if state.state == "RUNNING" and is_silent else "lost",
        "is_started_again": lambda *_: False,
    }
    past = agent_of("7+1", "node3")
    renewal = renewal_of(tmp_path, jobs, past, job_plans(CONFIG.slurm)[1])
    if state.state == "RUNNING" and is_silent:
        renewal.come_closer(set())
        assert renewal._lent.node.coming is not None, "it is waited for SLURM's notice"
    else:
        with pytest.raises(WorkerStartError, match=r"heterogeneous job 7\+1, which is "):
            renewal.come_closer(set())
