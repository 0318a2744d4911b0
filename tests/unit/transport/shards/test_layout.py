from __future__ import annotations

import msgpack
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from areal_sc.errors import ProtocolError
from areal_sc.transport.shards.layout import ShardLayout
from areal_sc.transport.tensor_bytes import DTYPE_NAMES, dtype_named


def test_fields_start_on_cache_lines() -> None:
    layout = ShardLayout.of(
        {
            "a": torch.zeros(3, dtype=torch.bfloat16),
            "empty": torch.zeros(0),
            "b": torch.zeros(33, dtype=torch.int16),
            "c": torch.zeros(1, dtype=torch.uint8),
        },
        {"a": [1, 2], "b": [0, 33], "c": [1]},
    )
    assert {name: (f.start, f.stop) for name, f in layout.fields.items()} == {
        "a": (0, 6),
        "empty": (64, 64),
        "b": (64, 130),
        "c": (192, 193),
    }
    assert layout.num_bytes == 256
    fields = layout.over(memoryview(bytes(range(256))))
    assert bytes(fields["a"].values) == bytes(range(6))
    assert fields["b"].row_bounds == (0, 0, 66)
    assert fields["c"].dtype == "uint8"


@given(
    st.dictionaries(
        st.text(max_size=5),
        st.tuples(
            st.sampled_from(DTYPE_NAMES),
            st.lists(st.integers(0, 5), max_size=5),
            st.lists(st.integers(1, 3), max_size=3),
        ),
        max_size=5,
    )
)
def test_a_header_is_read_as_it_was_written(
    shape: dict[str, tuple[str, list[int], list[int]]],
) -> None:
    tensors = {
        name: torch.zeros(sum(rows), *wide, dtype=torch.uint8).to(dtype_named(dtype))
        for name, (dtype, rows, wide) in shape.items()
    }
    rows = {name: rows for name, (_, rows, _) in shape.items()}
    layout = ShardLayout.of(tensors, rows, is_copy=len(shape) == 1)
    header = layout.header()
    memory = memoryview(header + bytes(layout.num_bytes))
    assert ShardLayout.behind_header(memory) == (layout, len(header))
    for name, values in tensors.items():
        found = layout.fields[name].tensor_in(bytearray(memory[len(header) :]) or b"")
        assert found.shape == values.shape
        assert found.dtype == values.dtype
    assert len(header) % 64 == 0
    if layout.num_bytes:
        with pytest.raises(ProtocolError, match="names bytes"):
            ShardLayout.behind_header(memory[:-1])


def test_common_row_lengths_are_written_once() -> None:
    rows = [1] * 1000
    one = ShardLayout.of({"a": torch.zeros(1000)}, rows)
    six = ShardLayout.of({name: torch.zeros(1000) for name in "abcdef"}, rows)
    assert len(six.header()) < len(one.header()) + 99


GOOD = [4, True, 128, [[2, 3]], [["a", "int64", 64, 0]], b"of it"]


def header_of(content: object) -> memoryview:
    packed = msgpack.packb(content)
    return memoryview((len(packed).to_bytes(8, "little") + packed).ljust(64, b"\0") + bytes(128))


def test_the_header_that_is_spoiled_below_is_good() -> None:
    layout, start = ShardLayout.behind_header(header_of(GOOD))
    assert (layout.fields["a"].stop, start) == (104, 64)


@pytest.mark.parametrize(
    ("position", "value"),
    [
        (0, 2),
        (0, "1"),
        (1, 1),
        (2, -1),
        (2, 100),  # the field ends at 104
        (2, 129),  # more than there is
        (3, [[2, -3]]),
        (3, [[2, 9]]),
        (3, [[1 << 62, 1 << 62]]),
        (3, [2]),
        (3, []),
        (4, [["a", "int64", 60, 0]]),
        (4, [["a", "int64", -64, 0]]),
        (4, [["a", "int64", 128, 0]]),
        (4, [["a", "int64", 64, 1]]),
        (4, [["a", "int64", 64, -1]]),
        (4, [["a", "object", 64, 0]]),
        (4, [[1, "int64", 64, 0]]),
        (4, [None]),
    ],
)
def test_a_header_that_points_outside_or_is_malformed_is_refused(
    position: int, value: object
) -> None:
    spoiled = [*GOOD[:position], value, *GOOD[position + 1 :]]
    with pytest.raises(ProtocolError, match="header"):
        ShardLayout.behind_header(header_of(spoiled))


@given(st.binary(max_size=64) | st.lists(st.integers(0, 300)).map(header_of))
def test_any_bytes_are_a_header_or_refused(content: bytes | memoryview) -> None:
    with pytest.raises(ProtocolError, match="header"):
        ShardLayout.behind_header(memoryview(content))


def test_a_header_cut_short_is_refused() -> None:
    whole = header_of(GOOD)
    for length in range(len(whole)):
        with pytest.raises(ProtocolError):
            ShardLayout.behind_header(whole[:length])
