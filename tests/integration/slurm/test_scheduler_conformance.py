"""Every scheduler does what controllers expect, and nothing is left of scripts that are killed."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from integration.run_process import REPOSITORY
from integration.scheduler_conformance import (
    AskedConformance,
    Conformance,
    Lent,
    environment,
    orders,
)
from integration.slurm.conftest import NODES, Cluster
from integration.test_node_recovery import processes
from msgspec import json
from waiting import until

from areal_sc import make_scheduler
from areal_sc.config.schema import SchedulerConfig, TransportConfig
from areal_sc.config.slurm_settings import RoleNodes, RolloutNodes, SlurmConfig
from areal_sc.transport.shards.memory_folder import user_folder

KINDS = ("local", "a job", "inside an allocation", "ssh")
SINGLY = "a job a node"
ORPHANS_S = 10.0
"""More than an agent may be silent on a busy machine, or a worker take to end."""
ENDS_S = ORPHANS_S + 90.0


def config_of(kind: str, run_dir: Path, cluster: Cluster) -> SchedulerConfig:
    config = SchedulerConfig(
        run_dir=str(run_dir), orphan_timeout_s=ORPHANS_S, heartbeat_interval_s=2.0
    )
    if kind == "local":
        return replace(config, transport=TransportConfig(shared_memory=str(run_dir / "memory")))
    if kind == "ssh":
        settings = {"hosts": list(cluster.addresses.values()), "command": cluster.ssh}
        return replace(config, type="ssh_scheduler:SshScheduler", settings=settings)
    slurm = SlurmConfig(nodes=len(NODES))
    if kind == SINGLY:
        rollout = RolloutNodes(nodes=1, role_workers=1)
        slurm = SlurmConfig(gang=False, train=RoleNodes(nodes=1), rollout=rollout)
    return replace(config, type="slurm", slurm=slurm)


@pytest.fixture(scope="class", params=KINDS)
def kind(request: pytest.FixtureRequest, _cluster: Cluster) -> Iterator[tuple[str, Cluster]]:
    """A kind of scheduler; the environment of the script is as it needs it."""
    kind: str = request.param
    with pytest.MonkeyPatch.context() as patch:
        for name in ("PATH", "SLURM_CONF"):
            patch.setenv(name, _cluster.environment[name])
        for name, value in environment().items():
            patch.setenv(name, value)
        patch.setenv("PYTHONPATH", str(REPOSITORY / "examples"), prepend=os.pathsep)
        if kind == "inside an allocation":
            done = subprocess.run(
                ["salloc", "--no-shell", "-N3"], capture_output=True, text=True, check=True
            )
            job = done.stderr.split("job allocation ")[1].split()[0]
            patch.setenv("SLURM_JOB_ID", job)
            patch.setenv("SLURM_JOB_NODELIST", "node[1-3]")
            yield kind, _cluster
            assert _cluster.jobs() == [job], "it goes on"
            _cluster.run("scancel", job)
            _cluster.wait_until_idle()
        else:
            yield kind, _cluster
        assert _cluster.jobs() == []


@pytest.fixture(scope="class")
def lent(kind: tuple[str, Cluster], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lent]:
    name, cluster = kind
    run_dir = tmp_path_factory.mktemp("lent") / "run"
    config = config_of(name, run_dir, cluster)
    scheduler = make_scheduler(config)
    try:
        if name == "local":
            yield Lent(scheduler, config, _here, lambda: _left_here(run_dir), 1, "127.0.0.1")
        else:
            on, left = cluster.on, cluster.left_overs
            num_nodes = 2 if name == SINGLY else len(NODES)
            yield Lent(scheduler, config, on, left, num_nodes, cluster.network)
    finally:
        scheduler.close()


def _here(_: str, *words: str) -> None:
    subprocess.run(words, check=True)


def _left_here(run_dir: Path) -> list[str]:
    memory = user_folder(run_dir / "memory")
    left = list(memory.iterdir()) if memory.exists() else []
    return [*processes(run_dir).values(), *map(str, left)]


class TestScheduler(Conformance):
    """Of each kind."""


@pytest.mark.parametrize("kind", [SINGLY], indirect=True)
class TestAsked(AskedConformance):
    """Of the kind that asks for nodes."""


@pytest.mark.parametrize("kind", ["ssh"], indirect=True)
class TestCutOff:
    """A machine to which there is no way any more, while the script goes on."""

    async def test_what_is_cut_off_for_good_ends_by_itself(
        self, lent: Lent, kind: tuple[str, Cluster]
    ) -> None:
        _, cluster = kind
        nodes = await lent.scheduler.nodes()
        before = {node: node.facts.incarnation for node in nodes}
        look = ["sh", "-c", "pgrep areal: || echo none"]
        async with lent.fleet() as (fleet, lost):
            await fleet.launch(orders(*["none"] * len(NODES)))
            cluster.host("cut", "node3")
            await until(lambda: cluster.on("node3", *look) == "none", ENDS_S)
            await until(lambda: lost)
            cluster.host("heal", "node3")
            [cut] = [node for node in nodes if node.name == "node3"]
            await lent.scheduler.renew(cut, before[cut])
            assert [node for node in nodes if node.facts.incarnation != before[node]] == [cut]


PROGRAM = """
import asyncio, sys, time
from msgspec import json
from areal_sc import make_scheduler
from areal_sc.config.schema import SchedulerConfig
scheduler = make_scheduler(json.decode(sys.argv[1], type=SchedulerConfig))
nodes = asyncio.run(scheduler.nodes())
print(json.encode({node.name: node.facts.incarnation for node in nodes}).decode(), flush=True)
time.sleep(99)
"""


async def started(config: SchedulerConfig) -> tuple[asyncio.subprocess.Process, dict[str, str]]:
    """A script, and the incarnation of each node's agent, once all are there."""
    words = [sys.executable, "-c", PROGRAM, json.encode(config).decode()]
    script = await asyncio.create_subprocess_exec(*words, stdout=subprocess.PIPE)
    assert script.stdout is not None
    return script, json.decode(await script.stdout.readline())


