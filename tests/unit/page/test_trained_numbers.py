"""What the trainer says of tokens, as the page tells it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from recorded_groups import add_trained

from areal_sc.algorithms.behavior_weights import bounded_weights
from areal_sc.config.ppo_settings import PPOConfig
from areal_sc.page.trained_numbers import TrainedNumbers, weights_by
from areal_sc.records.blocks import block

MASK = np.array([False, True, True, False, True])
ALL = slice(0, 5)
BEGAN = 1000.5


def settings(**changes: object) -> dict[str, str]:
    values = vars(replace(PPOConfig(), **changes))  # type: ignore[arg-type]
    return {f"actor.ppo.{name}": str(value) for name, value in values.items()}


def test_the_newest_numbers_of_a_row_count(tmp_path: Path) -> None:
    numbers, name = TrainedNumbers(tmp_path / "records", None), (16, 0, 1, 0)
    assert numbers.of_row(name, MASK, ALL, BEGAN) is None
    add_trained(tmp_path, 16, {(1, 0): 3}, rank=1, step=6)
    newest = add_trained(tmp_path, 16, {(1, 0): 3}, step=7)[1, 0]
    add_trained(tmp_path, 16, {(0, 0): 7, (1, 0): 3}, rank=2, step=5)
    add_trained(tmp_path, 32, {(1, 0): 3}, step=8)
    found = numbers.of_row(name, MASK, slice(1, 5), BEGAN)
    assert found is not None
    assert found.keys() == {"step", "minibatch", "gaps", "entropies", "advantages"}
    assert (found["step"], found["minibatch"]) == (7, 0)
    gaps = np.float16(newest.gaps).astype(float).tolist()
    assert found["gaps"] == [None, pytest.approx(gaps[1], abs=1e-6), None, pytest.approx(gaps[2])]
    assert numbers.of_row((16, 0, 0, 0), MASK, ALL, BEGAN) is None, "another number of tokens"
    assert numbers.of_row(name, MASK, ALL, 1007.0) is not None
    assert numbers.of_row(name, MASK, ALL, 1007.5) is None, "another group had its number"
    assert numbers.of_row((16, 1, 1, 0), MASK, ALL, BEGAN) is None
    for path in (tmp_path / "records").glob("train-0.trained.*"):
        content = bytearray(path.read_bytes())
        content[-1] ^= 1
        path.write_bytes(content)
    numbers = TrainedNumbers(tmp_path / "records", None)
    assert numbers.of_row((32, 0, 1, 0), MASK, ALL, BEGAN) is None, "it is damaged"
    for path in (tmp_path / "records").glob("train-1.trained.*"):
        path.write_bytes(block(b"?", b""))
    numbers = TrainedNumbers(tmp_path / "records", None)
    assert numbers.of_row((32, 0, 1, 0), MASK, ALL, BEGAN) is None
    (told,) = numbers.damage
    assert told.startswith("train-1.trained.000001: the head of a trained row cannot be read")


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"behavior_weight_cap": 1.3, "behavior_weight_floor": 0.8},
        {
            "behavior_weight_cap": 1.3,
            "behavior_weight_floor": 0.8,
            "behavior_weight_bound": "clamp",
        },
        {"behavior_weight_cap": math.inf},
        {"behavior_weight": "none"},
        {"behavior_weight": "sequence"},
    ],
)
def test_weights_are_those_of_the_loss(changes: Mapping[str, object]) -> None:
    gaps = np.array([np.nan, -1.0, -0.1, 0.0, 0.2, 3.0])
    weights = weights_by(settings(**changes))
    assert weights is not None
    known = torch.tensor(gaps[1:])
    if changes.get("behavior_weight") == "sequence":
        known = known.mean().expand(5)
    if changes.get("behavior_weight") == "none":
        known = torch.zeros(5)
    ppo = replace(PPOConfig(), **changes)  # type: ignore[arg-type]
    expected, _, _ = bounded_weights(
        known,
        floor=ppo.behavior_weight_floor,
        cap=ppo.behavior_weight_cap,
        is_clamped=ppo.behavior_weight_bound == "clamp",
    )
    found = weights(gaps)
    assert np.isnan(found[0])
    np.testing.assert_allclose(found[1:], expected.numpy(), rtol=1e-12)


@pytest.mark.parametrize(
    "told",
    [
        {},
        settings(loss="package:mine"),
        settings(clip_center="behavior"),
        settings(max_second_moment=0.1),
        {**settings(), "actor.ppo.behavior_weight_cap": "many"},
    ],
)
def test_weights_that_depend_on_more_are_not_told(told: Mapping[str, str]) -> None:
    assert weights_by(told) is None
