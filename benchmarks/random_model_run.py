"""Real controllers and workers around a model with random weights; answers have given lengths."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import qwen2_models
import torch

from areal_sc import (
    FSDPPPOActor,
    RolloutController,
    TrainController,
    Trajectory,
    Workflow,
    make_generator,
    make_scheduler,
    start,
)
from areal_sc.config.schema import (
    ActorConfig,
    Dtype,
    GenerationConfig,
    RolloutConfig,
    SchedulerConfig,
)
from areal_sc.workflows.base import EpisodeEngine
from areal_sc.workflows.transcript import Transcript


class GivenLengths(Workflow):
    """One answer of `num_new_tokens` tokens to the prompt's `input_ids`; nothing is scored."""

    async def run_episode(self, prompt: dict[str, Any], engine: EpisodeEngine) -> Trajectory:
        transcript = Transcript()
        transcript.add_context(prompt["input_ids"])
        sampling = GenerationConfig(max_new_tokens=prompt["num_new_tokens"])
        completion = await engine.generate(transcript.input_ids, sampling)
        transcript.add_completion(completion)
        assert len(completion.token_ids) == sampling.max_new_tokens, completion.finish_reason
        return transcript.trajectory(0.0)


@dataclass(frozen=True)
class Controllers:
    """Those of a run that has started."""

    actor: TrainController
    rollout: RolloutController


@contextmanager
def model_folder(shape: qwen2_models.Shape, dtype: Dtype) -> Iterator[Path]:
    """A folder with a model of this shape, in a temporary folder of its own."""
    with tempfile.TemporaryDirectory(prefix="areal-sc-model-") as name:
        qwen2_models.write_folder(Path(name) / "model", shape, getattr(torch, dtype))
        yield Path(name) / "model"


@contextmanager
def started(actor_config: ActorConfig, **rollout_settings: Any) -> Iterator[Controllers]:
    """A run of one train worker and one rollout worker, in a run folder beside the model.

    Args:
        rollout_settings: of RolloutConfig, beside what it shares with the trainer's; a group is one
            episode, unless they say otherwise.
    """
    shared = ("path", "dtype", "device", "weight_update")
    # the model never samples its tokenizer's end: a run wants to be told of another one
    generation = GenerationConfig(stop=[" ".join(f"t{word}" for word in range(9))])
    rollout_config = RolloutConfig(
        seed=0,
        **{name: getattr(actor_config, name) for name in shared},
        **({"group_size": 1, "generation": generation} | rollout_settings),
    )
    with tempfile.TemporaryDirectory(dir=Path(actor_config.path).parent) as run_dir:
        scheduler = make_scheduler(SchedulerConfig(run_dir=run_dir))
        try:
            actor = TrainController(FSDPPPOActor(actor_config), scheduler)
            rollout = RolloutController(make_generator(rollout_config), scheduler)
            with start(actor, rollout):
                yield Controllers(actor, rollout)
        finally:
            scheduler.close()
