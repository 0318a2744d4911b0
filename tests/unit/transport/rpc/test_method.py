"""Declared methods: what travels is checked while it is decoded."""

from __future__ import annotations

from types import NoneType

import pytest
from msgspec import Struct

from areal_sc.errors import ProtocolError
from areal_sc.metadata import BatchMetadata, Columns, RowMetadata, RowRun, ShardMetadata
from areal_sc.transport.rpc.method import Method, pack
from areal_sc.weights import methods
from areal_sc.workers import calls, rank_methods


class Point(Struct, frozen=True, array_like=True):
    x: int
    y: float


MOVE = Method("move", Point, tuple[Point, ...])


def test_arguments_and_replies_come_back_as_they_were() -> None:
    point = Point(1, 2.5)
    assert MOVE.read_args(pack(point)) == point
    assert MOVE.read_reply(pack([point, point])) == (point, point)
    assert Method("ping", NoneType, NoneType).read_args(pack(None)) is None


@pytest.mark.parametrize("args", [None, 1, [], [1], ["1", 2.5], [1.5, 2.5], {"x": 1, "y": 2.5}])
def test_other_arguments_name_the_method_and_what_is_wrong(args: object) -> None:
    with pytest.raises(ProtocolError, match=r"move: the arguments are not of the .*: Validation"):
        MOVE.read_args(pack(args))
    with pytest.raises(ProtocolError, match=r"move: the reply is not of the declared type"):
        MOVE.read_reply(pack([args]))


def test_the_declarations_of_the_workers_differ_in_name() -> None:
    named = {**vars(calls), **vars(rank_methods), **vars(methods)}.values()
    declared = [method for method in named if isinstance(method, Method)]
    assert len({method.name for method in declared}) == len(declared) > 25


def test_metadata_that_does_not_fit_together_is_refused_while_it_is_decoded() -> None:
    row = RowMetadata(1, 0, 9, 1.0, 0, (), 0)
    shard = ShardMetadata("rollout/0", "tcp://127.0.0.1:5000", "life.1", (RowRun(0, 0, 1),))
    batch = BatchMetadata("b", 0, (Columns({"input_ids": "int32"}, (shard,)),), (row,))
    reply = [[1, 0], batch, [], {}]
    assert calls.RUN_GROUP.read_reply(pack(reply)).batch == batch
    one_row_too_many = ["b", 0, batch.columns, (row, row), None]
    with pytest.raises(ProtocolError, match="shards hold 1 rows, the batch has 2"):
        calls.RUN_GROUP.read_reply(pack([[1, 0], one_row_too_many]))
