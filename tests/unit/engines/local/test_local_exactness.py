"""Log-probabilities of generation against plain forward passes of the same weights."""

from __future__ import annotations

import copy
import math
import random
from typing import Any

import numpy as np
import pytest
import torch
from random_models import random_model, reference_logprobs
from transformers import PreTrainedModel
from unit.engines.families import build

from areal_sc.engines.base import Completion
from areal_sc.engines.local.generator import SlotGenerator
from areal_sc.engines.local.model import LocalModel
from areal_sc.engines.local.slots import SlotRequest, SlotTable

MAX_CONTEXT = 96


def make_generator(
    model: PreTrainedModel, max_rows: int = 6, max_prefill_tokens: int = 24
) -> SlotGenerator:
    table = SlotTable(max_rows, MAX_CONTEXT, max_prefill_tokens, seed=5)
    return SlotGenerator(LocalModel(model), table, MAX_CONTEXT)


def changed(model: PreTrainedModel, seed: int) -> PreTrainedModel:
    other = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.05)
    return other


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("qwen2", {"tie_word_embeddings": True}),
        ("qwen3", {"head_dim": 16, "num_key_value_heads": 1}),
        ("llama", {"num_key_value_heads": 4}),
    ],
)
def test_mixed_requests_across_weight_updates(family: str, settings: dict[str, object]) -> None:
    model = random_model(family, **settings)
    models = {0: copy.deepcopy(model), 4: changed(model, 1), 5: changed(model, 2)}
    generator = make_generator(model)
    rng = random.Random(1)
    finished: list[tuple[SlotRequest, Completion]] = []
    for step in range(400):
        if step % 2 == 0 and step < 60:  # they join in groups and alone, at many steps
            prompt = [rng.randrange(40) for _ in range(rng.randrange(1, 40))]
            group = f"group {step}" if step % 4 == 0 else None
            for i in range(3 if group else 1):
                generator.table.add(
                    SlotRequest(
                        request_id=10 * step + i,
                        prompt=np.array(prompt),
                        max_length=len(prompt) + rng.randrange(1, 40),
                        length_reason="length",
                        temperature=rng.choice([0.0, 0.6, 1.0, 1.5]),
                        prefix_group=group,
                    )
                )
        for at_step, version in ((25, 4), (80, 5)):
            if step == at_step:
                generator.update_weights(version, list(models[version].named_parameters()))
        if generator.table.has_work:
            finished += generator.step()
    assert len(finished) == 60
    assert not generator.table.has_work
    crossing = [c for _, c in finished if len(set(c.versions)) > 1]
    assert len(crossing) >= 4
    assert {version for _, c in finished for version in c.versions} == {0, 4, 5}
    assert generator.counters["recomputed_tokens"] > 0
    assert generator.counters["shared_prompt_tokens"] > 0
    for request, completion in finished:
        assert completion.versions == sorted(completion.versions)
        expected = reference_logprobs(
            models, request.prompt.tolist(), completion, request.temperature
        )
        np.testing.assert_allclose(completion.logprobs, expected, atol=2e-5)


def test_top_p_and_top_k_are_part_of_the_log_probability() -> None:
    model = random_model()
    generator = make_generator(model)
    prompt = np.array([3, 1, 4])
    generator.table.add(SlotRequest(0, prompt, 40, "length", temperature=0.8, top_p=0.9, top_k=6))
    while generator.table.has_work:
        finished = generator.step()
    [(_, completion)] = finished
    ids = torch.tensor([[*prompt, *completion.token_ids]])
    with torch.no_grad():
        logits = model(ids).logits[0, len(prompt) - 1 :].double() / 0.8
    for row, token, logprob in zip(logits, completion.token_ids, completion.logprobs, strict=False):
        probabilities, order = row.softmax(-1).topk(6)
        probabilities /= probabilities.sum()
        num_kept = int((probabilities.cumsum(0) < 0.9).sum()) + 1
        kept = order[:num_kept].tolist()
        expected = probabilities[kept.index(token)] / probabilities[:num_kept].sum()
        assert logprob == pytest.approx(expected.log().item(), abs=2e-5)


