"""Rollout workers come and go while a run goes on, in virtual time; `RunBooks` checks it."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from statistics import mode
from typing import Any

import msgspec
import pytest
from simulation.behavior import Behavior
from simulation.cluster import SimulatedCluster
from simulation.settings import Settings
from simulation.training_run import TrainingRun
from simulation.virtual_loop import in_virtual_time, run_virtual
from simulation.workers import SimulatedRolloutWorker
from waiting import until

from areal_sc.config.parallel_settings import AutoscaleConfig
from areal_sc.config.schema import OverBound, WeightUpdateMethod
from areal_sc.controller.rollout.scaling import LOOK_S
from areal_sc.errors import ConfigError, CrashLoop
from areal_sc.run.run_folder import RunFolder
from areal_sc.workers import calls

LEAVING_S = 10.0
"""Of virtual time; nothing that a worker waits for here takes longer."""


def names(run: TrainingRun) -> list[str]:
    """Rollout workers whose processes live."""
    workers = run.cluster.rollout_workers
    return sorted(worker.name for worker in workers if worker.exit_status is None)


@pytest.mark.parametrize("over_bound", list(OverBound))
@pytest.mark.parametrize("method", list(WeightUpdateMethod))
def test_twenty_changes_lose_no_row_and_generate_none_twice(
    over_bound: OverBound, method: WeightUpdateMethod
) -> None:
    """The stores hold little more than a batch, and two groups a step are slow."""
    settings = Settings(
        num_steps=24,
        over_bound=over_bound,
        weight_update=method,
        batch_groups=3,
        store_groups=4,
        evaluate_every=5,
        num_rollout_workers=2,
        behavior=Behavior(generation_s=lambda rng: rng.choice((0.5, 1.0, 4.0))),
    )
    run, rng, sizes = TrainingRun(settings), random.Random(over_bound), set[int]()

    async def play() -> None:
        async with run.started():
            for step in range(settings.num_steps):
                if step < 20:
                    number = rng.choice([n for n in (1, 2, 3, 4) if n != len(sizes_now())])
                    await run.rollout.scale_async(number)
                    assert len(sizes_now()) == number
                    sizes.add(number)
                await run.step(checks_business=False)
            await run.collect_evaluation()
            await run.check_end()
            await asyncio.sleep(LEAVING_S)
            assert names(run) == sorted(state.name for state in run.rollout._workers.set.states)
            assert len(names(run)) == number

    def sizes_now() -> list[Any]:
        return run.rollout._workers.set.staying

    run_virtual(play())
    assert len(sizes) > 2
    assert not run.actor.publication_stats["failed_broadcasts"], "one has left in the middle of it"
    attempts = {(start.group_id, start.attempt) for start in run.cluster.starts}
    assert len(attempts) == len(run.cluster.starts), "a run was played twice"
    assert all(attempt == 0 for _, attempt in attempts), "nobody was lost, and a group runs again"


@in_virtual_time
async def test_a_new_worker_has_the_present_weights_before_it_generates() -> None:
    run = TrainingRun(Settings(num_rollout_workers=1, max_staleness=0))
    async with run.started():
        for _ in range(3):
            await run.step()
        await run.rollout.scale_async(2)
        for _ in range(3):
            await run.step()
    starts = [start for start in run.cluster.starts if start.worker == "rollout/1"]
    assert min(start.worker_version for start in starts) >= 3


@in_virtual_time
async def test_a_worker_that_leaves_gets_no_groups_and_ends_with_its_last_row() -> None:
    run = TrainingRun(Settings(num_rollout_workers=2, behavior=Behavior(training_s=5.0)))
    async with run.started():
        await run.step()
        await run.rollout.scale_async(1)
        asked_s = run.cluster.now_s
        await run.step()
        await run.step()
        await asyncio.sleep(2 * LOOK_S)
        late = [s for s in run.cluster.starts if s.worker == "rollout/1" and s.time_s > asked_s]
        assert not late
        leaver = run.cluster.workers["rollout/1"]
        assert leaver.exit_status == "exit code 0", "it was killed, or is there still"
        stats = await run.rollout.worker_stats_async()
        assert len(stats) == 2, "what it has done still counts"
        for _ in range(5):
            await run.step()


@in_virtual_time
async def test_a_lost_worker_that_is_to_leave_tells_first_which_episodes_have_ended() -> None:
    """It leaves before others, as it does no work now."""
    behavior = Behavior(generation_s=lambda rng: rng.choice((1.0, 20.0)))  # no group is complete
    run = TrainingRun(Settings(num_rollout_workers=2, group_size=4, behavior=behavior))
    async with run.started():
        step = asyncio.create_task(run.step(checks_business=False))
        await asyncio.sleep(4.0)
        assert run.cluster.sealed_episodes
        run.cluster.workers["rollout/1"].end("signal 9 (SIGKILL)")
        await until(lambda: not run.rollout._workers.are_rows_known("rollout/1"))
        await run.rollout.scale_async(1)
        await step
        for _ in range(3):
            await run.step(checks_business=False)
        assert names(run) == ["rollout/0"]
    assert run.cluster.num_taken_over
    assert not run.cluster.played_again


@in_virtual_time
async def test_one_that_was_to_leave_stays_when_it_is_wanted_again() -> None:
    run = TrainingRun(Settings(num_rollout_workers=2, behavior=Behavior(generation_s=30.0)))
    async with run.started():
        task = asyncio.create_task(run.step(checks_business=False))
        await asyncio.sleep(5.0)
        lives = [worker.incarnation for worker in run.cluster.rollout_workers]
        await run.rollout.scale_async(1)
        await run.rollout.scale_async(2)
        await task
        assert [worker.incarnation for worker in run.cluster.rollout_workers] == lives


@in_virtual_time
async def test_the_number_is_on_the_disk_before_anything_is_done() -> None:
    run = TrainingRun(Settings(num_rollout_workers=1))
    path = RunFolder(run.cluster.run_dir).rollout_workers_path
    async with run.started():
        assert path not in run.disk.files
        await run.rollout.scale_async(3)
        assert run.disk.durable[path] == b"3\n"


@in_virtual_time
async def test_numbers_that_cannot_be() -> None:
    run = TrainingRun(Settings(num_rollout_workers=2, batch_groups=4, store_groups=3))
    async with run.started():
        await run.step()
        with pytest.raises(ConfigError, match="at least 1, got 0"):
            await run.rollout.scale_async(0)
        for number in (2.5, "3", None, True):
            with pytest.raises(ConfigError, match=f"at least 1, got {number!r}"):
                await run.rollout.scale_async(number)  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match=r"train_batch_groups=4 .* room for 3;"):
            await run.rollout.scale_async(1)
        assert len(run.rollout._workers.set.staying) == 2
        await run.step()


class DyingNewcomers(SimulatedRolloutWorker):
    """Those beyond the first die as soon as they are asked for anything."""

    async def initialize(self, _: None) -> None:
        if self.name != "rollout/0":
            self.end("exit code 1")
        await super().initialize(None)


def test_a_new_worker_that_only_dies_ends_the_run_as_any_other() -> None:
    run = TrainingRun(Settings(num_rollout_workers=1, max_deaths=2))
    run.cluster.rollout_class = DyingNewcomers

    async def play() -> None:
        async with run.started():
            await run.step()
            await run.rollout.scale_async(2)
            while True:
                await run.step(checks_business=False)

    with pytest.raises(CrashLoop, match="rollout/1 died 3 times in a row"):
        run_virtual(play())


@in_virtual_time
async def test_a_new_worker_that_is_not_wanted_any_more_is_gone_with_its_start() -> None:
    run = TrainingRun(Settings(num_rollout_workers=1))
    async with run.started():
        await run.step()
        await run.rollout.scale_async(4)
        await asyncio.sleep(0.3)  # some serve, and some do not yet
        await run.rollout.scale_async(1)
        await asyncio.sleep(LEAVING_S)
        assert names(run) == ["rollout/0"]
        assert [member.name for member in run.rollout.fleet.members] == ["rollout/0"]


class OneAtATime(SimulatedRolloutWorker):
    """Has one slot: further groups wait."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._slot = asyncio.Lock()
        self._num_waiting = 0

    async def _play_group(self, run: calls.GroupAttempt, group: calls.RunGroup) -> calls.GroupReply:
        self._num_waiting += group.group_size
        async with self._slot:
            self._num_waiting -= group.group_size
            reply = await super()._play_group(run, group)
            return msgspec.structs.replace(reply, num_waiting=self._num_waiting)


