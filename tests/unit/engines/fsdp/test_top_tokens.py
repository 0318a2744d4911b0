"""A teacher's most probable tokens, and an update by them: from one engine to the other."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from builders import engines_on, packed_rows
from random_models import random_model

from areal_sc.algorithms.distillation import top_k_kl
from areal_sc.algorithms.loss_tokens import LossTokens
from areal_sc.algorithms.losses import Metrics
from areal_sc.transport.packed_rows import PackedRows

LENGTHS, TOP_K = (4, 7, 1, 5), 5
TEMPERATURES = torch.tensor([0.5, 1.0, 1.7])[torch.arange(sum(LENGTHS)) % 3]
ROWS = packed_rows(LENGTHS, temperatures=TEMPERATURES)
IS_ASKED = torch.tensor([place > 0 for length in LENGTHS for place in range(length)])


def whole_logprobs(model: Any, rows: PackedRows) -> torch.Tensor:
    """[T, V] float64: of all tokens before each token; of a row's first one NaN."""
    with torch.no_grad():
        parts = [
            model.double()(ids[None].long()).logits[0].roll(1, 0)
            for ids in rows.fields["input_ids"].split(list(LENGTHS))
        ]
    return (torch.cat(parts) / rows.fields["temperatures"][:, None]).log_softmax(-1)


@pytest.mark.parametrize("lacks", ["", "packs", "has_linear_head"])
def test_an_update_by_the_tokens_of_another_model(tmp_path: Path, lacks: str) -> None:
    """Both sides in float64; rows of several micro-batches; and the divergence falls."""
    models = {name: random_model(seed=seed) for seed, name in enumerate(("teacher", "student"))}
    seen: list[LossTokens] = []

    def loss(tokens: LossTokens) -> tuple[torch.Tensor, Metrics]:
        seen.append(tokens)
        return top_k_kl(tokens, top_k=TOP_K)

    for name, model in models.items():
        model.save_pretrained(tmp_path / name)
    with engines_on(tmp_path / "teacher") as build:
        teacher = build(is_frozen=True, max_tokens_per_micro_batch=8)
        student = build(tmp_path / "student", max_tokens_per_micro_batch=8)
        for engine in (teacher, student) if lacks else ():
            engine._model.abilities = replace(engine._model.abilities, **{lacks: False})
        top_logprobs, top_tokens = teacher.top_logprobs(ROWS, TOP_K)
        assert (top_logprobs.dtype, top_tokens.dtype) == (torch.float32, torch.int32)
        expected = whole_logprobs(models["teacher"], ROWS).topk(TOP_K)
        assert torch.equal(top_tokens[IS_ASKED].long(), expected.indices[IS_ASKED])
        gaps = top_logprobs[IS_ASKED] - expected.values[IS_ASKED]
        assert gaps.abs().max() < 1e-4
        assert not top_logprobs[~IS_ASKED].any()
        fields = {"teacher_top_logprobs": top_logprobs, "teacher_top_tokens": top_tokens}
        rows = replace(ROWS, fields=ROWS.fields | fields)
        losses = [student.update([rows], loss, step=step)["teacher_kl"] for step in range(3)]
        sampled = student.forward(ROWS, "logprobs")
    assert losses[2] < losses[1] < losses[0]
    of_all = whole_logprobs(models["student"], ROWS)
    by_ids = {}
    for tokens in seen[: len(seen) // 3]:
        assert tokens.top_logprobs is not None
        for ids, own, found in zip(
            tokens.fields["teacher_top_tokens"], tokens.logprobs, tokens.top_logprobs, strict=True
        ):
            by_ids[tuple(ids.tolist())] = (own, found)
    assert len(sampled) == len(of_all)
    assert len(by_ids) == int(IS_ASKED.sum())
    for place in IS_ASKED.nonzero().flatten().tolist():
        own, found = by_ids[tuple(top_tokens[place].tolist())]
        token = int(ROWS.fields["input_ids"][place])
        assert own.item() == pytest.approx(of_all[place, token].item(), abs=1e-4)
        assert torch.allclose(found.double(), of_all[place, top_tokens[place].long()], atol=1e-4)


def test_what_a_teacher_and_a_student_refuse(tmp_path: Path) -> None:
    random_model(vocab_size=30).save_pretrained(tmp_path)
    places = (sum(LENGTHS), 2)
    with engines_on(tmp_path) as build:
        engine = build()
        for top_k in (0, 31):
            with pytest.raises(ValueError, match=f"expected 1 to 30, .*, got {top_k}"):
                engine.top_logprobs(ROWS, top_k)
        assert engine.top_logprobs(ROWS, 30)[0].exp().sum(-1)[IS_ASKED].allclose(torch.ones(1))
        for tokens in (torch.full(places, 30), torch.full(places, -1), torch.zeros(places[0])):
            fields = {"teacher_top_logprobs": torch.zeros(places), "teacher_top_tokens": tokens}
            rows = replace(ROWS, fields=ROWS.fields | fields)
            with pytest.raises(ValueError, match=r"expected tokens below 30.* another vocabulary"):
                engine.update([rows], top_k_kl, step=0)
