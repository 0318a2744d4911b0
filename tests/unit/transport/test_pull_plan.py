from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_sc.errors import ProtocolError
from areal_sc.transport.bulk.wire import AskedPart
from areal_sc.transport.pull_plan import Owner, Part, Piece, Segment, SegmentCursor

OWNER = Owner("rollout/0", "tcp://127.0.0.1:1", "life1")


ITEM_BYTES = {"ids": 1, "scores": 4}
DTYPES = {"ids": "uint8", "scores": "float32"}


def segment(lengths: list[int], rows: Sequence[int] | None = None, fields: str = "ids") -> Segment:
    names = fields.split()
    its_rows = range(len(lengths)) if rows is None else rows
    piece = Piece(OWNER, "life1.1", {name: DTYPES[name] for name in names}, its_rows, lengths)
    sizes = [ITEM_BYTES[name] * sum(lengths) for name in names]
    return Segment(piece, [memoryview(bytearray(size)) for size in sizes])


def parts_of(
    cursor: SegmentCursor, max_bytes: int, max_rows: int, max_fields: int = 100
) -> list[list[Part]]:
    taken = []
    while not cursor.is_done:
        taken.append(cursor.take(max_bytes, max_rows, max_fields))
    return taken


@given(
    st.lists(st.lists(st.integers(0, 12), min_size=1, max_size=6), max_size=5),
    st.sampled_from(["ids", "scores", "ids scores", "scores ids"]),
    st.integers(1, 60),
    st.integers(1, 4),
    st.integers(1, 4),
    st.integers(0, 60),
)
def test_parts_carry_every_byte_to_its_place(
    all_lengths: list[list[int]],
    fields: str,
    max_bytes: int,
    max_rows: int,
    max_fields: int,
    uncut_bytes: int,
) -> None:
    # every byte is another one than its neighbours, so a misplaced one is seen
    count = 0
    segments = [segment(lengths, fields=fields) for lengths in all_lengths]
    rows_of: dict[int, dict[str, list[bytes]]] = {}
    for it in segments:
        rows_of[id(it)] = {
            name: [
                bytes((count := count + 1) % 251 for _ in range(n * ITEM_BYTES[name]))
                for n in it.piece.lengths
            ]
            for name in it.piece.fields
        }

    cursor = SegmentCursor(segments, min(uncut_bytes, max_bytes))
    for parts in parts_of(cursor, max_bytes, max_rows, max_fields):
        assert 0 < sum(part.num_bytes for part in parts) <= max_bytes
        assert sum((p.stop - p.first) * len(p.fields) for p in parts) <= max_rows
        assert sum(len(part.fields) for part in parts) <= max_fields
        for part in parts:
            assert part.num_bytes == sum(map(len, part.destinations))
            held = rows_of[id(part.segment)]
            asked = [row for name in part.fields for row in held[name][part.first : part.stop]]
            sent = b"".join(asked)[part.skip : part.skip + part.num_bytes]
            for place in part.destinations:
                place[:], sent = sent[: len(place)], sent[len(place) :]

    for it in segments:
        for name, place in zip(it.piece.fields, it.destinations, strict=True):
            assert bytes(place) == b"".join(rows_of[id(it)][name])


def test_parts_are_as_large_as_they_may_be() -> None:
    (first, second) = parts_of(SegmentCursor([segment([5, 5, 5])]), 10, 9)
    assert [part.num_bytes for part in first + second] == [10, 5]


def test_fields_of_a_shard_are_asked_for_together() -> None:
    both = segment([2, 1], fields="ids scores")
    ((part,),) = parts_of(SegmentCursor([both]), 100, 100)
    assert part.asked == AskedPart("life1.1", ["ids", "scores"], 0, 15, 0, 2)
    taken = parts_of(SegmentCursor([both]), 8, 100)
    assert [[(*part.fields, part.num_bytes) for part in parts] for parts in taken] == [
        [("ids", 3), ("scores", 5)],
        [("scores", 7)],
    ]


def test_what_is_small_enough_is_not_cut() -> None:
    cursor = SegmentCursor([segment([6]), segment([5]), segment([20])], uncut_bytes=5)
    taken = parts_of(cursor, 10, 100)
    assert [[part.num_bytes for part in parts] for parts in taken] == [[6], [5, 5], [10], [5]]


def test_empty_rows_ask_for_nothing() -> None:
    assert SegmentCursor([segment([0, 0])]).is_done


def test_consecutive_rows_are_named_by_first_and_count() -> None:
    run = segment([1, 1, 1], (4, 5, 6))
    mixed = segment([1, 1, 1], (6, 4, 5))
    (parts,) = parts_of(SegmentCursor([run, mixed]), 100, 100)
    assert [part.asked for part in parts] == [
        AskedPart("life1.1", ["ids"], 0, 3, 4, 3),
        AskedPart("life1.1", ["ids"], 0, 3, rows=[6, 4, 5]),
    ]
    assert run.piece.is_run
    assert not mixed.piece.is_run


@pytest.mark.parametrize(
    ("held", "message"),
    [
        ([["uint8"], [2, 4]], r"'ids': expected uint8 rows of \[2, 3\] values, got .* \[2, 4"),
        ([["int8"], [2, 3]], r"'ids': expected uint8 .* got int8"),
        ([["uint8"], [2]], "expected 1 dtypes and 2 row lengths, got 1 and 1"),
        ([[], [2, 3]], "expected 1 dtypes and 2 row lengths, got 0 and 2"),
    ],
)
def test_rows_that_differ_from_the_metadata_are_refused(
    held: list[list[Any]], message: str
) -> None:
    ((part,),) = parts_of(SegmentCursor([segment([2, 3])]), 100, 100)
    with pytest.raises(ProtocolError, match=rf"life1\.1 on rollout/0, field.*{message}"):
        part.check(*held)
