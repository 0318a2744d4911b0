"""Which jobs the settings ask for."""

from __future__ import annotations

import pytest

from areal_sc.config.placement import Purpose
from areal_sc.config.slurm_jobs import (
    job_plans,
    memory_bytes,
    merged_plan,
    single_plan,
    workers_of_single,
)
from areal_sc.config.slurm_settings import RoleNodes, RolloutNodes, SlurmConfig
from areal_sc.preflight.load import load_config

LEAST = {"run_dir": "r", "total_steps": 1, "actor": {"path": "m"}}


def test_nodes_of_all_roles_are_one_job() -> None:
    [plan] = job_plans(SlurmConfig(nodes=3))
    assert plan.shares == {Purpose.any: 3}


def test_nodes_that_are_alike_are_one_job_whatever_they_are_for() -> None:
    [plan] = job_plans(SlurmConfig(train=RoleNodes(nodes=1), rollout=RolloutNodes(nodes=2)))
    assert plan.shares == {Purpose.train: 1, Purpose.rollout: 2}
    assert plan.num_nodes == 3
    assert plan.of_one(Purpose.rollout).shares == {Purpose.rollout: 1}


def test_roles_that_need_different_nodes_have_a_job_each() -> None:
    slurm = SlurmConfig(nodes=2, gpus_per_node=8, rollout=RolloutNodes(nodes=4, constraint="l40"))
    train, rollout = job_plans(slurm)
    assert (train.shares, train.request.gpus_per_node) == ({Purpose.train: 2}, 8)
    assert (rollout.shares, rollout.request.constraint) == ({Purpose.rollout: 4}, "l40")


def test_nodes_that_join_singly_are_a_job_each_and_trainers_one() -> None:
    apart = {"train": RoleNodes(nodes=2), "rollout": RolloutNodes(nodes=3, role_workers=7)}
    slurm = SlurmConfig(gang=False, **apart)
    train, rollout = job_plans(slurm)
    assert (train.shares, train.num_jobs) == ({Purpose.train: 2}, 1)
    assert (rollout.shares, rollout.num_jobs) == ({Purpose.rollout: 1}, 3)
    assert rollout.request == train.request, "alike, and still no job of both"
    assert rollout.single == rollout.of_one(Purpose.rollout) == single_plan(slurm)
    assert workers_of_single(slurm) == 3
    shares = merged_plan([train, rollout]).shares
    assert shares == {Purpose.train: 2, Purpose.rollout: 3}, "in an allocation"
    both = job_plans(SlurmConfig(gang=False, nodes=2))
    assert [(plan.shares, plan.num_jobs) for plan in both] == [
        ({Purpose.train: 2}, 1),
        ({Purpose.rollout: 1}, 2),
    ]


def test_what_a_role_is_not_given_is_as_for_the_others() -> None:
    words = ["partition=gpu", "extra_flags=[--exclusive]", "train.nodes=1", "train.time_limit=60"]
    words += ["rollout.nodes=2", "rollout.partition=cheap", "rollout.extra_flags=[]"]
    config = load_config(LEAST, *(f"scheduler.slurm.{word}" for word in words))
    train, rollout = job_plans(config.scheduler.slurm)
    assert (train.request.partition, train.request.time_limit) == ("gpu", "60")
    assert (rollout.request.partition, rollout.request.time_limit) == ("cheap", "")
    assert (train.request.extra_flags, rollout.request.extra_flags) == (("--exclusive",), ())


@pytest.mark.parametrize(
    ("words", "expected"),
    [("64G", 64 << 30), ("100", 100 << 20), ("5kb", 5 << 10), ("", None), ("0", None), ("x", None)],
)
def test_memory_is_read_as_sbatch_reads_it(words: str, expected: int | None) -> None:
    assert memory_bytes(words) == expected
