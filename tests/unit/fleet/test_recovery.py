"""Lost workers, agents and nodes are started again, with simulated ones in virtual time."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path

import pytest
from simulation.behavior import Behavior
from simulation.cluster import SimulatedCluster, SimulatedTransport
from simulation.virtual_loop import in_virtual_time
from simulation.workers import SimulatedWorker
from waiting import until

from areal_sc.config.schema import Device
from areal_sc.errors import NodeLost, PeerLost, WorkerError, WorkerLost, WorkerStartError
from areal_sc.fleet.fleet import Fleet
from areal_sc.fleet.recovery import Recovery
from areal_sc.fleet.runtime import Runtime
from areal_sc.fleet.worker_life import FleetEvent, Progressed, RunFailed
from areal_sc.nodes.spec import NodeFacts, WorkerOrder
from areal_sc.schedulers.base import Node
from areal_sc.workers.calls import PING

INTERVAL_S = 2.0
LOST_AFTER_S = 7 * INTERVAL_S
"""Five missed heartbeats, the interval that they began in, and that of the question."""
START_S = 3.0
"""An agent takes 1 s to start, and a worker up to 1 s."""


class LifeCluster(SimulatedCluster):
    """Remembers every life of every worker.

    Attributes:
        lives: in order of their starts.
        num_bad_agents: so many further starts of an agent fail.
        num_agent_starts: of all nodes, failed ones too.
    """

    def __init__(self, run_dir: Path, seed: int = 0) -> None:
        super().__init__(run_dir, Behavior(), seed)
        self.train_class = SimulatedWorker  # no engine is asked for anything
        self.lives: list[SimulatedWorker] = []
        self.num_bad_agents = 0
        self.num_agent_starts = 0

    async def start(self, order: WorkerOrder, node: str) -> SimulatedWorker:
        worker = await super().start(order, node)
        assert all(w.exit_status is not None for w in self.lives if w.name == worker.name)
        self.lives.append(worker)
        return worker

    async def renew(self, node: Node, incarnation: str) -> None:
        if self.num_bad_agents:
            self.num_bad_agents -= 1
            self.num_agent_starts += 1
            raise WorkerStartError("the agent ended with exit code 1", log_tail=["no memory"])
        await super().renew(node, incarnation)

    def start_agent(self, node: str) -> NodeFacts:
        self.num_agent_starts += 1
        return super().start_agent(node)

    def num_lives(self, name: str) -> int:
        return sum(worker.name == name for worker in self.lives)


class Guarded:
    """The workers of one role, each a unit of its own unless `is_one_unit`.

    Attributes:
        brought_up: names of workers, in order.
        failures: that `bring_up` raises, one a call.
        given_up: what the run would end with.
    """

    def __init__(self, cluster: SimulatedCluster, role: str = "rollout", max_deaths: int = 3):
        self.cluster = cluster
        self.role = role
        self.max_deaths = max_deaths
        self.brought_up: list[str] = []
        self.failures: list[WorkerError] = []
        self.given_up: list[WorkerError] = []
        self.recovery = self._recovery_of("")

    def _recovery_of(self, unit: str) -> Recovery:
        self.cluster.config.max_deaths = self.max_deaths
        runtime = Runtime(SimulatedTransport(self.cluster), self.cluster.new_id)
        return Recovery(self.cluster, runtime, self._hear, unit)

    @property
    def fleet(self) -> Fleet:
        return self.recovery.fleet

    def _hear(self, event: FleetEvent) -> None:
        if isinstance(event, RunFailed):
            assert isinstance(event.cause, WorkerError)
            self.given_up.append(event.cause)

    async def _bring_up(self, unit: str) -> None:
        await asyncio.sleep(0.5)
        members = [member for member in self.fleet.members if member.life.unit == unit]
        for member in members:
            await self.fleet.call(member, PING, None)
        if self.failures:
            raise self.failures.pop()
        self.brought_up += [member.name for member in members]

    @asynccontextmanager
    async def started(self, num_workers: int, *, is_one_unit: bool = False) -> AsyncIterator[None]:
        if is_one_unit:
            self.recovery = self._recovery_of("ranks")
        await self.fleet.launch(
            [
                WorkerOrder(self.role, index, "LocalGenerator", {}, Device.cpu, 1)
                for index in range(num_workers)
            ]
        )
        names = {member.name for member in self.fleet.members}
        self.recovery.begin(self._bring_up)
        try:
            yield
        finally:
            await self.recovery.close()
            await self.fleet.close()
            await asyncio.sleep(2 * LOST_AFTER_S)
            left = {task.get_name() for task in asyncio.all_tasks() if "restart" in task.get_name()}
            assert not left
            assert all(w.exit_status for w in self.cluster.workers.values() if w.name in names)

    def is_ready(self, index: int) -> bool:
        return self.fleet.members[index].life.is_ready

    async def wait_until_ready(self, limit_s: float) -> None:
        async with asyncio.timeout(limit_s):
            for member in self.fleet.members:
                is_served = False
                while not is_served:
                    await self.recovery.wait_until_ready(member)
                    with suppress(WorkerLost):  # not noticed until now
                        await self.fleet.call(member, PING, None)
                        is_served = True

    def progress(self) -> None:
        for member in self.fleet.members:
            self.recovery.tell(Progressed(member.life.unit))


@in_virtual_time
async def test_a_killed_worker_serves_again_at_its_address_and_the_others_go_on(
    tmp_path: Path,
) -> None:
    cluster = LifeCluster(tmp_path)
    guarded = Guarded(cluster)
    async with guarded.started(3):
        before = [member.worker for member in guarded.fleet.members]
        num_bytes = guarded.fleet.num_bytes
        cluster.workers["rollout/1"].end("signal 9 (SIGKILL)")
        await asyncio.sleep(0.1)
        assert [guarded.is_ready(i) for i in range(3)] == [True, False, True]
        await guarded.wait_until_ready(START_S)
        after = [member.worker for member in guarded.fleet.members]
        assert [after[0], after[2]] == [before[0], before[2]]
        assert after[1].address == before[1].address
        assert after[1].incarnation != before[1].incarnation
        assert guarded.brought_up == ["rollout/1"]
        assert guarded.fleet.num_bytes > num_bytes, "what earlier connections carried counts"


@in_virtual_time
async def test_a_silent_worker_is_suspect_then_lost_and_dead_before_its_successor(
    tmp_path: Path,
) -> None:
    cluster = LifeCluster(tmp_path)  # whose `start` looks for an earlier life
    guarded = Guarded(cluster)
    async with guarded.started(2):
        stopped = cluster.workers["rollout/0"]
        stopped.is_hung = True
        await asyncio.sleep(4 * INTERVAL_S)
        assert [guarded.is_ready(i) for i in range(2)] == [False, True]
        stopped.is_hung = False
        await asyncio.sleep(2 * INTERVAL_S)
        assert guarded.is_ready(0)
        assert cluster.num_lives("rollout/0") == 1

        stopped.is_hung = True
        await asyncio.sleep(LOST_AFTER_S)
        stopped.is_hung = False
        assert stopped.exit_status == "signal 9 (SIGKILL)", "whatever it does now, it is none"
        await guarded.wait_until_ready(START_S)
        assert cluster.num_lives("rollout/0") == 2


@in_virtual_time
async def test_a_lost_rank_takes_the_others_along(tmp_path: Path) -> None:
    """They wait for it in vain; and they are killed before the pause, not after it."""
    cluster = LifeCluster(tmp_path)
    guarded = Guarded(cluster, "train")
    async with guarded.started(3, is_one_unit=True):
        guarded.failures = [WorkerLost("no rendezvous")]  # so that a pause comes
        cluster.workers["train/2"].end("signal 9 (SIGKILL)")
        await asyncio.sleep(0.1)
        assert all(worker.exit_status for worker in cluster.lives)
        with pytest.raises(WorkerLost, match="train/0 is started again"):
            await guarded.fleet.call(guarded.fleet.members[0], PING, None)
        await guarded.wait_until_ready(2 * START_S)
        assert len(cluster.lives) == 9
        assert guarded.recovery.num_restarts == 2


@in_virtual_time
async def test_a_loss_during_a_restart_begins_another_one(tmp_path: Path) -> None:
    cluster = LifeCluster(tmp_path)
    guarded = Guarded(cluster)
    async with guarded.started(2):
        for num_lives in (1, 2, 3):
            await until(lambda num=num_lives: cluster.num_lives("rollout/0") >= num)
            cluster.workers["rollout/0"].end("exit code 1")
            assert not guarded.brought_up
        await guarded.wait_until_ready(2 * START_S)
        assert cluster.num_lives("rollout/0") == 4
        assert guarded.brought_up == ["rollout/0"]


@in_virtual_time
@pytest.mark.parametrize("is_hung", [False, True])
async def test_two_controllers_share_the_new_agent_of_a_node(
    tmp_path: Path, is_hung: bool, caplog: pytest.LogCaptureFixture
) -> None:
    cluster = LifeCluster(tmp_path)
    cluster.num_nodes = 2
    rollout, train = Guarded(cluster), Guarded(cluster, "train")
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(rollout.started(4))
        await stack.enter_async_context(train.started(2, is_one_unit=True))
        if is_hung:
            cluster.agents["node-1"].is_hung = True
            await asyncio.sleep(LOST_AFTER_S / 2)
        else:
            cluster.agents["node-1"].end("exit code 5")
            await asyncio.sleep(0.5)
        assert [rollout.is_ready(i) for i in range(4)] == [True, True, False, False]
        await rollout.wait_until_ready(LOST_AFTER_S + START_S)
        await train.wait_until_ready(START_S)
        assert cluster.num_agent_starts == 2 + 1
        assert [cluster.num_lives(f"rollout/{i}") for i in range(4)] == [1, 1, 2, 2]
        assert [cluster.num_lives(f"train/{i}") for i in range(2)] == [2, 2]
        said = [record.getMessage() for record in caplog.records]
        assert sum("gives no news" in line for line in said) == 2, "once for each controller"
        assert not any("killed no workers" in line for line in said), "they died with it"
        cluster.workers["rollout/3"].end("exit code 1")
        await asyncio.sleep(0.1)
        assert not rollout.is_ready(3), "the new agent tells its own news"
        await rollout.wait_until_ready(START_S)


@in_virtual_time
async def test_a_node_whose_agent_does_not_come_up_ends_the_run(tmp_path: Path) -> None:
    cluster = LifeCluster(tmp_path)
    guarded = Guarded(cluster, max_deaths=3)
    async with guarded.started(2):
        cluster.num_bad_agents = 100
        cluster.agents["node-0"].end("signal 9 (SIGKILL)")
        with pytest.raises(NodeLost, match=r"lost 4 times in a row.*exit code 1") as caught:
            await guarded.wait_until_ready(4 * START_S)
        assert "no memory" in caught.value.log_tail
        assert cluster.num_agent_starts == 1 + 3
        assert len(guarded.given_up) == 1, "told once, not by each worker"


@in_virtual_time
async def test_an_agent_that_comes_up_late_ends_nothing(tmp_path: Path) -> None:
    cluster = LifeCluster(tmp_path)
    guarded = Guarded(cluster, max_deaths=3)
    async with guarded.started(2):
        for _ in range(3):
            cluster.num_bad_agents = 2
            cluster.agents["node-0"].end("signal 9 (SIGKILL)")
            await asyncio.sleep(0.5)
            await guarded.wait_until_ready(3 * START_S)
            guarded.progress()
        assert not guarded.given_up


@in_virtual_time
@pytest.mark.parametrize("seed", range(15))
async def test_random_faults_leave_one_life_of_each_worker_and_all_come_back(
    tmp_path: Path, seed: int
) -> None:
    """`LifeCluster.start` fails where an earlier life is not dead."""
    rng, cluster = random.Random(seed), LifeCluster(tmp_path, seed)
    cluster.num_nodes = rng.randint(1, 2)
    cluster.behavior.latency_s = rng.choice([0.001, 0.3])
    rollout, train = Guarded(cluster, max_deaths=50), Guarded(cluster, "train", max_deaths=50)
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(rollout.started(3))
        await stack.enter_async_context(train.started(2, is_one_unit=True))
        for _ in range(30):
            await asyncio.sleep(rng.choice([0.0, 0.3, 2.0, 12.0]))
            worker = rng.choice(list(cluster.workers.values()))
            agent = rng.choice(list(cluster.agents.values()))
            match rng.choice(["kill", "hang", "go on", "kill agent", "hang agent", "progress"]):
                case "kill":
                    worker.end("signal 9 (SIGKILL)")
                case "hang" if worker.exit_status is None:
                    worker.is_hung = True
                case "go on" if worker.exit_status is None:
                    worker.is_hung = False
                case "kill agent":
                    agent.end("signal 9 (SIGKILL)")
                case "hang agent":
                    agent.is_hung = True
                case "progress":
                    rollout.progress()
        await asyncio.sleep(2 * LOST_AFTER_S)  # the last fault is noticed, and what it hid
        limit_s = 3 * LOST_AFTER_S + 60.0  # and pauses
        await rollout.wait_until_ready(limit_s)
        await train.wait_until_ready(limit_s)
        assert not rollout.given_up + train.given_up
        living = [worker.name for worker in cluster.lives if worker.exit_status is None]
        assert sorted(living) == sorted(cluster.workers), "one life each"


@in_virtual_time
async def test_a_close_during_a_restart_ends_it(tmp_path: Path) -> None:
    cluster = LifeCluster(tmp_path)
    guarded = Guarded(cluster)
    async with guarded.started(2):  # whose end looks for what is left
        cluster.agents["node-0"].end("signal 9 (SIGKILL)")
        await asyncio.sleep(0.5)
        with pytest.raises((PeerLost, WorkerLost)):
            await guarded.fleet.call(guarded.fleet.members[0], PING, None)
