"""Which rows each rank computes, so that all ranks have equally much to do. No torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple


class GroupRows(NamedTuple):
    """Rows of a group.

    Attributes:
        group: a number.
        prompt_tokens: that they begin with; a rank computes them once, however many rows it has.
        rows: (tokens behind these, number) of each row, the longest first.
    """

    group: int
    prompt_tokens: int
    rows: list[tuple[int, int]]

    @property
    def num_tokens(self) -> int:
        """Those that are computed."""
        return self.prompt_tokens + sum(tokens for tokens, _ in self.rows)

    def cut(self, count: int) -> list[GroupRows]:
        """The rows in as many pieces, which are nearly equal."""
        pieces = (self.rows[first::count] for first in range(count))
        return [self._replace(rows=rows) for rows in pieces if rows]


class _Share(NamedTuple):
    """What a rank computes.

    Attributes:
        num_tokens: each token that its rows of a group begin with once.
        rows: numbers.
        groups: those of which it has a row.
    """

    num_tokens: int = 0
    rows: tuple[int, ...] = ()
    groups: frozenset[int] = frozenset()


def spread_groups(groups: Sequence[GroupRows], n: int) -> list[list[int]]:
    """Row numbers of `n` shares, ascending.

    The largest group first, each goes to the share that then computes least, as long as that gets
    no more than an nth of everything. The groups that are left are cut into 1, 2, 4, ... pieces
    each, and their prompts computed in several shares. Of these numbers the one is taken for which
    the largest share is smallest. So where nothing is shared, no share has more than an nth and one
    longest row.
    """
    shares, parted = [_Share()] * n, list[GroupRows]()
    num_tokens = sum(group.num_tokens for group in groups)
    for group in sorted(groups, key=lambda it: -it.num_tokens):
        # a group that is cut adds its prompt to all that is computed; one row cannot be cut
        most_tokens = (num_tokens + group.prompt_tokens) / n if len(group.rows) > 1 else math.inf
        if not _place(shares, group, most_tokens):
            parted.append(group)
    most_rows = max((len(group.rows) for group in parted), default=1)
    ways = list[list[_Share]]()
    for exponent in range((most_rows - 1).bit_length() + 1):
        pieces = chain.from_iterable(group.cut(2**exponent) for group in parted)
        ways.append(list(shares))
        for piece in sorted(pieces, key=lambda it: -it.num_tokens):
            _place(ways[-1], piece, math.inf)
    loads = [[share.num_tokens for share in way] for way in ways]
    best = min(range(len(ways)), key=lambda way: (max(loads[way]), sum(loads[way])))
    return [sorted(share.rows) for share in ways[best]]


def _place(shares: list[_Share], given: GroupRows, most_tokens: float) -> bool:
    """Gives rows to the share that then has least, if that is not too much."""
    size, known = given.num_tokens, given.prompt_tokens
    sizes = [it.num_tokens + size - (known if given.group in it.groups else 0) for it in shares]
    best = min(range(len(shares)), key=lambda share: (sizes[share], len(shares[share].rows)))
    if sizes[best] > most_tokens:
        return False
    rows = shares[best].rows + tuple(number for _, number in given.rows)
    shares[best] = _Share(sizes[best], rows, shares[best].groups | {given.group})
    return True
