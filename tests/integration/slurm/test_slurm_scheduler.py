"""SlurmScheduler on a real SLURM: nodes that join, are lost, and are given back."""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from integration.agents import connect_agent
from integration.slurm.conftest import LIMIT_S, NODES, Cluster
from waiting import until

from areal_sc.config.schema import SchedulerConfig, TransportConfig
from areal_sc.config.slurm_settings import RolloutNodes, SlurmConfig
from areal_sc.errors import ConfigError, WorkerStartError
from areal_sc.nodes.spec import WATCH, NodeFacts, Watch
from areal_sc.schedulers.slurm.scheduler import SlurmScheduler
from areal_sc.transport.rpc.transport import ZmqTransport
from areal_sc.transport.security.curve import CurveClient
from areal_sc.transport.sockets.interface import host_of

pytestmark = pytest.mark.usefixtures("idle_agents")


def config_of(run_dir: Path, **slurm: object) -> SchedulerConfig:
    return SchedulerConfig(
        run_dir=str(run_dir),
        startup_timeout_s=LIMIT_S,
        slurm=SlurmConfig(**{"nodes": 3, **slurm}),
    )


def with_gpus(folder: Path) -> str:
    """A line that lets the cluster's GPUs, which are but names, be seen by agents."""
    folder.mkdir()
    (folder / "nvidia-smi").write_text("#!/bin/sh\nfor i in 1 2 3 4 5 6 7 8; do echo 1000; done\n")
    (folder / "nvidia-smi").chmod(0o755)
    return f"export PATH={folder}:$PATH"


@asynccontextmanager
async def opened(config: SchedulerConfig) -> AsyncIterator[SlurmScheduler]:
    scheduler = SlurmScheduler(config)
    try:
        yield scheduler
    finally:
        await asyncio.to_thread(scheduler.close)


async def is_served(scheduler: SlurmScheduler, facts: NodeFacts) -> bool:
    transport = ZmqTransport(client=CurveClient.of_controller(scheduler.keys))
    try:
        agent = connect_agent(transport, facts)
        await agent.call(WATCH, Watch("rollout", 0, 0.0), timeout_s=LIMIT_S)
    finally:
        await transport.close()
    return True


def shown_of(cluster: Cluster, run_dir: Path, node: str, job: str = "") -> str:
    """All that others can see of a job of the run, or of its only one."""
    [job] = [job] if job else cluster.jobs()
    look = "cat /proc/[0-9]*/cmdline /proc/[0-9]*/environ 2>/dev/null | tr '\\0' '\\n'; true"
    processes = cluster.on(node, "sh", "-c", look)
    assert "areal_sc.nodes.agent" in processes
    return processes + "".join(
        [
            cluster.run("squeue", "-o", "%all"),
            cluster.run("squeue", "--steps", "-o", "%all"),
            cluster.run("scontrol", "-d", "show", "job", job),
            cluster.run("scontrol", "show", "steps"),
            cluster.run("scontrol", "write", "batch_script", job, "-"),
            cluster.run("ps", "-eww", "-o", "args"),
            *(path.read_text() for path in (run_dir / "logs").iterdir()),
        ]
    )


async def test_each_node_joins_keeps_the_secrets_and_is_given_back(
    cluster: Cluster, tmp_path: Path, invitations: list[str]
) -> None:
    asked = {"gpus_per_node": 2, "cpus_per_node": 2}
    with pytest.raises(ConfigError, match=r"node node1: expected 2 CUDA devices.* got 0"):
        async with opened(config_of(tmp_path, **asked)) as scheduler:
            await scheduler.nodes()
    invitations.clear()
    setup = ["export FROM_SETUP=1", with_gpus(tmp_path / "bin")]
    config = config_of(tmp_path, **asked, setup=setup)
    async with opened(config) as scheduler:
        nodes = await scheduler.nodes()
        assert await scheduler.nodes() == nodes
        assert [node.name for node in nodes] == list(NODES)
        assert len({node.facts.token for node in nodes}) == 3, "hosts that share no memory"
        for node in nodes:
            assert host_of(node.facts.address).startswith(cluster.network)
            assert await is_served(scheduler, node.facts)
            assert node.log_path.exists()
        assert await scheduler.ended_nodes() == {}
        agent = cluster.on("node2", "pgrep", "-f", "areal_sc.nodes.agent").split()[0]
        limits = cluster.on("node2", "cat", f"/proc/{agent}/limits")
        soft, hard = next(it for it in limits.splitlines() if "open files" in it).split()[3:5]
        assert soft == hard
        variables = cluster.on("node2", "cat", f"/proc/{agent}/environ").split("\0")
        assert "FROM_SETUP=1" in variables
        assert any(it in variables for it in ("CUDA_VISIBLE_DEVICES=0,1",))
        keys = scheduler.keys
        shown = shown_of(cluster, tmp_path, "node1")  # where the job's shell runs
        secrets = keys.controller_secret, keys.workers_secret, keys.signing_seed
        assert len(invitations) == 1
        for secret in (*invitations, *(it.decode() for it in secrets)):
            assert secret not in shown
    assert cluster.jobs() == []
    await until(lambda: cluster.left_overs() == [])
    assert not (tmp_path / "keys.json").exists()


