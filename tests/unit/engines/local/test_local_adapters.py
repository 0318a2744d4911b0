"""Adapters of several requests in one pass, and what they do to each other: nothing."""

from __future__ import annotations

import asyncio
import functools
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from local_engines import ENDLESS, MAX_CONTEXT, at_hand, running
from random_models import random_model
from safetensors.torch import load_file, save_file
from several_adapters import Merged, add_adapter, check_answer, of_the_model
from torch import nn
from waiting import until

from areal_sc.config.schema import GenerationConfig
from areal_sc.engines.base import RequestOptions
from areal_sc.engines.local import engine as local_engine
from areal_sc.engines.local import handle
from areal_sc.errors import ConfigError, ModelError

TOLERANCE = 1e-4
"""Nats. transformers in float32, an adapter merged, is up to 1.6e-5 from its float64 values here,
and 2 nats from those of the model alone."""

RANKS = (1, 2, 4, 8, 3, 5, 16, 8)
SAMPLED = GenerationConfig(max_new_tokens=12, temperature=0.7)

long_model = functools.partial(random_model, max_position_embeddings=MAX_CONTEXT)


def adapters_of(model: nn.Module, folder: Path, ranks: tuple[int, ...] = RANKS) -> list[Merged]:
    """One of them has a part beside some layers alone."""
    return [
        add_adapter(
            model,
            folder / f"adapter-{seed}",
            seed=seed,
            rank=rank,
            alpha=16.0 if seed % 2 else 2.0 * rank,
            targets=["q_proj", "down_proj"] if seed == 3 else [],
        )
        for seed, rank in enumerate(ranks)
    ]


@pytest.mark.parametrize("family", ["qwen2", "llama"])
async def test_eight_adapters_and_none_in_one_pass(tmp_path: Path, family: str) -> None:
    model = long_model(family)
    merged = [*adapters_of(model, tmp_path), of_the_model(model)]
    prompts = [[(7 * i + j * j) % 39 for j in range(5 + 13 * i)] for i in range(len(merged))]
    async with running(model, max_running_sequences=12) as engine:
        await engine.pause()
        tasks = [
            asyncio.create_task(
                engine.generate(
                    prompt,
                    SAMPLED,
                    RequestOptions(adapter=it.folder, prompt_logprobs=True, top_k_logprobs=3),
                )
            )
            for it, prompt in zip(merged, prompts, strict=True)
        ]
        await until(lambda: engine.num_waiting == len(tasks))
        await engine.resume()
        answers = await asyncio.gather(*tasks)
        # one after the other they would take nine times as many
        assert engine.stats()["steps"] <= -(-sum(map(len, prompts)) // 64) + 12
    for it, prompt, answer in zip(merged, prompts, answers, strict=True):
        assert len(answer.token_ids) == 12
        check_answer(it, prompt, answer, 0.7, tolerance=TOLERANCE, num_top=3)


async def test_a_prompt_is_shared_within_an_adapter_alone(tmp_path: Path) -> None:
    model, prompt = long_model(), list(range(20))
    merged = [*adapters_of(model, tmp_path, RANKS[:2]), of_the_model(model)]
    async with running(model, max_running_sequences=6) as engine:
        answers = await asyncio.gather(
            *(
                engine.generate(
                    prompt, SAMPLED, RequestOptions(adapter=it.folder, prefix_group="g")
                )
                for it in merged
                for _ in range(2)
            )
        )
        assert engine.stats()["shared_prompt_tokens"] == 3 * 19
    for number, answer in enumerate(answers):
        tokens = [*prompt, *answer.token_ids]
        expected = merged[number // 2].logprobs(tokens, 0.7)[19:]
        own = expected[np.arange(12), answer.token_ids]
        np.testing.assert_allclose(answer.logprobs, own, rtol=0, atol=TOLERANCE)


async def test_adapters_come_and_go_beyond_the_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = long_model()
    merged = adapters_of(model, tmp_path, (4, 4, 4, 4, 4, 4))
    size = (Path(merged[0].folder) / "adapter_model.safetensors").stat().st_size
    monkeypatch.setattr(handle, "LEAST_ADAPTER_BYTES", 2 * size)
    monkeypatch.setattr(handle, "ADAPTER_SHARE", 0.0)
    async with running(model) as engine:
        for _ in range(3):
            answers = await asyncio.gather(
                *(
                    engine.generate(
                        [1, 2, 3], SAMPLED, RequestOptions(adapter=it.folder, prompt_logprobs=True)
                    )
                    for it in merged
                )
            )
            for it, answer in zip(merged, answers, strict=True):
                check_answer(it, [1, 2, 3], answer, 0.7, tolerance=TOLERANCE)
        assert engine._adapters.num_loads > len(merged)
        assert len(engine._adapters._held) == 2
        large = add_adapter(model, tmp_path / "large", seed=9, rank=16)
        with pytest.raises(ModelError, match="there is room for"):
            await engine.generate([1], SAMPLED, RequestOptions(adapter=large.folder))


def _removed(folder: Path) -> None:
    for path in folder.iterdir():
        path.unlink()


def _without_weights(folder: Path) -> None:
    (folder / "adapter_model.safetensors").unlink()


def _cut(folder: Path) -> None:
    path = folder / "adapter_model.safetensors"
    path.write_bytes(path.read_bytes()[:-5])


def _settings(**settings: object) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        path = folder / "adapter_config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | settings))

    return change


def _tensors(change: Callable[[dict[str, torch.Tensor], str], object]) -> Callable[[Path], None]:
    def changed(folder: Path) -> None:
        path = folder / "adapter_model.safetensors"
        tensors = load_file(path)
        change(tensors, min(tensors))
        save_file(tensors, path)

    return changed


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (_removed, "no adapter_model.safetensors"),
        (_without_weights, "no adapter_model.safetensors"),
        (lambda folder: (folder / "adapter_config.json").unlink(), "cannot read adapter_config"),
        (_cut, "not a whole safetensors file"),
        (_settings(use_dora=True), "expected an adapter without use_dora, got True"),
        (_settings(r=3), r"lora_A.weight to be \(3, .*\) by its r"),
        (_settings(r=0), "expected r to be a count above 0, got 0"),
        (_settings(lora_alpha="much"), "expected lora_alpha to be a number above 0, got 'much'"),
        (_settings(lora_alpha=float("nan")), "expected lora_alpha to be a number"),
        (
            _tensors(lambda its, name: its[name].view(-1).__setitem__(0, torch.nan)),
            "has values that are not finite",
        ),
        (
            _tensors(lambda its, name: its.pop(name)),
            "has only one of lora_A and lora_B",
        ),
        (
            _tensors(lambda its, name: its.update({"base_model.model.lm_head.x": its[name] + 0})),
            r"expected base_model.model.lm_head.x to be absent by .*, got \(4, ",
        ),
        (_tensors(lambda its, _: its.clear()), "is empty"),
    ],
)
async def test_a_folder_that_cannot_be_served_fails_its_own_requests(
    tmp_path: Path, spoil: Callable[[Path], None], words: str
) -> None:
    model = long_model()
    good, bad = adapters_of(model, tmp_path, (4, 4))
    spoil(Path(bad.folder))
    async with running(model) as engine:
        other = asyncio.create_task(
            engine.generate(
                [1, 2], SAMPLED, RequestOptions(adapter=good.folder, prompt_logprobs=True)
            )
        )
        for _ in range(2):
            with pytest.raises(ModelError, match=rf"adapter.*{words}") as caught:
                await engine.generate([1, 2], SAMPLED, RequestOptions(adapter=bad.folder))
            assert bad.folder in str(caught.value)
        check_answer(good, [1, 2], await other, 0.7, tolerance=TOLERANCE)


