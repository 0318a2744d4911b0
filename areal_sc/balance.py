"""Which rows each rank computes, so that all ranks have equally much to do. No torch."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple


class GroupRows(NamedTuple):
    """Rows of a group.

    Attributes:
        group: a number.
        prompt_tokens: that they begin with; a rank computes them once, however many rows it has.
        rows: (tokens behind these, number) of each row, the longest first; a row without tokens is
            not computed.
    """

    group: int
    prompt_tokens: int
    rows: list[tuple[int, int]]

    @property
    def own_tokens(self) -> int:
        """Tokens behind those that all of them begin with."""
        return sum(tokens for tokens, _ in self.rows)

    def cut(self, count: int) -> list[GroupRows]:
        """The rows in as many pieces, which are nearly equal."""
        pieces = (self.rows[first::count] for first in range(count))
        return [self._replace(rows=rows) for rows in pieces if rows]


@dataclass(frozen=True)
class _Share:
    """What a rank computes.

    Attributes:
        num_tokens: each token that its rows of a group begin with once.
        rows: numbers.
        groups: those of which it has a row.
    """

    num_tokens: int = 0
    rows: tuple[int, ...] = ()
    groups: frozenset[int] = frozenset()

    def tokens_with(self, given: GroupRows) -> int:
        """What it would compute with further rows."""
        own = given.own_tokens
        is_known = not own or given.group in self.groups
        return self.num_tokens + own + (0 if is_known else given.prompt_tokens)

    def taking(self, given: GroupRows) -> _Share:
        groups = self.groups | {given.group} if given.own_tokens else self.groups
        numbers = tuple(number for _, number in given.rows)
        return _Share(self.tokens_with(given), self.rows + numbers, groups)


def spread_groups(groups: Sequence[GroupRows], n: int) -> list[list[int]]:
    """Row numbers of `n` shares, ascending.

    The largest group first, each goes to the share that then computes least, as long as no share
    gets more than an nth of everything. What the groups that are left begin with has to be computed
    in several shares. They are cut into 1, 2, 4, ... pieces each, by the number for which the
    largest share is smallest. So where nothing is shared, no share has more than an nth and one
    longest row.
    """
    shares = [_Share() for _ in range(n)]
    sizes = [group.own_tokens + group.prompt_tokens for group in groups]
    parted = list[GroupRows]()
    for size, group in sorted(zip(sizes, groups, strict=True), key=lambda it: -it[0]):
        best = _best(shares, group)
        # a group that is cut adds its prompt to all that is computed
        if shares[best].num_tokens + size <= (sum(sizes) + group.prompt_tokens) / n:
            shares[best] = shares[best].taking(group)
        else:
            parted.append(group)
    most = max((len(group.rows) for group in parted), default=1)
    counts = itertools.takewhile(lambda count: count < 2 * most, (2**n for n in itertools.count()))
    ways = [_with_pieces(shares, parted, count) for count in counts]
    way = min(ways, key=lambda way: (max(_tokens(way)), sum(_tokens(way))))
    return [sorted(share.rows) for share in way]


def _with_pieces(shares: Sequence[_Share], groups: Sequence[GroupRows], count: int) -> list[_Share]:
    """The shares with groups that are cut into as many pieces, the largest piece first."""
    found = list(shares)
    pieces = [piece for group in groups for piece in group.cut(count)]
    for piece in sorted(pieces, key=lambda it: -(it.own_tokens + it.prompt_tokens)):
        best = _best(found, piece)
        found[best] = found[best].taking(piece)
    return found


def _best(shares: Sequence[_Share], given: GroupRows) -> int:
    """The share that computes least with further rows; of several the one with fewest rows."""
    return min(range(len(shares)), key=lambda i: (shares[i].tokens_with(given), len(shares[i].rows)))


def _tokens(shares: Sequence[_Share]) -> list[int]:
    return [share.num_tokens for share in shares]
