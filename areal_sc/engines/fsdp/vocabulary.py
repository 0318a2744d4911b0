"""Which rows of embeddings and output layer a rank keeps, and how these get their gradients.

Autograd would make gradients of all rows, one for each of the two, and hold both where they are
tied, beside the sum of earlier micro-batches. Wherever FSDP does not have them, gradients are added
to that sum at once; those of embeddings to the rows that were looked up.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from areal_sc.algorithms.logprobs import gradient_of
from areal_sc.engines.fsdp.spread_vocabulary import SpreadRows, spread_embedding
from areal_sc.engines.training.process_group import ProcessGroup, memory_of
from areal_sc.sizing.output_layer import piece_bytes


def spread_vocabulary(
    causal_lm: Any, group: ProcessGroup, dtype: torch.dtype, most_tokens: int = 0
) -> tuple[set[nn.Parameter], list[SpreadRows]]:
    """Leaves each rank its rows of embeddings and output layer, without values, where it can.

    It can where the embeddings look rows up and do no more, and no third module has these rows; of
    tied ones, either both or none.

    Args:
        causal_lm: its logits are the product of the output layer and the hidden states.
        group: ranks that have the same rows so far.
        dtype: in which the model computes.
        most_tokens: that a rank computes in a micro-batch; 0: not known.
    Returns: the parameters that FSDP is to leave alone; and how they are spread, that of the output
        layer last. Nothing where this rank has all of them.
    """
    embeddings, head = causal_lm.get_input_embeddings(), causal_lm.get_output_embeddings()
    if not _is_plain(embeddings) or _has_other_users(causal_lm, embeddings, head):
        return set(), []
    spread = {id(p): p for p in (embeddings.weight, head.weight)}
    own = {key: _own_rows(weight, group) for key, weight in spread.items()}
    pieces = piece_bytes(group.device.type, memory_of(group.device))
    rows_of = {
        key: SpreadRows(len(weight), group, dtype, pieces, most_tokens)
        for key, weight in spread.items()
    }
    of_embeddings, of_head = rows_of[id(embeddings.weight)], rows_of[id(head.weight)]
    embeddings.weight, head.weight = own[id(embeddings.weight)], own[id(head.weight)]
    if group.size == 1:
        embeddings.forward = partial(_look_up, embeddings, dtype)
        return set(own.values()), []
    embeddings.forward = partial(_look_up_spread, embeddings, of_embeddings, head, of_head)
    return set(own.values()), list(rows_of.values())


def look_up_whole(causal_lm: Any) -> None:
    """Embeddings that this rank has, and not FSDP, add their gradients at once, where they can."""
    embeddings = causal_lm.get_input_embeddings()
    if _is_plain(embeddings):
        embeddings.forward = partial(_look_up, embeddings, embeddings.weight.dtype)


def _is_plain(embeddings: Any) -> bool:
    """Whether it looks rows up and does no more."""
    does_more = embeddings.max_norm is not None or embeddings.scale_grad_by_freq
    is_plain = type(embeddings).forward is nn.Embedding.forward and not does_more
    return is_plain and "weight" in embeddings._parameters


def _has_other_users(causal_lm: nn.Module, *modules: Any) -> bool:
    """Whether a parameter of these modules is one of another module, too."""
    own = {parameter for module in modules for parameter in module.parameters()}
    others = (module for module in causal_lm.modules() if module not in modules)
    return any(own & set(other.parameters(recurse=False)) for other in others)


def _own_rows(weight: nn.Parameter, group: ProcessGroup) -> nn.Parameter:
    share = -(-len(weight) // group.size)
    own = weight.detach()[group.rank * share : (group.rank + 1) * share]
    return nn.Parameter(torch.empty_like(own), requires_grad=weight.requires_grad)


def _look_up_spread(
    own: nn.Embedding, rows: SpreadRows, head: nn.Linear, of_head: SpreadRows, input: torch.Tensor
) -> torch.Tensor:
    """The forward of an embedding of which this rank has some rows.

    The output layer comes while the layers compute: its memory is needed behind them anyway.
    """
    found = spread_embedding(own.weight, input, rows, own.padding_idx)
    if rows is not of_head and not rows.meets_once:
        rows.let_go()
    of_head.prefetch(head.weight)
    return found


def _look_up(own: nn.Embedding, dtype: torch.dtype, input: torch.Tensor) -> torch.Tensor:
    """The forward of an embedding of which this rank has all rows, in this dtype."""
    found: torch.Tensor = _Lookup.apply(  # type: ignore[no-untyped-call]
        own.weight, input, own.padding_idx
    )
    return found.to(dtype)


class _Lookup(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, weight: torch.Tensor, token_ids: torch.Tensor, padding_idx: int | None
    ) -> torch.Tensor:
        ctx.save_for_backward(weight, token_ids)
        ctx.padding_idx = padding_idx
        return F.embedding(token_ids, weight)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[None, ...]:
        weight, token_ids = ctx.saved_tensors
        if ctx.padding_idx is not None:
            grad = grad.masked_fill((token_ids == ctx.padding_idx)[..., None], 0)
        gradient_of(weight).index_add_(0, token_ids.flatten(), grad.flatten(0, -2))
        return None, None, None
