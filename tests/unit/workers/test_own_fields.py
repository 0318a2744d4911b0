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
from areal_sc.metadata import PromptReference
from areal_sc.rejection import Rejection
from areal_sc.token_fields import TensorMetadata
from areal_sc.transport.packed_rows import PackedRows
from areal_sc.transport.tensor_bytes import type_name
from areal_sc.workers.calls import RunGroup
from areal_sc.workers.group_rows import dtypes_of, fields_of, metadata_of, rows_of
from areal_sc.workers.trajectory_checks import checked_episode
from areal_sc.workflows.base import Trajectory, Workflow
from areal_sc.workflows.task_mix import MixedWorkflow

FIELDS = {
    "turn": TensorMetadata(dtype="int32"),
    "choices": TensorMetadata((2, 3), "uint8"),
    "difficulty": TensorMetadata(per_row=True),
}
LIMITS = RolloutConfig(path="model", max_context_tokens=8)


def row(**fields: Any) -> Trajectory:
    given = {"turn": [0, 1, 1], "choices": np.ones((3, 2, 3)), "difficulty": 0.5} | fields
    given["choices"] = np.asarray(given["choices"]).astype("int64")
    logprobs, versions = [0.0, -1.0, -1.0], [-1, 0, 0]
    tokens = ([1, 2, 3], [False, True, True], logprobs, versions, [1.0] * 3)
    return Trajectory(*tokens, reward=1.0, fields=given)


def problem(trajectory: Trajectory) -> str:
    found = checked_episode(trajectory, LIMITS, FIELDS, is_trained=True)
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
        }
        assert trajectory.fields["turn"].tolist() == [0, 1, 1]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"more": 1}, r"fields \['choices', .* 'more', 'turn'\], and Workflow.fields declares"),
        ({"turn": [0, 1]}, r"'turn' has the shape \(2,\), expected \(3,\)"),
        ({"turn": [0.0, 0.5, 1.0]}, "'turn' is not what int32 can hold"),
        ({"turn": [0, 1, 2**31]}, "'turn' is not what int32 can hold"),
        ({"turn": [[0], [1, 2], [3]]}, "'turn' is no array"),
        ({"turn": ["a", "b", "c"]}, "'turn' is not what int32 can hold"),
        ({"choices": np.full((3, 2, 3), 256)}, "'choices' is not what uint8 can hold"),
        ({"choices": np.full((3, 2, 3), -1)}, "'choices' is not what uint8 can hold"),
        ({"difficulty": float("nan")}, "'difficulty' is not what float32 can hold"),
        ({"difficulty": [0.1, 0.2, 0.3]}, r"'difficulty' has the shape \(3,\), expected \(\)"),
    ],
)
def test_what_cannot_be_used_rejects_the_episode(fields: dict[str, Any], message: str) -> None:
    assert re.search(message, problem(row(**fields)))


def test_what_is_sealed_comes_back() -> None:
    (first,) = checked_episode(row(), LIMITS, FIELDS, is_trained=True)
    (second,) = checked_episode(
        row(turn=[2, 3, 4], difficulty=0.25), LIMITS, FIELDS, is_trained=True
    )
    sealed = fields_of([first, second], FIELDS)
    assert {name: type_name(values) for name, values in sealed.items()} == dtypes_of(FIELDS)
    assert sealed["choices"].shape == (6, 2, 3)
    group = RunGroup(0, 0, 0, PromptReference(0, 0, 0), 0, 2)
    metadata = metadata_of(group, {0: [first], 1: [second]})
    back = rows_of(PackedRows(sealed, (3, 3), metadata=metadata), [{}, {}], FIELDS)
    for one, again in zip((first, second), back, strict=True):
        for name, values in one.fields.items():
            assert again.fields[name].dtype == values.dtype
            assert np.array_equal(again.fields[name], values)


class Own(Workflow):
    def __init__(self, fields: dict[str, Any]) -> None:
        self.fields = fields


def test_names_are_checked_before_a_run_and_bytes_counted() -> None:
    assert check_fields(Own(FIELDS)) == 4 + 6 + 4
    assert check_fields(Own({})) == 0
    for name in ("versions", "proximal_logprobs", "a b"):
        with pytest.raises(WorkflowError, match=f"got '{name}'"):
            check_fields(Own({name: TensorMetadata()}))
    with pytest.raises(WorkflowError, match="expected a TensorMetadata, got 'int32'"):
        check_fields(Own({"turn": "int32"}))
    assert check_fields(Own({"routes": TensorMetadata((48, 8), "uint8")})) == 384


@pytest.mark.parametrize(
    "arguments",
    [
        {"dtype": "bfloat16"},
        {"shape": (0,)},
        {"shape": (2.0,)},
        {"shape": (1,) * 9},
        {"shape": (10**9,), "dtype": "uint8"},
        {"shape": (1 << 20, 1 << 20), "dtype": "int16"},
    ],
)
def test_a_field_that_there_cannot_be(arguments: dict[str, Any]) -> None:
    with pytest.raises(MetadataError, match="of a field: expected"):
        TensorMetadata(**arguments)


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
