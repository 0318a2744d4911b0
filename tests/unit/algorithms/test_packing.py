from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_sc.algorithms.packing import (
    NUM_SIZES,
    pack_full_micro_batches,
    pack_micro_batches,
    pack_padded_micro_batches,
    padded_size,
)


def fewest_rows_first(
    lengths: list[int], max_tokens: int, ties: Callable[[list[int]], Any] = lambda _: 0
) -> list[list[int]]:
    """Algorithm 1 of arXiv:2505.24298, as a yardstick; the first of `ties` decides, then age."""
    micro_batches: list[list[int]] = []
    for row in sorted(range(len(lengths)), key=lambda row: -lengths[row]):
        fitting = [
            rows
            for rows in micro_batches
            if sum(lengths[other] for other in rows) + lengths[row] <= max_tokens
        ]
        if fitting:
            min(fitting, key=lambda rows: (len(rows), ties([lengths[i] for i in rows]))).append(row)
        else:
            micro_batches.append([row])
    return micro_batches


def token_counts(lengths: list[int], micro_batches: list[list[int]]) -> list[int]:
    return [sum(lengths[row] for row in rows) for rows in micro_batches]


@given(
    lengths=st.lists(st.integers(0, 50), max_size=60),
    max_tokens=st.integers(50, 200),
    min_micro_batches=st.integers(1, 12),
)
def test_every_row_once_within_the_limit_and_enough_micro_batches(
    lengths: list[int], max_tokens: int, min_micro_batches: int
) -> None:
    packed = pack_micro_batches(lengths, max_tokens, min_micro_batches)
    assert sorted(row for rows in packed for row in rows) == list(range(len(lengths)))
    assert all(packed)
    assert max(token_counts(lengths, packed), default=0) <= max_tokens
    assert packed == pack_micro_batches(lengths, max_tokens, min_micro_batches)
    # exactly: ranks agree on a number, and each must then make that many
    without_minimum = len(pack_micro_batches(lengths, max_tokens))
    assert len(packed) == max(without_minimum, min(min_micro_batches, len(lengths)))


@given(
    lengths=st.lists(st.integers(0, 50), max_size=60),
    max_tokens=st.integers(50, 200),
    min_micro_batches=st.integers(1, 12),
)
def test_full_micro_batches_hold_every_row_once(
    lengths: list[int], max_tokens: int, min_micro_batches: int
) -> None:
    packed = pack_full_micro_batches(lengths, max_tokens, min_micro_batches)
    assert sorted(row for rows in packed for row in rows) == list(range(len(lengths)))
    assert max(token_counts(lengths, packed), default=0) <= max_tokens
    without_minimum = len(pack_full_micro_batches(lengths, max_tokens))
    assert len(packed) == max(without_minimum, min(min_micro_batches, len(lengths)))


def test_a_run_of_random_lengths_has_few_sizes_and_little_padding() -> None:
    generator, sizes = random.Random(0), set[int]()
    num_tokens = num_padded = 0
    for _ in range(50):
        lengths = [min(2048, max(16, int(generator.lognormvariate(6, 0.6)))) for _ in range(160)]
        counts = token_counts(lengths, pack_full_micro_batches(lengths, 8192))
        sizes |= {padded_size(count, 8192) for count in counts}
        num_tokens += sum(counts)
        num_padded += sum(padded_size(count, 8192) for count in counts)
    assert len(sizes) <= NUM_SIZES
    assert num_padded < 1.03 * num_tokens


@given(max_tokens=st.integers(2, 300), num_tokens=st.integers(0, 300))
def test_a_size_has_room_and_is_within_the_limit(max_tokens: int, num_tokens: int) -> None:
    if num_tokens <= max_tokens:
        assert max(2, num_tokens) <= padded_size(num_tokens, max_tokens) <= max_tokens
    assert len({padded_size(count, max_tokens) for count in range(max_tokens + 1)}) <= NUM_SIZES


@given(lengths=st.lists(st.integers(0, 50), max_size=60), max_tokens=st.integers(50, 200))
def test_padded_rows_stay_within_the_limit_with_their_padding(
    lengths: list[int], max_tokens: int
) -> None:
    packed = pack_padded_micro_batches(lengths, max_tokens)
    assert sorted(row for rows in packed for row in rows) == list(range(len(lengths)))
    areas = [len(rows) * max(lengths[row] for row in rows) for rows in packed]
    assert max(areas, default=0) <= max_tokens
    # two neighbours do not fit into one, or there would be fewer
    longest = sorted((max(lengths[row] for row in rows), len(rows)) for rows in packed)
    for (_, few), (length, many) in itertools.pairwise(longest):
        assert length * (few + many) > max_tokens


