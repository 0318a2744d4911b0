"""Rows of the batch that is being trained are gone: it is formed anew. In virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from simulation.behavior import Number
from simulation.settings import Settings
from simulation.store import SimulatedStore
from simulation.training_run import TrainingRun
from simulation.virtual_loop import in_virtual_time

from areal_sc.config.schema import OverBound
from areal_sc.controller.ledger.ledger_account import GroupAccount, read_account
from areal_sc.errors import BatchLost, PeerSilent, ShardGone
from areal_sc.metadata import BatchMetadata

KILLED = "signal 9 (SIGKILL)"


def lose_rows(run: TrainingRun) -> None:
    for worker in run.cluster.rollout_workers:
        worker.end(KILLED, keeps_memory=False)


async def prepared(run: TrainingRun) -> BatchMetadata:
    batch = await run.rollout.prepare_batch_async(run.prompts, run.workflow)
    run.batches.append(batch)
    run.check_batch(batch)
    return run.actor.compute_advantages(await run.actor.compute_proximal_logprobs_async(batch))


async def before_it_is_read(run: TrainingRun) -> None:
    batch = await run.rollout.prepare_batch_async(run.prompts, run.workflow)
    run.batches.append(batch)
    run.check_batch(batch)
    lose_rows(run)
    await run.actor.compute_proximal_logprobs_async(batch)


async def before_the_update(run: TrainingRun) -> None:
    batch = await prepared(run)
    lose_rows(run)
    await run.actor.ppo_update_async(batch)


async def with_their_machine_which_says_nothing(run: TrainingRun) -> None:
    batch, reach = await prepared(run), run.cluster.reach

    async def reach_in_vain(node_id: str, address: str) -> SimulatedStore:
        try:
            return await reach(node_id, address)
        except ShardGone as error:
            raise PeerSilent(str(error)) from error

    run.cluster.reach = reach_in_vain  # type: ignore[method-assign]
    lose_rows(run)
    await run.actor.ppo_update_async(batch)


async def while_a_rank_has_begun(run: TrainingRun) -> None:
    """One rank reads its rows before they are gone, and changes its weights."""
    batch = await prepared(run)
    first, last = run.cluster.train_workers
    read_shards = last.read_shards

    async def read_late(batch: BatchMetadata, duration: Number = 0.0) -> None:
        await asyncio.sleep(1.0)
        await read_shards(batch, duration)

    last.read_shards = read_late  # type: ignore[method-assign]
    update = asyncio.create_task(run.actor.ppo_update_async(batch))
    await asyncio.sleep(0.5)
    assert first.past[-1][0] == batch.global_step != last.past[-1][0]
    lose_rows(run)
    await update
    await run.actor.publish_weights_async(run.rollout)


async def between_update_and_publication(run: TrainingRun) -> None:
    batch = await prepared(run)
    await run.actor.ppo_update_async(batch)
    lose_rows(run)
    run.cluster.train_workers[0].end(KILLED)
    await run.actor.publish_weights_async(run.rollout)


async def between_two_updates(run: TrainingRun) -> None:
    """The script asks for the batch again, and gets another one than it has trained on."""
    batch = await prepared(run)
    await run.actor.ppo_update_async(batch)
    lose_rows(run)
    again = await run.rollout.prepare_batch_async(run.prompts, run.workflow)
    assert again.batch_id != batch.batch_id
    await run.actor.publish_weights_async(run.rollout)


@in_virtual_time
@pytest.mark.parametrize("mode", [OverBound.train, OverBound.wait])
@pytest.mark.parametrize(
    "lose",
    [
        before_it_is_read,
        before_the_update,
        with_their_machine_which_says_nothing,
        while_a_rank_has_begun,
        between_update_and_publication,
        between_two_updates,
    ],
    ids=lambda lose: lose.__name__,
)
async def test_a_batch_whose_rows_are_gone_is_formed_anew(
    lose: Callable[[TrainingRun], Awaitable[None]], mode: OverBound, tmp_path: Path
) -> None:
    settings = Settings(num_steps=5, num_ranks=2, over_bound=mode, max_staleness=1, store_groups=6)
    run = TrainingRun(settings)
    async with run.started():
        for _ in range(2):
            await run.step(checks_business=False)
        with pytest.raises(BatchLost, match=r"policy version 2 are gone.*prepare_batch again"):
            await lose(run)
        lost = run.batches[-1]
        run.forget_batch()
        for _ in range(3):
            await run.step(checks_business=False)
        again = run.batches[2]
        assert again.global_step == lost.global_step
        if mode is OverBound.wait:  # its groups are due; the others take those that are there
            assert again.group_ids == lost.group_ids
            assert {row.attempt for row in again.rows} == {1}
        await run.check_end()
        for rank in run.cluster.train_workers:
            trained = [key for version, rows in rank.past if version == 2 for key in rows]
            assert {key[:2] for key in trained} <= {(r.group_id, r.attempt) for r in again.rows}
    groups: list[GroupAccount] = []
    account = read_account(run.rollout._folder.ledger, groups.append, run.disk)
    assert (account.rows_lost, account.trained_again) == (0, [])
    assert sorted(g.group for g in groups if g.outcome == "trained") == list(range(20))


@in_virtual_time
async def test_rows_that_are_there_and_cannot_be_read_end_the_run() -> None:
    async with TrainingRun(Settings()).started() as run:

        async def gone(batch: BatchMetadata, duration: object = 0.0) -> None:
            raise ShardGone("shard x is gone")

        run.cluster.train_workers[0].read_shards = gone  # type: ignore[method-assign]
        first = await run.rollout.prepare_batch_async(run.prompts, run.workflow)
        with pytest.raises(BatchLost):
            await run.actor.compute_proximal_logprobs_async(first)
        again = await run.rollout.prepare_batch_async(run.prompts, run.workflow)
        assert again.batch_id == first.batch_id
        with pytest.raises(ShardGone, match="shard x"):
            await run.actor.compute_proximal_logprobs_async(again)
