from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from random_batches import batches, columns_of, rows_of, table

from areal_sc.controller.train.train_step import trained_content
from areal_sc.errors import MetadataError
from areal_sc.metadata import (
    BatchMetadata,
    Columns,
    RowMetadata,
    RowRun,
    ShardMetadata,
    concat,
)


@given(batches(), st.data())
def test_take_moves_rows_with_all_their_cells(batch: BatchMetadata, data: st.DataObject) -> None:
    rows = data.draw(rows_of(batch))
    taken = batch.take(rows)
    assert taken.total_batch_size == len(rows)
    assert taken.rows == tuple(batch.rows[row] for row in rows)
    before = table(batch)
    expected = {name: [cells[row] for row in rows] for name, cells in before.items()}
    assert table(taken) == expected, "fields stay, also without rows"
    again = data.draw(rows_of(taken))
    directly = batch.take([rows[row] for row in again])
    assert table(taken.take(again)) == table(directly)
    assert taken.take(again).rows == directly.rows


@given(batches())
def test_taking_every_row_in_order_changes_nothing(batch: BatchMetadata) -> None:
    assert batch.take(range(batch.total_batch_size)) == batch


@given(st.lists(batches(), min_size=1, max_size=4))
def test_concat_puts_the_tables_one_below_the_other(parts: list[BatchMetadata]) -> None:
    whole = concat(parts, batch_id="whole", global_step=7, min_token_version=2)
    assert (whole.batch_id, whole.global_step, whole.min_token_version) == ("whole", 7, 2)
    assert whole.rows == tuple(row for part in parts for row in part.rows)
    for name in whole.fields:
        assert table(whole)[name] == [c for p in parts for c in table(p).get(name, [])]
    filled = [part for part in parts if part.total_batch_size]
    assert set(whole.fields) == {name for part in filled for name in part.fields}


@given(batches(min_rows=1), st.data())
def test_union_joins_the_columns_of_equal_rows(batch: BatchMetadata, data: st.DataObject) -> None:
    cut = data.draw(st.integers(1, batch.total_batch_size))
    sizes = [size for size in (cut, batch.total_batch_size - cut) if size]
    other = replace(batch, columns=columns_of(sizes, "train", ["proximal_logprobs"], "other"))
    order = data.draw(rows_of(batch))
    united = batch.union(other)
    assert table(united) == table(batch) | table(other)
    assert united.rows == batch.rows
    # columns stay together whatever is done to the rows afterwards
    assert table(united.take(order)) == table(batch.take(order)) | table(other.take(order))
    assert table(united.select(batch.fields)) == table(batch)
    with pytest.raises(MetadataError, match="both hold"):
        united.union(other)


@given(batches(), st.integers(1, 6), st.sampled_from(["tokens", "episodes"]))
def test_split_gives_every_row_to_one_part(batch: BatchMetadata, n: int, balance: Any) -> None:
    parts = batch.partition(n, balance)
    assert len(parts) == n
    assert sorted(row for part in parts for row in part) == list(range(batch.total_batch_size))
    assert all(part == sorted(part) for part in parts)
    assert batch.split(n, balance) == [batch.take(part) for part in parts]
    if balance == "episodes":
        keys = [(row.group_id, row.episode) for row in batch.rows]
        of_parts = [{keys[row] for row in part} for part in parts]
        # in order of their first row, and each in one part
        cut = [key for key in dict.fromkeys(keys) for part in of_parts if key in part]
        assert cut == list(dict.fromkeys(keys))
        firsts = [[keys.index(key) for key in part] for part in of_parts if part]
        assert all(max(a) < min(b) for a, b in itertools.pairwise(firsts))
        assert max(map(len, of_parts)) - min(map(len, of_parts)) <= 1
    else:
        loads = [sum(batch.sequence_lengths[row] for row in part) for part in parts]
        assert max(loads) <= batch.num_tokens / n + max(batch.sequence_lengths, default=0)


