"""Embeddings and output layer that no rank ever has as a whole.

Each has one row a token of the vocabulary, and a rank keeps some rows. A few rows of each rank at
a time are gathered, used and dropped; their gradients are added up over the ranks, and each rank
keeps those of its own.

    rows of the matrix      0 1 2 3 | 4 5 6 7      of rank 0 | of rank 1
    first piece             0 1       4 5
    second piece                2 3       6 7
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from areal_sc.algorithms.logprobs import (
    VocabularyPart,
    entropy_gradient,
    gradient_product,
    part_of,
    scaled_logits,
)
from areal_sc.engines.fsdp.handle import PIECE_BYTES
from areal_sc.engines.training.process_group import ProcessGroup


@dataclass(frozen=True)
class SpreadRows:
    """How the rows of a matrix [R, H] are spread over the ranks of a group.

    Attributes:
        num_rows: R.
        group: each rank has a run of rows, the ranks before it those above.
        dtype: in which they are gathered; gradients are float32.
    """

    num_rows: int
    group: ProcessGroup
    dtype: torch.dtype

    @property
    def share(self) -> int:
        """Rows of each rank; the last ones may have fewer."""
        return -(-self.num_rows // self.group.size)

    def pieces(self, width: int) -> Iterator[range]:
        """Which of each rank's rows go together, at least one of each.

        Args:
            width: H.
        """
        step = max(1, PIECE_BYTES // (4 * width * self.group.size))
        for first in range(0, self.share, step):
            yield range(first, min(self.share, first + step))

    def rows_in(self, piece: range, device: torch.device) -> torch.Tensor:
        """[M] int64: rows of the matrix that are in the gathered piece, in its order.

        Behind the last row of the matrix there may be more, which are none.
        """
        firsts = torch.arange(self.group.size, device=device)[:, None] * self.share
        rows = (firsts + torch.arange(piece.start, piece.stop, device=device)).flatten()
        return rows[rows < self.num_rows]

    def gather(self, own: torch.Tensor, piece: range) -> torch.Tensor:
        """[ranks * len(piece), H] of each rank's own [n, H]; rows that are none are 0."""
        sent = _padded(own[piece.start : piece.stop].to(self.dtype), len(piece))
        if self.group.size == 1:
            return sent
        gathered = sent.new_empty(self.group.size * len(piece), sent.shape[1])
        parts = list(torch.split(gathered, len(piece)))
        dist.all_gather(parts, sent.contiguous(), group=self.group.torch_group)
        return gathered

    def add_averaged(self, grad: torch.Tensor, gathered: torch.Tensor, piece: range) -> None:
        """Adds to this rank's [n, H] the mean of all ranks' gradients of a piece, as FSDP does.

        Args:
            gathered: [at most ranks * len(piece), H] float32.
        """
        gathered = _padded(gathered, self.group.size * len(piece))
        own = gathered
        if self.group.size > 1:
            own = gathered.new_empty(len(piece), gathered.shape[1])
            parts = list(torch.split(gathered, len(piece)))
            dist.reduce_scatter(own, parts, group=self.group.torch_group)
        target = grad[piece.start : piece.stop]
        target.add_(own[: len(target)], alpha=1 / self.group.size)


