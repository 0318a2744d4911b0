"""A script with jobs in SLURM is killed; the next one finds its agents, and its jobs that wait."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from integration.scheduler_conformance import environment
from integration.slurm.conftest import LIMIT_S, SCRIPT, Cluster
from integration.slurm.test_slurm_scheduler import config_of, is_served, opened
from waiting import until

from areal_sc.run.run_owner import Owner

pytestmark = pytest.mark.usefixtures("idle_agents")

ORPHAN_S = 8.0
"""Of a script that nobody starts again; the next start of others may take long."""

PROGRAM = """
import asyncio, json, sys
from areal_sc.config.schema import SchedulerConfig
from areal_sc.schedulers.slurm.scheduler import SlurmScheduler
from msgspec import convert
config = convert(json.loads(sys.argv[1]), SchedulerConfig)
scheduler = SlurmScheduler(config)
print("began", flush=True)
for node in asyncio.run(scheduler.nodes()):
    if node.is_there:
        print(node.name, node.purpose, node.facts.incarnation, flush=True)
print("all", flush=True)
sys.stdin.read()
scheduler.close()
"""


def settings_of(run_dir: Path, **slurm: object) -> dict[str, object]:
    return {
        "run_dir": str(run_dir),
        "slurm": {"nodes": 2, **slurm},
        "orphan_timeout_s": 600.0,
        "heartbeat_interval_s": 1.0,
    }


class Script:
    """A process with a scheduler, on a host of the cluster."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process

    async def line(self) -> str:
        assert self.process.stdout is not None
        return (await asyncio.wait_for(self.process.stdout.readline(), LIMIT_S)).decode().strip()

    async def agents(self) -> dict[tuple[str, str], str]:
        """Incarnation of the agent of each node that is there, by that and its purpose."""
        agents: dict[tuple[str, str], str] = {}
        while (line := await self.line()) != "all":
            assert line, "it has ended"
            if line != "began":
                name, purpose, incarnation = line.split()
                agents[name, purpose] = incarnation
        return agents

    async def nodes(self) -> dict[str, str]:
        """Incarnation of the agent of each node, once all have joined."""
        return {name: incarnation for (name, _), incarnation in (await self.agents()).items()}

    async def end(self) -> None:
        """Lets it close its scheduler."""
        await asyncio.wait_for(self.process.communicate(b""), LIMIT_S)
        assert self.process.returncode == 0


@asynccontextmanager
async def script(
    cluster: Cluster, settings: dict[str, object], host: str = ""
) -> AsyncIterator[Script]:
    """One that is killed at the end of the block, if it has not ended.

    Args:
        host: "": this machine.
    """
    words = [sys.executable, "-c", PROGRAM, json.dumps(settings)]
    if host:
        words = [str(SCRIPT), "on", host, *words]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    process = await asyncio.create_subprocess_exec(
        *words, **pipes, env=cluster.environment | environment()
    )
    try:
        yield Script(process)
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate(b"")


def state_of(cluster: Cluster, job: str) -> str:
    return cluster.run("squeue", "-h", "-t", "all", "-j", job, "-o", "%T")


async def busy(cluster: Cluster, nodes: str) -> str:
    """A job of somebody else that has all of these nodes."""
    words = ["--parsable", nodes, "--exclusive", "-o/dev/null", "--wrap=sleep 999"]
    other = cluster.run("sbatch", *words)
    await until(lambda: state_of(cluster, other) == "RUNNING")
    return other


async def test_another_login_node_takes_agents_over_and_replaces_lost_ones(
    cluster: Cluster, tmp_path: Path
) -> None:
    settings = settings_of(tmp_path, nodes=3)
    async with script(cluster, settings) as killed:
        before = await killed.nodes()
    keys = (tmp_path / "keys.json").read_bytes()
    cluster.on("node2", "pkill", "-9", "-x", "areal:agent")
    async with script(cluster, settings, "node3") as second:
        after = await second.nodes()
        assert after.keys() == before.keys()
        assert [name for name in before if before[name] != after[name]] == ["node2"]
        assert (tmp_path / "keys.json").read_bytes() == keys
        assert len(cluster.jobs()) == 1
        owner = Owner.read(tmp_path)
        assert owner is not None
        assert (owner.term, owner.host) == (2, "node3")
        await second.end()
    assert cluster.jobs() == []
    await until(lambda: cluster.left_overs() == [])
    assert not {".jobs", "keys.json"} & set(os.listdir(tmp_path))


async def test_what_has_other_settings_ends_before_a_new_job_begins(
    cluster: Cluster, tmp_path: Path
) -> None:
    async with script(cluster, settings_of(tmp_path)) as killed:
        before = await killed.nodes()
    [job] = cluster.jobs()
    config = replace(config_of(tmp_path, nodes=1), heartbeat_interval_s=1.5)
    async with opened(config) as scheduler:
        [node] = await scheduler.nodes()
        assert node.facts.incarnation not in before.values()
        assert await is_served(scheduler, node.facts)
        await until(lambda: job not in cluster.jobs())  # it may be completing
    await until(lambda: cluster.left_overs() == [])