async def test_an_adapter_of_another_model_is_refused(tmp_path: Path) -> None:
    other = add_adapter(long_model(hidden_size=64), tmp_path / "other", seed=0, rank=4)
    async with running(long_model()) as engine:
        with pytest.raises(ModelError, match=r"expected .*_proj.lora_.* by its r and by the model"):
            await engine.generate([1], SAMPLED, RequestOptions(adapter=other.folder))


@pytest.mark.parametrize("size", [1e18, 5e37])  # at the end, and within the adapter
async def test_an_adapter_that_gives_no_numbers_fails_alone(tmp_path: Path, size: float) -> None:
    model = long_model()
    mad = add_adapter(model, tmp_path / "mad", seed=0, rank=4, size=size)
    good, bare = add_adapter(model, tmp_path / "good", seed=1, rank=4), of_the_model(model)
    async with running(model) as engine:
        others = [
            asyncio.create_task(
                engine.generate(
                    [1, 2], SAMPLED, RequestOptions(adapter=it.folder, prompt_logprobs=True)
                )
            )
            for it in (good, bare)
        ]
        with pytest.raises(ModelError, match=r"adapter .*mad: with it .* not finite"):
            await engine.generate([5] * 100, SAMPLED, RequestOptions(adapter=mad.folder))
        for it, answer in zip((good, bare), others, strict=True):
            check_answer(it, [1, 2], await answer, 0.7, tolerance=TOLERANCE)


