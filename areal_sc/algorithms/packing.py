"""Dynamic micro-batches: which rows share one forward. No torch."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from typing import Final

NUM_SIZES: Final = 4
"""Of micro-batches in a run, where they are padded."""


def pack_micro_batches(
    lengths: Sequence[int], max_tokens: int, min_micro_batches: int = 1
) -> list[list[int]]:
    """Packs rows into few micro-batches of nearly equal numbers of tokens.

    Serves the purpose of Algorithm 1 of AReaL (arXiv:2505.24298), which puts each row, longest
    first, into the micro-batch with the fewest rows that has room. Here the longest row goes to
    the micro-batch with the fewest *tokens*, in the smallest number of micro-batches for which
    that fits. Where best-fit packing or Algorithm 1 itself needs fewer, that way decides. So
    there are never more micro-batches than Algorithm 1 makes (whether its ties go to the oldest
    or to the emptiest micro-batch), unless more are asked for, and their token counts are more
    even. The result is deterministic.

    Args:
        lengths: tokens of each row, >= 0.
        max_tokens: limit of one micro-batch.
        min_micro_batches: at least so many, none of them empty; exactly so many where fewer
            would do. With fewer rows than that, each row is a micro-batch of its own; the caller
            makes up the difference.
    Returns: row indices of each micro-batch, ascending; every row exactly once.
    Raises: ValueError: a row is longer than `max_tokens`, or a length or a limit is impossible.
    """
    if min_micro_batches < 1:
        raise ValueError(f"min_micro_batches={min_micro_batches} must be >= 1")
    _check(lengths, max_tokens)
    if not lengths:
        return []
    longest_first = _longest_first(lengths)
    packed = _pack_into_fewest(lengths, longest_first, max_tokens)
    asked = min(min_micro_batches, len(lengths))
    if len(packed) < asked:
        even = _spread_evenly(lengths, longest_first, asked)
        packed = even if _fits(even, lengths, max_tokens) else _split_to(packed, lengths, asked)
    return [sorted(rows) for rows in packed]


def pack_full_micro_batches(
    lengths: Sequence[int], max_tokens: int, min_micro_batches: int = 1
) -> list[list[int]]:
    """Packs rows so that all micro-batches but the last are nearly full (best-fit packing).

    Args, returns, raises: those of `pack_micro_batches`.
    """
    _check(lengths, max_tokens)
    packed = _pack_greedily(lengths, _longest_first(lengths), max_tokens, _CHOICES[0])
    asked = min(min_micro_batches, len(lengths))
    return [sorted(rows) for rows in _split_to(packed, lengths, asked)]


def padded_size(num_tokens: int, max_tokens: int) -> int:
    """The next larger of the few sizes that micro-batches are padded to, at least 2.

    Memory that was freed is used again where sizes repeat, and torch compiles nothing anew.
    """
    step = -(-max_tokens // NUM_SIZES)
    return max(2, min(max_tokens, -(-max(1, num_tokens) // step) * step))


def pack_padded_micro_batches(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Packs rows that are padded to the longest one of their micro-batch.

    What is limited is the padded size, so rows of similar length come together: longest first, as
    many as fit.

    Args: those of `pack_micro_batches`.
    Returns: row indices of each micro-batch, ascending; every row exactly once.
    Raises: ValueError: see `pack_micro_batches`.
    """
    _check(lengths, max_tokens)
    packed: list[list[int]] = []
    for row in _longest_first(lengths):
        if packed and (len(packed[-1]) + 1) * lengths[packed[-1][0]] <= max_tokens:
            packed[-1].append(row)
        else:
            packed.append([row])
    return [sorted(rows) for rows in packed]


def _check(lengths: Sequence[int], max_tokens: int) -> None:
    """Raises: ValueError: a row is longer than `max_tokens`, or a number is impossible."""
    if max_tokens < 1:
        raise ValueError(f"max_tokens={max_tokens} must be >= 1")
    for row, length in enumerate(lengths):
        if length < 0:
            raise ValueError(f"row {row} has a negative length, {length}")
        if length > max_tokens:
            raise ValueError(
                f"row {row} has {length} tokens, but a micro-batch holds at most {max_tokens}; "
                "raise max_tokens_per_micro_batch or shorten the rows"
            )


def _longest_first(lengths: Sequence[int]) -> list[int]:
    return sorted(range(len(lengths)), key=lambda row: (-lengths[row], row))


def _pack_into_fewest(
    lengths: Sequence[int], longest_first: Sequence[int], max_tokens: int
) -> list[list[int]]:
    """Packs rows into as few micro-batches as the best of four ways, spread evenly if possible."""
    fewest = max(-(-sum(lengths) // max_tokens), 1)
    even = _spread_evenly(lengths, longest_first, fewest)
    if _fits(even, lengths, max_tokens):
        return even
    ways = (_pack_greedily(lengths, longest_first, max_tokens, choice) for choice in _CHOICES)
    packed = min(ways, key=len)
    for count in range(fewest + 1, len(packed) + 1):
        even = _spread_evenly(lengths, longest_first, count)
        if _fits(even, lengths, max_tokens):
            return even
    return packed


def _fits(micro_batches: list[list[int]], lengths: Sequence[int], max_tokens: int) -> bool:
    return all(sum(lengths[row] for row in rows) <= max_tokens for rows in micro_batches)


def _spread_evenly(
    lengths: Sequence[int], longest_first: Sequence[int], count: int
) -> list[list[int]]:
    """Longest row first, each to the micro-batch with the fewest tokens (then fewest rows)."""
    micro_batches: list[list[int]] = [[] for _ in range(count)]
    loads = [(0, 0, index) for index in range(count)]  # (tokens, rows, micro-batch)
    for row in longest_first:
        tokens, rows, index = loads[0]
        micro_batches[index].append(row)
        heapq.heapreplace(loads, (tokens + lengths[row], rows + 1, index))
    return micro_batches


# (its rows, its tokens) of a micro-batch that has room -> the smallest gets the next row
_CHOICES: tuple[Callable[[int, int], tuple[int, ...]], ...] = (
    lambda rows, tokens: (-tokens,),  # best-fit packing
    lambda rows, tokens: (rows,),  # Algorithm 1, ties to the oldest
    lambda rows, tokens: (rows, tokens),  # Algorithm 1, ties to the emptiest
)


def _pack_greedily(
    lengths: Sequence[int],
    longest_first: Sequence[int],
    max_tokens: int,
    choice: Callable[[int, int], tuple[int, ...]],
) -> list[list[int]]:
    """Longest row first; a row for which no micro-batch has room opens a new one."""
    micro_batches: list[list[int]] = []
    tokens: list[int] = []
    for row in longest_first:
        fitting = [i for i, used in enumerate(tokens) if used + lengths[row] <= max_tokens]
        if fitting:
            index = min(fitting, key=lambda i: choice(len(micro_batches[i]), tokens[i]))
        else:
            index = len(tokens)
            micro_batches.append([])
            tokens.append(0)
        micro_batches[index].append(row)
        tokens[index] += lengths[row]
    return micro_batches


def _split_to(
    micro_batches: list[list[int]], lengths: Sequence[int], count: int
) -> list[list[int]]:
    """Halves the micro-batch with the most rows until there are `count` of them."""
    split = [list(rows) for rows in micro_batches]
    while len(split) < count:
        index = max(range(len(split)), key=lambda i: (len(split[i]), -i))
        rows = sorted(split[index], key=lambda row: (-lengths[row], row))
        split[index] = rows[0::2]
        split.append(rows[1::2])
    return split
