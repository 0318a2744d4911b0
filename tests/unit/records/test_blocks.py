"""Blocks of a file of records, whole and in whatever state a kill or a disk leaves them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from areal_sc.records.blocks import Gap, RecordBlock, block, read_blocks, read_body

PAIRS = [(b"head 1", b"body 1"), (b"", b"b" * 70_000), (b"head 3", b""), (b"h" * 300, b"last")]
WHOLE = [block(head, body) for head, body in PAIRS]


def found(path: Path, content: bytes) -> tuple[list[tuple[bytes, bytes | None]], list[Gap]]:
    """Heads with their bodies, None for one that is damaged; and the gaps."""
    path.write_bytes(content)
    pairs: list[tuple[bytes, bytes | None]] = []
    gaps = []
    with path.open("rb") as file:
        for it in read_blocks(file.fileno(), 0, len(content)):
            if isinstance(it, Gap):
                gaps.append(it)
                continue
            try:
                pairs.append((it.head, read_body(file.fileno(), it)))
            except ValueError:
                pairs.append((it.head, None))
    return pairs, gaps


def test_blocks_come_back(tmp_path: Path) -> None:
    assert found(tmp_path / "f", b"".join(WHOLE)) == (PAIRS, [])


@pytest.mark.parametrize("num_bytes", [1, 3, 4, 5, 303, 320, len(WHOLE[3]) - 1])
def test_a_torn_end_is_left_out(tmp_path: Path, num_bytes: int) -> None:
    assert found(tmp_path / "f", b"".join(WHOLE)[:-num_bytes]) == (PAIRS[:3], [])


def test_no_flipped_byte_gives_something_wrong(tmp_path: Path) -> None:
    content = b"".join([WHOLE[0], WHOLE[2], WHOLE[3]])
    pairs = [PAIRS[0], PAIRS[2], PAIRS[3]]
    for place in range(len(content)):
        damaged = bytearray(content)
        damaged[place] ^= 0x40
        known, gaps = found(tmp_path / "f", bytes(damaged))
        for head, body in known:
            assert (head, body) in pairs or (body is None and head in {it[0] for it in pairs})
        # one block is damaged, and each that follows is found again
        num_whole = sum(body is not None for _, body in known)
        is_at_end = place >= len(content) - len(WHOLE[3])
        assert num_whole == 2, place
        assert gaps or is_at_end or len(known) == 3


def test_reading_goes_on_where_it_has_ended(tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_bytes(WHOLE[0] + WHOLE[1][:9])
    descriptor = os.open(path, os.O_RDONLY)
    try:
        (first,) = read_blocks(descriptor, 0, path.stat().st_size)
        assert isinstance(first, RecordBlock)
        with path.open("ab") as file:
            file.write(WHOLE[1][9:] + WHOLE[2])
        after = [it for it in read_blocks(descriptor, first.end, path.stat().st_size)]
    finally:
        os.close(descriptor)
    assert [it.head for it in after if isinstance(it, RecordBlock)] == [PAIRS[1][0], PAIRS[2][0]]


def test_a_marker_across_the_searched_parts_is_found(tmp_path: Path) -> None:
    for shift in range(9):
        content = b"x" * ((1 << 20) - shift) + WHOLE[0]
        assert found(tmp_path / "f", content) == ([PAIRS[0]], [Gap(0, (1 << 20) - shift)])
