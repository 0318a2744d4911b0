"""Attention over the slot cache, for an unmodified Hugging Face model.

The model runs on one packed row of tokens (shape [1, T]): prompt tokens of some rows, then the
last token of every row. Only attention looks across tokens, and it is replaced through
transformers' `AttentionInterface`: it stores the new keys and values in the cache, then attends
from each token to the entries of its own row.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from transformers import AttentionInterface

from areal_sc.engines.local.slots import Segment, StepPlan
from areal_sc.errors import ModelError

ATTENTION_NAME = "areal_sc_slots"
_MAX_MASK_ELEMENTS = 1 << 24  # queries x entries of one padded batch of segments
_LENGTH_STEP = 32  # cache lengths are multiples of this


class Attention(Protocol):
    """What the model's attention layers call during one forward pass."""

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """Attention of one layer.

        Args:
            query: [1, H, T, D].
            key, value: [1, H_kv, T, D].
        Returns: [1, T, H, D_value].
        """
        ...


def register_attention() -> None:
    """Makes the attention known to transformers as `ATTENTION_NAME`."""
    AttentionInterface.register(ATTENTION_NAME, _attention_forward)


def _attention_forward(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    slot_attention: Attention | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    name = type(module).__name__
    if slot_attention is None:
        raise ModelError(f"{name} does not pass keyword arguments on to its attention function")
    if attention_mask is not None:
        raise ModelError(
            f"embedded generation has plain causal attention, but {name} makes a mask of its own"
        )
    for unsupported in ("sliding_window", "softcap", "s_aux", "position_bias"):
        if kwargs.get(unsupported) is not None:
            raise ModelError(
                f"embedded generation has plain causal attention, but {name} asks for {unsupported}"
            )
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    return slot_attention.attend(module.layer_idx, query, key, value, scale), None


class ShapeProbe:
    """Stands in for the attention of a first pass and records what the model's layers are."""

    def __init__(self) -> None:
        self.layers: dict[int, tuple[torch.Size, torch.Size]] = {}

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
    ) -> torch.Tensor:
        self.layers[layer] = key.shape, value.shape
        num_tokens, num_heads = query.shape[2], query.shape[1]
        return value.new_zeros(1, num_tokens, num_heads, value.shape[-1])

    def make_cache(self, num_layers: int, dtype: torch.dtype, device: torch.device) -> SlotCache:
        """An empty cache for the layers that were seen.

        Raises: ModelError: not every layer attends, or they differ.
        """
        if sorted(self.layers) != list(range(num_layers)):
            raise ModelError(
                f"the model has {num_layers} layers, but only {sorted(self.layers)} use "
                "transformers' attention interface"
            )
        shapes = set(self.layers.values())
        if len(shapes) != 1:
            raise ModelError(f"the layers' keys and values have different shapes: {shapes}")
        key_shape, value_shape = shapes.pop()
        return SlotCache(num_layers, key_shape[1], (key_shape[-1], value_shape[-1]), dtype, device)


