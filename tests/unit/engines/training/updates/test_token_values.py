from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from areal_sc.algorithms.loss_tokens import RowTokens
from areal_sc.engines.training.updates.token_values import token_values
from areal_sc.errors import WorkflowError
from areal_sc.metadata import RowMetadata
from areal_sc.token_fields import field_type
from areal_sc.transport.packed_rows import PackedRows, RowValues

# a row of two turns, one of which nothing is trained, one whose first token nothing predicts
MASK = [0, 1, 1, 0, 0, 1, 0, 0, 0, 1, 1, 1]
LENGTHS = (7, 2, 3)


def rows(advantages: tuple[float, ...] | None = (1.0, 2.0, 3.0)) -> PackedRows:
    origins = [(5, 0, 0.5), (5, 0, 0.25), (6, 1, -1.0)]
    metadata = tuple(
        RowMetadata(group, 0, length, reward, 0, (), episode)
        for (group, episode, reward), length in zip(origins, LENGTHS, strict=True)
    )
    fields = {
        "loss_mask": torch.tensor(MASK, dtype=torch.bool),
        "scores": torch.arange(24.0).view(12, 2),
    }
    spans = tuple((row, row + 1) for row in range(3))
    style = RowValues(torch.tensor([0.5, 1, 2]), spans, field_type("row:float32"))
    return PackedRows(fields, LENGTHS, advantages, metadata, {"style": style})


def at_tokens(*values: float) -> torch.Tensor:
    found = torch.zeros(12)
    found[[1, 2, 5, 10, 11]] = torch.tensor(values, dtype=torch.float32)
    return found


Function = Callable[[RowTokens], torch.Tensor]
CASES: dict[str, tuple[Function, tuple[float, ...]]] = {
    "advantages": (lambda tokens: tokens.fields["advantages"], (1, 1, 1, 3, 3)),
    "a field of two values": (lambda it: it.fields["scores"][:, 1], (3, 5, 11, 21, 23)),
    "a value a row": (lambda it: it.fields["style"], (0.5, 0.5, 0.5, 2, 2)),
    "rewards": (lambda tokens: tokens.rows.spread(tokens.rows.reward), (0.5, 0.5, 0.5, -1, -1)),
    "positions": (lambda tokens: tokens.rows.position, (1, 2, 5, 1, 2)),
    "lengths": (lambda tokens: tokens.rows.spread(tokens.rows.num_tokens), (7, 7, 7, 3, 3)),
    "trained": (lambda tokens: tokens.rows.spread(tokens.rows.num_loss_tokens), (3, 3, 3, 3, 3)),
    "groups": (lambda tokens: tokens.rows.spread(tokens.rows.group), (0, 0, 0, 1, 1)),
}


@pytest.mark.parametrize("case", CASES)
def test_a_function_sees_trained_tokens_and_their_rows(case: str) -> None:
    function, expected = CASES[case]
    found = token_values(rows(), function, case)
    assert found.dtype == torch.float32
    assert torch.equal(found, at_tokens(*expected))


def test_rows_without_a_trained_token_call_nothing() -> None:
    def fail(tokens: RowTokens) -> torch.Tensor:
        raise AssertionError

    assert torch.equal(token_values(rows().take([1]), fail, "f"), torch.zeros(2))
    assert token_values(rows().take([]), fail, "f").shape == (0,)


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (torch.zeros(4), r"f: expected \[5\], a number a token, got \(4,\)"),
        (torch.zeros(5, 1), r"got \(5, 1\)"),
        ([0.0] * 5, "got list"),
        (torch.tensor([0, 0, math.nan, 0, 0]), "expected finite numbers, got nan"),
    ],
)
def test_what_is_no_number_a_token_is_refused(returned: torch.Tensor, message: str) -> None:
    with pytest.raises(WorkflowError, match=message):
        token_values(rows(), lambda _: returned, "f")