def test_episodes_of_one_row_are_cut_as_rows_are() -> None:
    rows = tuple(RowMetadata(i // 4, 0, 9, 0.0, 0, (), i % 4) for i in range(8))
    batch = BatchMetadata("b", 0, (), rows)
    assert batch.episodes == tuple((i,) for i in range(8))
    assert batch.partition(3, "episodes") == [[0, 1], [2, 3, 4], [5, 6, 7]]


def test_the_rows_of_an_episode_stay_together() -> None:
    numbers = [(0, 0), (0, 0), (0, 0), (0, 2), (1, 0), (1, 1), (1, 1)]  # (0, 1) was rejected
    rows = tuple(RowMetadata(group, 0, 9, 0.0, 0, (), episode) for group, episode in numbers)
    batch = BatchMetadata("b", 0, (), rows)
    assert batch.episodes == ((0, 1, 2), (3,), (4,), (5, 6))
    assert batch.partition(2, "episodes") == [[0, 1, 2, 3], [4, 5, 6]]
    assert batch.partition(3, "episodes") == [[0, 1, 2], [3], [4, 5, 6]]


def test_parts_of_equal_tokens_are_filled_evenly() -> None:
    rows = tuple(RowMetadata(i, 0, 0, 0.0, 0, (), 0) for i in range(6))
    batch = BatchMetadata("b", 0, (), rows)
    assert sorted(map(len, batch.partition(3))) == [2, 2, 2]


def test_groups_stay_whole_as_far_as_parts_stay_equal() -> None:
    groups = [(0, 30), (1, 10), (2, 20), (1, 10), (0, 30), (3, 5), (2, 20), (3, 5)]
    rows = tuple(RowMetadata(group, 0, length, 0.0, 0, (), 0) for group, length in groups)
    batch = BatchMetadata("b", 0, (), rows)
    # of groups of 60, 40, 20 and 10 the last one would be too much for either part
    assert batch.partition(2) == [[0, 4, 5], [1, 2, 3, 6, 7]]
    assert batch.partition(1) == [list(range(8))]
    in_three = batch.partition(3)  # of 43 tokens each: the first group is cut
    assert sorted(sum(groups[row][1] for row in part) for part in in_three) == [40, 40, 50]


def test_rows_behind_one_prompt_stay_together_where_that_saves_enough() -> None:
    """Prompts of 50, 10 and 10 tokens; answers of 8 tokens."""
    numbers = [(0, 50)] * 4 + [(1, 10)] * 2 + [(2, 10)] * 2
    rows = [RowMetadata(g, 0, p + 8, 0.0, 0, (), 0, prompt_length=p) for g, p in numbers]
    rows[1] = replace(rows[1], prompt_length=51)  # it has a turn before its first trained token
    batch = BatchMetadata("b", 0, (), tuple(rows))
    # 82 tokens and 2 * 26; the 132 of the others together would be too much for either part
    assert batch.partition(2, min_saved_tokens=1) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert batch.partition(2, min_saved_tokens=150) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    # now each row counts for itself, 58 or 18 tokens
    in_two = batch.partition(2, min_saved_tokens=151)
    assert sorted(sum(row < 4 for row in part) for part in in_two) == [2, 2]
    # a row of no advantage needs nothing: what is left saves no 150 tokens
    weightless = batch.with_advantages([0.0] + [1.0] * 7)
    parts = weightless.partition(2, min_saved_tokens=150)
    assert sorted(sum(0 < row < 4 for row in part) for part in parts) == [1, 2]


def test_rows_on_which_nothing_is_computed_weigh_nothing() -> None:
    lengths = (40, 10, 30, 20, 10)
    rows = [RowMetadata(i, 0, length, 0.0, 0, (), 0) for i, length in enumerate(lengths)]
    rows[2:] = [replace(it, returns=((0.0, 4), (1.0, 2))) for it in rows[2:]]
    advantages = [0.0, 1.0, (0.0, -0.5), 2.0, 0.0]
    batch = BatchMetadata("b", 0, (), tuple(rows)).with_advantages(advantages)
    assert [row.advantage for row in batch.rows] == advantages
    loads = [sum(lengths[row] for row in part if row not in (0, 4)) for part in batch.partition(2)]
    assert sorted(loads) == [30, 30]


def test_what_models_add_to_rewards() -> None:
    batch = small_batch()
    added = batch.add_rewards([1.0, -0.5, 0.0, 0.25])
    assert [row.reward for row in added.rows] == [1.5, 0.0, 0.5, 0.75]
    assert (batch.has_model_rewards, added.take([2]).has_model_rewards) == (False, True)
    assert concat([added.take([2]), added.take([0])], batch_id="c", global_step=0).has_model_rewards


def test_rewards_that_shape() -> None:
    batch = BatchMetadata("b", 0, (), (row(), row(returns=((1.0, 2), (2.0, 4)))))
    shaped = batch.add_rewards([-0.25, 0.5], is_shaping=True)
    assert [it.shaping for it in shaped.rows] == [-0.25, 0.5]
    assert [it.judged for it in shaped.rows] == [(0.5,), (1.0, 2.0)]
    assert [it.judged for it in shaped.add_rewards([1.0, 1.0]).rows] == [(1.5,), (2.0, 3.0)]


def test_scores_of_another_rounding_are_the_same_update() -> None:
    rows = tuple(replace(it, returns=((0.5, 1), (1.5, 2))) for it in small_batch().rows)
    batch = replace(small_batch(), rows=rows)
    once, again = (batch.add_rewards([score] * len(rows)) for score in (0.1, 0.1 + 1e-7))
    assert once.rows[0].returns == ((0.6, 1), (1.6, 2))
    assert trained_content(once) == trained_content(again)


def row(**changes: Any) -> RowMetadata:
    return replace(RowMetadata(1, 0, 10, 0.5, 3, ((3, 4), (5, 2)), 0), **changes)


def small_batch() -> BatchMetadata:
    rows = tuple(row(group_id=i // 2) for i in range(4))
    return BatchMetadata("b", 0, columns_of([3, 1], "rollout", ["input_ids"]), rows)


def with_shards(batch: BatchMetadata, shards: tuple[ShardMetadata, ...]) -> BatchMetadata:
    return replace(batch, columns=(Columns(batch.dtypes, shards),))


def with_run(batch: BatchMetadata, run: RowRun) -> ShardMetadata:
    return replace(batch.shards[0], runs=(run,))


def test_trained_tokens_are_counted_by_version() -> None:
    assert row().num_loss_tokens == 6
    assert [row().num_loss_tokens_since(v) for v in (3, 4, 5, 6)] == [6, 2, 2, 0]
    batch = small_batch()
    assert (batch.num_tokens, batch.group_ids) == (40, (0, 1))


def test_select_keeps_only_the_named_fields() -> None:
    batch = small_batch()
    other = replace(batch, columns=columns_of([4], "train", ["advantages"], "x"))
    assert batch.union(other).select(["advantages"]).columns == other.columns


@pytest.mark.parametrize(
    ("operation", "message"),
    [
        (lambda b: b.select(["absent"]), r"has fields \['input_ids'\], not \['absent'\]"),
        (lambda b: b.take([0, 4]), r"rows 0\.\.3, not 4"),
        (lambda b: b.take([-1]), r"rows 0\.\.3, not -1"),
        (lambda b: b.take([1, 1]), "named twice"),
        (lambda b: b.union(b.take([0])), r"has 4 rows, batch b has 1"),
        (lambda b: b.union(b.take([2, 0, 1, 3])), r"row 0 is \(0, 0, 10\).* but \(1, 0, 10\)"),
        (lambda b: b.with_advantages([1.0]), "has 4 rows, got 1 advantages"),
        (lambda b: b.add_rewards([1.0]), "has 4 rows: expected a finite number for each, got 1"),
        (lambda b: b.add_rewards([1.0, 2.0, 3.0, float("inf")]), r"got 4: \[1.0, 2.0, 3.0, inf\]"),
        (lambda b: b.partition(0), "into 0 parts"),
        (lambda b: concat([], batch_id="c", global_step=0), "got 0"),
        (
            lambda b: concat([b, replace(b, columns=())], batch_id="c", global_step=0),
            r"fields {'input_ids': 'float32'}, batch b has {}",
        ),
        (
            lambda b: concat(
                [b, replace(b, columns=(Columns({"input_ids": "int64"}, b.shards),))],
                batch_id="c",
                global_step=0,
            ),
            "'float32'}, batch b has {'input_ids': 'int64'}",
        ),
        (lambda b: with_shards(b, b.shards[:1]), "shards hold 3 rows, the batch has 4"),
        (lambda b: with_shards(b, b.shards[1:]), "got 1 from row 0 at row 3"),
        (lambda b: with_shards(b, (with_run(b, RowRun(0, -1, 4)),)), "got 4 from row -1 at row 0"),
        (
            lambda b: with_shards(b, (with_run(b, RowRun(0, 0, 0)), *b.shards)),
            "got 0 from row 0 at row 0",
        ),
        (lambda b: replace(b, columns=b.columns * 2), "a field is named twice"),
    ],
)
def test_operations_that_do_not_fit_name_both_values(
    operation: Callable[[BatchMetadata], Any], message: str
) -> None:
    with pytest.raises(MetadataError, match=message):
        operation(small_batch())