@pytest.mark.parametrize("is_given_up", [False, True])
async def test_its_row_is_given_to_others_without_what_it_computed(
    tmp_path: Path, is_given_up: bool
) -> None:
    """Beside a longer row, they look at entries that only it has filled, behind their mask.

    One that is given up is still reading its prompt, so that nobody has seen what it computes.
    """
    model = long_model()
    mad, bare = add_adapter(model, tmp_path / "mad", seed=0, rank=4, size=1e18), of_the_model(model)
    async with running(model, max_running_sequences=2, max_prefill_tokens=8) as engine:
        longer = asyncio.create_task(engine.generate([7] * 400, ENDLESS))
        await until(lambda: engine.stats()["generated_tokens"])
        num_read = engine.stats()["prefill_tokens"] + 80
        task = asyncio.create_task(
            engine.generate([5] * 3000, SAMPLED, RequestOptions(adapter=mad.folder))
        )
        if is_given_up:
            await until(lambda: engine.stats()["prefill_tokens"] > num_read)
            task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        answer = await engine.generate([1, 2], SAMPLED, RequestOptions(prompt_logprobs=True))
        assert not longer.done()
        longer.cancel()
    check_answer(bare, [1, 2], answer, 0.7, tolerance=TOLERANCE)


async def test_new_weights_are_under_the_adapter_as_well(tmp_path: Path) -> None:
    model, other = long_model(), long_model(seed=1)
    add_adapter(model, tmp_path / "adapter", seed=0, rank=4)
    on_other = add_adapter(other, tmp_path / "same", seed=0, rank=4)
    async with running(model) as engine:
        folder = str(tmp_path / "adapter")
        await engine.generate([1, 2], SAMPLED, RequestOptions(adapter=folder))
        await engine.update_weights(1, at_hand(other.named_parameters()))
        answer = await engine.generate(
            [1, 2], SAMPLED, RequestOptions(adapter=folder, prompt_logprobs=True)
        )
    assert set(answer.versions) == {1}
    check_answer(on_other, [1, 2], answer, 0.7, tolerance=TOLERANCE)


async def test_layers_stay_as_they_are_until_an_adapter_is_used(tmp_path: Path) -> None:
    model = long_model()
    adapter = add_adapter(model, tmp_path / "adapter", seed=0, rank=4, targets=["q_proj"])

    def changed() -> int:
        layers = engine._generator._model._model.modules()
        return sum(isinstance(it, nn.Linear) and type(it) is not nn.Linear for it in layers)

    async with running(model) as engine:
        await engine.generate([1, 2], SAMPLED)
        assert changed() == 0
        await engine.generate([1, 2], SAMPLED, RequestOptions(adapter=adapter.folder))
        assert changed() == 2
    assert all(type(it) is nn.Linear for it in model.modules() if isinstance(it, nn.Linear))


@pytest.mark.parametrize("num_tokens", [1, 2, 63, 64, 65, 200])
async def test_a_prompt_s_logprobs_need_no_more_than_its_prefill(
    num_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several passes tell them where one would hold too many logits."""
    model = long_model()
    monkeypatch.setattr(local_engine, "_MAX_ASKED_LOGITS", 50 * 40)
    prompt = [(3 * i * i + i) % 39 for i in range(num_tokens)]
    async with running(model) as engine:
        one = await engine.generate(
            prompt, SAMPLED, RequestOptions(prompt_logprobs=True, top_k_logprobs=40)
        )
        prefilled = num_tokens if num_tokens > 1 else 0  # one token is a step like any other
        assert engine.stats()["prefill_tokens"] == prefilled
        two, plain = await asyncio.gather(
            engine.generate(
                prompt, SAMPLED, RequestOptions(prefix_group="g", prompt_logprobs=True)
            ),
            engine.generate(prompt, SAMPLED, RequestOptions(prefix_group="g")),
        )
    check_answer(of_the_model(model), prompt, one, 0.7, tolerance=TOLERANCE, num_top=40)
    check_answer(of_the_model(model), prompt, two, 0.7, tolerance=TOLERANCE)
    assert (plain.prompt_logprobs, plain.prompt_top, plain.top, two.top) == ([], [], [], [])


async def test_greedy_answers_tell_the_most_probable_tokens_at_temperature_1() -> None:
    model = long_model()
    async with running(model) as engine:
        greedy = GenerationConfig(max_new_tokens=5, temperature=0.0)
        answer = await engine.generate(
            [3, 4], greedy, RequestOptions(prompt_logprobs=True, top_k_logprobs=2)
        )
        check_answer(of_the_model(model), [3, 4], answer, 1.0, tolerance=TOLERANCE, num_top=2)
        assert [pairs[0][0] for pairs in answer.top] == answer.token_ids
        for wrong in (-1, 1 << 20):
            with pytest.raises(ConfigError, match=r"top_k_logprobs: expected 0 to \d+ with 7"):
                await engine.generate([3, 4], greedy, RequestOptions(top_k_logprobs=wrong))
