"""A run that asks for nodes, gets them late or never, and gives them back, in virtual time."""

from __future__ import annotations

import asyncio

import pytest
from simulation.behavior import Behavior
from simulation.elastic_cluster import ElasticCluster
from simulation.settings import Settings
from simulation.training_run import TrainingRun
from simulation.virtual_loop import in_virtual_time, run_virtual
from waiting import until

from areal_sc.config.parallel_settings import AutoscaleConfig
from areal_sc.controller.rollout.scaling import LOOK_S
from areal_sc.errors import ConfigError, NodeLost, WorkerStartError
from areal_sc.schedulers.base import Node

LEAVING_S = 10.0
"""Of virtual time; nothing that a worker waits for here takes longer."""


class ElasticRun(TrainingRun):
    """Of one trainer, on a cluster whose nodes come when a test lets them."""

    cluster: ElasticCluster

    def __init__(self, cluster_class: type[ElasticCluster] = ElasticCluster, **settings: object):
        super().__init__(Settings(**{"num_rollout_workers": 1, **settings}), cluster_class)  # type: ignore[arg-type]

    @property
    def living(self) -> list[str]:
        """Rollout workers whose processes live."""
        workers = self.cluster.rollout_workers
        return sorted(worker.name for worker in workers if worker.exit_status is None)

    @property
    def nodes(self) -> list[str]:
        """Names of those that are for rollout workers."""
        return [node.name for node in self.cluster._now[1:]]


class ThreeToCome(ElasticCluster):
    num_first = 4


@in_virtual_time
async def test_a_run_begins_with_the_first_node_and_the_others_join_singly() -> None:
    run = ElasticRun(ThreeToCome, num_rollout_workers=4, num_steps=12)
    async with run.started():
        for _ in range(3):
            await run.step(checks_business=False)
        assert run.living == ["rollout/0"]
        assert run.rollout.num_workers == 4
        status = run.rollout._status()
        assert [wait.what for wait in status.waits].count("the cluster") == 3
        states = {worker.name: worker.state for worker in status.workers}
        assert states["rollout/0"] == "ready"
        assert [states[f"rollout/{i}"] for i in (1, 2, 3)] == ["starting"] * 3
        assert len(status.agents) == 1
        run.cluster.asked["asked-1"].set()
        await until(lambda: len(run.living) == 2)
        for _ in range(3):
            await run.step(checks_business=False)
        run.cluster.asked["asked-0"].set()
        run.cluster.asked["asked-2"].set()
        await until(lambda: len(run.living) == 4)
        for _ in range(6):
            await run.step(checks_business=False)
        await run.check_end()
        assert run.cluster.given_back == []
    late = [start for start in run.cluster.starts if start.worker != "rollout/0"]
    assert {start.worker for start in late} == {f"rollout/{index}" for index in (1, 2, 3)}
    assert all(start.worker_version >= 3 for start in late)
    attempts = {(start.group_id, start.attempt) for start in run.cluster.starts}
    assert len(attempts) == len(run.cluster.starts), "a run was played twice"


@in_virtual_time
async def test_the_first_batch_waits_for_workers_whose_stores_hold_it() -> None:
    run = ElasticRun(ThreeToCome, num_rollout_workers=4, batch_groups=4, store_groups=2)
    async with run.started():
        first = asyncio.create_task(run.step(checks_business=False))
        await asyncio.sleep(500.0)
        assert not run.cluster.starts
        run.cluster.asked["asked-0"].set()
        await asyncio.wait_for(first, 60.0)
        assert len(run.living) == 2


@in_virtual_time
async def test_more_workers_than_places_get_nodes_which_are_given_back_with_their_last() -> None:
    run = ElasticRun(num_steps=16)
    async with run.started():
        await run.step()
        await run.rollout.scale_async(3)
        assert run.nodes == ["generator", "asked-0", "asked-1"]
        await run.step()
        assert run.living == ["rollout/0"]
        for event in run.cluster.asked.values():
            event.set()
        await until(lambda: len(run.living) == 3)
        for _ in range(3):
            await run.step(checks_business=False)
        await run.rollout.scale_async(1)
        for _ in range(4):
            await run.step(checks_business=False)
        await asyncio.sleep(LEAVING_S)
        assert run.living == ["rollout/0"]
        assert run.nodes == ["generator"]
        assert sorted(run.cluster.given_back) == ["asked-0", "asked-1"]
        agents = run.cluster.agents
        assert [agents[f"asked-{i}"].exit_status for i in (0, 1)] == ["exit code 0"] * 2
        await run.rollout.scale_async(2)
        assert run.nodes == ["generator", "asked-2"]
        await run.step()


@in_virtual_time
async def test_a_node_that_is_on_its_way_is_asked_for_once_and_withdrawn_first() -> None:
    run = ElasticRun()
    async with run.started():
        await run.step()
        await run.rollout.scale_async(2)
        await run.rollout.scale_async(2)
        assert run.nodes == ["generator", "asked-0"]
        await run.rollout.scale_async(1)
        await asyncio.sleep(2 * LOOK_S)
        assert run.cluster.given_back == ["asked-0"]
        assert [member.name for member in run.rollout.fleet.members] == ["rollout/0"]
        await run.rollout.scale_async(2)
        run.cluster.asked["asked-1"].set()
        await until(lambda: len(run.living) == 2)
        assert run.cluster.given_back == ["asked-0"]
        await run.step()


class OneMore(ElasticCluster):
    most_nodes = 2


