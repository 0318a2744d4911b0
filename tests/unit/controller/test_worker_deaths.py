"""Rollout workers die, and the run goes on: in virtual time."""

from __future__ import annotations

import asyncio
import random

import pytest
from simulation.behavior import Behavior
from simulation.cluster import SimulatedCluster
from simulation.settings import Settings
from simulation.train_worker import SimulatedTrainWorker
from simulation.training_run import TrainingRun
from simulation.virtual_loop import in_virtual_time, run_virtual
from simulation.workers import SimulatedRolloutWorker

from areal_sc.config.schema import OverBound
from areal_sc.errors import CrashLoop, EngineFailed
from areal_sc.weights.published import WeightsReference
from areal_sc.workers.calls import RUN_GROUP, GroupAttempt, GroupReply, RunGroup
from areal_sc.workers.rank_methods import Update

KILLED = "signal 9 (SIGKILL)"


def slow_groups(**changes: object) -> Settings:
    behavior = Behavior(generation_s=20.0, publication_s=0.5)
    return Settings(**{"behavior": behavior, "num_rollout_workers": 2, **changes})  # type: ignore[arg-type]


def worker_of(run: TrainingRun, number: int) -> SimulatedRolloutWorker:
    worker = run.cluster.workers[f"rollout/{number}"]
    assert isinstance(worker, SimulatedRolloutWorker)
    return worker


async def keep_killing(run: TrainingRun, rng: random.Random, mean_s: float) -> None:
    """Kills random rollout workers, also those that are being started again."""
    while True:
        await asyncio.sleep(rng.expovariate(1 / mean_s))
        victims = [w for w in run.cluster.rollout_workers if w.exit_status is None]
        if victims:
            rng.choice(victims).end(KILLED)


@pytest.mark.parametrize("mode", OverBound)
def test_a_run_whose_workers_die_all_the_time_loses_nothing(mode: OverBound) -> None:
    behavior = Behavior(
        generation_s=lambda rng: rng.lognormvariate(0.5, 1.0),
        reply_delay_s=lambda rng: rng.choice([0.0, 0.3]),
        group_rejection=0.05,
    )

    async def scenario(seed: int) -> TrainingRun:
        run = TrainingRun(
            Settings(
                num_steps=8,
                over_bound=mode,
                num_rollout_workers=3,
                max_deaths=50,
                evaluate_every=4,
                store_groups=40,
                seed=seed,
                behavior=behavior,
            )
        )
        async with run.started():
            killer = asyncio.create_task(keep_killing(run, random.Random(seed), 4.0))
            for _ in range(run.settings.num_steps):
                await run.step()
            killer.cancel()
            await run.collect_evaluation()
            await run.check_end()
        return run

    for seed in (1, 2):
        run = run_virtual(scenario(seed))
        assert any(start.attempt for start in run.cluster.starts)
        assert run.evaluations


@in_virtual_time
async def test_a_group_of_a_dead_worker_runs_again_as_another_attempt_of_the_same() -> None:
    async with TrainingRun(slow_groups()).started() as run:
        step = asyncio.create_task(run.step())
        await asyncio.sleep(10.0)
        lost = set(worker_of(run, 0).running)
        others = set(worker_of(run, 1).running)
        assert lost
        worker_of(run, 0).end(KILLED)
        await asyncio.sleep(1.0)
        assert others <= set(worker_of(run, 1).running), "the other worker goes on"
        await asyncio.sleep(5.0)
        starts = {(s.group_id, s.attempt): s for s in run.cluster.starts}
        for begun in lost:
            first = starts[begun.group_id, begun.attempt]
            again = starts[begun.group_id, begun.attempt + 1]
            assert again.dataset_index == first.dataset_index
            assert again.admitted_version == first.admitted_version
        await step
        await asyncio.sleep(60.0)
        account = run.rollout.groups.ledger.account()
        assert account["rejected"] == {}
        assert worker_of(run, 0).incarnation in {
            m.worker.incarnation for m in run.rollout.updates.current_members
        }


@in_virtual_time
async def test_weights_come_before_the_first_group_of_a_new_life() -> None:
    async with TrainingRun(slow_groups(num_steps=20)).started() as run:
        for _ in range(3):
            await run.step(checks_business=False)
        num_starts = len(run.cluster.starts)
        worker_of(run, 1).end(KILLED)
        for _ in range(3):
            await run.step(checks_business=False)
        starts = [s for s in run.cluster.starts[num_starts:] if s.worker == "rollout/1"]
        assert starts
        assert min(start.worker_version for start in starts) >= 3


@in_virtual_time
async def test_rows_that_outlive_their_worker_are_trained_and_swept() -> None:
    settings = Settings(num_steps=6, max_staleness=3, behavior=Behavior(training_s=30.0))
    run = TrainingRun(settings)
    async with run.started():
        await run.step()
        await asyncio.sleep(25.0)  # all that may be is finished
        held = set(worker_of(run, 0).store.group_of)
        assert held
        num_starts = len(run.cluster.starts)
        worker_of(run, 0).end(KILLED)
        for _ in range(5):
            await run.step()
        assert {s.attempt for s in run.cluster.starts[num_starts:]} <= {0}
        await run.check_end()


