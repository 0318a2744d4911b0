"""The ray scheduler on a Ray cluster of three nodes, each a host that can lose its power."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
from integration.ray.conftest import RayHosts
from integration.scheduler_conformance import LIMIT_S, Conformance, Lent, environment
from integration.slurm.conftest import NODES
from integration.slurm.test_scheduler_conformance import ORPHANS_S, started
from waiting import until

from areal_sc import make_scheduler
from areal_sc.config.schema import SchedulerConfig
from areal_sc.config.slurm_settings import RayConfig
from areal_sc.errors import ConfigError
from areal_sc.schedulers.base import Node
from areal_sc.schedulers.join_server import JoinServer

REFUSED_LIMIT_S = 120.0
GONE = (FileNotFoundError, ProcessLookupError)


def config_of(hosts: RayHosts, run_dir: Path, **settings: object) -> SchedulerConfig:
    return SchedulerConfig(
        type="ray",
        run_dir=str(run_dir),
        orphan_timeout_s=ORPHANS_S,
        heartbeat_interval_s=2.0,
        ray=RayConfig(**{"address": hosts.address, **settings}),  # type: ignore[arg-type]
    )


@pytest.fixture(autouse=True, scope="module")
def _environment() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment().items():
            patch.setenv(name, value)
        yield


@pytest.fixture(scope="class")
def invitations() -> Iterator[list[bytes]]:
    """What agents show to be let in."""
    made: list[bytes] = []
    invite = JoinServer.invite

    def noted(*arguments: int) -> str:
        words = invite(*arguments)
        made.append(words.split()[1].encode())
        return words

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(JoinServer, "invite", noted)
        yield made


@pytest.fixture(scope="class")
def lent(
    ray_hosts: RayHosts, invitations: list[bytes], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Lent]:
    config = config_of(ray_hosts, tmp_path_factory.mktemp("lent") / "run")
    scheduler = make_scheduler(config)
    hosts = ray_hosts.hosts
    left = ray_hosts.left_overs
    try:
        yield Lent(scheduler, config, hosts.on, left, len(NODES), hosts.network)
    finally:
        scheduler.close()


class TestRayScheduler(Conformance):
    """Every check, on all nodes of the cluster: no setting but its address is given."""

    async def test_an_agent_that_died_is_started_again_for_all_who_ask(self, lent: Lent) -> None:
        """And so is one whose actor was killed, as Ray does where memory is short."""
        await super().test_an_agent_that_died_is_started_again_for_all_who_ask(lent)
        node, *_ = await lent.scheduler.nodes()
        past = node.facts
        lent.on(node.name, "pkill", "-9", "-f", "^ray::AgentActor")
        ended: dict[Node, str] = {}
        async with asyncio.timeout(LIMIT_S):
            while not ended:
                await asyncio.sleep(0.1)
                ended = await lent.scheduler.ended_nodes()
        assert ended.keys() == {node}
        assert ended[node].startswith("the end of its Ray actor: ActorDiedError")
        await lent.scheduler.renew(node, past.incarnation)
        assert node.facts.host == past.host
        assert node.facts.incarnation != past.incarnation
        assert await lent.scheduler.ended_nodes() == {}

    async def test_nothing_is_left_when_it_is_closed(
        self, lent: Lent, ray_hosts: RayHosts, invitations: list[bytes]
    ) -> None:
        """Nor was anything secret in Ray: GCS, raylets, actors and all that they have written."""
        assert len(invitations) >= len(NODES) + 2, "two agents were started again, at least"
        keys = lent.scheduler.keys
        secrets = [*invitations, keys.controller.secret, keys.workers.secret, keys.signing_seed]
        processes = ray_processes(ray_hosts)
        assert len([it for it in processes.values() if it == "ray::AgentActor"]) == len(NODES)
        assert {"gcs_server", "raylet", "ray::Keeper"} <= set(processes.values())
        run_id = keys.run_id.encode()
        knows = [name for pid, name in processes.items() if is_in_memory(pid, [run_id])]
        assert {"gcs_server", "ray::Keeper"} <= set(knows), "what is no secret is found"
        assert [name for pid, name in processes.items() if is_in_memory(pid, secrets)] == []
        logs = [path for path in ray_hosts.root.rglob("*") if path.is_file()]
        assert len(logs) > 10
        assert [path for path in logs if any(it in content_of(path) for it in secrets)] == []
        await super().test_nothing_is_left_when_it_is_closed(lent)


def content_of(path: Path) -> bytes:
    with suppress(FileNotFoundError):  # Ray has deleted it meanwhile
        return path.read_bytes()
    return b""


def ray_processes(hosts: RayHosts) -> dict[int, str]:
    """Those of the cluster, on all of its hosts, by this machine's process ids."""
    words = ["ps", "-ewwo", "pid=,args="]
    found = {}
    for line in subprocess.run(words, capture_output=True, text=True).stdout.splitlines():
        pid, command = line.split(None, 1)
        name = Path(command.split()[0]).name.partition(".")[0]  # `ray::Actor.method`
        is_its = name.startswith("ray::") or f"{hosts.root}/" in command
        if is_its and name.startswith(("ray::", "gcs_server", "raylet")):
            found[int(pid)] = name
    return found