async def test_a_lost_agent_is_started_again_on_its_node_over_ipv6(
    cluster: Cluster, tmp_path: Path, invitations: list[str]
) -> None:
    config = replace(
        config_of(tmp_path, nodes=2), transport=TransportConfig(bind=f"{cluster.network6}:/64")
    )
    async with opened(config) as scheduler:
        nodes = await scheduler.nodes()
        assert all(host_of(it.facts.address).startswith(cluster.network6) for it in nodes)
        first, before = nodes[0], nodes[0].facts
        cluster.on(first.name, "pkill", "-9", "-x", "areal:agent")
        await scheduler.renew(first, before.incarnation)
        assert first.facts.incarnation != before.incarnation
        assert first.facts.host == before.host
        await scheduler.renew(first, before.incarnation)  # it was replaced already
        assert await is_served(scheduler, first.facts)
        assert await scheduler.ended_nodes() == {}
        shown = shown_of(cluster, tmp_path, first.name)
        assert len(invitations) == 2
        assert not [secret for secret in invitations if secret in shown]
        cluster.run("scancel", *cluster.jobs())
        with pytest.raises(WorkerStartError, match="its job is CANCELLED"):
            await scheduler.renew(first, first.facts.incarnation)
    await until(lambda: cluster.left_overs() == [])


@pytest.mark.parametrize(
    ("slurm", "said"),
    [
        (
            {"partition": "none"},
            "partition='none': SLURM lists no node of it(?s:.*)  short: 3 nodes",
        ),
        ({"nodes": 4}, r"node configuration is not available(?s:.*)for: --nodes=4; (?s:.*)3 nodes"),
        ({"gpus_per_node": 9}, r"node configuration is not available(?s:.*)gpu:8"),
        (
            {"account": "broke"},
            r"project broke has used up its hours(?s:.*)change scheduler\.slurm",
        ),
        ({"extra_flags": ["--no-such-flag"]}, "unrecognized option '--no-such-flag'"),
        (
            {"partition": "short", "time_limit": "60"},
            r"would wait for ever: PartitionTimeLimit(?s:.*)short: 3 nodes .*time 10:00",
        ),
        (
            {"nodes": 1, "rollout": RolloutNodes(nodes=1, constraint="no_such_feature")},
            "Invalid feature specification",  # of the second job: the first one is not submitted
        ),
    ],
)
async def test_what_can_never_run_is_refused_in_slurms_words(
    cluster: Cluster, tmp_path: Path, slurm: dict[str, object], said: str
) -> None:
    begun_s = time.monotonic()
    with pytest.raises(ConfigError, match=said):
        async with opened(config_of(tmp_path, **slurm)) as scheduler:
            await scheduler.nodes()
    assert time.monotonic() < begun_s + LIMIT_S
    assert not (tmp_path / "keys.json").exists()


async def test_why_an_agent_could_not_be_started_is_shown(cluster: Cluster, tmp_path: Path) -> None:
    with pytest.raises(WorkerStartError, match=r"agent-node\d-\d+\.\d\.log") as told:
        async with opened(config_of(tmp_path, nodes=2, python="/no/python")) as scheduler:
            await scheduler.nodes()
    assert "/no/python: No such file" in told.value.log_tail[-1]


async def test_waiting_for_nodes_is_told_and_not_limited(
    cluster: Cluster, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    other = cluster.run(
        "sbatch", "--parsable", "-N3", "--exclusive", "-o/dev/null", "--wrap=sleep 999"
    )
    await until(lambda: cluster.run("squeue", "-h", "-j", other, "-o", "%T") == "RUNNING")
    with caplog.at_level(logging.WARNING, "areal_sc.schedulers"):
        async with opened(config_of(tmp_path, nodes=1)) as scheduler:
            nodes = asyncio.create_task(scheduler.nodes())
            await until(lambda: "waits for its nodes: PENDING, reason Resources" in caplog.text)
            cluster.run("scancel", other)
            assert len(await nodes) == 1


PROGRAM = """
import asyncio, sys
from areal_sc.config.schema import SchedulerConfig
from areal_sc.config.slurm_settings import SlurmConfig
from areal_sc.schedulers.slurm.scheduler import SlurmScheduler
scheduler = SlurmScheduler(SchedulerConfig(run_dir=sys.argv[1], slurm=SlurmConfig(nodes=3)))
print(*[node.name for node in asyncio.run(scheduler.nodes())], flush=True)
scheduler.close()
print("closed", flush=True)
"""


async def test_within_an_allocation_its_nodes_are_used_and_it_goes_on(
    cluster: Cluster, tmp_path: Path
) -> None:
    program, output = tmp_path / "program.py", tmp_path / "output"
    program.write_text(PROGRAM)
    run = f"{sys.executable} {program} {tmp_path / 'run'} && squeue -h --steps -o %j && sleep 999"
    job = cluster.run("sbatch", "--parsable", "-N3", f"-o{output}", f"--wrap={run}")
    await until(lambda: output.exists() and "closed" in output.read_text())
    await until(lambda: "batch" in output.read_text())
    assert output.read_text().split() == [*NODES, "closed", "batch"]
    assert cluster.jobs() == [job]
    assert cluster.left_overs() == []
    cluster.run("scancel", job)
    await until(lambda: cluster.jobs() == [])
