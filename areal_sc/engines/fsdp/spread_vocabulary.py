"""Embeddings and output layer that no rank ever has as a whole.

Each has one row a token of the vocabulary, and a rank keeps some rows. A few rows of each rank at
a time are gathered, used and dropped; their gradients are added up over the ranks, and each rank
keeps those of its own.

    rows of the matrix      0 1 2 3 | 4 5 6 7      of rank 0 | of rank 1
    first piece             0 1       4 5
    second piece                2 3       6 7

Gradients are added to `grad` of the rank's rows piece by piece, and not handed to autograd, which
would hold those of tied embeddings and output layer twice until both are there.
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


@dataclass(frozen=True)
class SpreadRows:
    """How the rows of a matrix [R, H] are spread over the ranks of a group.

    Attributes:
        num_rows: R.
        group: several ranks; each has a run of rows, the ranks before it those above.
        dtype: in which they are gathered; gradients are float32.
        piece_bytes: in float32 of what is gathered at a time.

    Rows and gradients that a rank keeps may lie in host memory: what is gathered is on its device.
    """

    num_rows: int
    group: ProcessGroup
    dtype: torch.dtype
    piece_bytes: int

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

    def gather(self, own: torch.Tensor, piece: range) -> torch.Tensor:
        """[M, H] of each rank's own [n, H]: the rows of the piece, as `rows_in`."""
        sent = own[piece.start : piece.stop].to(self.group.device, self.dtype)
        sent = _padded(sent, len(piece))
        gathered = sent.new_empty(self.group.size * len(piece), sent.shape[1])
        # `dist.all_gather` would copy each rank's part once more on a GPU, and the function for one
        # tensor has another name in each version of torch
        self.group.torch_group._allgather_base(gathered, sent.contiguous()).wait()
        return gathered[: self.num_rows_in(piece)]

    def new_gradient(self, own: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """[M, H] zeros for the gradient of the gathered values of a piece."""
        return torch.zeros_like(values, dtype=own.dtype)

    def take_gradient(self, own: torch.Tensor, gradient: torch.Tensor, piece: range) -> None:
        """Adds the mean of all ranks' gradients of a piece to those of this rank, as FSDP does.

        Args:
            own: [n, H] this rank's rows.
            gradient: [M, H] float32.
        """
        gathered = _padded(gradient, self.group.size * len(piece))
        summed = gathered.new_empty(len(piece), gathered.shape[1])
        self.group.torch_group._reduce_scatter_base(
            summed, gathered, dist.ReduceScatterOptions()
        ).wait()
        target = gradient_of(own)[piece.start : piece.stop]
        target.add_(summed[: len(target)].to(target.device), alpha=1 / self.group.size)


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
        ctx.save_for_backward(weight, token_ids)
        ctx.rows, ctx.padding_idx = rows, padding_idx
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
        for piece in rows.pieces(weight.shape[1]):
            is_in, places = rows.places_in(piece, token_ids)
            if ctx.padding_idx is not None:
                is_in &= token_ids != ctx.padding_idx
            size = rows.num_rows_in(piece), weight.shape[1]
            gathered = grad.new_zeros(size, dtype=weight.dtype)
            of_piece = grad.to(weight.dtype).masked_fill(~is_in[:, None], 0)
            gathered.index_add_(0, places, of_piece)
            rows.take_gradient(weight, gathered, piece)
        return None, None, None, None
