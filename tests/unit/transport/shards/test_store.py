from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from areal_sc.errors import MetadataError, ShardGone, StoreFull
from areal_sc.transport.shards.layout import ShardLayout
from areal_sc.transport.shards.store import ShardKey, StoreBackend, StoreBlock, TensorStore


def store_of(max_bytes: int = 1 << 20) -> TensorStore:
    return TensorStore("rollout/0", "life1", max_bytes=max_bytes)


def int32s(slices: list[memoryview]) -> list[int]:
    return [value for part in slices for value in part.cast("i")]


def test_a_shard_holds_copies_of_its_fields() -> None:
    store = store_of()
    ids = torch.arange(6, dtype=torch.int32)
    shard = store.put(
        {"ids": ids, "logp": torch.arange(6, dtype=torch.bfloat16), "mask": ids > 2}, [1, 2, 3]
    )
    ids.zero_()
    assert shard == "life1.1"
    fields = store.describe(shard)
    assert {name: (f.dtype, f.row_lengths) for name, f in fields.items()} == {
        "ids": ("int32", (1, 2, 3)),
        "logp": ("bfloat16", (1, 2, 3)),
        "mask": ("bool", (1, 2, 3)),
    }
    assert int32s(store.describe(shard)["ids"].slices(range(3))) == [0, 1, 2, 3, 4, 5]
    assert bytes(store.describe(shard)["mask"].slices(range(3))[0]) == b"\0\0\0\1\1\1"


def test_rows_are_read_in_the_asked_order_and_runs_come_as_one_slice() -> None:
    store = store_of()
    shard = store.put({"ids": torch.arange(10, dtype=torch.int32)}, [2, 0, 3, 1, 4])
    assert int32s(store.describe(shard)["ids"].slices([2, 0])) == [2, 3, 4, 0, 1]
    assert len(store.describe(shard)["ids"].slices([0, 1, 2, 3])) == 1
    assert store.describe(shard)["ids"].slices([1]) == []
    assert store.describe(shard)["ids"].slices([]) == []
    for rows in ([5], [-1], [-1, 0], [3, 4, 5]):
        with pytest.raises(MetadataError, match=r"rows 0\.\.4"):
            store.describe(shard)["ids"].slices(rows)


def test_sealed_bytes_cannot_be_written() -> None:
    store = store_of()
    shard = store.put({"ids": torch.arange(4)}, [4])
    with pytest.raises(TypeError, match="read-only"):
        store.describe(shard)["ids"].values[0] = 1


def test_fields_may_have_their_own_rows() -> None:
    store = store_of()
    shard = store.put(
        {"w": torch.zeros(12), "b": torch.zeros(0), "s": torch.ones(1)},
        {"w": [12], "b": [0], "s": [1]},
    )
    assert [f.row_lengths for f in store.describe(shard).values()] == [(12,), (0,), (1,)]


def test_empty_shards_can_be_put() -> None:
    store = store_of()
    assert store.describe(store.put({}, [])) == {}
    assert store.describe(store.put({"ids": torch.zeros(0)}, []))["ids"].slices(range(0)) == []


@pytest.mark.parametrize(
    ("values", "lengths"),
    [
        (torch.zeros(5), [2, 2]),
        (torch.zeros(2, 2), [2, 2]),
        (torch.zeros(2), [3, -1]),
        (torch.zeros(()), [1]),
    ],
    ids=["too long", "2-D", "negative length", "0-D"],
)
def test_fields_that_do_not_fit_their_rows_are_refused(
    values: torch.Tensor, lengths: list[int]
) -> None:
    store = store_of()
    with pytest.raises(MetadataError, match="'ids'"):
        store.put({"ids": values}, lengths)
    assert (store.num_bytes, store.last_sequence) == (0, 0)


def test_a_store_without_a_limit_takes_what_there_is_memory_for() -> None:
    store = store_of(max_bytes=0)
    for _ in range(3):
        store.put({"x": torch.zeros(800, dtype=torch.uint8)}, [800])
    assert store.num_bytes == 3 * 832


def test_a_full_store_names_both_numbers_and_takes_shards_again_after_a_sweep() -> None:
    store = store_of(max_bytes=1000)
    store.put({"x": torch.zeros(800, dtype=torch.uint8)}, [800])
    with pytest.raises(StoreFull, match=r"256 bytes.*832 bytes.*1000"):
        store.put({"x": torch.zeros(200, dtype=torch.uint8)}, [200])
    assert store.num_bytes == 832  # 64-byte lines
    assert store.sweep(live=[], acknowledged=1) == 1
    assert store.num_bytes == 0
    store.put({"x": torch.zeros(800, dtype=torch.uint8)}, [800])


def test_missing_shards_say_why() -> None:
    store = store_of()
    shard = store.put({"x": torch.zeros(1)}, [1])
    store.remove(shard)
    store.remove(shard)
    for shard_id, why in [(shard, "swept"), ("life0.1", "restarted"), ("life1.9", "never sealed")]:
        with pytest.raises(ShardGone, match=rf"{shard_id} on rollout/0 is gone.*{why}"):
            store.describe(shard_id)


