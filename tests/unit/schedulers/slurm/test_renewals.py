"""A new agent takes the place of one that is lost."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from areal_sc.config.schema import SchedulerConfig
from areal_sc.config.slurm_jobs import job_plans
from areal_sc.nodes.spec import Joining, NodeFacts
from areal_sc.run.run_folder import RunFolder
from areal_sc.schedulers.base import Node
from areal_sc.schedulers.slurm.jobs import Job
from areal_sc.schedulers.slurm.lent_node import LentNode, Renewal


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


@pytest.mark.parametrize("restart", [0, 1])
def test_a_step_of_the_job_before_it_was_started_again_is_not_ended(
    tmp_path: Path, restart: int
) -> None:
    """The job counts its steps anew: that number is the step of an agent that lives."""
    past, new = agent_of("7", "node3"), agent_of("7", "node2", restart=restart)
    ended: list[Joining] = []
    config = SchedulerConfig(run_dir="r")
    [plan] = job_plans(config.slurm)
    assert isinstance(past.facts, NodeFacts)
    job = Job(past.job, "name", plan, is_own=True)
    lent = LentNode(Node(past.facts, tmp_path), past.node, job, past)
    joins: Any = SimpleNamespace(joined=lambda _: {new.node: new}, refuse=lambda _: None)
    folder = RunFolder(tmp_path)
    jobs: Any = SimpleNamespace(end_step=ended.append, config=config, folder=folder, joins=joins)
    renewal = Renewal(lent, jobs)
    assert renewal.take({f"{past.job} {past.node} 0"})
    assert ended == ([] if restart else [past])