class SlotCache:
    """Keys and values of all rows: two tensors [layers, rows, H_kv, capacity, D].

    Capacity and rows grow by doubling as sequences need them.
    """

    def __init__(
        self,
        num_layers: int,
        num_heads: int,
        head_dims: tuple[int, int],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.num_heads = num_heads
        self.keys, self.values = (
            # zeros, not empty: entries that are masked out must be finite
            torch.zeros(
                num_layers, 1, num_heads, _LENGTH_STEP, head_dim, dtype=dtype, device=device
            )
            for head_dim in head_dims
        )

    @property
    def num_rows(self) -> int:
        return self.keys.shape[1]

    @property
    def capacity(self) -> int:
        return self.keys.shape[3]

    def reserve(self, num_rows: int, length: int, max_rows: int, max_length: int) -> None:
        """Makes room for `num_rows` sequences of `length` tokens, growing at most to the maxima."""
        if num_rows <= self.num_rows and length <= self.capacity:
            return
        rows, capacity = self.num_rows, self.capacity
        if num_rows > rows:
            rows = max(num_rows, min(2 * rows, max_rows))
        if length > capacity:
            capacity = max(length, min(2 * capacity, max_length))
            capacity = -(-capacity // _LENGTH_STEP) * _LENGTH_STEP
        self.keys = _enlarged(self.keys, rows, capacity)
        self.values = _enlarged(self.values, rows, capacity)

    def copy_rows(self, sources: list[int], targets: list[int], length: int) -> None:
        """Copies the first `length` entries of rows; no row is both source and target."""
        for table in (self.keys, self.values):
            table[:, targets, :, :length] = table[:, sources, :, :length]


def _enlarged(table: torch.Tensor, rows: int, capacity: int) -> torch.Tensor:
    layers, old_rows, heads, old_capacity, head_dim = table.shape
    larger = table.new_zeros(layers, rows, heads, capacity, head_dim)
    larger[:, :old_rows, :, :old_capacity] = table
    return larger


class SlotAttention:
    """Attention of one step: what all layers have in common is prepared once."""

    def __init__(self, plan: StepPlan, cache: SlotCache, positions: torch.Tensor) -> None:
        device = cache.keys.device
        self._cache = cache
        self._num_rows = plan.num_rows
        self._length = plan.max_length

        write_rows = torch.from_numpy(plan.write_rows).to(device)
        write_positions, self._write_tokens = positions, None
        if plan.segments:
            self._write_tokens = torch.from_numpy(plan.write_tokens).to(device)
            write_positions = positions[self._write_tokens]
        heads = torch.arange(cache.num_heads, device=device)
        entry = (write_rows[:, None] * cache.num_heads + heads) * cache.capacity
        self._entries = (entry + write_positions[:, None]).flatten()  # [M * H_kv]

        # additive: 0 on the row's own entries, -inf beyond them
        entries = torch.arange(self._length, device=device)
        is_beyond = entries > positions[-plan.num_rows :, None]
        self._bias = torch.zeros(is_beyond.shape, dtype=cache.keys.dtype, device=device)
        self._bias.masked_fill_(is_beyond, -torch.inf)
        self._bias = self._bias[:, None, None, :]  # [N, 1, 1, L]
        self._segment_batches = [
            _SegmentBatch(segments, device) for segments in _batches(plan.segments)
        ]

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
    ) -> torch.Tensor:
        keys, values = self._cache.keys[layer], self._cache.values[layer]
        self._store(keys, key)
        self._store(values, value)
        packed = query[0].transpose(0, 1)  # [T, H, D]
        if not self._segment_batches:
            return self._attend_last(packed, keys, values, scale)[None]
        output = packed.new_empty(*packed.shape[:2], values.shape[-1])
        for batch in self._segment_batches:
            batch.attend(packed, keys, values, scale, output)
        output[-self._num_rows :] = self._attend_last(
            packed[-self._num_rows :], keys, values, scale
        )
        return output[None]

    def _store(self, table: torch.Tensor, new: torch.Tensor) -> None:
        """Writes [1, H_kv, T, D] to the rows' entries."""
        packed = new[0].transpose(0, 1)
        if self._write_tokens is not None:
            packed = packed[self._write_tokens]
        head_dim = packed.shape[-1]
        table.view(-1, head_dim).index_copy_(0, self._entries, packed.reshape(-1, head_dim))

    def _attend_last(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """One query a row: [N, H, D] -> [N, H, D_value]."""
        n, length = self._num_rows, self._length
        num_heads, num_kv_heads = query.shape[1], self._cache.num_heads
        grouped = query.reshape(n, num_kv_heads, num_heads // num_kv_heads, -1)
        if query.dtype != torch.float32 or query.is_cuda:
            bias = self._bias.expand(n, 1, grouped.shape[2], length)
            attended = F.scaled_dot_product_attention(
                grouped, keys[:n, :, :length], values[:n, :, :length], attn_mask=bias, scale=scale
            )
            return attended.reshape(n, num_heads, -1)
        # for single queries on a CPU, batched products take 0.75 of the fused kernel's time
        flat_keys = keys[:n].flatten(0, 1)[:, :length]
        flat_values = values[:n].flatten(0, 1)[:, :length]
        scores = torch.bmm((grouped * scale).flatten(0, 1), flat_keys.transpose(1, 2))
        scores = scores.view(n, num_kv_heads, -1, length).add_(self._bias)
        weights = torch.softmax(scores, dim=-1).flatten(0, 1)
        return torch.bmm(weights, flat_values).view(n, num_heads, -1)


class _SegmentBatch:
    """Segments of similar length, padded to the longest for one attention call."""

    def __init__(self, segments: list[tuple[Segment, int]], device: torch.device) -> None:
        """`segments`: each with the index of its first token in the pass."""
        starts = np.array([segment.start for segment, _ in segments])
        counts = np.array([segment.end for segment, _ in segments]) - starts
        first_tokens = np.array([first for _, first in segments])
        self._length = int((starts + counts).max())
        column = np.arange(counts.max())
        is_real = column < counts[:, None]
        column = np.where(is_real, column, 0)  # padding repeats a real token and is dropped
        queries = first_tokens[:, None] + column
        self._rows = torch.tensor([segment.row for segment, _ in segments], device=device)
        self._queries = torch.from_numpy(queries).to(device)  # [S, Q]
        self._real = torch.from_numpy(np.flatnonzero(is_real)).to(device)
        self._targets = torch.from_numpy(queries[is_real]).to(device)
        # where all start at 0, query and entry positions agree and plain causality is enough
        self._mask = None
        if starts.any():
            positions = torch.from_numpy(starts[:, None] + column).to(device)
            entries = torch.arange(self._length, device=device)
            self._mask = (entries <= positions[:, :, None])[:, None]  # [S, 1, Q, L]

    def attend(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        scale: float,
        output: torch.Tensor,
    ) -> None:
        """Fills the segments' tokens in `output` [T, H, D_value]."""
        attended = F.scaled_dot_product_attention(
            query[self._queries].transpose(1, 2),
            keys[self._rows, :, : self._length],
            values[self._rows, :, : self._length],
            attn_mask=self._mask,
            is_causal=self._mask is None,
            scale=scale,
            enable_gqa=query.shape[1] != keys.shape[1],
        )
        attended = attended.transpose(1, 2).flatten(0, 1)
        output.index_copy_(0, self._targets, attended[self._real])


def _batches(segments: list[Segment]) -> Iterator[list[tuple[Segment, int]]]:
    """Groups segments so that at least half of each padded batch is real tokens."""
    placed, offset = [], 0
    for segment in segments:
        placed.append((segment, offset))
        offset += segment.end - segment.start
    placed.sort(key=lambda item: (item[0].start > 0, item[0].start - item[0].end))
    batch: list[tuple[Segment, int]] = []
    width = longest = 0
    for segment, first in placed:
        num_queries = segment.end - segment.start
        longest = max(longest, segment.end)
        is_full = (len(batch) + 1) * width * longest > _MAX_MASK_ELEMENTS
        has_context = segment.start > 0
        if batch and (2 * num_queries < width or is_full or has_context != (batch[0][0].start > 0)):
            yield batch
            batch = []
        if not batch:
            width, longest = num_queries, segment.end
        batch.append((segment, first))
    if batch:
        yield batch
