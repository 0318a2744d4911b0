"""Attention over the slot cache, for an unmodified Hugging Face model.

The model runs on one packed row of tokens (shape [1, T]): prompt tokens of some rows, then the last
token of every row. Its attention, alone in looking across tokens, is replaced through transformers'
`AttentionInterface`: it stores the new keys and values, then attends from each token to the entries
of its own row.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from areal_sc.engines.local.adapters import PassAdapters
from areal_sc.engines.local.slots import PrefillChunk, StepPlan
from areal_sc.engines.plain_attention import (
    AttentionRule,
    attend,
    attend_by_kernel,
    attend_by_scores,
    is_seen,
)
from areal_sc.errors import ModelError

ATTENTION_NAME = "areal_sc_slots"
_MAX_MASK_ELEMENTS = 1 << 24  # queries x entries of one padded batch of chunks
_LENGTH_STEP = 32  # cache lengths are multiples of this


def attention_forward(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """For transformers' `AttentionInterface`, by the name `ATTENTION_NAME`.

    Args:
        module: has an attribute `current_step`; see `CurrentStep`.
        sliding_window, softcap, s_aux: see `AttentionRule`.
    Raises: ModelError: the layer wants something else than causal attention.
    """
    asked = dict(kwargs, attention_mask=attention_mask)
    for unsupported in ("attention_mask", "position_bias"):
        if asked.get(unsupported) is not None:
            raise ModelError(
                f"embedded generation makes its own masks, but {type(module).__name__} asks for "
                f"{unsupported}"
            )
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    rule = AttentionRule(scale, sliding_window, softcap, s_aux)
    return module.current_step.attention.attend(query, key, value, rule), None


@dataclass
class CurrentStep:
    """What the layers of a model share: not all models hand arguments down to them.

    Attributes:
        attention: of the pass in progress.
        adapters: of its tokens; None: they have none.
    """

    attention: SlotAttention | None = None
    adapters: PassAdapters | None = None


class SlotCache:
    """Keys and values of all rows: for each attention of a pass two tensors [rows, H_kv, L, D].

    Most models attend once a layer, but some twice, or not in every layer. So a pass counts, and
    its first attention with a number tells the shapes. The capacity L and the rows grow by doubling
    as sequences need them.
    """

    def __init__(self, max_rows: int, max_length: int) -> None:
        self.num_rows = 1
        self.capacity = _LENGTH_STEP
        self._max_rows = max_rows
        self._max_length = max_length
        self._tables: list[tuple[torch.Tensor, torch.Tensor]] = []

    def table(
        self, number: int, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of one attention, whose new ones have the shapes [1, H_kv, T, D]."""
        if number == len(self._tables):
            self._tables.append((self._zeros_like(key), self._zeros_like(value)))
        return self._tables[number]

    def _zeros_like(self, new: torch.Tensor) -> torch.Tensor:
        # zeros, not empty: entries that are masked out must be finite
        return new.new_zeros(self.num_rows, new.shape[1], self.capacity, new.shape[-1])

    def reserve(self, num_rows: int, length: int) -> None:
        """Makes room for `num_rows` sequences of `length` tokens."""
        if num_rows <= self.num_rows and length <= self.capacity:
            return
        if num_rows > self.num_rows:
            self.num_rows = max(num_rows, min(2 * self.num_rows, self._max_rows))
        if length > self.capacity:
            capacity = max(length, min(2 * self.capacity, self._max_length))
            self.capacity = -(-capacity // _LENGTH_STEP) * _LENGTH_STEP
        for number, (keys, values) in enumerate(self._tables):
            self._tables[number] = (self._enlarged(keys), self._enlarged(values))

    def _enlarged(self, table: torch.Tensor) -> torch.Tensor:
        larger = self._zeros_like(table)
        larger[: table.shape[0], :, : table.shape[2]] = table
        return larger

    def clear_rows(self, rows: Sequence[int]) -> None:
        """Forgets all entries of rows."""
        present = [row for row in rows if row < self.num_rows]
        for tables in self._tables:
            for table in tables:
                table[present] = 0

    def copy_rows(self, pairs: Sequence[tuple[int, int]], length: int) -> None:
        """Copies `length` entries of each (source, target) rows; no row is both."""
        sources, targets = map(list, zip(*pairs, strict=True))
        for tables in self._tables:
            for table in tables:
                table[targets, :, :length] = table[sources, :, :length]


class SlotAttention:
    """Attention of one step: what all layers have in common is prepared once, by the first."""

    def __init__(self, plan: StepPlan, cache: SlotCache, positions: torch.Tensor) -> None:
        self._plan = plan
        self._cache = cache
        self._positions = positions
        self._num_rows = plan.num_rows
        self._length = plan.max_length
        self._num_attentions = 0
        self._write_tokens: torch.Tensor | None = None
        self._entries: dict[int, torch.Tensor] = {}  # by heads of keys
        # by window: 0 at the entries that each row's last token attends to, else -inf, [N, 1, 1, L]
        self._bias: dict[int | None, torch.Tensor] = {}
        self._batches = [_ChunkBatch(chunks, positions.device) for chunks in _batches(plan.chunks)]

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, rule: AttentionRule
    ) -> torch.Tensor:
        """The pass' next attention.

        Args:
            query: [1, H, T, D].
            key, value: [1, H_kv, T, D].
        Returns: [1, T, H, D_value].
        """
        keys, values = self._cache.table(self._num_attentions, key, value)
        self._num_attentions += 1
        num_heads = key.shape[1]
        if num_heads not in self._entries:
            self._entries[num_heads] = self._written_entries(num_heads)
        if rule.window not in self._bias:
            entries = torch.arange(self._length, device=query.device)
            of_last = self._positions[-self._num_rows :]
            seen = is_seen(entries, of_last, rule.window)[:, None, None]
            bias = torch.zeros(seen.shape, dtype=query.dtype, device=seen.device)
            self._bias[rule.window] = bias.masked_fill_(~seen, -torch.inf)
        self._store(keys, key, self._entries[num_heads])
        self._store(values, value, self._entries[num_heads])
        packed = query[0].transpose(0, 1)  # [T, H, D]
        if not self._batches:
            return self._attend_last(packed, keys, values, rule)[None]
        output = packed.new_empty(*packed.shape[:2], values.shape[-1])
        for batch in self._batches:
            batch.attend(packed, keys, values, rule, output)
        output[-self._num_rows :] = self._attend_last(packed[-self._num_rows :], keys, values, rule)
        return output[None]

    def _written_entries(self, num_heads: int) -> torch.Tensor:
        """[M * H_kv] int64: indices of new entries in a layer's [rows * H_kv * capacity, D]."""
        positions, device = self._positions, self._positions.device
        if self._plan.chunks:
            self._write_tokens = torch.from_numpy(self._plan.write_tokens).to(device)
            positions = positions[self._write_tokens]
        rows = torch.from_numpy(self._plan.write_rows).to(device)
        heads = rows[:, None] * num_heads + torch.arange(num_heads, device=device)
        return (heads * self._cache.capacity + positions[:, None]).flatten()

    def _store(self, table: torch.Tensor, new: torch.Tensor, entries: torch.Tensor) -> None:
        """Writes [1, H_kv, T, D] to the rows' entries."""
        packed = new[0].transpose(0, 1)
        if self._write_tokens is not None:
            packed = packed[self._write_tokens]
        head_dim = packed.shape[-1]
        table.view(-1, head_dim).index_copy_(0, entries, packed.reshape(-1, head_dim))

    def _attend_last(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        rule: AttentionRule,
    ) -> torch.Tensor:
        """One query a row: [N, H, D] -> [N, H, D_value]."""
        n, length = self._num_rows, self._length
        num_heads, num_kv_heads = query.shape[1], keys.shape[1]
        entries = (keys[:n, :, :length], values[:n, :, :length])
        bias = self._bias[rule.window]
        if not rule.is_plain:
            return attend_by_scores(query[:, :, None], *entries, bias == 0, rule)[:, :, 0]
        grouped = query.reshape(n, num_kv_heads, num_heads // num_kv_heads, -1)
        if query.dtype != torch.float32 or query.is_cuda:
            mask = bias.expand(n, 1, grouped.shape[2], length)
            attended = attend_by_kernel(grouped, *entries, mask=mask, scale=rule.scale)
            return attended.reshape(n, num_heads, -1)
        # for single queries on a CPU, batched products take 0.75 of the fused kernel's time
        flat_keys = keys[:n].flatten(0, 1)[:, :length]
        flat_values = values[:n].flatten(0, 1)[:, :length]
        scores = torch.bmm((grouped * rule.scale).flatten(0, 1), flat_keys.transpose(1, 2))
        scores = scores.view(n, num_kv_heads, -1, length).add_(bias)
        weights = torch.softmax(scores, dim=-1).flatten(0, 1)
        return torch.bmm(weights, flat_values).view(n, num_heads, -1)


class _ChunkBatch:
    """Chunks of similar length, padded to the longest for one attention call."""

    def __init__(self, chunks: list[PrefillChunk], device: torch.device) -> None:
        starts = np.array([chunk.start for chunk in chunks])
        counts = np.array([chunk.num_tokens for chunk in chunks])
        first_tokens = np.array([chunk.first_token for chunk in chunks])
        self._length = int((starts + counts).max())
        column = np.arange(counts.max())
        is_real = column < counts[:, None]
        column = np.where(is_real, column, 0)  # padding repeats a real token and is dropped
        queries = first_tokens[:, None] + column
        self._rows = torch.tensor([chunk.row for chunk in chunks], device=device)
        self._queries = torch.from_numpy(queries).to(device)  # [S, Q]
        self._real = torch.from_numpy(np.flatnonzero(is_real)).to(device)
        self._targets = torch.from_numpy(queries[is_real]).to(device)
        self._positions = torch.from_numpy(starts[:, None] + column).to(device)  # [S, Q]
        # where all start at 0, query and entry positions agree and plain causality is enough
        self._is_at_start = not starts.any()
        self._masks: dict[int | None, torch.Tensor] = {}

    def attend(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        rule: AttentionRule,
        output: torch.Tensor,
    ) -> None:
        """Fills the chunks' tokens in `output` [T, H, D_value]."""
        queries = query[self._queries].transpose(1, 2)
        entries = (keys[self._rows, :, : self._length], values[self._rows, :, : self._length])
        mask = partial(self._mask, rule.window)
        attended = attend(queries, *entries, rule, mask, is_at_start=self._is_at_start)
        attended = attended.transpose(1, 2).flatten(0, 1)
        output.index_copy_(0, self._targets, attended[self._real])

    def _mask(self, window: int | None) -> torch.Tensor:
        """[S, 1, Q, L] bool, which entries each query attends to."""
        if window not in self._masks:
            entries = torch.arange(self._length, device=self._positions.device)
            self._masks[window] = is_seen(entries, self._positions, window)[:, None]
        return self._masks[window]


def _batches(chunks: list[PrefillChunk]) -> Iterator[list[PrefillChunk]]:
    """Groups chunks so that at least half of each padded batch is real tokens."""
    batch: list[PrefillChunk] = []
    longest = 0
    for chunk in sorted(chunks, key=lambda c: (c.start > 0, -c.num_tokens)):
        longest = max(longest, chunk.end)
        if batch and (
            2 * chunk.num_tokens < batch[0].num_tokens
            or (len(batch) + 1) * batch[0].num_tokens * longest > _MAX_MASK_ELEMENTS
            or (chunk.start > 0) != (batch[0].start > 0)
        ):
            yield batch
            batch, longest = [], chunk.end
        batch.append(chunk)
    if batch:
        yield batch
