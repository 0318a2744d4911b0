"""Nodes of a real SLURM that join singly, are asked for and are given back."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from integration.run_process import SCRIPTS, RunProcess, tiny_run
from integration.slurm.conftest import Cluster
from integration.slurm.test_slurm_scheduler import config_of, is_served, opened
from integration.slurm.test_slurm_takeover import busy, script, settings_of, state_of
from waiting import until

from areal_sc.config.placement import Purpose
from areal_sc.config.slurm_settings import RoleNodes, RolloutNodes
from areal_sc.run.run_status import RoleStatus, read_status

TRAIN = {"nodes": 1, "cpus_per_node": 2}
ROLLOUT = {"nodes": 2, "cpus_per_node": 6}
"""A host has eight CPUs: the trainers' node and one for generation fill one."""

TOTAL_STEPS = 20


def states(cluster: Cluster) -> dict[str, str]:
    """State of each job that waits, runs or ends, by its id."""
    return dict(line.split() for line in cluster.run("squeue", "-h", "-o", "%i %T").splitlines())


def waiting(cluster: Cluster) -> list[str]:
    return [job for job, state in states(cluster).items() if state == "PENDING"]


@pytest.mark.usefixtures("idle_agents")
async def test_one_node_is_enough_and_others_join_are_asked_for_and_given_back(
    cluster: Cluster, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    other = await busy(cluster, "-wnode2,node3")
    nodes_of = {"train": RoleNodes(**TRAIN), "rollout": RolloutNodes(**ROLLOUT)}
    config = config_of(tmp_path, gang=False, **nodes_of)
    with caplog.at_level(logging.WARNING, "areal_sc.schedulers"):
        async with opened(config) as scheduler:
            nodes = await scheduler.nodes()
            there = [node for node in nodes if node.is_there]
            assert sorted(node.purpose for node in there) == [Purpose.rollout, Purpose.train]
            [late] = [node for node in nodes if not node.is_there]
            [job] = waiting(cluster)
            joining = asyncio.create_task(scheduler.renew(late, late.facts.incarnation))
            said = f"SLURM's job {job}: PENDING, reason "
            await until(lambda: late.coming is not None and said in late.coming.what)
            assert f"job={job} kind=rollout waits for its nodes: PENDING, reason" in caplog.text
            assert not joining.done()
            cluster.run("scancel", other)
            await joining
            assert late.name in ("node2", "node3")
            assert late.log_path.exists()
            assert await is_served(scheduler, late.facts)
            assert await scheduler.nodes() == nodes

            further = [await scheduler.ask_node() for _ in range(2)]
            assert {*await scheduler.nodes()} == {*nodes, *further}
            first, second = further
            await scheduler.renew(first, first.facts.incarnation)
            assert {first.name, late.name} == {"node2", "node3"}
            [waits] = waiting(cluster)
            await scheduler.give_back(second)
            assert state_of(cluster, waits) == "CANCELLED"
            await scheduler.give_back(first)
            assert set(states(cluster).values()) == {"RUNNING"}
            assert len(cluster.jobs()) == 3
            cluster.run("scancel", job)  # the run has not given it back
            await scheduler.renew(late, late.facts.incarnation)
            await until(lambda: job not in cluster.jobs())  # it may be completing
            assert len(cluster.jobs()) == 3
            used = {"node1", late.name}
            await until(lambda: {it.split()[0] for it in cluster.left_overs()} == used)
            assert await scheduler.nodes() == nodes
            assert await scheduler.ended_nodes() == {}
            for node in nodes:
                assert await is_served(scheduler, node.facts)
    assert cluster.jobs() == []
    await until(lambda: cluster.left_overs() == [])


@pytest.mark.usefixtures("idle_agents")
@pytest.mark.parametrize("then", ["started again", "stopped", "stopped as the node comes"])
async def test_a_script_is_killed_while_a_node_is_on_its_way(
    cluster: Cluster, tmp_path: Path, then: str
) -> None:
    other = await busy(cluster, "-wnode2,node3")
    settings = settings_of(tmp_path, gang=False, train=TRAIN, rollout=ROLLOUT)
    async with script(cluster, settings) as killed:
        before = await killed.agents()
    assert {purpose for _, purpose in before} == {"train", "rollout"}
    jobs = states(cluster)
    assert sorted(jobs.values()) == ["PENDING", "RUNNING", "RUNNING", "RUNNING"]
    if then == "stopped as the node comes":
        cluster.run("scancel", other)  # no agent is there yet who could be told
        await until(lambda: waiting(cluster) == [])
    if then != "started again":
        said = cluster.run(sys.executable, "-m", "areal_sc", "stop", str(tmp_path))
        assert "stopped: nothing of the run is left" in said
    else:
        told = json.loads((tmp_path / ".jobs").read_text())
        [there, *_] = [it for it in told["lent"] if it["agent"] and it["purpose"] == "rollout"]
        gone = {**there, "agent": {**there["agent"], "job": "999999"}}
        told["lent"].append(gone)  # as if it was killed while it gave that node back
        (tmp_path / ".jobs").write_text(json.dumps(told))
        async with script(cluster, settings) as second:
            assert await second.agents() == before
            assert states(cluster) == jobs
            told = json.loads((tmp_path / ".jobs").read_text())["lent"]
            assert [it["agent"] is None for it in told].count(True) == 1
            await second.end()
    assert set(cluster.jobs()) <= {other}
    assert cluster.left_overs() == []
    assert not {".jobs", ".join"} & set(os.listdir(tmp_path))
    guards = f"pgrep -f 'slurm[.]guard {tmp_path} ' || true"
    await until(lambda: cluster.run("sh", "-c", guards) == "")
    cluster.run("scancel", other)
    await until(lambda: cluster.jobs() == [])


class Scaled:
    """A run whose number of workers and steps this process decides."""

    def __init__(self, folder: Path, model: Path) -> None:
        self._folder, self._model = folder, model

    def order(self, num_workers: int, num_steps: int) -> None:
        (self._folder / "next").write_text(f"{num_workers} {num_steps}")
        (self._folder / "next").replace(self._folder / "orders")  # the file is always whole

    @contextmanager
    def started(self) -> Iterator[RunProcess]:
        words = (
            *(
                f"total_steps={TOTAL_STEPS}",
                f"+task.orders={self._folder / 'orders'}",
                "rollout.num_workers=2",
            ),
            *("scheduler.type=slurm", "scheduler.slurm.gang=false"),
            *("scheduler.orphan_timeout_s=600", "scheduler.heartbeat_interval_s=2"),
            "checkpoint.every_steps=4",
            *(f"scheduler.slurm.train.{name}={value}" for name, value in TRAIN.items()),
            *(f"scheduler.slurm.rollout.{name}={value}" for name, value in ROLLOUT.items()),
        )
        folder, script = self._folder / "run", SCRIPTS / "scaled_run.py"
        with tiny_run(folder, self._model, *words, script=script) as run:
            yield run

    def told(self) -> RoleStatus | None:
        """Of the rollout workers, by the run's status."""
        status = read_status(self._folder / "run" / "status.json")
        return status.roles.get("rollout") if status else None

    def ready(self) -> list[str]:
        told = self.told()
        return [it.name for it in told.workers if it.state == "ready"] if told else []


@pytest.mark.slow
def test_a_run_begins_with_one_node_scales_over_others_and_is_taken_over(
    cluster: Cluster, tmp_path: Path, tiny_model_folder: Path
) -> None:
    words = ["--parsable", "--exclusive", "-o/dev/null", "--wrap=sleep 999"]
    others = [cluster.run("sbatch", f"-w{node}", *words) for node in ("node2", "node3")]
    scaled = Scaled(tmp_path, tiny_model_folder)
    scaled.order(2, 2)
    with scaled.started() as run:
        run.wait_for_step(2)
        run.wait_until(lambda: scaled.ready() == ["rollout/0"], "one worker that is ready")
        run.wait_until(
            lambda: any("PENDING, reason" in it.what for it in scaled.told().waits),  # type: ignore[union-attr]
            "the status to say what the second worker waits for",
        )
        cluster.run("scancel", others[0])
        run.wait_until(lambda: len(scaled.ready()) == 2, "the second node")
        scaled.order(3, 4)
        run.wait_until(lambda: len(waiting(cluster)) == 1, "a job that SLURM was asked for")
        run.wait_for_step(4)
        jobs = states(cluster)
        run.send(signal.SIGKILL)
        run.wait()
        scaled.order(3, 6)
        with scaled.started() as second:
            second.wait_for_step(6)
            assert states(cluster) == jobs
            cluster.run("scancel", others[1])
            second.wait_until(lambda: len(scaled.ready()) == 3, "the third node")
            scaled.order(3, 7)
            second.wait_for_step(7)
            assert len(cluster.jobs()) == 4
            for num_steps in range(8, TOTAL_STEPS):  # a worker leaves when its rows are trained
                scaled.order(1, num_steps)
                second.wait_for_step(num_steps)
                next_step_s = time.monotonic() + 3.0
                while len(cluster.jobs()) != 2 and time.monotonic() < next_step_s:
                    time.sleep(0.1)
            second.wait_until(lambda: len(cluster.jobs()) == 2, "the jobs of two workers to end")
            scaled.order(1, TOTAL_STEPS)
            second.finish()
        assert second.steps() == list(range(1, TOTAL_STEPS + 1))
        assert second.events("reattached")
        assert second.summary()["num_rows_trained_twice"] == 0
        changes = [(event["before"], event["num_workers"]) for event in second.events("scaled")]
        assert changes == [(2, 3), (3, 1)]
    assert cluster.jobs() == []
    assert cluster.left_overs() == []
