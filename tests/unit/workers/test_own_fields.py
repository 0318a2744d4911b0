"""Fields that a workflow adds to its trajectories: what is checked before they are sealed."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import torch

from areal_sc.config.schema import RolloutConfig
from areal_sc.controller.ledger.group import check_fields
from areal_sc.errors import MetadataError, WorkflowError
from areal_sc.rejection import Rejection
from areal_sc.token_fields import FieldBytes, TensorMetadata, field_type
from areal_sc.workers.trajectory_checks import checked_episode
from areal_sc.workflows.base import Trajectory, Workflow
from areal_sc.workflows.task_mix import MixedWorkflow

FIELDS = {
    "turn": TensorMetadata(dtype="int32"),
    "choices": TensorMetadata((2, 3), "uint8"),
    "difficulty": TensorMetadata(per_row=True),
    "found": TensorMetadata((None, 2), "int16", per_row=True, max_bytes=12),
    "picture": TensorMetadata((2,), "uint8", per_group=True),
}
LIMITS = RolloutConfig(path="model", max_context_tokens=8)


def row(**fields: Any) -> Trajectory:
    given = {"turn": [0, 1, 1], "choices": np.ones((3, 2, 3)), "difficulty": 0.5}
    given |= {"found": [[1, 2]], "picture": [3, 4]} | fields
    given["choices"] = np.asarray(given["choices"]).astype("int64")
    logprobs, versions = [0.0, -1.0, -1.0], [-1, 0, 0]
    tokens = ([1, 2, 3], [False, True, True], logprobs, versions, [1.0] * 3)
    return Trajectory(*tokens, reward=1.0, fields=given)


def problem(trajectory: Trajectory) -> str:
    found = checked_episode(trajectory, LIMITS, FIELDS, is_trained=True, workflow="Played")
    assert isinstance(found, Rejection)
    return found.message


def test_lists_arrays_and_tensors_become_arrays_of_the_declared_dtype() -> None:
    for turn in ([0, 1, 1], np.array([0, 1, 1]), torch.tensor([0, 1, 1]), [False, True, True]):
        found = checked_episode(row(turn=turn), LIMITS, FIELDS, is_trained=True)
        assert isinstance(found, list)
        (trajectory,) = found
        assert {name: (v.dtype, v.shape) for name, v in trajectory.fields.items()} == {
            "turn": (np.int32, (3,)),
            "choices": (np.uint8, (3, 2, 3)),
            "difficulty": (np.float32, ()),
            "found": (np.int16, (1, 2)),
            "picture": (np.uint8, (2,)),
        }
        assert trajectory.fields["turn"].tolist() == [0, 1, 1]


def test_a_value_with_its_own_length_may_be_a_list_of_nothing() -> None:
    found = checked_episode(row(found=[]), LIMITS, FIELDS, is_trained=True)
    assert isinstance(found, list)
    values = found[0].fields["found"]
    assert (values.dtype, values.shape) == (np.int16, (0, 2))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"more": 1}, r"fields \['choices', .* 'more', .*'turn'\], and Workflow.fields declares"),
        ({"turn": [0, 1]}, r"'turn' has the shape \(2,\), expected \(3,\)"),
        ({"turn": [0.0, 0.5, 1.0]}, "'turn' is not what int32 can hold"),
        ({"turn": [0, 1, 2**31]}, "'turn' is not what int32 can hold"),
        ({"turn": [[0], [1, 2], [3]]}, "'turn' is no array"),
        ({"turn": ["a", "b", "c"]}, "'turn' is not what int32 can hold"),
        ({"choices": np.full((3, 2, 3), 256)}, "'choices' is not what uint8 can hold"),
        ({"choices": np.full((3, 2, 3), -1)}, "'choices' is not what uint8 can hold"),
        ({"difficulty": float("nan")}, "'difficulty' is not what float32 can hold"),
        ({"difficulty": [0.1, 0.2, 0.3]}, r"'difficulty' has the shape \(3,\), expected \(\)"),
        ({"found": [1, 2]}, r"Played: field 'found' has .*\(2,\), expected \(None, 2\)"),
        ({"found": [[1, 2, 3]]}, r"'found' has the shape \(1, 3\), expected \(None, 2\)"),
        ({"found": [[1, 2]] * 4}, "'found' has a value of 16 bytes, expected .* max_bytes=12"),
        ({"picture": [3, 4, 5]}, r"'picture' has the shape \(3,\), expected \(2,\)"),
    ],
)
def test_what_cannot_be_used_rejects_the_episode(fields: dict[str, Any], message: str) -> None:
    assert re.search(message, problem(row(**fields)))


class Own(Workflow):
    def __init__(self, fields: dict[str, Any]) -> None:
        self.fields = fields


def test_names_are_checked_before_a_run_and_bytes_counted() -> None:
    assert check_fields(Own(FIELDS), {}) == FieldBytes(token=4 + 6, row=64 + 64, group=64)
    assert check_fields(Own({}), {}) == FieldBytes()
    for name in ("versions", "proximal_logprobs", "a b"):
        with pytest.raises(WorkflowError, match=f"got '{name}'"):
            check_fields(Own({name: TensorMetadata()}), {})
    with pytest.raises(WorkflowError, match="expected a TensorMetadata, got 'int32'"):
        check_fields(Own({"turn": "int32"}), {})
    assert check_fields(Own({"routes": TensorMetadata((48, 8), "uint8")}), {}) == (384, 0, 0)


@pytest.mark.parametrize(
    "arguments",
    [
        {"dtype": "bfloat16"},
        {"shape": (0,)},
        {"shape": (2.0,)},
        {"shape": (1,) * 9},
        {"shape": (10**9,), "dtype": "uint8"},
        {"shape": (1 << 20, 1 << 20), "dtype": "int16"},
        {"device": "cuda"},
        {"per_row": True, "per_group": True},
        {"shape": (None,), "max_bytes": 8},
        {"shape": (None,), "per_row": True},
        {"shape": (2, None), "per_row": True, "max_bytes": 8},
        {"shape": (2,), "per_row": True, "max_bytes": 8},
        {"shape": (None,), "per_group": True, "max_bytes": 1 << 41},
    ],
)
def test_a_field_that_there_cannot_be(arguments: dict[str, Any]) -> None:
    with pytest.raises(MetadataError, match="of a field: expected"):
        TensorMetadata(**arguments)


@pytest.mark.parametrize(
    ("field", "name", "stored"),
    [
        (TensorMetadata((48, 8), "uint8"), "uint8[48x8]", "uint8[48x8]"),
        (TensorMetadata(per_row=True), "row:float32", "float32"),
        (TensorMetadata((None,), per_row=True, max_bytes=8), "row:float32[?]", "float32"),
        (
            TensorMetadata((None, 4, 2), per_group=True, max_bytes=8),
            "group:float32[?x4x2]",
            "float32[4x2]",
        ),
    ],
)
def test_types_have_names(field: TensorMetadata, name: str, stored: str) -> None:
    assert field.type_name == name
    per = "token" if field.per_token else "row" if field.per_row else "group"
    assert field_type(name) == (per, field.has_own_length, stored)


@pytest.mark.parametrize("name", ["float32[?]", "col:int8", "row:group:int8"])
def test_a_type_that_there_cannot_be(name: str) -> None:
    with pytest.raises(MetadataError, match="the type of a field cannot be"):
        field_type(name)


def test_rows_beyond_one_need_room_for_their_values() -> None:
    """Room is reserved for one row of full length: short ones leave some for others."""
    declared = {"wide": TensorMetadata((16,), per_row=True)}

    def rows(count: int, num_tokens: int) -> list[Trajectory]:
        mask = [False] + [True] * (num_tokens - 1)
        logprobs, versions = [-1.0 * it for it in mask], [-1 + it for it in mask]
        tokens = ([1] * num_tokens, mask, logprobs, versions, [1.0] * num_tokens)
        fields = {"wide": np.zeros(16)}
        return [Trajectory(*tokens, reward=1.0, fields=dict(fields)) for _ in range(count)]

    limits = RolloutConfig(path="model", max_context_tokens=64)
    for count, num_tokens, fits in ((1, 64, True), (2, 2, True), (2, 32, False)):
        found = checked_episode(rows(count, num_tokens), limits, declared, is_trained=True)
        assert isinstance(found, list) == fits
        if isinstance(found, Rejection):
            assert "2 rows have 128 bytes in the fields ['wide'], expected at most" in found.message


class Plays(Workflow):
    def __init__(self, fields: dict[str, TensorMetadata], given: dict[str, Any]) -> None:
        self.fields = fields
        self.given = given

    async def run_episode(self, prompt: dict[str, Any], engine: Any) -> Trajectory:
        tokens = ([1, 2], [False, True], [0.0, -1.0], [-1, 0], [1.0] * 2)
        return Trajectory(*tokens, reward=1.0, fields=self.given)


async def test_tasks_of_a_mix_have_zeros_in_the_fields_of_others() -> None:
    mix = MixedWorkflow(
        {
            "turns": Plays({"turn": TensorMetadata(dtype="int32")}, {"turn": [0, 1]}),
            "plain": Plays({}, {}),
        }
    )
    engine: Any = None
    for name, turn in (("turns", [0, 1]), ("plain", [0, 0])):
        played = await mix.run_episode({"task": name}, engine)
        (found,) = checked_episode(played, LIMITS, mix.fields, is_trained=True)
        assert found.fields["turn"].tolist() == turn
    with pytest.raises(WorkflowError, match="another task's field 'turn' is not the same"):
        MixedWorkflow(
            {
                "a": Plays({"turn": TensorMetadata()}, {}),
                "b": Plays({"turn": TensorMetadata((2,))}, {}),
            }
        )
