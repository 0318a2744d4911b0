"""Both engines on one CUDA device, against the same computation on the CPU in float32."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from builders import engines_on, packed_rows
from transformers import AutoModelForCausalLM

from areal_sc.algorithms.named_loss import loss_of
from areal_sc.config.schema import (
    ActivationCheckpointing,
    Device,
    Dtype,
    GenerationConfig,
    OptimizerConfig,
    RolloutConfig,
)
from areal_sc.engines.base import Completion
from areal_sc.engines.fsdp.engine import FSDPEngine
from areal_sc.engines.fsdp.optimizer import local_part
from areal_sc.engines.local.engine import LocalEngine
from areal_sc.transport.packed_rows import PackedRows

pytestmark = pytest.mark.gpu

LENGTHS = (9, 14, 5)
Build = Callable[..., FSDPEngine]


@pytest.fixture
def build(tiny_model_folder: Path) -> Iterator[Build]:
    optimizer = OptimizerConfig(lr=1e-3, total_steps=10)
    with engines_on(tiny_model_folder) as build_engine:

        def build_on(device: Device, dtype: Dtype, **settings: object) -> FSDPEngine:
            return build_engine(device=device, dtype=dtype, optimizer=optimizer, **settings)

        yield build_on


def random_rows(seed: int = 0) -> PackedRows:
    num_tokens = sum(LENGTHS)
    return packed_rows(
        LENGTHS,
        seed,
        behavior_logprobs=torch.full((num_tokens,), -3.0),
        proximal_logprobs=torch.full((num_tokens,), -3.0),
        versions=torch.zeros(num_tokens, dtype=torch.int32),
        temperatures=torch.ones(num_tokens),
        advantages=(1.0, -0.5, 0.25),
    )


def weights(engine: FSDPEngine) -> dict[str, torch.Tensor]:
    """Copies of the float32 parameters, on the CPU."""
    parameters = engine._model.causal_lm.named_parameters()
    return {name: local_part(p).detach().float().cpu().clone() for name, p in parameters}


TOLERANCES = [(Dtype.float32, 1e-3), (Dtype.bfloat16, 5e-2), (Dtype.float16, 1e-2)]


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"activation_checkpointing": ActivationCheckpointing.layers},
        {"activation_checkpointing": ActivationCheckpointing.selective},
        {"activation_checkpointing": ActivationCheckpointing.layers, "activation_offload": True},
        {"cpu_offload": True},
        # torch's compiler warns of its own code, and of what is slow
        pytest.param({"compile_layers": True}, marks=pytest.mark.filterwarnings("default")),
    ],
    ids=lambda settings: "_".join(map(str, [*settings, *settings.values()])) or "plain",
)
@pytest.mark.parametrize(("dtype", "tolerance"), [(Dtype.float32, 1e-4), *TOLERANCES[1:]])
def test_training_agrees_with_the_cpu(
    device: Device, build: Build, dtype: Dtype, tolerance: float, settings: dict[str, Any]
) -> None:
    found = []
    for place, used in ((Device.cpu, Dtype.float32), (device, dtype)):
        engine = build(place, used, **settings)
        before = engine.forward(random_rows(), "logprobs")
        stats = engine.update([random_rows()], loss_of(engine.config.ppo), step=0)
        after = engine.forward(random_rows(), "logprobs")
        engine.close()
        found.append((before, after, stats["loss"]))
    for cpu, other in zip(found[0][:2], found[1][:2], strict=True):
        assert (cpu - other).abs().max() < tolerance
    assert found[1][2] == pytest.approx(found[0][2], abs=tolerance)


@pytest.mark.parametrize("dtype", list(Dtype))
def test_a_snapshot_goes_on_where_there_is_no_gpu(
    device: Device, build: Build, tmp_path: Path, dtype: Dtype
) -> None:
    """Weights and both Adam moments come through: the next updates are the same, too."""
    engine = build(device, dtype)
    for step in range(2):
        engine.update([random_rows(step)], loss_of(engine.config.ppo), step=step)
    engine.begin_snapshot(tmp_path / "snapshot").result()
    at_snapshot = weights(engine)
    for step in (2, 3):
        engine.update([random_rows(step)], loss_of(engine.config.ppo), step=step)
    later = weights(engine)
    engine.close()  # its process group would be the other's

    other = build(Device.cpu, Dtype.float32)
    other.load_snapshot(tmp_path / "snapshot")
    restored = weights(other)
    assert restored.keys() == at_snapshot.keys()
    assert [name for name in restored if not torch.equal(restored[name], at_snapshot[name])] == []
    for step in (2, 3):
        other.update([random_rows(step)], loss_of(other.config.ppo), step=step)
    differences = torch.cat([(values - later[n]).flatten() for n, values in weights(other).items()])
    way = torch.cat([(later[name] - at_snapshot[name]).flatten() for name in later])
    # lost moments would give differences of the size of the way, where Adam turns about
    assert way.abs().mean() > 5e-4
    assert differences.abs().mean() < (2e-5 if dtype == Dtype.float32 else 1e-4)


def local_engine(folder: Path, device: Device, dtype: Dtype) -> LocalEngine:
    config = RolloutConfig(
        path=str(folder),
        device=device,
        dtype=dtype,
        max_context_tokens=64,
        max_running_sequences=4,
        seed=0,
    )
    return LocalEngine(config)


SAMPLING = GenerationConfig(max_new_tokens=12, temperature=0.7)


def logprob_errors(folder: Path, prompt: list[int], completion: Completion) -> torch.Tensor:
    """[C] differences to a float32 forward of the folder's model on the CPU, nats."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = torch.tensor([prompt + completion.token_ids])
    with torch.no_grad():
        logits = model(ids, use_cache=False).logits[0] / SAMPLING.temperature
    expected = torch.log_softmax(logits, -1)[len(prompt) - 1 : -1].gather(
        1, torch.tensor(completion.token_ids)[:, None]
    )[:, 0]
    return (expected - torch.tensor(completion.logprobs)).abs()


@pytest.mark.parametrize(("dtype", "tolerance"), TOLERANCES)
async def test_generation_records_its_own_logprobs(
    device: Device, tiny_model_folder: Path, dtype: Dtype, tolerance: float
) -> None:
    engine = local_engine(tiny_model_folder, device, dtype)
    await engine.start()
    prompts = [[1, 2, 3], [4, 5, 6, 7, 8]]
    completions = await asyncio.gather(*(engine.generate(p, SAMPLING) for p in prompts))
    await engine.close()
    for prompt, completion in zip(prompts, completions, strict=True):
        assert logprob_errors(tiny_model_folder, prompt, completion).max() < tolerance


async def test_weights_replaced_from_a_folder(
    device: Device, build: Build, tiny_model_folder: Path, tmp_path: Path
) -> None:
    trainer = build(device, Dtype.float32)
    trainer.update([random_rows()] * 4, loss_of(trainer.config.ppo), step=0)
    trainer.begin_save_hf(tmp_path / "trained").result(60)
    engine = local_engine(tiny_model_folder, device, Dtype.float32)
    await engine.start()
    await engine.update_weights_from_disk(1, tmp_path / "trained")
    completion = await engine.generate([1, 2, 3], SAMPLING)
    await engine.close()
    assert set(completion.versions) == {1}
    assert logprob_errors(tmp_path / "trained", [1, 2, 3], completion).max() < 1e-3
    old = logprob_errors(tiny_model_folder, [1, 2, 3], completion).max()
    assert old > 2e-3, "the old weights would have been noticed"