def test_a_long_row_among_short_ones_is_padded_alone() -> None:
    lengths = [200, *[2] * 28]
    assert sorted(map(len, pack_padded_micro_batches(lengths, 256))) == [1, 28]
    with pytest.raises(ValueError, match=r"row 0 has 200 tokens, but .* at most 199"):
        pack_padded_micro_batches(lengths, 199)


def test_beats_algorithm_1_in_number_and_evenness() -> None:
    generator = random.Random(0)
    more = fewer = 0
    spread = spread_of_algorithm_1 = 0
    for _ in range(300):
        lengths = [min(1000, max(2, int(generator.lognormvariate(5, 0.8)))) for _ in range(64)]
        ours = pack_micro_batches(lengths, 1000)
        theirs = fewest_rows_first(lengths, 1000)
        more += len(ours) > len(theirs)
        fewer += len(ours) < len(theirs)
        spread += max(token_counts(lengths, ours)) - min(token_counts(lengths, ours))
        counts = token_counts(lengths, theirs)
        spread_of_algorithm_1 += max(counts) - min(counts)
    assert more == 0
    assert fewer > 0
    assert spread < 0.2 * spread_of_algorithm_1


@pytest.mark.parametrize(
    ("lengths", "max_tokens", "num_micro_batches"),
    [
        ([8, 12, 14, 4, 5, 4, 7, 2, 4], 20, 3),  # a perfect packing; best fit needs 4
        ([6, 5, 5, 4], 10, 2),  # even spreading needs 3
    ],
)
def test_the_way_that_needs_fewest_decides(
    lengths: list[int], max_tokens: int, num_micro_batches: int
) -> None:
    assert len(pack_micro_batches(lengths, max_tokens)) == num_micro_batches


def test_never_more_than_algorithm_1_on_small_batches() -> None:
    """Every batch of up to 6 rows of 1 to 9 tokens, and many random ones that are tight."""
    batches = [
        (list(lengths), 9)
        for num_rows in range(1, 7)
        for lengths in itertools.combinations_with_replacement(range(1, 10), num_rows)
    ]
    generator = random.Random(1)
    for _ in range(5000):
        num_rows, max_tokens = generator.randint(5, 24), generator.randint(10, 40)
        batches.append(([generator.randint(1, max_tokens) for _ in range(num_rows)], max_tokens))
    for lengths, max_tokens in batches:
        ours = len(pack_micro_batches(lengths, max_tokens))
        for ties in (len, sum):  # len breaks none: the oldest wins
            theirs = fewest_rows_first(lengths, max_tokens, ties)
            assert ours <= len(theirs), (lengths, max_tokens)


def test_even_token_counts() -> None:
    packed = pack_micro_batches([8, 7, 6, 5, 4, 3, 2, 1], 100, min_micro_batches=2)
    assert token_counts([8, 7, 6, 5, 4, 3, 2, 1], packed) == [18, 18]


def test_fewer_rows_than_micro_batches_gives_one_each() -> None:
    assert sorted(pack_micro_batches([3, 4], 10, min_micro_batches=5)) == [[0], [1]]
    assert pack_micro_batches([], 10, min_micro_batches=5) == []


def test_a_perfect_packing_that_even_spreading_misses_is_kept_within_the_limit() -> None:
    # longest to emptiest overflows two micro-batches; best fit finds 6+4 and 5+5
    lengths = [6, 5, 5, 4]
    assert sorted(token_counts(lengths, pack_micro_batches(lengths, 10))) == [10, 10]
    lengths = [7, 6, 3, 2, 2]
    packed = pack_micro_batches(lengths, 10)
    assert max(token_counts(lengths, packed)) <= 10


def test_minimum_is_met_where_even_spreading_overflows() -> None:
    lengths = [5, 5, 4, 3, 3]
    assert len(pack_micro_batches(lengths, 10, min_micro_batches=2)) == 2
    assert len(pack_micro_batches(lengths, 10, min_micro_batches=4)) == 4


def test_errors_name_the_row_and_both_numbers() -> None:
    with pytest.raises(ValueError, match=r"row 1 has 12 tokens.* at most 10"):
        pack_micro_batches([3, 12], 10)
    with pytest.raises(ValueError, match=r"row 0 has a negative length, -1"):
        pack_micro_batches([-1], 10)
    with pytest.raises(ValueError, match=r"max_tokens=0 must be >= 1"):
        pack_micro_batches([1], 0)
    with pytest.raises(ValueError, match=r"min_micro_batches=0"):
        pack_micro_batches([1], 10, 0)