def test_tokens_that_would_end_an_answer_too_early_have_no_probability() -> None:
    model = random_model()
    generator = make_generator(model)
    prompt, least = np.array([3, 1, 4]), 7
    ends = tuple(range(0, model.config.vocab_size, 2))
    for number, (length, temperature) in enumerate([(10, 1.0), (10, 0.0), (10, 0.7), (0, 1.0)] * 4):
        generator.table.add(
            SlotRequest(
                number,
                prompt,
                max_length=40,
                length_reason="length",
                min_length=length,
                temperature=temperature,
                stop_token_ids=(*ends, model.config.vocab_size + 3),
            )
        )
    finished = []
    while generator.table.has_work:
        finished += generator.step()
    is_early = []
    for request, completion in finished:
        tokens = completion.token_ids
        assert completion.finish_reason == "stop"
        assert not set(tokens[:-1]) & set(ends), "it ends at the first one"
        is_early.append(len(tokens) <= least)
        if not request.min_length:
            continue
        assert len(tokens) > least
        with torch.no_grad():
            logits = model(torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1]
        logits = logits.double() / (request.temperature or 1.0)
        logits[:least, list(ends)] = -math.inf
        expected = logits.log_softmax(-1)[range(len(tokens)), tokens]
        np.testing.assert_allclose(completion.logprobs, expected, atol=2e-5)
    assert any(is_early), "requests without a least length end early beside the others"


def test_the_same_request_samples_the_same_alone_and_in_company() -> None:
    def completions(num_others: int) -> list[int]:
        generator = make_generator(random_model())
        for i in range(num_others):
            generator.table.add(SlotRequest(100 + i, np.arange(1 + i), 30 + i, "length"))
        for _ in range(num_others):
            generator.step()
        generator.table.add(SlotRequest(7, np.array([2, 3, 5]), 40, "length"))
        found: list[int] = []
        while generator.table.has_work:
            for request, completion in generator.step():
                if request.request_id == 7:
                    found = completion.token_ids
        return found

    assert len(completions(0)) == 37
    assert completions(0) == completions(3) == completions(5)


def test_greedy_completion_is_that_of_transformers() -> None:
    model = random_model("llama")
    generator = make_generator(model)
    generator.table.add(SlotRequest(0, np.array([9, 8, 7]), 43, "length", temperature=0.0))
    while generator.table.has_work:
        finished = generator.step()
    expected = model.generate(
        torch.tensor([[9, 8, 7]]),
        attention_mask=torch.ones(1, 3, dtype=torch.int64),
        max_new_tokens=40,
        do_sample=False,
        pad_token_id=0,
    )
    assert finished[0][1].token_ids == expected[0, 3:].tolist()


@pytest.mark.parametrize("family", ["qwen2", "mistral", "gemma2", "gpt_oss"])
def test_bfloat16_stays_near_its_own_forward_pass(family: str) -> None:
    """Also with windows, soft caps and sinks, on rows beyond the windows."""
    model = build(family).to(torch.bfloat16)
    table = SlotTable(6, 64, 24, seed=5)
    generator = SlotGenerator(LocalModel(model), table, 64)
    for i in range(5):
        generator.table.add(SlotRequest(i, np.arange(2 + 7 * i), 50, "length"))
    finished = []
    while generator.table.has_work:
        finished += generator.step()
    assert len(finished) == 5
    for request, completion in finished:
        expected = reference_logprobs({0: model}, request.prompt.tolist(), completion, 1.0)
        difference = np.abs(np.array(completion.logprobs) - expected)
        assert difference.mean() < 0.03


def test_a_float32_output_layer_does_not_round_logits() -> None:
    """As in the trainer, so that generation differs from it by hidden states alone."""
    model = random_model("qwen2", hidden_size=64).to(torch.bfloat16)

    def worst_error(has_float32_logits: bool) -> float:
        local = LocalModel(model, has_float32_logits=has_float32_logits)
        hidden: list[torch.Tensor] = []
        model_copy: Any = local._model
        model_copy.base_model.register_forward_hook(lambda *call: hidden.append(call[2][0][0]))
        generator = SlotGenerator(local, SlotTable(1, MAX_CONTEXT, 24, seed=5), MAX_CONTEXT)
        generator.table.add(SlotRequest(0, np.array([3, 1, 4]), 60, "length"))
        while generator.table.has_work:
            finished = generator.step()
        [(_, completion)] = finished
        last = torch.stack([states[-1] for states in hidden]).double().detach()
        logprobs = (last @ model.lm_head.weight.detach().double().T).log_softmax(-1)
        chosen = logprobs.gather(1, torch.tensor(completion.token_ids)[:, None])[:, 0]
        return float((chosen - torch.tensor(completion.logprobs)).abs().max())

    assert worst_error(True) < 1e-5
    assert worst_error(False) > 1e-3
