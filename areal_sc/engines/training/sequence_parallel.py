"""Sequence parallelism in the manner of Ulysses: a rank has some tokens, or some heads of all.

Everywhere but in attention a rank of a sequence group computes its own stretch of the packed
tokens. For attention the ranks exchange: each gets all tokens for its share of the heads, and gives
the results back. The stretches are equally long; what the last ones lack is padding that nobody
reads.

    4 heads, 6 tokens, 2 ranks      tokens 0 1 2 | 3 4 5
    rank 0   heads a b c d          becomes, in attention, tokens 0 … 5 of heads a b
    rank 1   heads a b c d                                              of heads c d
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from areal_sc.config.parallel_settings import ParallelConfig
from areal_sc.engines.rotary import rope_limits
from areal_sc.engines.training.process_group import ProcessGroup
from areal_sc.errors import ModelError


@dataclass(frozen=True)
class SequencePart:
    """This rank's stretch of the tokens of a micro-batch.

    Attributes:
        num_tokens: of the micro-batch, T.
        group: the sequence group.
    """

    num_tokens: int
    group: ProcessGroup

    @property
    def length(self) -> int:
        """Length of each rank's stretch, C, padding included."""
        return -(-self.num_tokens // self.group.size)

    @property
    def own(self) -> range:
        """The tokens of this rank; there may be none."""
        first = min(self.num_tokens, self.group.rank * self.length)
        return range(first, min(self.num_tokens, first + self.length))

    def stretch(self, values: torch.Tensor) -> torch.Tensor:
        """[..., C] of values [..., T], on the right the padding, which is 0."""
        own = values[..., self.own.start : self.own.stop]
        return F.pad(own, (0, self.length - len(self.own)))

    def to_heads(self, tensor: torch.Tensor) -> torch.Tensor:
        """[1, H, C, D] of this rank's tokens -> [1, H / size, T, D] of this rank's heads.

        Key-value heads that are fewer than ranks go to several of them.
        """
        size = self.group.size
        if tensor.shape[1] < size:
            tensor = tensor.repeat_interleave(size // tensor.shape[1], 1)
        parts = tensor[0].reshape(size, -1, *tensor.shape[2:])  # [rank, H / size, C, D]
        received = _exchange(parts, self.group)
        return received.transpose(0, 1).flatten(1, 2)[None, :, : self.num_tokens]

    def to_tokens(self, tensor: torch.Tensor) -> torch.Tensor:
        """[1, T, H / size, D] of this rank's heads -> [1, C, H, D] of this rank's tokens."""
        missing = self.length * self.group.size - self.num_tokens
        padded = F.pad(tensor[0], (0, 0, 0, 0, 0, missing))
        parts = padded.reshape(self.group.size, self.length, *tensor.shape[2:])
        received = _exchange(parts, self.group)
        return received.transpose(0, 1).flatten(1, 2)[None]

    def own_heads(self, values: torch.Tensor) -> torch.Tensor:
        """[H / size] of one value for each head, [H]."""
        return values.chunk(self.group.size)[self.group.rank]


def check_sequence_parallel(causal_lm: Any, parallel: ParallelConfig, *, packs: bool) -> None:
    """Raises: ModelError, ConfigError: the ranks would not compute what one rank computes."""
    if parallel.sequence == 1:
        return
    name, config = type(causal_lm).__name__, causal_lm.config.get_text_config()
    way_out = "set actor.parallel.sequence=1, and more actor.parallel.data"
    if not packs:
        raise ModelError(
            f"{name} cannot attend within packed rows by transformers' attention interface, "
            f"through which the ranks of a sequence group exchange heads: {way_out}"
        )
    if rope := rope_limits(config):
        raise ModelError(
            f"{name} has {', '.join(rope)} rotary embeddings, which depend on the length of a "
            f"whole row, and a rank of a sequence group sees a part of it: {way_out}"
        )
    heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    parallel.check_heads(heads, kv_heads)


def _exchange(parts: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
    """[size, ...]: part n goes to rank n; in its place comes what rank n has for this one."""
    exchanged: torch.Tensor = _Exchange.apply(parts, group)  # type: ignore[no-untyped-call]
    return exchanged


class _Exchange(torch.autograd.Function):
    """It is its own reverse, and so its own gradient."""

    @staticmethod
    def forward(ctx: Any, parts: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
        ctx.group = group
        parts = parts.contiguous()
        received = torch.empty_like(parts)
        dist.all_to_all_single(received, parts, group=group.handle)
        return received

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _Exchange.apply(grad, ctx.group), None  # type: ignore[no-untyped-call]
