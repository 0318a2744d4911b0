"""Losses by name, and those of the user's own: whatever these raise is told with its line."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from loss_rows import made_tokens

from areal_sc.algorithms.loss_trial import try_loss
from areal_sc.algorithms.named_loss import BUILT_IN, NamedLoss, is_tried, loss_of
from areal_sc.config.ppo_settings import KLPlace, PPOConfig
from areal_sc.config.schema import ActorConfig, ModelHead
from areal_sc.errors import ConfigError, WorkflowError

SHAPE = [(3, 0, 0), (2, 0, 1)]
OF_VALUES = ("value", "bradley_terry")


@pytest.mark.parametrize(
    ("changes", "is_zero"),
    [
        ({}, True),
        ({"kl_coefficient": 0.1}, False),
        ({"kl_coefficient": 0.1, "kl_place": KLPlace.reward}, True),
        ({"entropy_coefficient": 0.1}, False),
        ({"loss": "cross_entropy"}, False),
    ],
)
def test_rows_without_advantage_are_left_out_where_nothing_else_has_a_gradient(
    changes: dict[str, Any], is_zero: bool
) -> None:
    """And the gradient says the same."""
    loss = loss_of(PPOConfig(**changes))
    assert loss.is_zero_without_advantage is is_zero
    tokens = made_tokens(SHAPE, seed=0)
    fields = dict(tokens.fields) | {"advantages": torch.zeros(5)}
    given = replace(tokens, fields=fields)
    found = torch.autograd.grad(
        loss.load()(given)[0], (tokens.logprobs, tokens.entropy), allow_unused=True
    )
    assert is_zero is not any(it is not None and bool(it.any()) for it in found)


@pytest.mark.parametrize("name", BUILT_IN)
def test_each_built_in_loss_reads_the_fields_that_it_names(name: str) -> None:
    tokens = made_tokens(SHAPE, seed=0)
    asked: set[str] = set()

    class Asked(dict[str, torch.Tensor]):
        def __getitem__(self, field: str) -> torch.Tensor:
            asked.add(field)
            return super().__getitem__(field)

    loss = loss_of(PPOConfig(loss=name))
    loss.load()(replace(tokens, fields=Asked({**tokens.fields, "given_weights": torch.ones(5)})))
    assert loss.fields == tuple(sorted(asked))
    heads = list(ModelHead) if name not in OF_VALUES else [ModelHead.value, ModelHead.lm]
    try_loss(loss, heads[0])
    with pytest.raises(ConfigError, match=r"depends on values|reads values: expected a model with"):
        try_loss(loss, heads[1])


@pytest.mark.parametrize(
    ("name", "setting", "value", "expected"),
    [
        ("reverse_kl", "ratio_cap", 0.5, "a number at least 1, or inf, got 0.5"),
        ("value", "value_clip", -1, "a number above 0, or inf, got -1"),
        ("dpo", "beta", "0.1", "a number above 0, got '0.1'"),
        ("bradley_terry", "label_smoothing", 0.5, "a number at least 0 and below 0.5, got 0.5"),
        ("policy_gradient", "behavior_weight_cap", 0.9, "a number at least 1, or inf, got 0.9"),
        ("policy_gradient", "row_filter", {"low": 2, "high": 1}, "of: one of .*, low <= high, got"),
        (
            *("policy_gradient", "row_filter", {"low": 0.5, "also": {"of": "k1"}}),
            "of: one of .*; also: maybe another such filter; .*, got",
        ),
        ("policy_gradient", "row_filter", 2.0, "of: one of ratio, .*, got 2.0"),
        ("dpo", "of_margin", "log", "one of sigmoid, square, hinge, got 'log'"),
        ("dpo", "of_row", "max", "one of sum, mean, got 'max'"),
        ("top_k_kl", "direction", "both", "one of forward, reverse, got 'both'"),
        ("top_k_kl", "top_k", 0, "a number at least 1, got 0"),
        ("top_k_kl", "top_k", 2.5, "a number at least 1, got 2.5"),
    ],
)
def test_settings_that_a_loss_cannot_have(
    name: str, setting: str, value: object, expected: str
) -> None:
    with pytest.raises(ConfigError, match=f"loss {name}, {setting}: expected {expected}"):
        NamedLoss(name, {setting: value}).load()


@pytest.mark.parametrize("of_margin", ["square", "hinge"])
def test_smoothed_labels_are_of_sigmoid_alone(of_margin: str) -> None:
    NamedLoss("dpo", {"label_smoothing": 0.0, "of_margin": of_margin}).check()
    wrong = NamedLoss("dpo", {"label_smoothing": 0.1, "of_margin": of_margin})
    with pytest.raises(ConfigError, match=f"expected 0 with of_margin {of_margin} .*, got 0.1"):
        wrong.check()


def test_a_value_head_without_a_loss_of_its_own_may_start() -> None:
    """Each of its updates may name one."""
    own = ActorConfig(path="x", head=ModelHead.value)
    assert not is_tried(own)
    assert is_tried(replace(own, ppo=PPOConfig(loss="value")))
    assert is_tried(replace(own, head=ModelHead.lm))
    assert not is_tried(replace(own, head=ModelHead.lm, is_frozen=True))


def test_fields_of_a_loss_of_the_users_own_are_not_known() -> None:
    assert NamedLoss("my_loss:stops").fields is None


LOSS = """
def stops(tokens):
    return next(iter(()))

def exits(tokens):
    raise SystemExit("no reference model")
"""


@pytest.mark.parametrize(
    ("name", "message"),
    [
        # a future of asyncio cannot hold a StopIteration: whoever waited would wait for ever
        ("stops", r"loss 'my_loss:stops' raised StopIteration at my_loss\.py:3"),
        ("exits", r"loss 'my_loss:exits' raised SystemExit: no reference model at my_loss\.py:6"),
    ],
)
def test_what_a_loss_raises_is_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, message: str
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "my_loss.py").write_text(LOSS)
    tokens: Any = None
    with pytest.raises(WorkflowError, match=message):
        NamedLoss(f"my_loss:{name}").load()(tokens)


def test_a_module_that_ends_its_importer_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "exiting_loss.py").write_text("import sys\n\nsys.exit(3)\n")
    with pytest.raises(ConfigError, match=r"its import raised SystemExit: 3 at exiting_loss\.py:3"):
        NamedLoss("exiting_loss:loss").load()
