"""Adapters beside each other on one base: each as if it were alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from builders import engines_on, packed_rows
from random_models import random_model

from areal_sc.algorithms.loss_tokens import LossTokens
from areal_sc.algorithms.losses import Metrics
from areal_sc.config.lora_settings import LoraConfig
from areal_sc.config.schema import OptimizerConfig
from areal_sc.engines.fsdp.engine import FSDPEngine
from areal_sc.engines.training.adapters.lora import adapter_place, new_values
from areal_sc.transport.packed_rows import PackedRows

PLACES, RANK, ALPHA = 8, 4, 6.0
LORA = LoraConfig(rank=RANK, alpha=ALPHA, places=PLACES)
LENGTHS = [[5, 7, 3], [9], [4, 4], [6, 2, 8], [11], [3, 5], [7, 6], [10, 4]]
SETTINGS = {
    place: OptimizerConfig(
        lr=1e-2 / (1 + place), eps=1e-6, weight_decay=0.01 * place, max_grad_norm=0.3 * place
    )
    for place in range(PLACES)
}
Build = Callable[..., FSDPEngine]


@pytest.fixture
def build(tmp_path: Path) -> Iterator[Build]:
    random_model(vocab_size=30).save_pretrained(tmp_path / "model")
    with engines_on(tmp_path / "model") as build_engine:
        yield lambda lora=LORA, **settings: build_engine(lora=lora, **settings)


def summed(tokens: LossTokens) -> tuple[torch.Tensor, Metrics]:
    """A sum over tokens, as a server's; that of place 5 has weights of its own."""
    weights = torch.where(tokens.fields["adapter"] == 5, 2.5, 1.0)
    return -(weights * tokens.logprobs).sum(), {}


def rows_of(places: Sequence[int], step: int = 0, *, named: int | None = None) -> PackedRows:
    """The rows of some places in this step, shuffled; all are of place `named`, if it is given."""
    lengths, of_rows, tokens = list[int](), list[int](), list[torch.Tensor]()
    for place in places:
        its = packed_rows(LENGTHS[place], seed=100 * step + place)
        lengths += LENGTHS[place]
        of_rows += [place] * len(LENGTHS[place])
        tokens += torch.split(its.fields["input_ids"], list(its.lengths))
    order = torch.randperm(len(lengths), generator=torch.Generator().manual_seed(step)).tolist()
    lengths = [lengths[row] for row in order]
    of_tokens = [of_rows[row] if named is None else named for row in order]
    adapter = torch.tensor(of_tokens, dtype=torch.float32)
    fields = {
        "input_ids": torch.cat([tokens[row] for row in order]),
        "loss_mask": torch.ones(sum(lengths), dtype=torch.bool),
        "adapter": adapter.repeat_interleave(torch.tensor(lengths)),
    }
    return PackedRows(fields, tuple(lengths))


def adapter(engine: FSDPEngine, place: int) -> dict[str, torch.Tensor]:
    found = {n: p.detach() for n, p in engine._model.causal_lm.named_parameters()}
    its = {n: p for n, p in found.items() if adapter_place(n) == place}
    return {n.removesuffix(f"_{place}") if place else n: p.clone() for n, p in its.items()}


def by_hand(model: Path, place: int, num_steps: int) -> tuple[dict[str, torch.Tensor], list[float]]:
    """Adapter and gradient norms in float64, row by row, W + (B A) alpha / r, torch's AdamW."""
    causal_lm = hf.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float64).eval()
    base = {name: p.detach() for name, p in causal_lm.named_parameters()}
    linear = [n for n, m in causal_lm.model.layers.named_modules() if type(m) is torch.nn.Linear]
    values = {}
    for layer in linear:
        outputs, inputs = base[f"model.layers.{layer}.weight"].shape
        for own, shape in (("lora_A", (RANK, inputs)), ("lora_B", (outputs, RANK))):
            name = f"model.layers.{layer}.{own}"
            values[name] = new_values(name, shape, place).double().requires_grad_()
    settings, norms = SETTINGS[place], []
    adamw = torch.optim.AdamW(
        values.values(), lr=settings.lr, eps=settings.eps, weight_decay=settings.weight_decay
    )
    for step in range(num_steps):
        rows = rows_of([place], step)
        adamw.zero_grad()
        loss = torch.zeros((), dtype=torch.float64)
        for row in torch.split(rows.fields["input_ids"].long(), list(rows.lengths)):
            changed = {
                f"model.layers.{layer}.weight": base[f"model.layers.{layer}.weight"]
                + ALPHA
                / RANK
                * values[f"model.layers.{layer}.lora_B"]
                @ values[f"model.layers.{layer}.lora_A"]
                for layer in linear
            }
            logits = torch.func.functional_call(causal_lm, base | changed, (row[None],)).logits
            logprobs = logits[0, :-1].log_softmax(-1).gather(1, row[1:, None])
            loss = loss - (2.5 if place == 5 else 1.0) * logprobs.sum()
        loss.backward()
        norms.append(float(torch.stack([it.grad.norm() for it in values.values()]).norm()))
        if settings.max_grad_norm:
            torch.nn.utils.clip_grad_norm_(values.values(), settings.max_grad_norm)
        adamw.step()
    return {name: it.detach() for name, it in values.items()}, norms


def begin(engine: FSDPEngine, place: int, seed: int) -> None:
    engine.fill_adapter(place, None, rank=0, seed=seed, with_optimizer=False)


def farthest(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    assert found.keys() == expected.keys()
    return max(float((found[n].double() - expected[n].double()).abs().max()) for n in found)


@pytest.mark.parametrize("settings", [{}, {"max_tokens_per_micro_batch": 24}])
def test_eight_together_train_as_each_alone(
    build: Build, tmp_path: Path, settings: dict[str, Any]
) -> None:
    together = build(**settings)
    everyone = range(PLACES)
    for place in everyone:
        begin(together, place, seed=place)
    found = [
        together.update([rows_of(everyone, step)], summed, step=step, optimizers=SETTINGS)
        for step in range(3)
    ]
    for place in everyone:
        expected, norms = by_hand(tmp_path / "model", place, 3)
        print(place, farthest(adapter(together, place), expected), norms)
        assert farthest(adapter(together, place), expected) < 1e-5
        its = [metrics[f"grad_norm_{place}"] for metrics in found]
        assert its == pytest.approx(norms, rel=1e-5)
