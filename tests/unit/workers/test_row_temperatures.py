"""Rows are trained at the temperatures that they were sampled at, from a workflow to the loss."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from areal_sc.config.schema import ActorConfig, Device, Dtype, GenerationConfig, RolloutConfig
from areal_sc.engines.fsdp.engine import FSDPEngine
from areal_sc.engines.local.engine import LocalEngine
from areal_sc.token_fields import TRAJECTORY_FIELDS
from areal_sc.transport.packed_rows import PackedRows
from areal_sc.workers.rollout_worker import WorkerEpisodeEngine
from areal_sc.workflows.base import EpisodeEngine, Trajectory, Workflow
from areal_sc.workflows.transcript import Transcript

TIMEOUT_S = 60.0


class Turns(Workflow):
    """A completion at each temperature, with feedback between them."""

    def __init__(self, *temperatures: float) -> None:
        self.temperatures = temperatures

    async def run_episode(self, prompt: dict[str, Any], engine: EpisodeEngine) -> Trajectory:
        transcript = Transcript()
        for temperature in self.temperatures:
            transcript.add_context([5, 9, 12])
            sampling = GenerationConfig(max_new_tokens=20, temperature=temperature)
            transcript.add_completion(await engine.generate(transcript.input_ids, sampling))
        return transcript.trajectory(1.0)


async def play(folder: Path, workflows: Sequence[Workflow]) -> PackedRows:
    """The rows of one episode of each workflow, as a worker seals them."""
    config = RolloutConfig(
        path=str(folder), device=Device.cpu, dtype=Dtype.float32, max_context_tokens=128, seed=0
    )
    engine = LocalEngine(config)
    await engine.start()
    try:
        async with asyncio.timeout(TIMEOUT_S):
            episode: Any = WorkerEpisodeEngine(engine, None, "group", GenerationConfig(), None)  # type: ignore[arg-type]
            rows = [await workflow.run_episode({}, episode) for workflow in workflows]
    finally:
        await engine.close()
    fields = {
        name: torch.tensor(
            list(itertools.chain.from_iterable(getattr(row, name) for row in rows)),
            dtype=getattr(torch, dtype),
        )
        for name, dtype in TRAJECTORY_FIELDS.items()
    }
    return PackedRows(fields, tuple(len(row.input_ids) for row in rows))


@pytest.mark.parametrize(
    "turns", [[(0.5,), (0.5,)], [(0.5, 1.7), (1.0, 0.3)]], ids=["one turn", "two turns"]
)
async def test_the_trainer_finds_the_log_probabilities_of_the_sampler(
    turns: list[tuple[float, ...]], tiny_model_folder: Path
) -> None:
    rows = await play(tiny_model_folder, [Turns(*temperatures) for temperatures in turns])
    trainer = FSDPEngine(ActorConfig(path=str(tiny_model_folder), device=Device.cpu, seed=0))
    trainer.initialize(0, 1, "")
    found = trainer.forward(rows, "logprobs")
    trainer.close()
    mask = rows.fields["loss_mask"]
    assert mask.sum() > 20
    difference = (rows.fields["behavior_logprobs"] - found)[mask]
    assert difference.abs().max() < 1e-5
    assert abs(difference.mean().item()) < 1e-6  # the KL divergence of the two, estimated
