"""Samples of each batch: who is asked for them, when, and what it costs if nobody answers."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Callable
from statistics import fmean

import pytest
from simulation.behavior import Behavior
from simulation.settings import Settings
from simulation.training_run import TrainingRun
from simulation.virtual_loop import run_virtual
from simulation.workers import SimulatedRolloutWorker

from areal_sc.config.schema import AdmissionMode
from areal_sc.controller.rollout.batch_samples import chosen_groups
from areal_sc.metadata import BatchMetadata, RowMetadata
from areal_sc.records.samples import Place, Sample, read_samples
from areal_sc.workers import calls

NUM_STEPS = 6
SETTINGS = Settings(
    num_steps=NUM_STEPS, batch_groups=5, group_size=4, admission=AdmissionMode.eager
)


def samples_of(
    run: TrainingRun, change: Callable[[TrainingRun], None] = lambda run: None
) -> tuple[list[Sample], float]:
    """What a whole run leaves in its file, and how long its steps took together."""

    async def play() -> tuple[list[Sample], float]:
        path = run.cluster.run_dir / "samples.jsonl"
        async with run.started():
            change(run)
            began_s = run.cluster.now_s
            for _ in range(run.settings.num_steps):
                await run.step()
            duration_s = run.cluster.now_s - began_s
            return read_samples(path) if path.exists() else [], duration_s

    return run_virtual(play())


def test_each_step_leaves_the_best_and_the_worst_answer_of_some_groups() -> None:
    run = TrainingRun(SETTINGS)
    samples, _ = samples_of(run)
    assert {sample.step for sample in samples} == set(range(1, NUM_STEPS + 1))
    num_places = dict.fromkeys(Place, 0)
    for sample in samples:
        batch = run.batches[sample.step - 1]
        rows = [row for row in batch.rows if row.group_id == sample.group]
        rewards = [row.reward for row in rows]
        expected = max(rewards) if sample.place is Place.best else min(rewards)
        assert (sample.reward, sample.group_reward) == (expected, fmean(rewards))
        assert (sample.place is Place.equal) == (max(rewards) == min(rewards))
        same = [row for row in rows if row.sequence_length == sample.num_tokens]
        spans = [(row.version_spans[0][0], row.version_spans[-1][0]) for row in same]
        assert (sample.first_version, sample.last_version) in spans
        assert sample.staleness == batch.global_step - sample.first_version
        assert (sample.prompt, sample.answer) == ("1+1=", "2")
        of_episode = [row for row in rows if row.episode == sample.episode]
        row = of_episode[sample.row]
        assert (row.attempt, row.reward) == (sample.attempt, sample.reward)
        assert row.sequence_length == sample.num_tokens
        num_places[sample.place] += 1
    assert num_places[Place.best] == num_places[Place.worst] > NUM_STEPS / 2
    groups = {(sample.step, sample.group) for sample in samples}
    assert len(groups) == 2 * NUM_STEPS
    assert run.rollout.newest_samples == tuple(s for s in samples if s.step == NUM_STEPS)


def test_a_worker_that_does_not_answer_costs_samples_and_no_time(
    caplog: pytest.LogCaptureFixture,
) -> None:
    asked: list[calls.ReadTexts] = []

    class Silent(SimulatedRolloutWorker):
        async def read_texts(self, wanted: calls.ReadTexts) -> tuple[calls.RowText, ...]:
            asked.append(wanted)
            await asyncio.sleep(1e6)
            return ()

    _, expected_s = samples_of(TrainingRun(SETTINGS))
    run = TrainingRun(SETTINGS)
    run.cluster.rollout_class = Silent
    with caplog.at_level(logging.INFO):
        samples, duration_s = samples_of(run)
    assert samples == []
    late = set(re.findall(r"step=(\d+) has no samples: those before are late", caplog.text))
    last = re.findall(r"step=(\d+) has no samples: the run ends before", caplog.text)
    assert late
    assert len(last) == 1
    assert not late & set(last)
    assert duration_s == expected_s
    assert 0 < len(asked) <= 4  # of one batch at a time


def test_a_worker_that_is_being_started_again_is_not_asked(
    caplog: pytest.LogCaptureFixture,
) -> None:
    run, too_early = TrainingRun(SETTINGS), []

    class SlowlyBuilt(SimulatedRolloutWorker):
        is_built = False

        async def initialize(self, _: None) -> None:
            await self.spend(10.0)  # some steps
            await super().initialize(_)
            self.is_built = True

        async def read_texts(self, wanted: calls.ReadTexts) -> tuple[calls.RowText, ...]:
            if not self.is_built:
                too_early.append(self.name)
            return await super().read_texts(wanted)

    def kill_soon(run: TrainingRun) -> None:
        worker = run.cluster.workers["rollout/0"]
        asyncio.get_running_loop().call_later(1.5, worker.end, "signal 9 (SIGKILL)")

    run.cluster.rollout_class = SlowlyBuilt
    with caplog.at_level(logging.INFO):
        samples, _ = samples_of(run, kill_soon)
    assert samples
    assert "lacks a sample: worker rollout/0 is being started again" in caplog.text
    assert too_early == []


def test_rows_that_were_swept_meanwhile_are_missing_samples() -> None:
    class Slow(SimulatedRolloutWorker):
        async def read_texts(self, wanted: calls.ReadTexts) -> tuple[calls.RowText, ...]:
            await asyncio.sleep(5.0)
            return await super().read_texts(wanted)

    run = TrainingRun(Settings(num_steps=NUM_STEPS, behavior=Behavior(training_s=0.5)))
    run.cluster.rollout_class = Slow
    samples, _ = samples_of(run)
    assert samples == []
    assert len(run.batches) == NUM_STEPS


def test_a_file_that_cannot_be_written_is_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    def take_folder_away(run: TrainingRun) -> None:
        run.rollout._samples.path = run.cluster.run_dir / "no folder" / "samples.jsonl"

    with caplog.at_level(logging.WARNING):
        samples, _ = samples_of(TrainingRun(SETTINGS), take_folder_away)
    assert samples == []
    assert [r.message.partition(":")[0] for r in caplog.records] == ["no more samples are kept"]


def test_no_groups_a_step_ask_nobody() -> None:
    def refuse(run: TrainingRun) -> None:
        run.rollout.config.samples.groups_per_step = 0

    run = TrainingRun(SETTINGS)
    samples, _ = samples_of(run, refuse)
    assert samples == []
    assert run.rollout.newest_samples == ()


@pytest.mark.parametrize(
    ("num_groups", "expected"), [(1, [0]), (2, [0, 2]), (4, [0, 1, 2, 3]), (64, [0, 1, 2, 3, 4])]
)
def test_groups_are_taken_at_even_distances(num_groups: int, expected: list[int]) -> None:
    rows = tuple(
        RowMetadata(group, 0, 3, 0.0, 0, ((0, 1),), episode)
        for group in range(5)
        for episode in range(2)
    )
    batch = BatchMetadata("b", 0, (), rows)
    found = chosen_groups(batch, num_groups)
    assert found == [(2 * group, 2 * group + 1) for group in expected]
