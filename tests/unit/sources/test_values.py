"""Values between processes: what arrives is equal, type by type, or it is refused by its path."""

from __future__ import annotations

import math
import subprocess
import sys
from collections import Counter, OrderedDict, defaultdict, namedtuple
from datetime import UTC, date, datetime, time, timedelta, timezone
from decimal import Decimal
from enum import IntEnum, StrEnum
from fractions import Fraction
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import numpy as np
import pytest
import torch

from areal_sc.errors import WorkflowError
from areal_sc.sources.reference import Referable, reference_of, resolve
from areal_sc.sources.values import (
    MALFORMED,
    MAX_DEPTH,
    UnfitValue,
    from_json,
    from_wire,
    to_json,
    to_wire,
)

Pair = namedtuple("Pair", "x y")


class Level(IntEnum):
    high = 3


class Word(StrEnum):
    yes = "yes"


class Text(str):
    pass


class Whole(int):
    pass


class Shy:
    def __repr__(self) -> str:
        raise RuntimeError


class Holder(Referable):
    def __init__(self, value: Any) -> None:
        self.value = value


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = (value,)
    return value


EQUAL: list[Any] = [
    None,
    [True, 1, 1.0, "1", b"1"],
    (1, (2, [3, ()])),
    {2: 7.0, "2": 1, (1, "a"): 0, None: 1, 1.5: 2, b"k": 3},
    {"$": "tuple", "items": [1]},
    {"a": {"$": 5}},
    2**63 - 1,
    -(2**63),
    2**64 - 1,
    [2**70, -(2**70), 10**5000],
    [0.1, -0.0, math.inf, -math.inf, 5e-324],
    b"\x00\xff",
    "\ud83d \ud83d\ude00 \U0001f600 \u2028\n\x00",
    {1, "a", (2, 3)},
    frozenset([b"x", frozenset([1])]),
    date(2024, 2, 29),
    [datetime(2024, 2, 29, 1, 2, 3, 4), datetime(1, 1, 1, tzinfo=UTC)],
    datetime(2024, 1, 1, tzinfo=timezone(timedelta(hours=5, minutes=30))),
    [datetime(2024, 7, 1, 3, tzinfo=ZoneInfo(zone)) for zone in ("UTC", "Europe/Berlin")],
    [time(23, 59, 59, 999999), timedelta(-1, 5, 7), timedelta(days=10**8)],
    [Decimal("1.10"), Decimal("1E+400"), Decimal("-0")],
    1 + 2j,
    Path("data/a.json"),
    [np.float32(0.1), np.float64(0.1), np.float16(1), np.int8(-3), np.uint64(2**64 - 1)],
    [np.bool_(True), np.str_("ä"), np.str_(""), np.bytes_(b"a"), np.complex64(1j)],
    [np.datetime64("2024-02-29T01:02:03.000000004"), np.timedelta64(3, "h")],
    {np.int64(3): "a", np.str_("k"): "b"},
    nested(MAX_DEPTH - 1),
]


def through_json(value: Any) -> Any:
    return from_wire(from_json(to_json(to_wire(value))))


def types_of(value: Any) -> Any:
    if isinstance(value, dict):
        return [(types_of(key), types_of(item)) for key, item in value.items()]  # and their order
    if isinstance(value, list | tuple):
        return type(value), [types_of(item) for item in value]
    return type(value), repr(value) if not isinstance(value, set | frozenset | int) else ""


@pytest.mark.parametrize("value", EQUAL, ids=range(len(EQUAL)))
def test_what_arrives_is_equal_and_of_the_same_types(value: Any) -> None:
    back = through_json(value)
    assert back == value
    assert types_of(back) == types_of(value)


@pytest.mark.parametrize("value", EQUAL, ids=range(len(EQUAL)))
def test_arguments_of_constructors_arrive_by_the_same_form(value: Any) -> None:
    if not isinstance(value, Path):  # which is made absolute
        back = resolve(reference_of(Holder(value))).value
        assert back == value
        assert types_of(back) == types_of(value)