@in_virtual_time
async def test_what_cannot_be_had_is_refused_and_nothing_of_it_stays() -> None:
    run = ElasticRun(OneMore)
    async with run.started():
        await run.step()
        with pytest.raises(ConfigError, match="there are only 2 nodes"):
            await run.rollout.scale_async(3)
        assert run.nodes == ["generator"]
        assert run.rollout.num_workers == 1
        await run.rollout.scale_async(2)
        run.cluster.asked["asked-1"].set()
        await until(lambda: len(run.living) == 2)
        await run.step()


@in_virtual_time
async def test_workers_leave_all_the_same_when_more_are_refused() -> None:
    run = ElasticRun(OneMore, behavior=Behavior(generation_s=30.0))
    async with run.started():
        await run.rollout.scale_async(2)
        run.cluster.asked["asked-0"].set()
        await until(lambda: len(run.living) == 2)
        step = asyncio.create_task(run.step(checks_business=False))
        await asyncio.sleep(5.0)
        await run.rollout.scale_async(1)
        with pytest.raises(ConfigError, match="there are only 2 nodes"):
            await run.rollout.scale_async(4)
        assert run.rollout.num_workers == 1
        await step
        for _ in range(3):
            await run.step(checks_business=False)
        await until(lambda: len(run.living) == 1)


@in_virtual_time
async def test_a_node_nobody_gets_a_place_on_is_given_back_at_the_start() -> None:
    run = ElasticRun(ThreeToCome, num_rollout_workers=2)
    async with run.started():
        assert run.nodes == ["generator", "asked-0"]
        await run.step()


@in_virtual_time
async def test_one_that_dies_is_replaced_and_dropped_if_its_worker_was_to_leave() -> None:
    run = ElasticRun(num_steps=20, behavior=Behavior(generation_s=5.0))
    async with run.started():
        await run.step(checks_business=False)
        await run.rollout.scale_async(3)
        for event in run.cluster.asked.values():
            event.set()
        await until(lambda: len(run.living) == 3)
        await run.step(checks_business=False)
        run.cluster.lose_machine("asked-0")
        await until(lambda: len(run.living) == 2)
        await until(lambda: len(run.living) == 3)
        assert run.cluster.given_back == []
        await until(lambda: all(it.life.is_up for it in run.rollout._workers.set.states))
        await run.rollout.scale_async(2)
        run.cluster.lose_machine("asked-1")
        for _ in range(5):  # its rows are trained, or generated again
            await run.step(checks_business=False)
        await asyncio.sleep(LEAVING_S)
        assert run.cluster.given_back == ["asked-1"]
        assert run.living == ["rollout/0", "rollout/1"]
        await run.step(checks_business=False)


class NeverThere(ElasticCluster):
    """What is asked for fails when it is to come."""

    async def renew(self, node: Node, incarnation: str) -> None:
        if not node.is_there:
            raise WorkerStartError("its agent does not join")
        await super().renew(node, incarnation)


def test_a_node_that_never_comes_up_ends_the_run_as_a_lost_one() -> None:
    run = ElasticRun(NeverThere, max_deaths=2)

    async def play() -> None:
        async with run.started():
            await run.step()
            await run.rollout.scale_async(2)
            while True:
                await run.step(checks_business=False)

    with pytest.raises(NodeLost, match=r"asked-0 was lost 3 times .*its agent does not join"):
        run_virtual(play())


def test_autoscaling_does_not_ask_twice_and_withdraws_what_is_not_needed_any_more() -> None:
    """One worker is too slow, until answers get short while the asked node is on its way."""
    slow, now = 8.0, {"generation_s": 8.0}
    behavior = Behavior(generation_s=lambda rng: now["generation_s"], training_s=0.5)
    autoscale = AutoscaleConfig(1, 2)
    run = ElasticRun(num_steps=200, autoscale=autoscale, max_staleness=3, behavior=behavior)

    async def play() -> None:
        async with run.started():
            while not run.cluster.asked:
                await run.step(checks_business=False)
            for _ in range(60):
                await run.step(checks_business=False)
            assert len(run.cluster.asked) == 1, "it has asked again"
            assert run.rollout.num_workers == 2
            now["generation_s"] = slow / 100
            while not run.cluster.given_back:
                await run.step(checks_business=False)
            assert run.cluster.given_back == ["asked-0"]
            assert run.rollout.num_workers == 1

    run_virtual(play(), max_turns=2_000_000)


LONG_S = 5 * 3600.0
"""Far longer than anything that the run itself bounds."""


class Queue(ElasticCluster):
    """The place of a lost machine is taken hours later."""

    async def renew(self, node: Node, incarnation: str) -> None:
        if node.is_there:
            await asyncio.sleep(LONG_S)
        await super().renew(node, incarnation)


@pytest.mark.parametrize("machine", ["generator", "trainer"])
def test_however_long_another_machine_takes_the_run_waits_for_it(machine: str) -> None:
    run = ElasticRun(Queue, num_steps=6, group_timeout_s=600.0, behavior=Behavior(generation_s=5.0))

    async def play() -> None:
        async with run.started():
            if machine == "generator":
                await run.step(checks_business=False)
            began_s = run.cluster.now_s
            run.cluster.lose_machine(machine)  # the trainer's before there is a step to lose
            if machine == "generator":
                await until(lambda: not run.rollout._workers.set.states[0].life.is_up)
            for _ in range(4):
                await run.step(checks_business=False)
            assert run.cluster.now_s > began_s + LONG_S

    run_virtual(play(), max_virtual_s=10 * LONG_S, max_turns=20_000_000)