def spread_embedding(
    weight: torch.Tensor, token_ids: torch.Tensor, rows: SpreadRows, padding_idx: int | None = None
) -> torch.Tensor:
    """[..., H] in `rows.dtype`: as `nn.Embedding`. All ranks of the group make the call.

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
    """As `chunked_logprobs`. All ranks of the group make the call, and go backward through it.

    Args:
        weight: [n, H] this rank's rows.
        bias: of all rows.
        vocabulary: of which all rows are a part; None: all of it.
    """
    logprobs, entropy = _SpreadLogprobs.apply(  # type: ignore[no-untyped-call]
        hidden, weight, bias, targets, temperatures, rows, chunk_tokens, vocabulary
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
        found = weight.new_empty(len(token_ids), weight.shape[1], dtype=rows.dtype)
        for piece in rows.pieces(weight.shape[1]):
            tokens, places = _tokens_of(piece, token_ids, rows.share)
            found[tokens] = rows.gather(weight, piece)[places]
        return found

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        weight, token_ids = ctx.saved_tensors
        rows, own = ctx.rows, torch.zeros_like(weight)
        for piece in rows.pieces(weight.shape[1]):
            tokens, places = _tokens_of(piece, token_ids, rows.share, ctx.padding_idx)
            gathered = own.new_zeros(rows.group.size * len(piece), weight.shape[1])
            gathered.index_add_(0, places, grad[tokens].to(own.dtype))
            rows.add_averaged(own, gathered, piece)
        return own, None, None, None


def _tokens_of(
    piece: range, token_ids: torch.Tensor, share: int, left_out: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """[N] indices of the tokens whose rows are in a piece, and [N] their places in it."""
    row_of_rank = token_ids % share
    is_in = (row_of_rank >= piece.start) & (row_of_rank < piece.stop)
    if left_out is not None:
        is_in &= token_ids != left_out
    tokens = is_in.nonzero()[:, 0]
    places = token_ids // share * len(piece) + row_of_rank - piece.start
    return tokens, places[tokens]


class _SpreadLogprobs(torch.autograd.Function):
    """Sums over the vocabulary grow piece by piece, relative to the highest logit so far."""

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
    ) -> tuple[torch.Tensor, torch.Tensor]:
        is_foreign = None
        if vocabulary is not None:
            targets, is_foreign = vocabulary.locate(targets, rows.num_rows)
        sums = _Sums.empty(hidden)
        for piece in rows.pieces(weight.shape[1]):
            in_piece = rows.rows_in(piece, hidden.device)
            values = rows.gather(weight, piece)[: len(in_piece)]
            own_bias = None if bias is None else bias[in_piece]
            tokens, places = _tokens_of(piece, targets, rows.share)
            for start in range(0, len(targets), chunk_tokens):
                part = slice(start, start + chunk_tokens)
                logits = scaled_logits(hidden[part], values, own_bias, part_of(temperatures, part))
                within = (tokens >= start) & (tokens < start + chunk_tokens)
                sums.of_targets[tokens[within]] = logits[tokens[within] - start, places[within]]
                sums.add(logits, part)
        if vocabulary is not None:
            sums.combine(vocabulary, is_foreign)
        normalizer = sums.peak + sums.total.log()
        logprobs = (sums.of_targets - sums.peak) - sums.total.log()
        entropy = sums.total.log() - sums.weighed / sums.total
        ctx.save_for_backward(
            hidden, weight, bias, targets, is_foreign, temperatures, normalizer, entropy
        )
        ctx.rows, ctx.chunk_tokens, ctx.vocabulary = rows, chunk_tokens, vocabulary
        ctx.set_materialize_grads(False)
        return logprobs, entropy

    @staticmethod
    def backward(
        ctx: Any, grad_logprobs: torch.Tensor | None, grad_entropy: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, ...]:
        hidden, weight, bias, targets, is_foreign, temperatures, normalizer, entropy = (
            ctx.saved_tensors
        )
        rows = ctx.rows
        if grad_logprobs is None:
            grad_logprobs = torch.zeros_like(normalizer)
        if grad_entropy is not None and temperatures is not None:
            grad_entropy = grad_entropy / temperatures
        scale = grad_logprobs if temperatures is None else grad_logprobs / temperatures
        of_targets = scale if is_foreign is None else scale.masked_fill(is_foreign, 0)
        grad_hidden = torch.zeros_like(hidden, dtype=normalizer.dtype)
        grad_weight = torch.zeros_like(weight)
        grad_bias = None if bias is None else torch.zeros_like(bias, dtype=normalizer.dtype)
        for piece in rows.pieces(weight.shape[1]):
            in_piece = rows.rows_in(piece, hidden.device)
            values = rows.gather(weight, piece)[: len(in_piece)]
            own_bias = None if bias is None else bias[in_piece]
            tokens, places = _tokens_of(piece, targets, rows.share)
            grad_values = torch.zeros_like(values, dtype=weight.dtype)
            for start in range(0, len(targets), ctx.chunk_tokens):
                part = slice(start, start + ctx.chunk_tokens)
                logits = scaled_logits(hidden[part], values, own_bias, part_of(temperatures, part))
                probabilities = logits.sub_(normalizer[part, None]).exp_()
                of_entropy: torch.Tensor | float = 0.0
                if grad_entropy is not None:
                    of_entropy = entropy_gradient(probabilities, entropy[part], grad_entropy[part])
                # d logprob_t / d logit_v = (1[v = target] - p_v) / temperature
                grad_logits = probabilities.mul_(-scale[part, None]).add_(of_entropy)
                within = tokens[(tokens >= start) & (tokens < start + ctx.chunk_tokens)]
                at = places[(tokens >= start) & (tokens < start + ctx.chunk_tokens)]
                grad_logits[within - start, at] += of_targets[within]
                grad_hidden[part] += gradient_product(grad_logits, values)
                grad_values += gradient_product(grad_logits.t(), hidden[part])
                if grad_bias is not None:
                    grad_bias[in_piece] += grad_logits.sum(0)
            rows.add_averaged(grad_weight, grad_values, piece)
        if ctx.vocabulary is not None:
            ctx.vocabulary.sum(grad_hidden)
        if grad_bias is not None:
            grad_bias = grad_bias.to(bias.dtype)
        return grad_hidden.to(hidden.dtype), grad_weight, grad_bias, None, None, None, None, None


@dataclass
class _Sums:
    """Of each token over the logits so far; [N] float32, relative to the peak.

    Attributes:
        peak: the highest logit.
        total: sum of exp(logit - peak).
        weighed: sum of (logit - peak) exp(logit - peak).
        of_targets: logit of the target, 0 while it is not known.
    """

    peak: torch.Tensor
    total: torch.Tensor
    weighed: torch.Tensor
    of_targets: torch.Tensor

    @classmethod
    def empty(cls, hidden: torch.Tensor) -> _Sums:
        dtype = torch.float64 if hidden.dtype == torch.float64 else torch.float32
        zeros = hidden.new_zeros(4, len(hidden), dtype=dtype)
        # a peak that every logit is above, and differences to which are finite
        zeros[0] = torch.finfo(dtype).min / 4
        return cls(*zeros)

    def add(self, logits: torch.Tensor, part: slice) -> None:
        """Those of the tokens of a part [C, M]; they are overwritten."""
        peak = torch.maximum(self.peak[part], logits.amax(-1))
        self._move(peak, part)
        gaps = logits.sub_(peak[:, None])
        exponentials = gaps.exp()
        self.total[part] += exponentials.sum(-1)
        # einsum keeps the product of the two from being stored
        self.weighed[part] += torch.einsum("nv,nv->n", exponentials, gaps)

    def _move(self, peak: torch.Tensor, part: slice) -> None:
        """Makes the sums relative to a higher peak."""
        fall = self.peak[part] - peak
        shrunk = fall.exp()
        self.weighed[part] = shrunk * (self.weighed[part] + self.total[part] * fall)
        self.total[part] *= shrunk
        self.peak[part] = peak

    def combine(self, vocabulary: VocabularyPart, is_foreign: torch.Tensor | None) -> None:
        """Over the ranks that have other parts of the vocabulary."""
        self._move(vocabulary.max(self.peak.clone()), slice(None))
        if is_foreign is not None:
            self.of_targets = self.of_targets.masked_fill(is_foreign, 0)
        self.total, self.weighed, self.of_targets = vocabulary.sum(
            torch.stack([self.total, self.weighed, self.of_targets])
        )


class _SpreadForward:
    """The forward of an embedding."""

    def __init__(self, embeddings: nn.Embedding, rows: SpreadRows) -> None:
        self._embeddings = embeddings
        self._rows = rows

    def __call__(self, token_ids: torch.Tensor) -> torch.Tensor:
        own = self._embeddings
        return spread_embedding(own.weight, token_ids, self._rows, own.padding_idx)


def spread_vocabulary(
    causal_lm: Any, group: ProcessGroup, dtype: torch.dtype
) -> tuple[set[nn.Parameter], SpreadRows | None]:
    """Leaves each rank its rows of embeddings and output layer, without values, where it can.

    It can where the embeddings look rows up and do no more; of tied ones, either both or none.

    Args:
        causal_lm: its logits are the product of the output layer and the hidden states.
        group: ranks that have the same rows so far.
        dtype: in which the model computes.
    Returns: the parameters that FSDP is to leave alone; and how the output layer is spread.
    """
    embeddings, head = causal_lm.get_input_embeddings(), causal_lm.get_output_embeddings()
    is_plain = type(embeddings).forward is nn.Embedding.forward and embeddings.max_norm is None
    if not is_plain:
        return set(), None
    spread = {id(p): p for p in (embeddings.weight, head.weight)}
    own = {key: _own_rows(weight, group) for key, weight in spread.items()}
    of_embeddings = SpreadRows(len(embeddings.weight), group, dtype)
    of_head = SpreadRows(len(head.weight), group, dtype)
    embeddings.weight, head.weight = own[id(embeddings.weight)], own[id(head.weight)]
    embeddings.forward = _SpreadForward(embeddings, of_embeddings)
    return set(own.values()), of_head


def _own_rows(weight: nn.Parameter, group: ProcessGroup) -> nn.Parameter:
    share = -(-len(weight) // group.size)
    own = weight.detach()[group.rank * share : (group.rank + 1) * share]
    return nn.Parameter(torch.empty_like(own), requires_grad=weight.requires_grad)
