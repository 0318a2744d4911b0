"""Nodes that differ are components of one heterogeneous job of a real SLURM."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path

import pytest
from integration.run_process import open_gate, tiny_run
from integration.slurm.conftest import Cluster
from integration.slurm.test_slurm_jobs import visible_devices
from integration.slurm.test_slurm_scheduler import (
    config_of,
    is_served,
    opened,
    shown_of,
    until,
    with_gpus,
)
from integration.slurm.test_slurm_takeover import busy, script, settings_of

from areal_sc.config.placement import Purpose
from areal_sc.config.slurm_settings import RolloutNodes, TrainNodes
from areal_sc.errors import ConfigError, WorkerStartError


def components(cluster: Cluster) -> list[str]:
    return sorted(cluster.run("squeue", "-h", "-o", "%i %D %P").splitlines())


async def test_all_components_are_one_job_and_an_agent_is_started_again_in_its_own(
    cluster: Cluster, tmp_path: Path, invitations: list[str]
) -> None:
    config = config_of(
        tmp_path / "run",
        heterogeneous=True,
        requeue=True,
        setup=[with_gpus(tmp_path / "bin")],
        train=TrainNodes(nodes=1, gpus_per_node=4, cpus_per_node=2, partition="short"),
        rollout=RolloutNodes(nodes=2, gpus_per_node=2, cpus_per_node=1),
    )
    async with opened(config) as scheduler:
        nodes = sorted(await scheduler.nodes(), key=lambda node: node.purpose is Purpose.rollout)
        assert [node.purpose for node in nodes] == [Purpose.train, *[Purpose.rollout] * 2]
        assert [node.facts.num_devices for node in nodes] == [4, 2, 2]
        first, second = components(cluster)
        job = first.partition("+")[0]
        assert (first, second) == (f"{job}+0 1 short", f"{job}+1 2 debug")
        assert len({node.facts.token for node in nodes}) == 3, "each has a memory of its own"
        assert len({node.log_path for node in nodes}) == 3
        assert all(node.log_path.exists() for node in nodes)
        assert len(invitations) == 2
        lost = nodes[-1]
        shown = "".join(shown_of(cluster, tmp_path / "run", it.name, job) for it in nodes)
        assert not [secret for secret in invitations if secret in shown]
        before, log = lost.facts.incarnation, lost.log_path
        cluster.on(lost.name, "pkill", "-9", "-x", "areal:agent")
        await scheduler.renew(lost, before)
        assert lost.facts.incarnation != before
        assert lost.facts.num_devices == 2
        assert visible_devices(cluster, scheduler, lost.name) == ["0,1"]
        assert lost.log_path.exists()
        assert lost.log_path != log
        pairs = [(node, node.facts.incarnation) for node in nodes]
        cluster.run("scontrol", "requeue", job)
        await asyncio.gather(*(scheduler.renew(*pair) for pair in pairs))
        assert components(cluster) == [first, second]
        assert [node.facts.num_devices for node in nodes] == [4, 2, 2]
        for node in nodes:
            assert await is_served(scheduler, node.facts)
            assert node.log_path.name.endswith("-1.log")
        assert await scheduler.ended_nodes() == {}
        cluster.run("scancel", job)
        with pytest.raises(WorkerStartError, match=rf"heterogeneous job {job}\+1, which is CANCEL"):
            await scheduler.renew(lost, lost.facts.incarnation)
    assert cluster.jobs() == []
    await until(lambda: cluster.left_overs() == [])


async def test_what_slurm_refuses_of_any_component_is_not_submitted(
    cluster: Cluster, tmp_path: Path
) -> None:
    rollout = RolloutNodes(nodes=1, constraint="no_such_feature")
    said = r"Invalid feature spec(?s:.*)for: --nodes=1 hetjob --nodes=1 --constraint=no_such"
    with pytest.raises(ConfigError, match=said):
        async with opened(config_of(tmp_path, nodes=1, heterogeneous=True, rollout=rollout)):
            pass
    assert cluster.jobs() == []
    rollout = RolloutNodes(nodes=1, partition="short", time_limit="60")
    with pytest.raises(ConfigError, match=r"job \d+\+1 would wait for ever: PartitionTimeLimit"):
        async with opened(
            config_of(tmp_path, nodes=1, heterogeneous=True, rollout=rollout)
        ) as scheduler:
            await scheduler.nodes()
    assert cluster.jobs() == []


async def test_the_next_start_of_a_script_finds_the_components_that_wait_and_the_agents(
    cluster: Cluster, tmp_path: Path
) -> None:
    other = await busy(cluster, "-N3")
    rollout = {"nodes": 2, "cpus_per_node": 2}
    settings = settings_of(tmp_path, nodes=1, heterogeneous=True, rollout=rollout)
    async with script(cluster, settings) as killed:
        assert await killed.line() == "began"
    waiting = set(cluster.jobs()) - {other}
    assert {it.rpartition("+")[2] for it in waiting} == {"0", "1"}
    jobs = json.loads((tmp_path / ".jobs").read_text())
    for job in jobs["jobs"]:
        job["job_id"] = ""  # as if it was killed while it submitted
    (tmp_path / ".jobs").write_text(json.dumps(jobs))
    async with script(cluster, settings) as killed:
        assert await killed.line() == "began"
        assert set(cluster.jobs()) == {other, *waiting}
        cluster.run("scancel", other)
        before = await killed.nodes()
        assert len(before) == 3
    async with script(cluster, settings, "node3") as last:
        assert await last.nodes() == before
        assert set(cluster.jobs()) == waiting
        await last.end()
    assert cluster.jobs() == []
    await until(lambda: cluster.left_overs() == [])
    assert not {".jobs", "keys.json"} & set(os.listdir(tmp_path))


@pytest.mark.long
def test_slurm_starts_all_of_it_again_when_a_host_is_lost_and_the_run_goes_on(
    cluster: Cluster, tmp_path: Path, tiny_model_folder: Path
) -> None:
    words = (
        *("scheduler.type=slurm", "scheduler.slurm.heterogeneous=true"),
        *("scheduler.slurm.requeue=true", "scheduler.slurm.rollout.nodes=2"),
        *("scheduler.slurm.rollout.cpus_per_node=5", "rollout.num_workers=2"),
        *("scheduler.slurm.cpus_per_node=4", "scheduler.orphan_timeout_s=600"),
        *("checkpoint.every_steps=9999", "total_steps=30"),
        "task.num_free_episodes=8",  # of each of two workers: two steps a byte
    )
    with tiny_run(tmp_path / "run", tiny_model_folder, *words) as run:
        run.wait_for_step(2)
        before = set(cluster.jobs())
        assert len(before) == 2
        places = cluster.run("squeue", "-h", "-o", "%i %N").splitlines()
        [train] = [place.split()[1] for place in places if "+0 " in place]
        lost = next(node for node in ("node1", "node2", "node3") if node != train)
        cluster.host("kill", lost)
        try:
            state = ["squeue", "-h", "-j", next(iter(before)), "-o", "%T"]
            run.wait_until(lambda: "RUNNING" not in cluster.run(*state), "SLURM's notice of a loss")
        finally:
            cluster.host("boot", lost)
        assert "SLURM is to end or restart all of job=" in run.story()
        run.wait_until(lambda: len(run.events("workers_restarted")) == 3, "the next start")
        for _ in range(30):
            open_gate(run.run_dir)
        run.finish()
        assert run.steps() == list(range(1, 31)), "no step is lost after the snapshot"
        assert run.summary()["num_rows_trained_twice"] == 0
        assert set(cluster.jobs()) <= before
        logs = [path.name for path in (run.run_dir / "logs").glob("agent-*")]
        assert sum(name.endswith("-1.log") for name in logs) == 3, logs
    cluster.wait_until_idle()
    assert cluster.left_overs() == []
