"""A run on hosts of their own that lose their power and their cable; another host stands by."""

from __future__ import annotations

import re
import time
from datetime import datetime
from pathlib import Path

import pytest
from integration.run_process import REPOSITORY, RunProcess, open_gate, tiny_run
from integration.slurm.conftest import Cluster

from areal_sc.controller.ledger.ledger_account import GroupAccount, read_account
from areal_sc.records.metrics_log import History
from areal_sc.run.run_folder import RunFolder

ROWS_A_STEP = 4 * 2
STEPS_A_BYTE = 2
NOTICE_S = 12.0
"""Ten seconds of silence, and the interval of the last heartbeat."""
MARGIN_S = 40.0
"""For a machine that is busy with other work."""
MOST_OPENINGS = 8


class RunOnHosts:
    """A run that can be held every few steps."""

    def __init__(self, run: RunProcess, cluster: Cluster) -> None:
        self.run = run
        self._hosts = {address: node for node, address in cluster.addresses.items()}
        self._cluster = cluster

    def host_of(self, worker: str) -> str:
        """Where the newest life of a worker is."""
        found = re.findall(rf"worker={worker} pid=\d+ address=tcp://(\S+):", self.log())
        return self._hosts[found[-1]]

    def lose(self, what: str, worker: str) -> str:
        """Its host is lost in the midst of the work; returns that host when this is noticed."""
        host, log = self.host_of(worker), self.log()
        lost_at = datetime.now()
        self._cluster.host(what, host)
        self.run.wait_until(lambda: f"worker={worker} lost=" in self.log()[len(log) :], "a loss")
        line = next(it for it in self.log()[len(log) :].splitlines() if "lost=" in it)
        noticed_s = (datetime.now() - lost_at).total_seconds()
        print(f"{what} {host}, which has {worker}: noticed after {noticed_s:.1f} s\n{line}")
        assert noticed_s < NOTICE_S + MARGIN_S
        return host

    def wait_until_elsewhere(self, worker: str, host: str) -> None:
        """Another host is there in place of that one."""
        self.run.wait_until(lambda: self.host_of(worker) != host, "another host")

    def go_on(self) -> None:
        """Two more steps, at least one of which begins after this.

        What one opening of the gate gives may be lost, where the host is lost before the snapshot
        of its newest step is on the disk: then the gate is opened once more.
        """
        step = self.run.steps()[-1]
        for _ in range(MOST_OPENINGS):
            open_gate(self.run.run_dir)
            count, until_s = len(self.run.steps()), time.monotonic() + MARGIN_S
            self.run.wait_until(
                lambda count=count, until_s=until_s: (
                    len(self.run.steps()) > count or time.monotonic() > until_s
                ),
                "a step",
            )
            if self.run.steps()[-1] >= step + STEPS_A_BYTE:
                return
        raise AssertionError(f"{MOST_OPENINGS} openings of the gate, and no two steps")

    def log(self) -> str:
        return (self.run.run_dir / "logs" / "controller.log").read_text()


@pytest.mark.slow
def test_nothing_is_lost_or_doubled_when_hosts_lose_their_power_or_their_cable(
    cluster: Cluster, tmp_path: Path, tiny_model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY / "examples"), prepend=":")
    hosts = ", ".join(cluster.addresses.values())
    settings = f"{{hosts: [{hosts}], nodes: 2, command: '{cluster.ssh}'}}"
    with tiny_run(
        tmp_path / "run",
        tiny_model_folder,
        *("scheduler.type=ssh_scheduler:SshScheduler", f"scheduler.settings={settings}"),
        *("scheduler.heartbeat_interval_s=2", "scheduler.orphan_timeout_s=300"),
        *(
            "checkpoint.every_steps=1",
            "total_steps=30",
            f"task.num_free_episodes={STEPS_A_BYTE * ROWS_A_STEP}",
        ),
    ) as process:
        run = RunOnHosts(process, cluster)
        process.wait_for_step(1)
        assert {run.host_of("train/0"), run.host_of("rollout/0")} == {"node1", "node2"}

        first = run.lose("kill", "rollout/0")
        run.wait_until_elsewhere("rollout/0", first)
        run.go_on()
        second = run.lose("kill", "train/0")
        process.wait_until(lambda: "no other machine stands by" in run.log(), "a wait")
        cluster.host("boot", first)
        run.wait_until_elsewhere("train/0", second)
        run.go_on()
        cluster.host("boot", second)
        cut = run.lose("cut", "rollout/0")
        run.wait_until_elsewhere("rollout/0", cut)
        run.go_on()
        assert cluster.on(cut, "pgrep", "-c", "areal:"), "nobody can reach it"
        cluster.host("heal", cut)
        look = ["sh", "-c", "pgrep areal: || echo none"]
        process.wait_until(lambda: cluster.on(cut, *look) == "none", "the end of who was replaced")

        for _ in range(40):
            open_gate(process.run_dir)
        process.finish()
        assert cluster.left_overs() == []
        summary = process.summary()
        folder = RunFolder(process.run_dir)
        steps = [step.step for step in History.read(folder.metrics_path).steps]
        assert steps == list(range(1, 31))
        assert summary["num_rows_trained"] == 30 * ROWS_A_STEP
        assert summary["num_rows_trained_twice"] == 0
        groups: list[GroupAccount] = []
        account = read_account(folder.ledger, groups.append)
        assert account.trained_again == []
        assert not folder.keys_path.exists()
    cluster.wait_until_idle()
