"""What a loss may know of the rows of a minibatch: lengths, rewards, and counts over all ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from areal_sc.algorithms.loss_tokens import LossCounts, LossRows
from areal_sc.transport.packed_rows import PackedRows


@dataclass(frozen=True)
class RowNumbers:
    """Numbers of R rows.

    Attributes:
        counts: [6, R] int64: `num_tokens`, `group`, `episode`, `num_loss_tokens`,
            `num_episode_tokens` and `num_group_tokens` of `LossRows`.
        rewards: [R] float32.
    """

    counts: torch.Tensor
    rewards: torch.Tensor

    def take(self, rows: Sequence[int]) -> RowNumbers:
        """The numbers of the named rows, in their order."""
        chosen = torch.tensor(rows, dtype=torch.int64)
        return RowNumbers(self.counts[:, chosen], self.rewards[chosen])

    def with_tokens(
        self, of_token: torch.Tensor, position: torch.Tensor, fields: Mapping[str, Any]
    ) -> LossRows:
        """What a loss sees of the rows.

        Args: as the attributes of `LossRows`.
        """
        num_tokens, group, episode, *counts = self.counts
        rows = LossRows(of_token, position, num_tokens, self.rewards, group, episode, *counts)
        return replace(rows, fields=fields)


class _Origin(NamedTuple):
    """Where a row comes from; equal values are equal origins, on all ranks."""

    group: Hashable
    episode: Hashable
    reward: float


@dataclass(frozen=True)
class ShareOfRows:
    """What one rank tells the others of its rows of a minibatch.

    Attributes:
        num_rows: with at least one trained token.
        episode_tokens, group_tokens: trained tokens of each episode and group.
    """

    num_rows: int
    episode_tokens: Counter[Hashable]
    group_tokens: Counter[Hashable]


def count_rows(
    minibatches: Sequence[PackedRows],
    trained: Sequence[torch.Tensor],
    rank: int,
    gather: Callable[[list[ShareOfRows]], list[list[ShareOfRows]]],
) -> list[tuple[RowNumbers, LossCounts]]:
    """The numbers of this rank's rows of each minibatch, and what it holds on all ranks.

    Args:
        trained: [T] bool for each minibatch: the tokens that count.
        rank: names rows without metadata.
        gather: gives what every rank says of its rows, once for each row, and takes what this one
            says.
    """
    origins = [_origins(rows, rank) for rows in minibatches]
    tokens = [sums_of_rows(rows, mask) for rows, mask in zip(minibatches, trained, strict=True)]
    everyone = gather([_share(*pair) for pair in zip(origins, tokens, strict=True)])
    counted = []
    for index, rows in enumerate(minibatches):
        each = [of_rank[index] for of_rank in everyone]
        in_episodes = sum((it.episode_tokens for it in each), Counter[Hashable]())
        in_groups = sum((it.group_tokens for it in each), Counter[Hashable]())
        table = [
            rows.lengths,
            _numbered(it.group for it in origins[index]),
            _numbered(it.episode for it in origins[index]),
            tokens[index],
            [in_episodes[it.episode] for it in origins[index]],
            [in_groups[it.group] for it in origins[index]],
        ]
        numbers = RowNumbers(
            torch.tensor(table, dtype=torch.int64).view(len(table), rows.num_rows),
            torch.tensor([it.reward for it in origins[index]], dtype=torch.float32),
        )
        counts = LossCounts(
            tokens=in_groups.total(),
            sequences=sum(it.num_rows for it in each),
            episodes=len(in_episodes),
            prompts=len(in_groups),
        )
        counted.append((numbers, counts))
    return counted


def sums_of_rows(rows: PackedRows, mask: torch.Tensor) -> list[int]:
    """How many tokens of each row are in a [T] mask."""
    if not rows.num_rows:
        return []
    lengths = torch.tensor(rows.lengths)
    of_token = torch.repeat_interleave(torch.arange(rows.num_rows), lengths)
    counted: list[int] = torch.bincount(of_token[mask], minlength=rows.num_rows).tolist()
    return counted


def _origins(rows: PackedRows, rank: int) -> list[_Origin]:
    if rows.metadata is not None:
        return [_Origin(it.group_id, (it.group_id, it.episode), it.reward) for it in rows.metadata]
    alone = [(f"rank {rank}", number) for number in range(rows.num_rows)]
    return [_Origin(it, it, 0.0) for it in alone]


def _share(origins: Sequence[_Origin], tokens: Sequence[int]) -> ShareOfRows:
    in_episodes, in_groups = Counter[Hashable](), Counter[Hashable]()
    for origin, count in zip(origins, tokens, strict=True):
        in_episodes[origin.episode] += count
        in_groups[origin.group] += count
    return ShareOfRows(sum(count > 0 for count in tokens), in_episodes, in_groups)


def _numbered(ids: Iterable[Hashable]) -> list[int]:
    """Numbers from 0 in place of ids, in order of appearance."""
    numbers: dict[Hashable, int] = {}
    return [numbers.setdefault(it, len(numbers)) for it in ids]
