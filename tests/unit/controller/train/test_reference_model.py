"""A second model computes a field of the rows, in virtual time: who keeps it, and for how long."""

from __future__ import annotations

import pytest
from simulation.settings import Settings
from simulation.training_run import TrainingRun
from simulation.virtual_loop import in_virtual_time, run_virtual

from areal_sc.errors import MetadataError

NUM_STEPS = 8
SETTINGS = Settings(num_steps=NUM_STEPS, num_minibatches=2, num_ranks=2, has_reference=True)


def test_deaths_of_a_frozen_model_are_in_a_row_only_where_it_computes_nothing_in_between() -> None:
    async def scenario() -> int:
        async with TrainingRun(SETTINGS).started() as run:
            for _ in range(NUM_STEPS):
                await run.step()
                run.cluster.workers["ref/1"].end("killed")
            return run.others[0].version

    assert run_virtual(scenario()) == 0


@in_virtual_time
async def test_a_field_goes_with_its_rows_and_survives_a_death_of_its_ranks() -> None:
    async with TrainingRun(SETTINGS).started() as run:
        (reference,), held = run.others, list[list[int]]()
        for number in range(NUM_STEPS):
            if number == NUM_STEPS // 2:
                run.cluster.workers["ref/1"].end("killed")
            batch = await run.step()
            assert batch.dtypes["reference_logprobs"] == "float32"
            ranks = [run.cluster.workers[f"ref/{rank}"] for rank in range(2)]
            held.append([len(rank.store.sizes) for rank in ranks])
        kept = run.actor.ranks._fields._stores.values()
        assert sum(store.num_held for store in kept) <= 2, "a publication forgets all of them"
        with pytest.raises(MetadataError, match="has the field 'reference_logprobs' already"):
            await reference.compute_logprobs_async(batch, field="reference_logprobs")
        with pytest.raises(ValueError, match="output: expected one of logprobs, entropy"):
            await reference.compute_async(batch, "reward", field="x")
    assert max(map(max, held)) <= 2, held