class SlottedCluster(SimulatedCluster):
    def __init__(self, run_dir: Path, behavior: Behavior, seed: int = 0) -> None:
        super().__init__(run_dir, behavior, seed)
        self.rollout_class = OneAtATime


def numbers_found(first: int, max_staleness: int, num_steps: int) -> list[int]:
    """Of workers after each step, with autoscaling.

    A step of 4 groups takes 2 s to train, and 6.4 s of one worker to generate.
    """
    settings = Settings(
        num_steps=num_steps,
        group_size=1,
        num_rollout_workers=first,
        autoscale=AutoscaleConfig(1, 8),
        max_staleness=max_staleness,
        behavior=Behavior(
            generation_s=lambda rng: 1.6 * rng.choice((0.5, 1.0, 1.5)),
            training_s=0.65,
            publication_s=0.05,
        ),
    )
    run, numbers = TrainingRun(settings, SlottedCluster), list[int]()

    async def play() -> None:
        async with run.started():
            for _ in range(settings.num_steps):
                await run.step(checks_business=False)
                numbers.append(len(run.rollout._workers.set.staying))
            await run.check_end()

    run_virtual(play(), max_turns=4_000_000)
    assert numbers[0] == first
    return numbers


@pytest.mark.parametrize("first", [1, 6])
def test_autoscaling_finds_the_number_that_the_trainer_needs(first: int) -> None:
    numbers = numbers_found(first, max_staleness=3, num_steps=300)
    late = numbers[-200:]  # one less was tried now and then, and one more
    assert mode(late) == 4, numbers
    assert sum(late) / len(late) == pytest.approx(4.0, abs=0.5), numbers


def test_autoscaling_without_staleness_gives_each_group_a_worker() -> None:
    """The trainer always waits, and a fifth worker would have nothing to do."""
    numbers = numbers_found(1, max_staleness=0, num_steps=60)
    assert mode(numbers[-40:]) == 4, numbers  # more were tried now and then
