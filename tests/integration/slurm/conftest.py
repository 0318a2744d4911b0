"""A real SLURM of three hosts on this machine, started once for all tests that a process runs."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from integration.agent_forks import Fork, environment_of_scripts, start_script
from integration.scheduler_conformance import environment
from waiting import wait_until

from areal_sc.schedulers.join_server import JoinServer

SCRIPT = Path(__file__).parents[2] / "slurm_cluster" / "hosts.sh"
NODES = ("node1", "node2", "node3")
_BRINGS_BACK = {"kill": "boot", "cut": "heal"}
LIMIT_S = 180.0
"""Far above what any command takes, for a machine that is busy with other work."""


@dataclass(frozen=True)
class Cluster:
    """Three hosts, and this machine as their login node.

    Attributes:
        network: first part of all addresses; network6: the same of IPv6.
        lost: host that is off, or whose cable is pulled -> what brings it back.
    """

    environment: dict[str, str]
    network: str
    network6: str
    lost: dict[str, str] = field(default_factory=dict)

    def run(self, *words: str) -> str:
        """Output of a command on this machine, the login node."""
        done = subprocess.run(
            words, env=self.environment, capture_output=True, text=True, timeout=LIMIT_S
        )
        assert done.returncode == 0, f"{words}: {done.stdout}{done.stderr}"
        return done.stdout.strip()

    def on(self, node: str, *words: str) -> str:
        return self.run(str(SCRIPT), "on", node, *words)

    def host(self, what: str, node: str) -> None:
        """kill: power loss; boot; cut: its cable is pulled; heal."""
        self.run(str(SCRIPT), what, node)
        self.lost.pop(node, None)
        if what in _BRINGS_BACK:
            self.lost[node] = _BRINGS_BACK[what]

    @property
    def addresses(self) -> dict[str, str]:
        """Node -> its address."""
        return {node: f"{self.network}{10 + i}" for i, node in enumerate(NODES, start=1)}

    @property
    def ssh(self) -> str:
        """A command that runs shell commands on `{host}`, an address, as ssh does."""
        names = ("SLURM_CLUSTER_ID", "SLURM_CLUSTER_ROOT")
        variables = [f"{name}={self.environment[name]}" for name in names]
        return f"env {' '.join(variables)} {SCRIPT} ssh {{host}}"

    def wait_until_idle(self) -> None:
        """SLURM has all nodes, and no job on them."""
        self._wait_for(NODES, {"idle"})

    def _wait_for(self, nodes: Sequence[str], states: set[str]) -> None:
        words = ["sinfo", "-h", "-N", "-p", "debug", "-n", ",".join(nodes), "-o", "%T"]
        try:
            wait_until(lambda: states.issuperset(self.run(*words).split()))
        except AssertionError as error:
            error.add_note(self.run("sinfo", "-N", "-o", "%N %T"))
            error.add_note(self.run("squeue", "-o", "%i %T %r %N %M"))
            raise

    @contextmanager
    def without(self, node: str) -> Iterator[None]:
        """The node loses its power; afterwards SLURM has it again."""
        self.host("kill", node)
        try:
            yield
        finally:
            self.host("boot", node)
            self._wait_for([node], {"idle", "mixed", "allocated"})

    def jobs(self) -> list[str]:
        """Ids of what waits, runs or ends."""
        return self.run("squeue", "-h", "-o", "%i").split()

    def left_overs(self) -> list[str]:
        """What runs have left on the nodes: processes and shared memory."""
        look = "ps -eo comm= | grep ^areal: ; ls -d /dev/shm/areal*/*/ 2>/dev/null; true"
        return [f"{node} {it}" for node in NODES for it in self.on(node, "sh", "-c", look).split()]

    def clear(self) -> None:
        """No run's shared memory is left on the nodes."""
        for node in NODES:
            self.on(node, "sh", "-c", "rm -rf /dev/shm/areal*/*/")


@pytest.fixture(scope="session")
def _cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    if os.geteuid() != 0:
        pytest.skip("hosts of their own need root")
    with ExitStack() as stack:
        number, root = place_of_its_own(stack)
        yield from started(number, root)


def place_of_its_own(stack: ExitStack) -> tuple[int, Path]:
    """The number and the folder of a cluster that no other process has until the stack ends."""
    for number in range(1, 100):
        # sockets' paths are limited in length
        root = Path("/var/tmp") / f"slurm-cluster-{number}"
        lock = stack.enter_context(root.with_suffix(".lock").open("w"))
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            continue
        return number, root
    raise AssertionError("99 clusters run on this machine")


def started(number: int, root: Path, **variables: str) -> Iterator[Cluster]:
    """Args: variables: of `hosts.sh`, beside those of every cluster."""
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith("SLURM_")},
        "PATH": f"{os.environ['PATH']}:/usr/sbin:/sbin",
        "SLURM_CLUSTER_ID": str(number),
        "SLURM_CLUSTER_ROOT": str(root),
        "SLURM_CONF": str(root / "slurm.conf"),
        **variables,
    }
    cluster = Cluster(environment, f"10.77.{number}.", f"fd77:{number}:")
    subprocess.run([SCRIPT, "stop"], env=environment, check=True)  # of a run that was killed
    shutil.rmtree(root, ignore_errors=True)
    cluster.run(str(SCRIPT), "start")
    try:
        yield cluster
    finally:
        subprocess.run([SCRIPT, "stop"], env=environment, check=True)
        shutil.rmtree(root, ignore_errors=True)


@pytest.fixture
def cluster(_cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    """The cluster as this process, and its children, see it; nothing may run when a test ends."""
    for name in ("PATH", "SLURM_CONF"):
        monkeypatch.setenv(name, _cluster.environment[name])
    yield _cluster
    for node, what in dict(_cluster.lost).items():  # of a test that failed
        _cluster.host(what, node)
    jobs = _cluster.jobs()
    if jobs:  # the next test is to begin as it expects
        _cluster.run("scancel", *jobs)
        _cluster.wait_until_idle()
        _cluster.clear()
    assert not jobs


@contextmanager
def running_script(
    command: Sequence[str], folder: Path, output: Path
) -> Iterator[Fork | subprocess.Popen[bytes]]:
    """`python FILE ARGUMENT ...` in that folder; it is killed at the end of the block."""
    with output.open("ab") as file:
        script = start_script([sys.executable, *command], folder, environment_of_scripts(), file)
    try:
        yield script
    finally:
        script.kill()
        script.wait()


@pytest.fixture
def idle_agents(monkeypatch: pytest.MonkeyPatch) -> None:
    """Agents do not import for seconds what workers need, of which the test has none."""
    for name, value in environment().items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def invitations(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The secrets of all that there are."""
    made: list[str] = []
    invite = JoinServer.invite

    def noted(*arguments: int) -> str:
        words = invite(*arguments)
        made.append(words.split()[1])
        return words

    monkeypatch.setattr(JoinServer, "invite", noted)
    return made