def test_bytes_being_sent_outlive_their_shard() -> None:
    store = store_of()
    shard = store.put({"ids": torch.arange(4, dtype=torch.int32)}, [4])
    view = store.describe(shard)["ids"].values
    store.remove(shard)
    store.put({"ids": torch.zeros(4, dtype=torch.int32)}, [4])
    assert int32s([view]) == [0, 1, 2, 3]


class FailingBlock(StoreBlock):
    """Memory that is lost when it is sealed."""

    def __init__(self, backend: FailingBackend, layout: ShardLayout) -> None:
        super().__init__(layout, memoryview(bytearray(layout.num_bytes)))
        self._backend = backend

    def seal(self, sequence: int) -> None:
        raise OSError("no space")

    def free(self) -> None:
        self._backend.num_freed += 1


class FailingBackend(StoreBackend):
    num_freed = 0

    def allocate(self, layout: ShardLayout, spare_bytes: int = 0) -> FailingBlock:
        return FailingBlock(self, layout)


def test_a_put_that_fails_leaves_nothing_behind() -> None:
    backend = FailingBackend()
    store = TensorStore("rollout/0", "life1", max_bytes=1000, backend=backend)
    with pytest.raises(OSError, match="no space"):
        store.put({"x": torch.zeros(9)}, [9])
    assert (store.num_bytes, store.num_shards, store.last_sequence) == (0, 0, 0)
    assert (store.last_sequence, backend.num_freed) == (0, 1)


class RetiringBackend(StoreBackend):
    """Memory that comes back one `reclaim` after it was freed."""

    def allocate(self, layout: ShardLayout, spare_bytes: int = 0) -> RetiringBlock:
        return RetiringBlock(self, layout)

    def reclaim(self) -> None:
        self.retired_bytes = 0


class RetiringBlock(StoreBlock):
    def __init__(self, backend: RetiringBackend, layout: ShardLayout) -> None:
        super().__init__(layout, memoryview(bytearray(layout.num_bytes)))
        self._backend = backend

    def free(self) -> None:
        self._backend.retired_bytes += len(self.memory)


def test_memory_that_is_still_read_counts_until_it_is_back() -> None:
    store = TensorStore("rollout/0", "life1", max_bytes=1000, backend=RetiringBackend())
    store.put({"x": torch.zeros(800, dtype=torch.uint8)}, [800])
    assert store.sweep([], 1) == 1
    assert (store.num_shards, store.num_bytes, store.mapped_retired_bytes) == (0, 832, 832)
    # a put that needs the room looks whether it is back
    store.put({"x": torch.zeros(800, dtype=torch.uint8)}, [800])
    assert (store.num_shards, store.num_bytes, store.mapped_retired_bytes) == (1, 832, 0)


class PredecessorBackend(StoreBackend):
    """Has found shards 3 and 5 of an earlier life."""

    def adopt(self) -> dict[ShardKey, StoreBlock]:
        found = {}
        for sequence in (3, 5):
            values = torch.tensor([sequence, 0], dtype=torch.int32)
            layout = ShardLayout.of({"x": values}, [1, 1])
            block = self.allocate(layout)
            block.memory[:8] = values.view(torch.uint8).numpy().data
            found["life0", sequence] = block
        return found


def test_adopted_shards_keep_their_ids_until_they_are_live_no_more() -> None:
    store = TensorStore("rollout/0", "life1", max_bytes=1000, backend=PredecessorBackend())
    own = store.put({"x": torch.zeros(1, dtype=torch.int32)}, [1])
    assert store.adopt() == 2
    assert (store.num_shards, store.num_bytes, store.last_sequence) == (3, 192, 1)
    assert int32s(store.describe("life0.5")["x"].slices(range(2))) == [5, 0]
    # sequence numbers are those of the own shards, whatever happened to be adopted
    assert store.sweep([], acknowledged=0, dead=[3, 5]) == 0
    assert store.sweep([1], acknowledged=9) == 0
    assert store.sweep([1], acknowledged=9, adopted_live=["life0.5", own]) == 1
    assert int32s(store.describe("life0.5")["x"].slices([0])) == [5]
    with pytest.raises(ShardGone, match=r"life0\.3 on rollout/0 is gone.*restarted"):
        store.describe("life0.3")
    store.remove("life0.5")
    store.remove("life0.5")
    assert (store.num_shards, store.num_bytes) == (1, 64)


@given(
    st.lists(
        st.integers(1, 100) | st.tuples(st.sets(st.integers(1, 30)), st.integers(0, 30)),
        max_size=30,
    )
)
def test_sweep_keeps_the_live_and_the_young(actions: list[int | tuple[set[int], int]]) -> None:
    store = store_of()
    expected: dict[int, int] = {}
    sealed = 0
    for action in actions:
        if isinstance(action, int):
            store.put({"x": torch.zeros(action, dtype=torch.uint8)}, [action])
            sealed += 1
            expected[sealed] = -(-action // 64) * 64
        else:
            live, acknowledged = action
            dead = {n for n in expected if n <= acknowledged} - live
            assert store.sweep(live, acknowledged) == len(dead)
            expected = {n: size for n, size in expected.items() if n not in dead}
        assert store.last_sequence == sealed
        assert (store.num_shards, store.num_bytes) == (len(expected), sum(expected.values()))
    for sequence in expected:
        store.describe(f"life1.{sequence}")
