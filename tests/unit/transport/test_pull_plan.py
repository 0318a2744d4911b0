from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_sc.errors import ProtocolError
from areal_sc.transport.pull_plan import Owner, Segment, chunks_of, segment_of

OWNER = Owner("rollout/0", "tcp://127.0.0.1:1", "life1")


def segment(lengths: list[int], destination: bytearray, first_row: int = 0) -> Segment:
    rows = range(first_row, first_row + len(lengths))
    return segment_of("life1.1", "ids", rows, "uint8", lengths, memoryview(destination))


@given(
    st.lists(st.lists(st.integers(0, 12), min_size=1, max_size=6), max_size=5),
    st.integers(1, 20),
    st.data(),
)
def test_chunks_carry_every_byte_to_its_place(
    all_lengths: list[list[int]], chunk_bytes: int, data: st.DataObject
) -> None:
    # row r of segment s holds distinct bytes, so a misplaced one is seen
    rows_of: list[list[bytes]] = []
    count = 0
    for lengths in all_lengths:
        rows_of.append([bytes((count := count + 1) % 251 for _ in range(n)) for n in lengths])
    targets = [bytearray(sum(lengths)) for lengths in all_lengths]
    segments = [segment(n, target) for n, target in zip(all_lengths, targets, strict=True)]
    index = {id(s): i for i, s in enumerate(segments)}

    chunks = list(chunks_of(segments, chunk_bytes))

    assert all(chunk.num_bytes == chunk_bytes for chunk in chunks[:-1])
    for chunk in chunks:
        rows = [
            rows_of[index[id(part.segment)]][row]
            for part in chunk.parts
            for row in part.segment.rows[part.first : part.stop]
        ]
        window = b"".join(rows)[chunk.start : chunk.start + chunk.num_bytes]
        cut = data.draw(st.integers(0, len(window)))
        frames = [memoryview(window[:cut]), memoryview(window[cut:])]
        held = [["uint8", list(p.segment.lengths[p.first : p.stop])] for p in chunk.parts]
        chunk.check(OWNER, held, frames)
        chunk.fill(frames)
    assert targets == [bytearray(b"".join(rows)) for rows in rows_of]


def test_empty_rows_ask_for_nothing() -> None:
    assert list(chunks_of([segment([0, 0], bytearray())], 8)) == []


def test_consecutive_rows_are_named_by_first_and_count() -> None:
    target = memoryview(bytearray(3))
    run = segment_of("life1.1", "ids", (4, 5, 6), "uint8", (1, 1, 1), target)
    mixed = segment_of("life1.1", "ids", (6, 4, 5), "uint8", (1, 1, 1), target)
    (chunk,) = chunks_of([run, mixed], 100)
    assert chunk.to_wire() == [["life1.1", "ids", 4, 3], ["life1.1", "ids", [6, 4, 5]]]


@pytest.mark.parametrize(
    ("held", "num_bytes", "message"),
    [
        (
            [["uint8", [2, 4]]],
            5,
            r"expected uint8 rows of \[2, 3\] values, got uint8 rows of \[2, 4",
        ),
        ([["int8", [2, 3]]], 5, r"expected uint8 .* got int8"),
        ([["uint8", [2]]], 5, "expected a dtype and row lengths"),
        ([["uint8"]], 5, "expected a dtype and row lengths"),
        ([["uint8", 5]], 5, "expected a dtype and row lengths"),
        ([], 5, "expected 1 segments"),
        (None, 5, "expected 1 segments"),
        ([["uint8", [2, 3]]], 4, "expected 5 bytes, got 4"),
        ([["uint8", [2, 3]]], 6, "expected 5 bytes, got 6"),
    ],
)
def test_answers_that_differ_from_the_metadata_are_refused(
    held: object, num_bytes: int, message: str
) -> None:
    (chunk,) = chunks_of([segment([2, 3], bytearray(5))], 100)
    with pytest.raises(ProtocolError, match=rf"life1\.1 on rollout/0, field 'ids': {message}"):
        chunk.check(OWNER, held, [memoryview(bytes(num_bytes))])