@in_virtual_time
async def test_finished_groups_whose_rows_went_with_their_worker_run_again() -> None:
    settings = Settings(num_steps=6, max_staleness=3, behavior=Behavior(training_s=30.0))
    run = TrainingRun(settings)
    async with run.started():
        await run.step()
        await asyncio.sleep(25.0)
        lost = set(worker_of(run, 0).store.group_of.values()) - run.trained_at.keys()
        assert lost
        worker_of(run, 0).end(KILLED, keeps_memory=False)
        await asyncio.sleep(0.1)
        for _ in range(5):
            await run.step()
        assert lost <= {s.group_id for s in run.cluster.starts if s.attempt == 1}
        await run.check_end()


@in_virtual_time
async def test_a_machine_that_nobody_replaces_for_long_costs_its_rows_and_not_the_run() -> None:
    """The others generate them again, and the run does not wait for the next machine."""
    behavior = Behavior(training_s=30.0, agent_start_s=5000.0)
    settings = Settings(num_steps=8, num_rollout_workers=4, max_staleness=3, behavior=behavior)
    run = TrainingRun(settings)
    run.cluster.num_nodes = 3
    async with run.started():
        await run.step()
        await asyncio.sleep(25.0)
        first, *others = (worker_of(run, number) for number in range(4))
        gone = [worker for worker in (first, *others) if worker.node == first.node]
        assert {rank.node for rank in run.cluster.train_workers} != {first.node}
        lost = {g for worker in gone for g in worker.store.group_of.values()}
        lost -= run.trained_at.keys()
        assert lost
        run.cluster.lose_machine(first.node)
        await asyncio.sleep(5.0)
        for _ in range(7):
            await run.step(checks_business=False)
        assert lost <= run.trained_at.keys()
        assert lost <= {s.group_id for s in run.cluster.starts if s.attempt == 1}
        assert run.cluster.now_s < 5000.0
        await asyncio.sleep(5000.0)
        assert worker_of(run, 0).address != first.address
        assert worker_of(run, 0).version == run.actor.version
        await run.check_end()


@in_virtual_time
async def test_an_evaluation_goes_on_elsewhere_and_tells_its_versions() -> None:
    settings = Settings(behavior=Behavior(evaluation_s=50.0))
    async with TrainingRun(settings).started() as run:
        evaluation = asyncio.create_task(
            run.rollout.evaluate_async(run.prompts, run.workflow, num_prompts=10)
        )
        await asyncio.sleep(5.0)
        (worker,) = (w for w in run.cluster.rollout_workers if w.num_evaluations)
        worker.end(KILLED)
        outcome = await evaluation
        assert (outcome.num_prompts, outcome.num_rejected) == (10, 0)
        assert outcome.versions == (0, 0)


@in_virtual_time
async def test_rollout_batch_runs_again_what_a_dead_worker_ran_or_held() -> None:
    durations = iter([1.0, 20.0] * 20)
    behavior = Behavior(generation_s=lambda rng: next(durations))
    settings = Settings(group_size=1, behavior=behavior)
    async with TrainingRun(settings).started() as run:
        call = run.rollout.rollout_batch_async(run.prompts, run.workflow, 6)
        waiting = asyncio.create_task(call)
        await asyncio.sleep(10.0)
        worker = worker_of(run, 0)
        lost = {r.group_id for r in worker.running} | set(worker.store.group_of.values())
        assert len(lost) > len(worker.running) > 0
        worker.end(KILLED, keeps_memory=False)
        batch = await waiting
        assert len(batch.group_ids) == 6
        assert {row.group_id for row in batch.rows if row.attempt == 1} == lost
        for shard in batch.shards:
            (await run.cluster.reach(shard.node_id, shard.node_addr)).require(shard.shard_id)


@in_virtual_time
async def test_a_silent_worker_gets_no_new_groups() -> None:
    settings = Settings(num_steps=20, behavior=Behavior(training_s=5.0))
    async with TrainingRun(settings).started() as run:
        await run.step()
        worker_of(run, 0).is_hung = True
        await asyncio.sleep(7.0)  # it is not lost yet
        steps = asyncio.create_task(run.step(checks_business=False))
        await asyncio.sleep(2.0)
        silent_since_s = run.cluster.now_s - 4.0
        late = [s for s in run.cluster.starts if s.time_s > silent_since_s]
        assert "rollout/0" not in {start.worker for start in late}
        worker_of(run, 0).is_hung = False
        await steps


@in_virtual_time
async def test_an_answer_for_another_run_is_none() -> None:
    async with TrainingRun(Settings()).started() as run:

        async def late(group: RunGroup) -> GroupReply:
            return GroupReply(GroupAttempt(group.group_id, group.attempt - 1))

        first = worker_of(run, 0)
        first.served["run_group"] = RUN_GROUP.served_by(late)
        await run.step()
        assert run.rollout.groups.ledger.account()["rejected"] == {}
        assert first.exit_status == KILLED


