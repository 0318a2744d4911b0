"""What counts as the same update of a version, in virtual time."""

from __future__ import annotations

import asyncio
from typing import Any

from msgspec.structs import replace
from simulation.settings import Settings
from simulation.training_run import TrainingRun
from simulation.virtual_loop import in_virtual_time

from areal_sc.errors import StaleCall
from areal_sc.metadata import BatchMetadata, Columns, RowRun, ShardMetadata


def with_field(
    batch: BatchMetadata, name: str, owner: Any, *, is_computed: bool = False
) -> BatchMetadata:
    """The batch with a field of its own, in a new shard."""
    shard = ShardMetadata(
        owner.name,
        owner.address,
        owner.store.put(4 * batch.num_tokens),
        (RowRun(0, 0, batch.total_batch_size),),
    )
    columns = Columns({name: "float32"}, (shard,), is_computed)
    return replace(batch, columns=(*batch.columns, columns))


@in_virtual_time
async def test_an_update_with_other_token_advantages_is_no_repeat() -> None:
    async with TrainingRun(Settings(num_minibatches=1, num_ranks=2)).started() as run:
        batch = await run.rollout.prepare_batch_async(run.prompts, run.workflow)
        batch = run.actor.compute_advantages(batch)
        owner = run.cluster.workers["train/0"]
        first, other = (with_field(batch, "advantages", owner) for _ in range(2))
        recomputed = with_field(first, "reference_logprobs", owner, is_computed=True)
        assert (
            await asyncio.gather(
                *(run.actor.ppo_update_async(repeated) for repeated in (first, first, recomputed)),
            )
            == [{"loss": 0.0}] * 3
        )
        run.actor.ranks.step.num_updates = 0  # as in a controller that has not heard of it
        (refused,) = await asyncio.gather(run.actor.ppo_update_async(other), return_exceptions=True)
        assert isinstance(refused, StaleCall), refused
