"""Dynamic micro-batches: which rows share one padding-free forward. No torch."""

from __future__ import annotations

import heapq
from collections.abc import Sequence


def pack_micro_batches(
    lengths: Sequence[int], max_tokens: int, min_micro_batches: int = 1
) -> list[list[int]]:
    """Packs rows into few micro-batches of nearly equal numbers of tokens.

    Serves the purpose of Algorithm 1 of AReaL (arXiv:2505.24298), which puts each row, longest
    first, into the micro-batch with the fewest rows that has room. Here the longest row goes to
    the micro-batch with the fewest *tokens*, in the smallest number of micro-batches for which
    that fits; where it needs more of them than best-fit packing does, best-fit decides. The
    result is deterministic, has no more micro-batches, and its token counts are more even.

    Args:
        lengths: tokens of each row, >= 0.
        max_tokens: limit of one micro-batch.
        min_micro_batches: at least so many, none of them empty. With fewer rows than that, each
            row is a micro-batch of its own; the caller makes up the difference.
    Returns: row indices of each micro-batch, ascending; every row exactly once.
    Raises: ValueError: a row is longer than `max_tokens`, or a length or a limit is impossible.
    """
    if max_tokens < 1 or min_micro_batches < 1:
        raise ValueError(
            f"max_tokens={max_tokens} and min_micro_batches={min_micro_batches} must be >= 1"
        )
    for row, length in enumerate(lengths):
        if length < 0:
            raise ValueError(f"row {row} has a negative length, {length}")
        if length > max_tokens:
            raise ValueError(
                f"row {row} has {length} tokens, but a micro-batch holds at most {max_tokens}; "
                "raise max_tokens_per_micro_batch or shorten the rows"
            )
    if not lengths:
        return []
    longest_first = sorted(range(len(lengths)), key=lambda row: (-lengths[row], row))
    best_fit = _best_fit(lengths, longest_first, max_tokens)
    fewest = max(-(-sum(lengths) // max_tokens), min(min_micro_batches, len(lengths)), 1)
    for count in range(fewest, max(fewest, len(best_fit)) + 1):
        even = _spread_evenly(lengths, longest_first, count)
        if all(sum(lengths[row] for row in rows) <= max_tokens for rows in even):
            return [sorted(rows) for rows in even]
    packed = best_fit
    if len(packed) < fewest:
        packed = _split_to(packed, lengths, fewest)
    return [sorted(rows) for rows in packed]


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


def _best_fit(
    lengths: Sequence[int], longest_first: Sequence[int], max_tokens: int
) -> list[list[int]]:
    """Longest row first, each to the fullest micro-batch that has room for it, else a new one."""
    micro_batches: list[list[int]] = []
    room: list[int] = []
    for row in longest_first:
        fitting = [index for index, free in enumerate(room) if free >= lengths[row]]
        if fitting:
            index = min(fitting, key=room.__getitem__)
        else:
            index = len(room)
            room.append(max_tokens)
            micro_batches.append([])
        micro_batches[index].append(row)
        room[index] -= lengths[row]
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
