"""What the forwards of an update give of the tokens of some rows, for whoever records it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch

from areal_sc.metadata import RowMetadata
from areal_sc.transport.packed_rows import PackedRows


class TracedRow(NamedTuple):
    """A row that an update has trained; [N] float32 on the CPU, of its N trained tokens.

    Attributes:
        minibatch: number within the update, from 0.
        gaps: nats, proximal log-probability less the sampler's; without a proximal one, that of the
            update's own forward. NaN: the token went through no forward.
        entropies: nats, of the update's own forward.
        advantages: of each token.
    """

    metadata: RowMetadata
    minibatch: int
    gaps: torch.Tensor
    entropies: torch.Tensor
    advantages: torch.Tensor


class UpdateTrace:
    """Collects the outputs of a language model's forwards.

    Args:
        is_wanted: chooses the rows.
    """

    def __init__(self, is_wanted: Callable[[RowMetadata], bool]) -> None:
        self._is_wanted = is_wanted
        self._minibatches: list[_Minibatch] = []

    def begin(self, number: int, rows: PackedRows) -> None:
        """The next outputs are of tokens of these rows, which have metadata and advantages."""
        wanted = torch.tensor(
            [self._is_wanted(row) for row in rows.metadata or ()], dtype=torch.bool
        )
        lengths = torch.tensor(rows.lengths, dtype=torch.int64)
        self._minibatches.append(_Minibatch(number, rows, wanted.repeat_interleave(lengths), []))

    def add(self, token_index: torch.Tensor, outputs: torch.Tensor) -> None:
        """Takes the outputs of a micro-batch.

        Args:
            token_index: [N] int64 on the CPU, places among the tokens of the minibatch.
            outputs: [2, N] log-probabilities and entropies, without gradient.
        """
        minibatch = self._minibatches[-1]
        places = minibatch.is_wanted[token_index].nonzero().flatten()
        if len(places):
            found = outputs.index_select(1, places.to(outputs.device))
            minibatch.outputs.append((token_index[places], found))

    def rows(self) -> Iterator[TracedRow]:
        """The rows that were asked for, of all minibatches."""
        for minibatch in self._minibatches:
            if minibatch.is_wanted.any():
                yield from minibatch.traced()


class _Minibatch(NamedTuple):
    number: int
    rows: PackedRows
    is_wanted: torch.Tensor  # [T] bool
    outputs: list[tuple[torch.Tensor, torch.Tensor]]

    def traced(self) -> Iterator[TracedRow]:
        rows, fields = self.rows, self.rows.fields
        logprobs, entropies = values = torch.full((2, rows.num_tokens), torch.nan)
        for index, outputs in self.outputs:
            values[:, index] = outputs.float().cpu()
        if (proximal := fields.get("proximal_logprobs")) is not None:
            # the first minibatch may have none: its own forward is that of the proximal policy
            is_given = ~(logprobs.isnan() | proximal.isnan())
            logprobs = torch.where(is_given, proximal, logprobs)
        gaps = logprobs - fields["behavior_logprobs"]
        for metadata, begin in zip(rows.metadata or (), rows.starts, strict=True):
            if self.is_wanted[begin]:
                tokens = slice(begin, begin + metadata.sequence_length)
                mask = fields["loss_mask"][tokens].bool()
                its = (it[tokens][mask] for it in (gaps, entropies, fields["advantages"]))
                yield TracedRow(metadata, self.number, *its)
