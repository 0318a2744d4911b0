"""Several jobs a run on a real SLURM: nodes by role, and another machine for one that is lost."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from integration.slurm.conftest import Cluster
from integration.slurm.test_slurm_scheduler import (
    config_of,
    is_served,
    opened,
    with_gpus,
)
from waiting import until

from areal_sc.config.placement import Purpose
from areal_sc.config.schema import Device
from areal_sc.config.slurm_settings import RoleNodes, RolloutNodes
from areal_sc.nodes.spec import WorkerOrder
from areal_sc.schedulers.base import placed
from areal_sc.schedulers.slurm.scheduler import SlurmScheduler

pytestmark = pytest.mark.usefixtures("idle_agents")


def order(role: str, index: int, num_devices: int) -> WorkerOrder:
    return WorkerOrder(role, index, "none", {}, Device.cuda, 1, num_devices)


def visible_devices(cluster: Cluster, scheduler: SlurmScheduler, name: str) -> list[str]:
    """What each agent on a node was given."""
    agents = cluster.on(name, "pgrep", "-x", "areal:agent").split()
    found = []
    for agent in agents:
        variables = cluster.on(name, "cat", f"/proc/{agent}/environ").split("\0")
        found += [it.partition("=")[2] for it in variables if it.startswith("CUDA_VISIBLE")]
    return found


async def test_each_role_has_nodes_of_its_own_kind_and_gpus_that_no_other_has(
    cluster: Cluster, tmp_path: Path
) -> None:
    config = config_of(
        tmp_path / "run",
        setup=[with_gpus(tmp_path / "bin")],
        train=RoleNodes(nodes=1, gpus_per_node=4, cpus_per_node=2, partition="short"),
        rollout=RolloutNodes(nodes=3, gpus_per_node=2, cpus_per_node=1),
    )
    async with opened(config) as scheduler:
        nodes = sorted(await scheduler.nodes(), key=lambda node: node.purpose is Purpose.rollout)
        of = {p: [node for node in nodes if node.purpose is p] for p in Purpose}
        assert (len(of[Purpose.train]), len(of[Purpose.rollout])) == (1, 3)
        assert [node.facts.num_devices for node in nodes] == [4, 2, 2, 2]
        partitions = cluster.run("squeue", "-h", "-o", "%D %P").splitlines()
        assert sorted(partitions) == ["1 short", "3 debug"]
        trainers = placed([order("train", index, 1) for index in range(4)], nodes)
        generators = placed([order("rollout", index, 2) for index in range(3)], nodes)
        assert [len(trainers[node]) for node in nodes] == [4, 0, 0, 0]
        assert [len(generators[node]) for node in nodes] == [0, 1, 1, 1]
        both = of[Purpose.train][0].name  # all three have a node of the other job, too
        given = [set(it.split(",")) for it in visible_devices(cluster, scheduler, both)]
        assert sorted(map(len, given)) == [2, 4]
        assert not set.intersection(*given)
        assert len({node.facts.token for node in nodes}) == 4
        assert len({node.log_path for node in nodes}) == 4
        assert all(node.log_path.exists() for node in nodes)
        lost = next(node for node in of[Purpose.rollout] if node.name != both)
        cluster.on(lost.name, "pkill", "-9", "-x", "areal:agent")
        await scheduler.renew(lost, lost.facts.incarnation)
        assert lost.facts.num_devices == 2
        assert visible_devices(cluster, scheduler, lost.name) == ["0,1"]
    await until(lambda: cluster.left_overs() == [])
    assert cluster.jobs() == []


async def test_another_machine_takes_the_place_of_one_that_lost_its_power(
    cluster: Cluster, tmp_path: Path
) -> None:
    """Of a job of two nodes, and of another run's node that has joined singly."""
    half = {"nodes": 1, "cpus_per_node": 4}
    roles = {"train": RoleNodes(**half), "rollout": RolloutNodes(**half)}
    config = config_of(tmp_path / "run", setup=[with_gpus(tmp_path / "bin")], **roles)
    roles["rollout"] = RolloutNodes(**half, extra_flags=["--exclude=node1"])
    singly = config_of(tmp_path / "singly", gang=False, **roles)
    async with opened(config) as scheduler, opened(singly) as other:
        train, rollout = await scheduler.nodes()
        [single] = [node for node in await other.nodes() if node.purpose is Purpose.rollout]
        jobs = cluster.jobs()
        assert len(jobs) == 3
        name = rollout.name
        assert single.name == name
        before = rollout.facts.incarnation, single.facts.incarnation
        with cluster.without(name):
            renewals = [scheduler.renew(rollout, before[0]) for _ in range(2)]
            # as two controllers do
            await asyncio.gather(*renewals, other.renew(single, before[1]))
            assert (rollout.purpose, rollout.name) == (Purpose.rollout, "node3")
            assert (single.purpose, single.name) == (Purpose.rollout, "node3")
            for lender, node in ((scheduler, rollout), (scheduler, train), (other, single)):
                assert await is_served(lender, node.facts)
                assert node.is_there
                assert await lender.ended_nodes() == {}
            assert len(set(cluster.jobs()) - set(jobs)) == 2
    assert cluster.jobs() == []
    await until(lambda: cluster.left_overs() == [])


async def test_agents_of_a_requeued_job_take_the_places_of_those_before(
    cluster: Cluster, tmp_path: Path
) -> None:
    container = tmp_path / "bin" / "apptainer"
    setup = [with_gpus(tmp_path / "bin"), f"export MARK={tmp_path / 'seen'}"]
    container.write_text('#!/bin/sh\necho "$1 $2" >> "$MARK"\nshift 2\nexec "$@"\n')
    container.chmod(0o755)
    slurm = {"requeue": True, "setup": setup, "container": ["apptainer", "exec", "image.sif"]}
    async with opened(config_of(tmp_path / "run", nodes=2, **slurm)) as scheduler:
        nodes = await scheduler.nodes()
        before = [node.facts.incarnation for node in nodes]
        logs = {node.log_path for node in nodes}
        [job] = cluster.jobs()
        cluster.run("scontrol", "requeue", job)
        pairs = zip(nodes, before, strict=True)
        await asyncio.gather(*(scheduler.renew(*pair) for pair in pairs))
        assert not {node.facts.incarnation for node in nodes} & set(before)
        logs |= {node.log_path for node in nodes}
        assert len(logs) == 4
        assert all(log.exists() for log in logs)
        assert sorted(node.name for node in nodes) == ["node1", "node2"]
        assert cluster.jobs() == [job]
        for node in nodes:
            assert await is_served(scheduler, node.facts)
        assert (tmp_path / "seen").read_text().split() == ["exec", "image.sif"] * 4  # agents
        first = nodes[0]
        cluster.on(first.name, "pkill", "-9", "-x", "areal:agent")
        await scheduler.renew(first, first.facts.incarnation)  # a step: no start is waited for
        assert await is_served(scheduler, first.facts)
        assert first.log_path.exists()
        assert first.log_path not in logs
    await until(lambda: cluster.left_overs() == [])
