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

from areal_sc.algorithms.logprobs import (
    VocabularyPart,
    add_gradient_product,
    gradient_of,
    logits_gradient,
    output_logits,
    part_of,
)
from areal_sc.algorithms.vocabulary_sums import VocabularySums, is_fused, sums_over
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

    def add_averaged(self, weight: torch.Tensor, gathered: torch.Tensor, piece: range) -> None:
        """Adds the mean of all ranks' gradients of a piece to those of this rank, as FSDP does.

        Args:
            weight: [n, H] this rank's rows.
            gathered: [M, H] float32.
        """
        gathered = _padded(gathered, self.group.size * len(piece))
        own = gathered.new_empty(len(piece), gathered.shape[1])
        self.group.torch_group._reduce_scatter_base(
            own, gathered, dist.ReduceScatterOptions()
        ).wait()
        target = gradient_of(weight)[piece.start : piece.stop]
        target.add_(own[: len(target)].to(target.device), alpha=1 / self.group.size)


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


def spread_logprobs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    rows: SpreadRows,
    *,
    bias: torch.Tensor | None,
    temperatures: torch.Tensor | None,
    chunk_tokens: int,
    vocabulary: VocabularyPart | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes `chunked_logprobs` with an output layer whose rows are spread over the ranks of a
    group. All its ranks make the call, and go backward through it.

    The gradient of `weight` is added to `weight.grad`, and given to nobody else.

    Args:
        weight: [n, H] this rank's rows.
        bias: of all rows.
        vocabulary: of which all rows are a part; None: all of it.
    """
    keeps = torch.is_grad_enabled() and len(targets) <= chunk_tokens
    logprobs, entropy = _SpreadLogprobs.apply(  # type: ignore[no-untyped-call]
        hidden, weight, bias, targets, temperatures, rows, chunk_tokens, vocabulary, keeps
    )
    return logprobs, entropy


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
            is_in, places = _places_in(piece, token_ids, rows.share)
            # which tokens are in it stays on the device: the host would wait to know their number
            of_piece = rows.gather(weight, piece).index_select(0, places)
            torch.where(is_in[:, None], of_piece, found, out=found)
        return found

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[None, ...]:
        weight, token_ids = ctx.saved_tensors
        rows = ctx.rows
        for piece in rows.pieces(weight.shape[1]):
            is_in, places = _places_in(piece, token_ids, rows.share)
            if ctx.padding_idx is not None:
                is_in &= token_ids != ctx.padding_idx
            size = rows.num_rows_in(piece), weight.shape[1]
            gathered = grad.new_zeros(size, dtype=weight.dtype)
            of_piece = grad.to(weight.dtype).masked_fill(~is_in[:, None], 0)
            gathered.index_add_(0, places, of_piece)
            rows.add_averaged(weight, gathered, piece)
        return None, None, None, None


def _places_in(
    piece: range, token_ids: torch.Tensor, share: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """[T] whether the row of each token is in a piece, and [T] its place in it, else 0."""
    row_of_rank = token_ids % share
    is_in = (row_of_rank >= piece.start) & (row_of_rank < piece.stop)
    places = token_ids // share * len(piece) + row_of_rank - piece.start
    return is_in, places.masked_fill(~is_in, 0)


class _SpreadLogprobs(torch.autograd.Function):
    """Sums over the vocabulary grow piece by piece, relative to the highest logit so far.

    With one chunk, what the probabilities are made of is kept for a backward pass, [N, V].
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        targets: torch.Tensor,
        temperatures: torch.Tensor | None,
        rows: SpreadRows,
        chunk_tokens: int,
        vocabulary: VocabularyPart | None,
        keeps: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        is_foreign = None
        if vocabulary is not None:
            targets, is_foreign = vocabulary.locate(targets, rows.num_rows)
        sums, of_targets = _no_sums(hidden)
        kept = list[torch.Tensor]()
        for piece in rows.pieces(weight.shape[1]):
            values = rows.gather(weight, piece)
            own_bias = None if bias is None else bias[rows.rows_in(piece, hidden.device)]
            is_in, places = _places_in(piece, targets, rows.share)
            for start in range(0, len(targets), chunk_tokens):
                part = slice(start, start + chunk_tokens)
                logits = output_logits(hidden[part], values, own_bias)
                found = logits.gather(1, places[part, None])[:, 0]
                if temperatures is not None:
                    found = found / temperatures[part]
                of_targets[part].add_(found.masked_fill_(~is_in[part], 0))
                of_piece, for_backward = sums_over(logits, part_of(temperatures, part))
                if keeps:
                    kept += [for_backward, of_piece.peak.clone()]
                sums.part(part).add(of_piece)
                del logits, for_backward  # before those of the next chunk come
        if vocabulary is not None and is_foreign is not None:
            sums.move(vocabulary.max(sums.peak.clone()))
            stacked = torch.stack([sums.total, sums.weighed, of_targets.masked_fill(is_foreign, 0)])
            sums.total, sums.weighed, of_targets = vocabulary.sum(stacked)
        normalizer, entropy = sums.normalizer, sums.entropy
        logprobs = (of_targets - sums.peak) - sums.total.log()
        ctx.save_for_backward(
            hidden, weight, bias, targets, is_foreign, temperatures, normalizer, entropy, *kept
        )
        ctx.rows, ctx.chunk_tokens, ctx.vocabulary = rows, chunk_tokens, vocabulary
        ctx.set_materialize_grads(False)
        return logprobs, entropy

    @staticmethod
    def backward(
        ctx: Any, grad_logprobs: torch.Tensor | None, grad_entropy: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, ...]:
        hidden, weight, bias, targets, is_foreign, temperatures, normalizer, entropy, *kept = (
            ctx.saved_tensors
        )
        rows, (_, needs_weight, needs_bias) = ctx.rows, ctx.needs_input_grad[:3]
        if grad_logprobs is None:
            grad_logprobs = torch.zeros_like(normalizer)
        scale = grad_logprobs if temperatures is None else grad_logprobs / temperatures
        of_targets = scale if is_foreign is None else scale.masked_fill(is_foreign, 0)
        grad_hidden = torch.zeros_like(hidden, dtype=normalizer.dtype)
        grad_bias = torch.zeros_like(bias, dtype=normalizer.dtype) if needs_bias else None
        for number, piece in enumerate(rows.pieces(weight.shape[1])):
            values = rows.gather(weight, piece)
            in_piece = None if bias is None else rows.rows_in(piece, hidden.device)
            own_bias = None if bias is None else bias[in_piece]
            is_in, places = _places_in(piece, targets, rows.share)
            of_piece = of_targets.masked_fill(~is_in, 0)
            grad_values = torch.zeros_like(values, dtype=weight.dtype) if needs_weight else None
            for start in range(0, len(targets), ctx.chunk_tokens):
                part = slice(start, start + ctx.chunk_tokens)
                of_forward = None
                if kept:
                    of_forward, peak = kept[2 * number : 2 * number + 2]
                    if not is_fused(of_forward):
                        of_forward = of_forward * (peak - normalizer).exp()[:, None]
                grad_logits = logits_gradient(
                    *(hidden[part], values, own_bias, part_of(temperatures, part), places[part]),
                    *(normalizer[part], scale[part], of_piece[part], entropy[part]),
                    *(part_of(grad_entropy, part), of_forward),
                )
                add_gradient_product(grad_hidden[part], grad_logits, values)
                if grad_values is not None:
                    add_gradient_product(grad_values, grad_logits.t(), hidden[part])
                if grad_bias is not None:
                    grad_bias[in_piece] += grad_logits.sum(0, dtype=grad_bias.dtype)
            if grad_values is not None:
                rows.add_averaged(weight, grad_values, piece)
        if ctx.vocabulary is not None:
            ctx.vocabulary.sum(grad_hidden)
        if grad_bias is not None:
            grad_bias = grad_bias.to(bias.dtype)
        return grad_hidden.to(hidden.dtype), None, grad_bias, *(None,) * 6


def _no_sums(hidden: torch.Tensor) -> tuple[VocabularySums, torch.Tensor]:
    """The sums over no logits, and [N] zeros for the logits of the targets."""
    dtype = torch.float64 if hidden.dtype == torch.float64 else torch.float32
    zeros = hidden.new_zeros(4, len(hidden), dtype=dtype)
    # a peak that every logit is above, and differences to which are finite
    zeros[0] = torch.finfo(dtype).min / 4
    peak, total, weighed, of_targets = zeros
    return VocabularySums(peak, total, weighed), of_targets
