"""Both engines on one CUDA device, against the same computation on the CPU in float32."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from areal_sc.config.schema import (
    ActorConfig,
    Device,
    Dtype,
    GenerationConfig,
    OptimizerConfig,
    PPOConfig,
    RolloutConfig,
)
from areal_sc.engines.fsdp import FSDPEngine
from areal_sc.engines.local import LocalEngine
from areal_sc.transport.packed_rows import PackedRows

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, there is none"),
]

LENGTHS = (9, 14, 5)


def actor_config(folder: Path, device: Device, dtype: Dtype) -> ActorConfig:
    return ActorConfig(
        path=str(folder),
        device=device,
        dtype=dtype,
        seed=0,
        optimizer=OptimizerConfig(lr=1e-3, total_steps=10),
        ppo=PPOConfig(temperature=1.0),
    )


def random_rows() -> PackedRows:
    generator = torch.Generator().manual_seed(0)
    num_tokens = sum(LENGTHS)
    return PackedRows(
        {
            "input_ids": torch.randint(0, 20, (num_tokens,), generator=generator).int(),
            "loss_mask": torch.ones(num_tokens, dtype=torch.bool),
            "behavior_logprobs": torch.full((num_tokens,), -3.0),
            "proximal_logprobs": torch.full((num_tokens,), -3.0),
            "versions": torch.zeros(num_tokens, dtype=torch.int32),
        },
        LENGTHS,
        (1.0, -0.5, 0.25),
    )


@pytest.mark.parametrize(("dtype", "tolerance"), [(Dtype.float32, 1e-4), (Dtype.bfloat16, 5e-2)])
def test_training_on_cuda_agrees_with_the_cpu(
    tiny_model_folder: Path, dtype: Dtype, tolerance: float
) -> None:
    found = {}
    for device, used in ((Device.cpu, Dtype.float32), (Device.cuda, dtype)):
        engine = FSDPEngine(actor_config(tiny_model_folder, device, used))
        engine.initialize(0, 1, "")
        before = engine.compute_logprobs(random_rows())
        stats = engine.ppo_update([random_rows()], step=0, min_token_version=None)
        after = engine.compute_logprobs(random_rows())
        engine.close()
        found[device] = (before, after, stats["loss"])
    for cpu, cuda in zip(found[Device.cpu][:2], found[Device.cuda][:2], strict=True):
        assert (cpu - cuda).abs().max() < tolerance
    assert found[Device.cuda][2] == pytest.approx(found[Device.cpu][2], abs=tolerance)


async def test_generation_on_cuda_records_its_own_logprobs(tiny_model_folder: Path) -> None:
    config = RolloutConfig(
        path=str(tiny_model_folder),
        device=Device.cuda,
        dtype=Dtype.float32,
        max_context_tokens=64,
        max_running_sequences=4,
        seed=0,
    )
    engine = LocalEngine(config)
    await engine.start()
    sampling = GenerationConfig(max_new_tokens=12, temperature=0.7)
    prompts = [[1, 2, 3], [4, 5, 6, 7, 8]]
    completions = await asyncio.gather(*(engine.generate(p, sampling) for p in prompts))
    await engine.close()
    model = AutoModelForCausalLM.from_pretrained(tiny_model_folder, dtype=torch.float32)
    for prompt, completion in zip(prompts, completions, strict=True):
        ids = torch.tensor([prompt + completion.token_ids])
        with torch.no_grad():
            logits = model(ids, use_cache=False).logits[0] / sampling.temperature
        expected = torch.log_softmax(logits, -1)[len(prompt) - 1 : -1].gather(
            1, torch.tensor(completion.token_ids)[:, None]
        )[:, 0]
        assert (expected - torch.tensor(completion.logprobs)).abs().max() < 1e-3