def test_arrays_and_what_is_not_equal_to_itself_arrive_too() -> None:
    arrays = [np.array(3), np.zeros((0, 2)), np.array([["a", "bc"]]), np.array([1, 2], ">i4")]
    for array, back in zip(arrays, through_json(arrays), strict=True):
        assert type(back) is np.ndarray
        assert (back.dtype, back.shape) == (array.dtype, array.shape)
        np.testing.assert_array_equal(back, array)
        back[...] = back  # it can be written
    nan, nat = through_json([math.nan, np.datetime64("NaT")])
    assert math.isnan(nan)
    assert np.isnat(nat)


CYCLE: list[Any] = []
CYCLE.append(CYCLE)


@pytest.mark.parametrize(
    ("value", "path"),
    [
        (OrderedDict(a=1), ""),
        ({"counts": defaultdict(int)}, "['counts']"),
        ([0, {"k": (1, Counter("a"))}], "[1]['k'][1]"),
        (Pair(1, 2), ""),
        (Level.high, ""),
        ([Word.yes], "[0]"),
        ({Word.yes: 1}, ""),
        (Text("a"), ""),
        ({Text("a"): 1}, ""),
        (Whole(3), ""),
        (Fraction(1, 3), ""),
        (bytearray(b"a"), ""),
        (range(3), ""),
        (object(), ""),
        ([Shy()], "[0]"),
        (len, ""),
        (torch.zeros(2), ""),
        (np.ma.masked_array([1], [True]), ""),
        (np.array([object()]), ""),
        (np.zeros(2, [("a", "i4")]), ""),
        (datetime(2024, 10, 27, 2, 30, tzinfo=ZoneInfo("Europe/Berlin"), fold=1), ""),
        (time(12, tzinfo=ZoneInfo("UTC")), ""),
        (datetime(2024, 1, 1, tzinfo=timezone(timedelta(0), "mine")), ""),
        (datetime(2024, 10, 27, 2, 30, fold=1), ""),
        ({math.nan: 1}, ""),
        ({"k": {(1, math.nan): 1}}, "['k']"),
        ({np.datetime64("NaT"): 1}, ""),
        ({math.nan}, ""),
        (nested(MAX_DEPTH + 1), "[0]" * MAX_DEPTH),
        (CYCLE, "[0]" * MAX_DEPTH),
    ],
)
def test_what_would_arrive_as_another_value_is_refused_by_its_path(value: Any, path: str) -> None:
    with pytest.raises(UnfitValue) as caught:
        to_wire({"row": value})
    assert caught.value.path == f"['row']{path}"


def test_sets_have_one_form_in_every_process() -> None:
    """Else equal rows had another digest, and so another number, after each start."""
    program = "from areal_sc.sources.values import to_wire; print(to_wire({'a', 'b', 'c', (1, 2)}))"
    shown = {
        subprocess.run(
            [sys.executable, "-c", program],
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(sys.path)},
            capture_output=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(shown) == 1


@pytest.mark.parametrize(
    "content",
    [
        b'{"$": "numpy", "dtype": "O", "shape": null, "bytes": "0011223344556677"}',
        b'{"$": "numpy", "dtype": "i4,O", "shape": [1], "bytes": "001122334455667788990011"}',
        b'{"$": "numpy", "dtype": "<U0", "shape": [9], "bytes": ""}',
        b'{"$": "numpy", "dtype": "<i4", "shape": [2], "bytes": "00112233"}',
        b'{"$": "reference"}',
        b'{"$": 5}',
        b'{"$": []}',
        b'{"$": "tuple"}',
        b"{",
        b"\xff",
    ],
)
def test_what_it_did_not_make_is_refused(content: bytes) -> None:
    with pytest.raises(MALFORMED):
        from_wire(from_json(content))


def test_arguments_that_would_arrive_as_others_are_refused() -> None:
    with pytest.raises(WorkflowError, match=r"argument 0 of Holder\['k'\] is 3, a .*\.Whole"):
        reference_of(Holder({"k": Whole(3)}))
    assert resolve(reference_of(Holder({Level.high: Word.yes}))).value == {Level.high: Word.yes}
