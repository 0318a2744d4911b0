"""Embeddings and output layer that no rank ever has as a whole.

Each has one row a token of the vocabulary, and a rank keeps some rows. A few rows of each rank at
a time are gathered, used and dropped; their gradients are added up over the ranks, and each rank
keeps those of its own.

    rows of the matrix      0 1 2 3 | 4 5 6 7      of rank 0 | of rank 1
    first piece             0 1       4 5
    second piece                2 3       6 7

Gradients are added to `grad` of the rank's rows piece by piece, and not handed to autograd, which
would hold those of tied embeddings and output layer twice until both are there.

On a GPU the matrix is one piece as a rule. That of the output layer is on its way while the layers
before it compute, and its gradients while they go backward. Embeddings are not gathered where the
ranks' tokens are fewer than the rows: each rank looks up those of its rows that others ask for.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from areal_sc.algorithms.logprobs import gradient_of
from areal_sc.engines.training.process_group import ProcessGroup


@dataclass(eq=False)
class SpreadRows:
    """How the rows of a matrix [R, H] are spread over the ranks of a group.

    Attributes:
        num_rows: R.
        group: several ranks; each has a run of rows, the ranks before it those above.
        dtype: in which they are gathered; gradients are float32.
        piece_bytes: in float32 of what is gathered at a time.
        most_tokens: that a rank looks up in a micro-batch; 0: not known.
        meets_once: the matrix is gathered, and gradients of it are reduced, once between two calls
            of `finish`: whatever else the ranks do then, they do not meet here.

    Rows and gradients that a rank keeps may lie in host memory: what is gathered is on its device.
    """

    num_rows: int
    group: ProcessGroup
    dtype: torch.dtype
    piece_bytes: int
    most_tokens: int = 0
    meets_once: bool = False
    _held: tuple[torch.Tensor, dist.Work] | None = None
    _sums: tuple[torch.Tensor, torch.Tensor] | None = None
    _leaving: tuple[torch.Tensor, torch.Tensor, dist.Work] | None = None

    @property
    def share(self) -> int:
        """Rows of each rank; the last ones may have fewer."""
        return -(-self.num_rows // self.group.size)

    def pieces(self, width: int) -> Iterator[range]:
        """Which of each rank's rows go together, at least one of each.

        Args:
            width: H.
        """
        step = max(1, self.piece_bytes // (4 * width * self.group.size))
        step = self.share if self.meets_once else step
        for first in range(0, self.share, step):
            yield range(first, min(self.share, first + step))

    def rows_in(self, piece: range, device: torch.device) -> torch.Tensor:
        """[M] int64: rows of the matrix that are in the gathered piece, in its order.

        Behind the last row of the matrix there may be more, which are none.
        """
        firsts = torch.arange(self.group.size, device=device)[:, None] * self.share
        rows = (firsts + torch.arange(piece.start, piece.stop, device=device)).flatten()
        return rows[: self.num_rows_in(piece)]

    def places_in(self, piece: range, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """[N] whether each of these rows is in a piece, and [N] its place in it, else 0."""
        row_of_rank = rows % self.share
        is_in = (row_of_rank >= piece.start) & (row_of_rank < piece.stop)
        places = rows // self.share * len(piece) + row_of_rank - piece.start
        return is_in, places.masked_fill(~is_in, 0)

    def num_rows_in(self, piece: range) -> int:
        """Number of rows of the matrix in the gathered piece."""
        stops = (self.num_rows - rank * self.share for rank in range(self.group.size))
        return sum(max(0, min(stop, piece.stop) - piece.start) for stop in stops)

    def prefetch(self, own: torch.Tensor) -> None:
        """Begins to gather the matrix, if it is one piece, and not here."""
        piece = range(self.share)
        if self._held is None and next(iter(self.pieces(own.shape[1]))) == piece:
            self._held = self._begin_gather(own, piece)

    def gather(self, own: torch.Tensor, piece: range) -> torch.Tensor:
        """[M, H] of each rank's own [n, H]: the rows of the piece, as `rows_in`.

        A matrix of one piece stays here until its gradient is taken, or `let_go`.
        """
        self.prefetch(own)
        gathered, work = self._held or self._begin_gather(own, piece)
        work.wait()
        return gathered[: self.num_rows_in(piece)]

    def _begin_gather(self, own: torch.Tensor, piece: range) -> tuple[torch.Tensor, dist.Work]:
        sent = own.detach()[piece.start : piece.stop].to(self.group.device, self.dtype)
        return _gathered(_padded(sent, len(piece)), self.group)

    def let_go(self) -> None:
        """Nothing of the matrix is held any more."""
        self._held = None

    def new_gradient(self, own: torch.Tensor, num_rows: int) -> torch.Tensor:
        """[M, H] for the gradient of M rows, those of a piece: zeros, or what is there."""
        if self._sums is not None:
            return self._sums[1]
        return own.new_zeros(num_rows, own.shape[1], device=self.group.device)

    def take_gradient(self, own: torch.Tensor, gradient: torch.Tensor, piece: range) -> None:
        """Adds the mean of all ranks' gradients of a piece to those of this rank, as FSDP does.

        They are there after `finish`.

        Args:
            own: [n, H] this rank's rows.
            gradient: [M, H] float32.
        """
        if self.meets_once:
            self._sums = own, gradient
            return
        self.let_go()
        self._begin_reduction(own, gradient, piece)
        if len(piece) < self.share:
            self._add_arrived()

    def _begin_reduction(self, own: torch.Tensor, gradient: torch.Tensor, piece: range) -> None:
        self._add_arrived()  # those of tied embeddings and output layer follow each other
        gathered = _padded(gradient, self.group.size * len(piece))
        summed = gathered.new_empty(len(piece), gathered.shape[1])
        work = self.group.torch_group._reduce_scatter_base(
            summed, gathered, dist.ReduceScatterOptions()
        )
        self._leaving = gradient_of(own)[piece.start : piece.stop], summed, work

    def _add_arrived(self) -> None:
        if self._leaving is not None:
            target, summed, work = self._leaving
            work.wait()
            target.add_(summed[: len(target)].to(target.device), alpha=1 / self.group.size)
            self._leaving = None

    def finish(self) -> None:
        """The gradients so far are in `grad` of the rows. All ranks make the call."""
        if self._sums is not None:
            own, gradient = self._sums
            self._sums = None
            self._begin_reduction(own, gradient, range(self.share))
        self._add_arrived()

    def forget_gradients(self) -> None:
        """Those that are not in `grad` yet, of an update that has failed."""
        self._sums = self._leaving = None

    def moves_less(self, own: torch.Tensor, token_ids: torch.Tensor) -> bool:
        """Whether to look rows up where they are moves less than the matrix; alike on all ranks."""
        num_tokens = self.group.size * self.most_tokens
        is_less = len(token_ids) <= self.most_tokens and 0 < num_tokens < self.num_rows
        return is_less and not self.meets_once and own.device == self.group.device

    def look_up(
        self, own: torch.Tensor, token_ids: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """[N, H] of [N] token ids, from the ranks that have them.

        Returns: also the places of all ranks' tokens in the rows of this one, for `add_looked_up`.
        """
        missing = self.most_tokens - len(token_ids)
        asked, work = _gathered(F.pad(token_ids, (0, missing), value=-1), self.group)
        work.wait()
        local = asked - self.group.rank * self.share
        local = torch.where((local >= 0) & (local < len(own)), local, -1)
        found = own.detach().to(self.dtype).index_select(0, local.clamp(min=0))
        found.masked_fill_((local < 0)[:, None], 0)
        summed = found.new_empty(self.most_tokens, own.shape[1])
        self.group.torch_group._reduce_scatter_base(
            summed, found, dist.ReduceScatterOptions()
        ).wait()
        return summed[: len(token_ids)], local

    def add_looked_up(
        self, own: torch.Tensor, grad: torch.Tensor, local: torch.Tensor, padding: int | None
    ) -> None:
        """Adds the mean of all ranks' gradients [N, H] of what `look_up` gave.

        Args: padding: a row of the matrix that gets none.
        """
        gathered, work = _gathered(_padded(grad, self.most_tokens), self.group)
        work.wait()
        is_foreign = local < 0
        if padding is not None:
            is_foreign |= local == padding - self.group.rank * self.share
        gathered.masked_fill_(is_foreign[:, None], 0)
        target, ids = gradient_of(own), local.clamp(min=0)
        for of_rank in range(0, len(ids), self.most_tokens):
            part = slice(of_rank, of_rank + self.most_tokens)
            values = gathered[part].to(target.dtype)
            target.index_add_(0, ids[part], values, alpha=1 / self.group.size)


def _gathered(own: torch.Tensor, group: ProcessGroup) -> tuple[torch.Tensor, dist.Work]:
    """What all ranks have, one after the other, and until when it comes."""
    gathered = own.new_empty(group.size * len(own), *own.shape[1:])
    # `dist.all_gather` would copy each rank's part once more on a GPU, and the function for one
    # tensor has another name in each version of torch
    work = group.torch_group._allgather_base(gathered, own.contiguous())
    return gathered, work


def spread_embedding(
    weight: torch.Tensor, token_ids: torch.Tensor, rows: SpreadRows, padding_idx: int | None = None
) -> torch.Tensor:
    """[..., H] in `rows.dtype`: as `nn.Embedding`. All ranks of the group make the call.

    The gradient is added to `weight.grad`, and given to nobody else.

    Args:
        weight: [n, H] this rank's rows.
        token_ids: [...] int64, in the range of all rows; of any number on each rank.
        padding_idx: a token whose row gets no gradient.
    """
    found: torch.Tensor = _SpreadEmbedding.apply(  # type: ignore[no-untyped-call]
        weight, token_ids.flatten(), rows, padding_idx
    )
    return found.view(*token_ids.shape, weight.shape[1])


def _padded(values: torch.Tensor, num_rows: int) -> torch.Tensor:
    missing = num_rows - len(values)
    return F.pad(values, (0, 0, 0, missing)) if missing else values


class _SpreadEmbedding(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        weight: torch.Tensor,
        token_ids: torch.Tensor,
        rows: SpreadRows,
        padding_idx: int | None,
    ) -> torch.Tensor:
        ctx.rows, ctx.padding_idx = rows, padding_idx
        ctx.are_looked_up = rows.moves_less(weight, token_ids)
        if ctx.are_looked_up:
            found, local = rows.look_up(weight, token_ids)
            ctx.save_for_backward(weight, local)
            return found
        ctx.save_for_backward(weight, token_ids)
        found = token_ids.new_zeros(len(token_ids), weight.shape[1], dtype=rows.dtype)
        for piece in rows.pieces(weight.shape[1]):
            is_in, places = rows.places_in(piece, token_ids)
            # which tokens are in it stays on the device: the host would wait to know their number
            of_piece = rows.gather(weight, piece).index_select(0, places)
            torch.where(is_in[:, None], of_piece, found, out=found)
        return found

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[None, ...]:
        weight, token_ids = ctx.saved_tensors
        rows = ctx.rows
        if ctx.are_looked_up:
            rows.add_looked_up(weight, grad, token_ids, ctx.padding_idx)
            return None, None, None, None
        for piece in rows.pieces(weight.shape[1]):
            is_in, places = rows.places_in(piece, token_ids)
            if ctx.padding_idx is not None:
                is_in &= token_ids != ctx.padding_idx
            gathered = rows.new_gradient(weight, rows.num_rows_in(piece))
            of_piece = grad.to(weight.dtype).masked_fill(~is_in[:, None], 0)
            gathered.index_add_(0, places, of_piece)
            rows.take_gradient(weight, gathered, piece)
        return None, None, None, None
