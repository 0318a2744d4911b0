"""What ends a run, and what does not: failures of simulated workers, in virtual time.

Where a worker is lost, it is given up at once (`max_deaths` is 0): see `test_worker_deaths`.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable
from typing import Any

import pytest
from simulation.behavior import Behavior
from simulation.cluster import SimulatedCluster
from simulation.settings import Settings
from simulation.training_run import TrainingRun
from simulation.virtual_loop import in_virtual_time, run_virtual
from simulation.workers import SimulatedRolloutWorker, SimulatedWorker

from areal_sc.config.schema import OverBound
from areal_sc.errors import (
    ArealError,
    ModelError,
    RpcTimeout,
    ShardGone,
    TooManyRejections,
    WorkerLost,
    WorkerStartError,
    WorkflowError,
)
from areal_sc.nodes.spec import WorkerOrder
from areal_sc.weights.methods import ADOPT_WEIGHTS
from areal_sc.weights.published import WeightsReference


async def fails_within(seconds: float, call: Awaitable[Any], expected: type[Exception]) -> Any:
    """The exception that the call ends with, in that much virtual time at most."""
    began = asyncio.get_running_loop().time()
    with pytest.raises(expected) as caught:
        await call
    assert asyncio.get_running_loop().time() - began <= seconds
    return caught.value


def slow_run(**changes: Any) -> TrainingRun:
    """Groups take 1,000 s, so that whatever ends a wait sooner is not a group."""
    defaults: dict[str, Any] = {"behavior": Behavior(generation_s=1000.0), "max_deaths": 0}
    return TrainingRun(Settings(**{**defaults, "num_rollout_workers": 3, **changes}))


@in_virtual_time
async def test_a_lost_rollout_worker_ends_the_wait_for_a_batch() -> None:
    async with slow_run().started() as run:
        worker = run.cluster.workers["rollout/1"]
        asyncio.get_running_loop().call_later(20.0, worker.end, "signal 9 (SIGKILL)")
        error = await fails_within(21.0, run.step(), WorkerLost)
        assert re.search(r"rollout/1 ended with signal 9 \(SIGKILL\).*rollout-1\.log", str(error))
        assert error.log_path.endswith("rollout-1.log")
        # it is not forgotten
        assert await fails_within(0.1, run.step(), WorkerLost) is error
        account = run.rollout.groups.ledger.account()
        assert account["finished"] + account["consumed"] == 0, "a lost group is no result"


@in_virtual_time
async def test_the_loss_of_an_idle_worker_counts_too() -> None:
    async with slow_run(max_concurrent_groups=1).started() as run:
        waiting = asyncio.create_task(run.step())
        await asyncio.sleep(20.0)
        idle = [w for w in run.cluster.rollout_workers if not w.running]
        assert len(idle) == 2
        idle[0].end("exit code 1")
        await fails_within(1.0, waiting, WorkerLost)


@in_virtual_time
@pytest.mark.parametrize("rank", [0, 1])
async def test_a_lost_rank_ends_the_training_step(rank: int) -> None:
    behavior = Behavior(training_s=100.0)
    settings = Settings(num_ranks=2, behavior=behavior, max_deaths=0)
    async with TrainingRun(settings).started() as run:
        batch = await run.rollout.prepare_batch_async(run.prompts, run.workflow)
        batch = await run.actor.compute_proximal_logprobs_async(batch)
        batch = run.actor.compute_advantages(batch)
        worker = run.cluster.workers[f"train/{rank}"]
        asyncio.get_running_loop().call_later(20.0, worker.end, "exit code 1")
        error = await fails_within(21.0, run.actor.ppo_update_async(batch), WorkerLost)
        assert f"train/{rank} ended with exit code 1" in str(error)


@in_virtual_time
async def test_a_rank_that_is_lost_while_weights_are_pulled_is_the_one_that_is_named() -> None:
    behavior = Behavior(publication_s=100.0)
    settings = Settings(max_staleness=0, behavior=behavior, max_deaths=0)
    async with TrainingRun(settings).started() as run:
        await run.step()
        run.cluster.workers["train/0"].end("signal 11 (SIGSEGV)")
        error = await fails_within(300.0, run.step(), ArealError)
        assert "train/0" in str(error)
        assert "worker rollout/" not in str(error), "the puller is not the one that is lost"


@in_virtual_time
async def test_a_worker_lost_between_two_calls_fails_the_next_one() -> None:
    settings = Settings(num_rollout_workers=3, max_deaths=0)
    async with TrainingRun(settings).started() as run:
        await run.step()
        run.cluster.workers["rollout/2"].end("exit code 3")
        await asyncio.sleep(10.0)
        await fails_within(0.1, run.step(), WorkerLost)


@in_virtual_time
@pytest.mark.parametrize("mode", OverBound)
async def test_too_many_rejections_end_the_run_with_their_cause(mode: OverBound) -> None:
    settings = Settings(
        over_bound=mode,
        max_rejection_rate=0.5,
        rejection_window=20,
        behavior=Behavior(group_rejection=1.0),
    )
    async with TrainingRun(settings).started() as run:
        error = await fails_within(100.0, run.step(), TooManyRejections)
        assert "40 of the last 40 episodes were rejected" in str(error)
        assert "reward_error x" in str(error)
        assert "it raised" in str(error)
        assert sum(run.rollout.groups.ledger.account()["rejected"].values()) < 60
        assert error.exit_code == 7


def test_rejections_below_the_limit_do_not_end_the_run() -> None:
    behavior = Behavior(group_rejection=0.2, episode_rejection=0.1)
    settings = Settings(max_rejection_rate=0.6, behavior=behavior, num_steps=20)
    run = run_virtual(TrainingRun(settings).play())
    assert run.rollout.rejections.episodes["reward_error"] > 20
    assert run.rejected


@in_virtual_time
async def test_a_group_that_never_ends_has_a_time_limit_of_its_own() -> None:
    async with slow_run(group_timeout_s=100.0).started() as run:
        error = await fails_within(161.0, run.step(), WorkerLost)
        assert "run_group on rollout/" in str(error)
        assert isinstance(error.__cause__, RpcTimeout)


@in_virtual_time
async def test_a_worker_that_cannot_pull_weights_fails_the_run() -> None:
    async with TrainingRun(Settings(max_deaths=0)).started() as run:

        async def gone(weights: WeightsReference) -> None:
            raise ShardGone("shard x is gone")

        served = run.cluster.workers["rollout/1"].served
        served["adopt_weights"] = ADOPT_WEIGHTS.served_by(gone)
        await run.step()
        await fails_within(10.0, run.step(), ShardGone)


class PartlyBroken(SimulatedCluster):
    """The second rollout worker does not come up."""

    async def start(self, order: WorkerOrder, node: str) -> SimulatedWorker:
        if order.name == "rollout/1":
            await asyncio.sleep(2.0)
            raise WorkerStartError("worker rollout/1 ended with exit code 1 before it served")
        return await super().start(order, node)


@in_virtual_time
async def test_a_worker_that_does_not_come_up_takes_the_others_with_it() -> None:
    run = TrainingRun(Settings(num_rollout_workers=3), cluster_class=PartlyBroken)
    with pytest.raises(WorkerStartError, match="rollout/1"):
        async with run.started():
            raise AssertionError("it started")
    assert run.cluster.rollout_workers
    assert all(worker.exit_status for worker in run.cluster.rollout_workers)


@in_virtual_time
async def test_an_engine_that_cannot_be_built_fails_the_start() -> None:
    class NoModel(SimulatedRolloutWorker):
        async def initialize(self, _: None) -> None:
            raise ModelError("the folder has no weights")

    run = TrainingRun(Settings())
    run.cluster.rollout_class = NoModel
    with pytest.raises(ModelError, match="no weights"):
        async with run.started():
            raise AssertionError("it started")


@in_virtual_time
async def test_pause_holds_admission_and_generation_and_resume_goes_on() -> None:
    async def some_steps(run: TrainingRun) -> None:
        for _ in range(10):
            await run.step(checks_business=False)

    async with TrainingRun(Settings(num_steps=20)).started() as run:
        await run.step()
        await run.rollout.pause_async()
        before = run.rollout.groups.ledger.account()
        steps = asyncio.create_task(some_steps(run))
        await asyncio.sleep(1000.0)
        held = run.rollout.groups.ledger.account()
        assert held["admitted"] == before["admitted"]
        assert held["finished"] == 0, "what was finished is trained, and nothing more finishes"
        assert not steps.done()
        await run.rollout.resume_async()
        await steps
        await asyncio.sleep(1000.0)
        assert run.rollout.groups.num_open == 0, "everything that was admitted has ended"


@in_virtual_time
async def test_rollout_batch_runs_what_it_is_given_in_order_and_can_be_trained_on() -> None:
    settings = Settings(num_steps=20, num_prompts=3, max_staleness=0)
    async with TrainingRun(settings).started() as run:
        seen: set[int] = set()
        for version in range(3):
            num_starts = len(run.cluster.starts)
            batch = await run.rollout.rollout_batch_async(run.prompts, run.workflow, 5)
            starts = run.cluster.starts[num_starts:]
            assert sorted(start.dataset_index for start in starts) == [0, 0, 1, 1, 2]
            assert {start.worker for start in starts} == {"rollout/0", "rollout/1"}
            assert all(start.worker_version == version for start in starts)
            assert len(batch.group_ids) == 5
            assert not seen & set(batch.group_ids)
            seen |= set(batch.group_ids)
            assert batch.total_batch_size == 5 * settings.group_size
            batch = await run.actor.compute_proximal_logprobs_async(batch)
            await run.actor.ppo_update_async(run.actor.compute_advantages(batch))
            await run.actor.publish_weights_async(run.rollout)
        account = run.rollout.groups.ledger.account()
        assert account["admitted"] == account["rows_trained_twice"] == 0


@in_virtual_time
async def test_rollout_batch_of_nothing_but_rejections_says_so() -> None:
    run = TrainingRun(Settings(behavior=Behavior(group_rejection=1.0)))
    async with run.started():
        with pytest.raises(WorkflowError, match=r"all 5 groups were rejected: reward_error x10"):
            await run.rollout.rollout_batch_async(run.prompts, run.workflow, 5)


async def evaluations_beside_training(run: TrainingRun, num_evaluations: int) -> None:
    async def evaluate(delay_s: float) -> None:
        await asyncio.sleep(delay_s)
        outcome = await run.rollout.evaluate_async(run.prompts, run.workflow, num_prompts=4)
        assert outcome.versions[0] == outcome.versions[1]
        assert outcome.reward == 1.0

    evaluations = [asyncio.create_task(evaluate(1.7 * i)) for i in range(num_evaluations)]
    while not all(evaluation.done() for evaluation in evaluations):
        await run.step()
    await asyncio.gather(*evaluations)
    await run.rollout.wait_for_weights_async()
    assert {worker.version for worker in run.cluster.rollout_workers} == {run.rollout.version}


@in_virtual_time
@pytest.mark.parametrize("num_workers", [2, 3])
async def test_evaluations_that_overlap_see_one_version_each(num_workers: int) -> None:
    behavior = Behavior(evaluation_s=6.0, publication_s=0.7)
    settings = Settings(num_steps=200, num_rollout_workers=num_workers, behavior=behavior)
    async with TrainingRun(settings).started() as run:
        await evaluations_beside_training(run, 8)


@in_virtual_time
@pytest.mark.parametrize("evaluation_s", [0.3 * i for i in range(1, 25)])
async def test_an_evaluation_may_end_at_any_moment_of_a_step(evaluation_s: float) -> None:
    """While weights are sealed and the ones before are dropped, for one."""
    behavior = Behavior(evaluation_s=evaluation_s, sealing_s=1.0, publication_s=0.7)
    async with TrainingRun(Settings(num_steps=200, behavior=behavior)).started() as run:
        await evaluations_beside_training(run, 2)


@in_virtual_time
async def test_an_evaluation_of_a_lost_worker_fails() -> None:
    settings = Settings(behavior=Behavior(evaluation_s=1000.0), max_deaths=0)
    async with TrainingRun(settings).started() as run:
        evaluation = asyncio.create_task(
            run.rollout.evaluate_async(run.prompts, run.workflow, num_prompts=100)
        )
        await asyncio.sleep(5.0)
        (worker,) = (w for w in run.cluster.rollout_workers if w.num_evaluations)
        worker.end("signal 9 (SIGKILL)")
        error = await fails_within(3.0, evaluation, WorkerLost)
        assert worker.name in str(error)


def test_a_resumed_run_trains_nothing_twice() -> None:
    """A snapshot after step 4; the first run goes on to step 6 and is lost."""
    behavior = Behavior(generation_s=lambda rng: rng.lognormvariate(0.5, 1.0), group_rejection=0.1)
    for mode in OverBound:
        settings = Settings(num_steps=12, over_bound=mode, behavior=behavior)

        async def first(settings: Settings = settings) -> tuple[TrainingRun, dict[str, Any]]:
            async with TrainingRun(settings).started() as run:
                for _ in range(4):
                    await run.step()
                state = await run.save()
                for _ in range(2):
                    await run.step()
            return run, state

        _, state = run_virtual(first())

        async def second(settings: Settings = settings, state: Any = state) -> TrainingRun:
            run = TrainingRun(settings)
            async with run.started():
                await run.load(state)
                for _ in range(4, settings.num_steps):
                    await run.step()
                await run.check_end()
            return run

        run = run_virtual(second())
        assert [batch.global_step for batch in run.batches] == list(range(settings.num_steps))
        assert run.cluster.trained[0].version == 4
