from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_sc.errors import ProtocolError
from areal_sc.transport.pull_plan import Owner, Part, Piece, Segment, SegmentCursor

OWNER = Owner("rollout/0", "tcp://127.0.0.1:1", "life1")


def segment(lengths: list[int], destination: bytearray, rows: object = None) -> Segment:
    its_rows = range(len(lengths)) if rows is None else rows
    piece = Piece(OWNER, "life1.1", "ids", its_rows, "uint8", lengths)  # type: ignore[arg-type]
    return Segment.create(piece, memoryview(destination))


def parts_of(cursor: SegmentCursor, max_bytes: int, max_rows: int) -> list[list[Part]]:
    taken = []
    while not cursor.is_done:
        taken.append(cursor.take(max_bytes, max_rows))
    return taken


@given(
    st.lists(st.lists(st.integers(0, 12), min_size=1, max_size=6), max_size=5),
    st.integers(1, 20),
    st.integers(1, 4),
)
def test_parts_carry_every_byte_to_its_place(
    all_lengths: list[list[int]], max_bytes: int, max_rows: int
) -> None:
    # every byte is another one than its neighbours, so a misplaced one is seen
    rows_of: list[list[bytes]] = []
    count = 0
    for lengths in all_lengths:
        rows_of.append([bytes((count := count + 1) % 251 for _ in range(n)) for n in lengths])
    targets = [bytearray(sum(lengths)) for lengths in all_lengths]
    segments = [segment(n, target) for n, target in zip(all_lengths, targets, strict=True)]
    index = {id(s): i for i, s in enumerate(segments)}

    for parts in parts_of(SegmentCursor(segments), max_bytes, max_rows):
        assert 0 < sum(len(part.destination) for part in parts) <= max_bytes
        assert sum(part.stop - part.first for part in parts) <= max_rows
        sent = b""
        for part in parts:
            asked = rows_of[index[id(part.segment)]][part.first : part.stop]
            sent += b"".join(asked)[part.skip : part.skip + len(part.destination)]
        for part in parts:
            size = len(part.destination)
            part.destination[:], sent = sent[:size], sent[size:]

    assert targets == [bytearray(b"".join(rows)) for rows in rows_of]


def test_parts_are_as_large_as_they_may_be() -> None:
    (first, second) = parts_of(SegmentCursor([segment([5, 5, 5], bytearray(15))]), 10, 9)
    assert [len(part.destination) for part in first + second] == [10, 5]


def test_empty_rows_ask_for_nothing() -> None:
    assert SegmentCursor([segment([0, 0], bytearray())]).is_done


def test_consecutive_rows_are_named_by_first_and_count() -> None:
    run = segment([1, 1, 1], bytearray(3), (4, 5, 6))
    mixed = segment([1, 1, 1], bytearray(3), (6, 4, 5))
    (parts,) = parts_of(SegmentCursor([run, mixed]), 100, 100)
    assert [part.to_wire() for part in parts] == [
        ["life1.1", "ids", 0, 3, 4, 3],
        ["life1.1", "ids", 0, 3, [6, 4, 5]],
    ]
    assert run.piece.is_run
    assert not mixed.piece.is_run


@pytest.mark.parametrize(
    ("held", "message"),
    [
        (["uint8", [2, 4]], r"expected uint8 rows of \[2, 3\] values, got uint8 rows of \[2, 4"),
        (["int8", [2, 3]], r"expected uint8 .* got int8"),
        (["uint8", [2]], "expected a dtype and row lengths"),
        (["uint8"], "expected a dtype and row lengths"),
        (["uint8", 5], "expected a dtype and row lengths"),
        (None, "expected a dtype and row lengths"),
    ],
)
def test_rows_that_differ_from_the_metadata_are_refused(held: object, message: str) -> None:
    ((part,),) = parts_of(SegmentCursor([segment([2, 3], bytearray(5))]), 100, 100)
    with pytest.raises(ProtocolError, match=rf"life1\.1 on rollout/0, field 'ids': {message}"):
        part.check(held)