async def test_a_job_that_waits_is_taken_over_and_not_submitted_twice(
    cluster: Cluster, tmp_path: Path
) -> None:
    """One of its nodes does not see the run folder, and so not where the script is by then."""
    cluster.on("node1", "mount", "-t", "tmpfs", "tmpfs", str(tmp_path))
    other = cluster.run(
        "sbatch", "--parsable", "-N3", "--exclusive", "-o/dev/null", "--wrap=sleep 999"
    )
    await until(lambda: cluster.run("squeue", "-h", "-j", other, "-o", "%T") == "RUNNING")
    settings = settings_of(tmp_path) | {"node_folder": str(tmp_path / "node")}
    async with script(cluster, settings) as killed:
        assert await killed.line() == "began"
    [waits] = set(cluster.jobs()) - {other}
    jobs = json.loads((tmp_path / ".jobs").read_text())
    jobs["jobs"][0]["job_id"] = ""  # as if it was killed while it submitted
    (tmp_path / ".jobs").write_text(json.dumps(jobs))
    async with script(cluster, settings) as second:
        assert await second.line() == "began"
        assert set(cluster.jobs()) == {other, waits}
        cluster.run("scancel", other)
        assert (await second.nodes()).keys() == {"node1", "node2"}
        await until(lambda: cluster.jobs() == [waits])  # the other one may be completing
        assert "node1" in (tmp_path / ".joined").read_text()
        await second.end()
    assert cluster.jobs() == []
    await until(lambda: cluster.left_overs() == [])
    cluster.on("node1", "umount", str(tmp_path))


@pytest.mark.parametrize("is_killed", [False, True])
async def test_the_command_stop_cancels_a_job_that_waits_from_another_host(
    cluster: Cluster, tmp_path: Path, *, is_killed: bool
) -> None:
    other = await busy(cluster, "-N3")
    settings = settings_of(tmp_path)
    async with script(cluster, settings) as waiting:
        assert await waiting.line() == "began"
        [waits] = set(cluster.jobs()) - {other}
        if is_killed:
            waiting.process.kill()
            await waiting.process.wait()
        stop = ("-m", "areal_sc", "stop", str(tmp_path), "--timeout", "90")
        said = cluster.on("node3", sys.executable, *stop)
        assert (f"jobs that were left of it are cancelled: {waits}" in said) is is_killed
        assert "stopped: nothing of the run is left" in said
        assert state_of(cluster, waits) == "CANCELLED"
        await asyncio.wait_for(waiting.process.wait(), LIMIT_S)
    assert cluster.jobs() == [other]
    assert not {".jobs", ".join"} & set(os.listdir(tmp_path))
    assert "nothing to stop" in cluster.on("node3", sys.executable, *stop)
    cluster.run("scancel", other)
    await until(lambda: cluster.jobs() == [])


async def test_nobody_comes_back_and_nothing_is_left_that_runs_or_waits(
    cluster: Cluster, tmp_path: Path
) -> None:
    """One job runs, another one waits; of a third run, whose guard dies, too, the job starts."""
    other = cluster.run(
        "sbatch", "--parsable", "-wnode3", "--exclusive", "-o/dev/null", "--wrap=sleep 999"
    )
    await until(lambda: cluster.run("squeue", "-h", "-j", other, "-o", "%T") == "RUNNING")
    on_node3 = {"nodes": 1, "extra_flags": ["--nodelist=node3"]}
    run, unguarded = tmp_path / "run", tmp_path / "unguarded"
    soon = {"orphan_timeout_s": ORPHAN_S}
    settings = settings_of(run, nodes=1, rollout=on_node3) | soon
    async with (
        script(cluster, settings) as killed,
        script(cluster, settings_of(unguarded, **on_node3) | soon) as waiting,
    ):
        assert (await killed.line(), await waiting.line()) == ("began", "began")
        await until(lambda: list((run / "agents").glob("*.json")))
        guards = cluster.run("pgrep", "-f", f"slurm.guard {unguarded} ").split()
        assert len(guards) == 1
        cluster.run("kill", "-9", *guards)
        assert len(cluster.jobs()) == 4
    await until(lambda: len(cluster.jobs()) == 2, ORPHAN_S + LIMIT_S)
    [left] = set(cluster.jobs()) - {other}
    cluster.run("scancel", other)
    await until(
        lambda: cluster.run("squeue", "-h", "-t", "all", "-j", left, "-o", "%T") == "COMPLETED"
    )
    assert cluster.left_overs() == []
    assert not (run / "keys.json").exists()
    assert cluster.jobs() == []