class TestScript:
    """Of each kind but local, whose scripts have tests of their own."""

    @pytest.mark.parametrize("kind", KINDS[1:], indirect=True)
    async def test_a_script_that_is_killed_or_stopped_leaves_nothing_for_long(
        self, kind: tuple[str, Cluster], tmp_path: Path
    ) -> None:
        name, cluster = kind
        scripts = {}
        for number in (signal.SIGINT, signal.SIGKILL):
            config = config_of(name, tmp_path / number.name, cluster)
            if number == signal.SIGINT:  # so that nothing ends by itself
                config = replace(config, orphan_timeout_s=1000.0)
            scripts[number] = asyncio.create_task(started(config))
        for number, start in scripts.items():
            script, nodes = await start
            assert len(nodes) == len(NODES)
            if name == "ssh" and number == signal.SIGKILL:
                cluster.host("cut", "node3")
            script.send_signal(number)
            await script.communicate()
        own = os.environ.get("SLURM_JOB_ID")
        await until(lambda: cluster.left_overs() == [], ENDS_S)
        await until(lambda: cluster.jobs() == ([own] if own else []), ENDS_S)
        cluster.host("heal", "node3")
        assert not any((tmp_path / number.name / "keys.json").exists() for number in scripts)

    @pytest.mark.parametrize("kind", ["ssh"], indirect=True)
    async def test_the_same_command_goes_on_with_the_agents_of_a_script_that_was_killed(
        self, kind: tuple[str, Cluster], tmp_path: Path
    ) -> None:
        """One does not see the run folder, and one does not answer."""
        name, cluster = kind
        config = replace(config_of(name, tmp_path, cluster), orphan_timeout_s=1000.0)
        config = replace(config, node_folder=str(tmp_path / "node"))
        cluster.on("node1", "mount", "-t", "tmpfs", "tmpfs", str(tmp_path))
        killed, before = await started(config)
        unseen, *others = json.decode((tmp_path / ".joined").read_bytes())
        assert (unseen["facts"]["host"], others) == ("node1", [])
        killed.kill()
        await killed.communicate()
        cluster.host("cut", "node2")
        written_ns = (tmp_path / ".join").stat().st_mtime_ns
        starting = asyncio.create_task(started(config))
        await until(lambda: (tmp_path / ".join").stat().st_mtime_ns != written_ns)
        cluster.host("heal", "node2")  # by now it was found not to answer, and is waited for
        again, after = await starting
        assert after.keys() == before.keys() == set(NODES)
        assert [it for it in before if before[it] != after[it]] == ["node2"]
        again.kill()
        await again.communicate()
        stop = [sys.executable, "-m", "areal_sc", "stop", str(tmp_path), "--timeout", "60"]
        said = await asyncio.to_thread(cluster.run, *stop)
        assert "agents that were left of it have ended: on node1" in said
        assert "stopped: nothing of the run is left" in said
        await until(lambda: cluster.left_overs() == [])
        assert not {"keys.json", ".join", ".joined", ".jobs"} & set(os.listdir(tmp_path))
        assert cluster.on("node1", "ls", str(tmp_path)) == "node"
        cluster.on("node1", "umount", str(tmp_path))
