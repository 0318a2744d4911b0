from __future__ import annotations

import msgpack
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from areal_sc.errors import ProtocolError
from areal_sc.transport.shard_layout import TICKET_VERSION, ShardLayout, Ticket
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
        st.tuples(st.sampled_from(DTYPE_NAMES), st.lists(st.integers(0, 5), max_size=5)),
        max_size=5,
    )
)
def test_a_ticket_is_read_as_it_was_written(shape: dict[str, tuple[str, list[int]]]) -> None:
    tensors = {
        name: torch.zeros(sum(rows), dtype=torch.uint8).to(dtype_named(dtype))
        for name, (dtype, rows) in shape.items()
    }
    layout = ShardLayout.of(tensors, {name: rows for name, (_, rows) in shape.items()})
    ticket = Ticket(3, 8192, 12288, layout)
    assert Ticket.from_bytes(ticket.to_bytes()) == ticket


def test_common_row_lengths_are_written_once() -> None:
    rows = [1] * 1000
    one = ShardLayout.of({"a": torch.zeros(1000)}, rows)
    six = ShardLayout.of({name: torch.zeros(1000) for name in "abcdef"}, rows)
    assert len(Ticket(1, 0, 1 << 20, six).to_bytes()) < len(Ticket(1, 0, 8192, one).to_bytes()) + 99


GOOD = [TICKET_VERSION, 1, 0, 4096, 128, [[2, 3]], [["a", "int64", 64, 0]]]


def test_the_ticket_that_is_spoiled_below_is_good() -> None:
    assert Ticket.from_bytes(msgpack.packb(GOOD)).layout.fields["a"].stop == 104


@pytest.mark.parametrize(
    ("position", "value"),
    [
        (0, TICKET_VERSION + 1),
        (0, "1"),
        (1, -1),
        (2, "0"),
        (3, 127),
        (4, -1),
        (4, 100),  # the field ends at 104
        (5, [[2, -3]]),
        (5, [[2, 9]]),
        (5, [2]),
        (5, []),
        (6, [["a", "int64", 60, 0]]),
        (6, [["a", "int64", -64, 0]]),
        (6, [["a", "int64", 128, 0]]),
        (6, [["a", "int64", 64, 1]]),
        (6, [["a", "object", 64, 0]]),
        (6, [[1, "int64", 64, 0]]),
        (6, [None]),
    ],
)
def test_a_ticket_that_points_outside_or_is_malformed_is_refused(
    position: int, value: object
) -> None:
    spoiled = [*GOOD[:position], value, *GOOD[position + 1 :]]
    with pytest.raises(ProtocolError, match="ticket"):
        Ticket.from_bytes(msgpack.packb(spoiled))


@given(st.binary(max_size=64) | st.builds(msgpack.packb, st.lists(st.integers(0, 300))))
def test_any_bytes_are_a_ticket_or_refused(content: bytes) -> None:
    with pytest.raises(ProtocolError, match="ticket"):
        Ticket.from_bytes(content)


def test_a_ticket_cut_short_is_refused() -> None:
    whole = msgpack.packb(GOOD)
    for length in range(len(whole)):
        with pytest.raises(ProtocolError):
            Ticket.from_bytes(whole[:length])