def is_in_memory(pid: int, texts: list[bytes]) -> bool:
    try:  # an idle process of Ray may have ended meanwhile
        maps = Path(f"/proc/{pid}/maps").read_text().splitlines()
    except GONE:
        return False
    with suppress(*GONE), open(f"/proc/{pid}/mem", "rb") as memory:
        for line in maps:
            places, rights, *_ = line.split()
            begin, end = (int(place, 16) for place in places.split("-"))
            if not rights.startswith("rw"):
                continue
            try:
                memory.seek(begin)
                content = memory.read(end - begin)
            except (OSError, ValueError):
                continue  # a device, say
            if any(text in content for text in texts):
                return True
    return False


async def test_agents_of_a_killed_script_go_on_and_a_lost_node_is_replaced(
    ray_hosts: RayHosts, tmp_path: Path
) -> None:
    """Two nodes of three: the third one takes the place of one that loses its power."""
    config = config_of(ray_hosts, tmp_path / "run", nodes=2, resources={"CPU": 1})
    config = replace(config, orphan_timeout_s=1000.0)
    script, before = await started(config)
    assert len(before) == 2
    script.kill()
    await script.communicate()
    (lost, _), (kept, incarnation) = sorted(before.items())
    with ray_hosts.without(lost):
        await until(lambda: lost not in ray_hosts.ask("nodes"))
        script, after = await started(config)
        assert after.keys() == set(NODES) - {lost}
        assert after[kept] == incarnation, "it was taken over"
    script.send_signal(signal.SIGINT)
    await script.communicate()
    await until(lambda: ray_hosts.left_overs() == [])


async def test_a_script_that_is_killed_leaves_nothing_for_long(
    ray_hosts: RayHosts, tmp_path: Path
) -> None:
    script, nodes = await started(config_of(ray_hosts, tmp_path / "run"))
    assert nodes.keys() == set(NODES)
    script.kill()
    await script.communicate()
    assert ray_hosts.left_overs() != []
    await until(lambda: ray_hosts.left_overs() == [])
    assert not (tmp_path / "run" / "keys.json").exists()


def refused(config: SchedulerConfig) -> str:
    """Why, and within the limit."""
    began_s = time.monotonic()
    with pytest.raises(ConfigError) as error:
        make_scheduler(config)
    assert time.monotonic() - began_s < REFUSED_LIMIT_S
    return str(error.value)


def test_what_cannot_be_had_is_refused_by_name(ray_hosts: RayHosts, tmp_path: Path) -> None:
    said = refused(config_of(ray_hosts, tmp_path / "a", address=f"{ray_hosts.hosts.network}1:9"))
    assert f"address={ray_hosts.hosts.network}1:9: there is no Ray cluster" in said
    said = refused(config_of(ray_hosts, tmp_path / "b", nodes=2, resources={"GPU": 8, "CPU": 1}))
    assert 'at least 2 Ray nodes with {"GPU":8,"CPU":1}, got 0' in said
    assert f"{ray_hosts.hosts.network}11 has " in said
    said = refused(config_of(ray_hosts, tmp_path / "c", nodes=4))
    assert "expected at least 4 Ray nodes with CPUs or GPUs, got 3" in said
    own = ray_hosts.ask("python 3.9.1")
    try:
        said = refused(config_of(ray_hosts, tmp_path / "d"))
    finally:
        ray_hosts.ask(f"python {own}")
    assert "expected Python 3.9.1 with Ray" in said
    assert f"got Python {own} with Ray" in said
    assert ray_hosts.left_overs() == []
