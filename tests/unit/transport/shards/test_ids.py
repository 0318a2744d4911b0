from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_sc.errors import MetadataError
from areal_sc.transport.shards.ids import make_shard_id, parse_shard_id


@given(st.text(max_size=20), st.integers(0, 2**63))
def test_an_id_names_its_incarnation_and_sequence(incarnation: str, sequence: int) -> None:
    assert parse_shard_id(make_shard_id(incarnation, sequence)) == (incarnation, sequence)


@pytest.mark.parametrize("shard_id", ["", "abc", "abc.", "abc.-1", "abc.x", "abc.²"])
def test_other_strings_are_refused(shard_id: str) -> None:
    with pytest.raises(MetadataError, match=r"incarnation\.sequence"):
        parse_shard_id(shard_id)
