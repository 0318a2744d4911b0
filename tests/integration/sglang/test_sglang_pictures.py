"""Prompts with pictures on a real server, every token against the model that trains."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from builders import picture
from local_engines import at_hand
from picture_models import own_logprobs, save_picture_model
from transformers import AutoModelForImageTextToText

from areal_sc.config.schema import GenerationConfig, RolloutConfig
from areal_sc.engines.base import Completion, RequestOptions
from areal_sc.engines.servers.engine import ServerEngine
from areal_sc.engines.servers.sglang.handle import SGLangEngine
from areal_sc.errors import ConfigError, WorkflowError
from areal_sc.workflows.pictures import encode_text_with

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(600)]

PATCH = 14
"""SGLang takes pixels of another size for the tower's output."""
MAX_CONTEXT = 256
TOLERANCE = 1e-5
ROWS = (
    ("hello there", ()),
    ("see <image>!", (picture(0, 60, 90),)),
    ("see <image>!", (picture(9, 60, 90),)),  # the same tokens, another picture
    ("a <image> b <image> c", (picture(1, 60, 31), picture(2, 24, 80))),
)


def error(model: Any, folder: Path, prompt: list[int], row: Any, answer: Completion) -> float:
    """The largest of the answer's tokens, nats, against float64."""
    ids = torch.tensor([*prompt, *answer.token_ids])
    with torch.no_grad():
        expected = own_logprobs(model, folder, ids, row[1])[len(prompt) :]
    return float((expected - torch.tensor(answer.logprobs, dtype=torch.float64)).abs().max())


async def test_answers_to_pictures(rollout_config: RolloutConfig, tmp_path: Path) -> None:
    folder = save_picture_model(tmp_path / "model", "qwen2_5_vl", patch=PATCH)
    config = replace(rollout_config, path=str(folder), max_context_tokens=MAX_CONTEXT)
    load = AutoModelForImageTextToText.from_pretrained
    models = [load(folder, dtype=torch.float64), load(folder, dtype=torch.float64)]
    with torch.no_grad():
        for parameter in models[1].parameters():  # the tower's, too
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=torch.Generator()))
    engine = ServerEngine(SGLangEngine(config), log_folder=tmp_path, name="pictures")
    assert engine.processor is not None
    read = engine.processor, engine.tokenizer
    prompts = [encode_text_with(pictures, *read, text) for text, pictures in ROWS]
    sampling = GenerationConfig(max_new_tokens=24)
    await engine.start()
    try:
        for version, model in enumerate(models):
            if version:
                tensors = [(name, p.detach().float()) for name, p in model.named_parameters()]
                await engine.update_weights(version, at_hand(tensors))
            asked = [
                engine.generate(prompt, sampling, RequestOptions(pictures=row[1]))
                for row, prompt in zip(ROWS, prompts, strict=True)
            ]
            streamed = list[int]()
            answers = await asyncio.gather(
                *asked,
                engine.generate(
                    prompts[1],
                    sampling,
                    RequestOptions(pictures=ROWS[1][1]),
                    on_tokens=streamed.extend,
                ),
            )
            assert streamed == answers[-1].token_ids
            for prompt, row, answer in zip(
                [*prompts, prompts[1]], [*ROWS, ROWS[1]], answers, strict=True
            ):
                assert set(answer.versions) == {version}
                assert error(model, folder, prompt, row, answer) < TOLERANCE
        other = error(models[1], folder, prompts[1], ROWS[2], answers[1])
        assert other > 100 * TOLERANCE  # pictures are looked at
        with pytest.raises(WorkflowError, match=r"has not the .* tokens of its picture 0"):
            await engine.generate(prompts[0], sampling, RequestOptions(pictures=ROWS[1][1]))
        options = RequestOptions(pictures=ROWS[1][1], prompt_logprobs=True)
        with pytest.raises(ConfigError, match="prompt_logprobs: expected false with pictures"):
            await engine.generate(prompts[1], sampling, options)
    finally:
        await engine.close()
