"""A second model computes a field of the rows, in virtual time: who keeps it, and for how long."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest
from simulation.settings import Settings, configs
from simulation.training_run import TrainingRun
from simulation.virtual_loop import run_virtual

from areal_sc.controller.train import TrainController
from areal_sc.engines.handles import FSDPPPOActor
from areal_sc.errors import MetadataError
from areal_sc.metadata import BatchMetadata

NUM_STEPS = 8
FIELD = "reference_logprobs"
SETTINGS = Settings(num_steps=NUM_STEPS, num_minibatches=2, num_ranks=2)


@asynccontextmanager
async def with_reference(
    run: TrainingRun, **changes: Any
) -> AsyncIterator[tuple[TrainingRun, TrainController]]:
    config = replace(configs(run.settings)[0], **changes)
    reference = TrainController(FSDPPPOActor(config), run.cluster, role="ref", runtime=run.runtime)
    compute_proximal = run.actor.compute_proximal_logprobs_async

    async def compute_both(batch: BatchMetadata) -> BatchMetadata:
        batch = await reference.compute_logprobs_async(batch, field=FIELD)
        assert batch.dtypes[FIELD] == "float32"
        return await compute_proximal(batch)

    async with run.started():
        run.actor.compute_proximal_logprobs_async = compute_both  # type: ignore[method-assign]
        await reference.start_async()
        try:
            yield run, reference
        finally:
            await reference.close_async()


def held(run: TrainingRun) -> list[int]:
    """Number of shards in the store of each rank of the reference model."""
    return [len(run.cluster.workers[f"ref/{rank}"].store.sizes) for rank in range(2)]


def test_a_field_goes_with_its_rows_and_survives_a_death_of_its_ranks() -> None:
    async def scenario() -> list[list[int]]:
        async with with_reference(TrainingRun(SETTINGS)) as (run, reference):
            kept = []
            for number in range(NUM_STEPS):
                if number == NUM_STEPS // 2:
                    run.cluster.workers["ref/1"].end("killed")
                batch = await run.step()
                kept.append(held(run))
            with pytest.raises(MetadataError, match=f"has the field {FIELD!r} already"):
                await reference.compute_logprobs_async(batch, field=FIELD)
            with pytest.raises(ValueError, match="output: expected one of logprobs, entropy"):
                await reference.compute_async(batch, "reward", field="x")
            return kept

    kept = run_virtual(scenario())
    assert max(map(max, kept)) <= max(kept[2]), kept
