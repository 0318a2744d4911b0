from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from areal_sc.errors import MetadataError, ProtocolError
from areal_sc.transport.bulk import plan
from areal_sc.transport.bulk.messages import MAX_REQUEST_FIELDS, ShardSlice
from areal_sc.transport.bulk.plan import (
    Transfer,
    cut,
    find_bytes,
    first_of_run,
    shard_slice,
    window,
)
from areal_sc.transport.shards.layout import SealedField
from areal_sc.transport.shards.store import TensorStore

DTYPES = {"ids": "uint8", "scores": "float32"}


def transfer(lengths: Sequence[int], rows: Sequence[int] | None, fields: Sequence[str]) -> Transfer:
    its_rows = range(len(lengths)) if rows is None else rows
    wanted = shard_slice("life1.1", {name: DTYPES[name] for name in fields}, its_rows, (*lengths,))
    sizes = [torch.tensor([], dtype=getattr(torch, DTYPES[name])).itemsize for name in fields]
    return Transfer(wanted, [memoryview(bytearray(size * sum(lengths))) for size in sizes])


def held(lengths: Sequence[int]) -> dict[str, SealedField]:
    """A shard in which every byte is another one than its neighbours."""
    store = TensorStore("rollout/0", "life1", max_bytes=1 << 20)
    values = (torch.arange(sum(lengths) * 4) % 251).to(torch.uint8)
    fields = {"ids": values[: sum(lengths)], "scores": values.view(torch.float32)}
    return store.describe(store.put(fields, lengths))


def content(shard: dict[str, SealedField], wanted: ShardSlice) -> bytes:
    """What an owner sends."""
    found = find_bytes(shard, wanted, "rollout/0")
    return b"".join(window([part for its in found for part in its], wanted.skip, wanted.num_bytes))


@given(
    st.lists(st.integers(0, 12), min_size=1, max_size=8),
    st.permutations(range(8)),
    st.sampled_from([["ids"], ["scores"], ["ids", "scores"], ["scores", "ids"]]),
    st.integers(1, 60),
    st.integers(1, 8),
)
def test_parts_carry_every_byte_to_its_place(
    all_lengths: list[int], order: list[int], fields: list[str], max_bytes: int, max_rows: int
) -> None:
    shard = held(all_lengths)
    rows = [row for row in order if row < len(all_lengths)]
    whole = transfer([all_lengths[row] for row in rows], rows, fields)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan, "MAX_REQUEST_ROWS", max_rows)
        parts = list(cut(whole, max_bytes))
    for part in parts:
        assert 0 < part.rows.num_bytes == sum(map(len, part.destinations)) <= max_bytes
        assert part.rows.num_rows <= max_rows
        sent = content(shard, part.rows)
        for place in part.destinations:
            place[:], sent = sent[: len(place)], sent[len(place) :]
    for name, place in zip(fields, whole.destinations, strict=True):
        field = shard[name]
        bounds = [field.row_bounds[row : row + 2] for row in rows]
        assert bytes(place) == b"".join(bytes(field.values[a:b]) for a, b in bounds)


def test_what_fits_is_asked_for_whole_and_the_rest_field_by_field() -> None:
    both = transfer([2, 1], None, ["ids", "scores"])
    assert list(cut(both, 15)) == [both]
    parts = [(list(part.rows.fields), part.rows.num_bytes) for part in cut(both, 8)]
    assert parts == [(["ids"], 3), (["scores"], 8), (["scores"], 4)]
    assert list(cut(transfer([0, 0], None, ["ids"]), 8)) == []


def test_a_part_names_a_limited_number_of_fields() -> None:
    fields = {f"f{number}": "uint8" for number in range(MAX_REQUEST_FIELDS + 1)}
    wanted = shard_slice("life1.1", fields, [0], (1,))
    whole = Transfer(wanted, [memoryview(bytearray(1)) for _ in fields])
    assert len(list(cut(whole, 1 << 20))) == len(fields)


def test_consecutive_rows_are_a_run() -> None:
    assert [first_of_run(rows) for rows in ([4, 5, 6], [6, 4, 5], [7], [])] == [4, None, 7, None]


@pytest.mark.parametrize("rows", [[0, 1], [1, 0]], ids=["run", "order"])
@pytest.mark.parametrize(
    ("fields", "lengths", "message"),
    [
        ({"ids": "uint8"}, (2, 4), r"'ids': expected uint8 rows of \[2, 4\] values, got uint8"),
        ({"ids": "uint8"}, (2,), r"'ids': expected uint8 rows of \[2\] values, got uint8 rows"),
        ({"ids": "int8"}, (3, 3), r"'ids': expected int8 .* got uint8 rows of \[3, 3\]"),
        ({"ids": "uint8", "scores": "int32"}, (3, 3), r"'scores': expected int32 .* got float32"),
    ],
)
def test_rows_that_differ_from_the_metadata_are_refused(
    fields: dict[str, str], lengths: tuple[int, ...], rows: list[int], message: str
) -> None:
    wanted = ShardSlice("life1.1", fields, rows, lengths, 0, 0)
    with pytest.raises(ProtocolError, match=rf"shard life1\.1 on rollout/0, field {message}"):
        find_bytes(held([3, 3]), wanted, "rollout/0")


def test_what_the_shard_does_not_have_is_refused() -> None:
    for fields, rows, message in [
        ({"labels": "uint8"}, [0], r"has fields \['ids', 'scores'\], not 'labels'"),
        ({"ids": "uint8"}, [1, 2], "the shard has rows 0..1, not 1..2"),
        ({"ids": "uint8"}, [2, 0], "the shard has rows 0..1, not 2..2"),
    ]:
        wanted = ShardSlice("life1.1", fields, rows, (3,) * len(rows), 0, 0)
        with pytest.raises(MetadataError, match=message):
            find_bytes(held([3, 3]), wanted, "rollout/0")
    with pytest.raises(ProtocolError, match="the rows have 2 of 5 bytes asked for"):
        window([memoryview(b"abc"), memoryview(b"defg")], 5, 5)