@in_virtual_time
async def test_a_run_that_waits_for_agents_outside_is_asked_for_as_long_as_it_takes() -> None:
    settings = Settings(num_rollout_workers=1, group_timeout_s=100.0)
    async with TrainingRun(settings).started() as run:
        worker = worker_of(run, 0)
        comes_s = run.cluster.now_s + 1000.0  # far beyond all limits of one group

        async def wait(group: RunGroup) -> GroupReply:
            if run.cluster.now_s >= comes_s:
                return await worker.run_group(group)
            await asyncio.sleep(100.0)
            return GroupReply(GroupAttempt(group.group_id, group.attempt), goes_on=True)

        worker.served["run_group"] = RUN_GROUP.served_by(wait)
        await run.step()
        assert run.cluster.now_s >= comes_s
        assert worker.exit_status is None


@in_virtual_time
async def test_an_engine_that_fails_costs_the_worker_not_the_run() -> None:
    async with TrainingRun(slow_groups()).started() as run:

        async def fail(group: RunGroup) -> GroupReply:
            raise EngineFailed("no more memory")

        first = worker_of(run, 0)
        first.served["run_group"] = RUN_GROUP.served_by(fail)
        await run.step()
        assert first.exit_status == KILLED
        assert worker_of(run, 0) is not first


@in_virtual_time
async def test_a_worker_that_only_dies_ends_the_run_with_its_last_words() -> None:
    class Dying(SimulatedCluster):
        """Later lives of the first worker end before they have done anything."""

        async def start(self, order, node):  # type: ignore[no-untyped-def]
            worker = await super().start(order, node)
            if order.name == "rollout/0" and order.port:
                asyncio.get_running_loop().call_later(0.2, worker.end, "signal 11 (SIGSEGV)")
            return worker

    run = TrainingRun(slow_groups(max_deaths=3), cluster_class=Dying)
    async with run.started():
        step = asyncio.create_task(run.step())
        await asyncio.sleep(5.0)
        log = run.cluster.run_dir / "logs" / "rollout-0.log"
        log.parent.mkdir(exist_ok=True)
        log.write_text("cannot read\n")
        worker_of(run, 0).end(KILLED)
        with pytest.raises(CrashLoop, match=r"rollout/0.*SIGSEGV") as caught:
            await step
        assert caught.value.log_tail == ("cannot read",)
        assert run.rollout.num_restarts == 3


@in_virtual_time
async def test_pause_also_holds_a_worker_that_comes_back() -> None:
    async with TrainingRun(Settings(num_steps=20)).started() as run:
        await run.step()
        worker_of(run, 0).end(KILLED)
        await asyncio.sleep(0.1)
        await run.rollout.pause_async()
        await asyncio.sleep(30.0)
        assert not worker_of(run, 0).is_awake.is_set()
        await run.rollout.resume_async()
        assert worker_of(run, 0).is_awake.is_set()
        await run.step(checks_business=False)


async def never_answered(*_: object) -> None:
    await asyncio.Event().wait()


@in_virtual_time
async def test_a_worker_that_never_takes_new_weights_is_started_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    update, hung = SimulatedRolloutWorker.adopt_weights, []

    async def one_hangs(worker: SimulatedRolloutWorker, weights: WeightsReference) -> None:
        if worker.name == "rollout/0" and weights.version == 2 and not hung:
            hung.append(worker.incarnation)
            await never_answered()
        await update(worker, weights)

    monkeypatch.setattr(SimulatedRolloutWorker, "adopt_weights", one_hangs)
    async with TrainingRun(Settings(num_steps=6)).started() as run:
        for _ in range(3):
            await run.step(checks_business=False)
        await asyncio.sleep(3 * 3600.0)
        assert [worker_of(run, 0).incarnation] != hung
        for _ in range(3):
            await run.step(checks_business=False)
        await run.check_end()
    assert "adopt_weights on rollout/0 gave no reply" in caplog.text
    assert "the limit of a step of a weight update" in caplog.text
    assert "the log of rollout/0" in caplog.text, "where its threads are"


@in_virtual_time
@pytest.mark.parametrize("num_ranks", [1, 2])
async def test_ranks_that_never_answer_are_started_again(
    num_ranks: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    update, hung = SimulatedTrainWorker.update, []

    async def hangs_once(worker: SimulatedTrainWorker, wanted: Update) -> dict[str, float]:
        if wanted.operation.version == 2 and len(hung) < num_ranks:
            hung.append(worker.incarnation)
            await never_answered()
        return await update(worker, wanted)

    monkeypatch.setattr(SimulatedTrainWorker, "update", hangs_once)
    async with TrainingRun(Settings(num_steps=4, num_ranks=num_ranks)).started() as run:
        for _ in range(4):
            await run.step(checks_business=False)
        await run.check_end()
    assert hung
    assert "update on train/" in caplog.text
    assert all(f"the log of train/{n}" in caplog.text for n in range(num_ranks))
