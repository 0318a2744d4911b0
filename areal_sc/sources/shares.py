"""Drawing from several sources by their weights, in an order that is always the same. No torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence


def numbers_by_weight(weights: Sequence[float]) -> Iterator[int]:
    """Numbers of the sources, without an end; each comes as often as its weight says.

    Of the first n, each source has its share, to within one for each of the other sources.

    Args:
        weights: > 0 and finite, one for each source.
    """
    total = sum(weights)
    owed = [0.0] * len(weights)
    while True:
        owed = [debt + weight / total for debt, weight in zip(owed, weights, strict=True)]
        number = owed.index(max(owed))  # the first one of equals
        owed[number] -= 1
        yield number
