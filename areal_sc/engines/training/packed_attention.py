"""Causal attention within each row of a packed sequence, as a transformers attention function.

A micro-batch is one sequence [1, T] of rows without padding between them. Attention must not
cross row borders, and its cost should be that of the rows. Three ways, chosen by shape:

    rows alone      one call a row, on slices; for long rows, where the call itself costs nothing
    buckets         rows of similar length are padded on the right to one length and share a call;
                    for many short rows
    varlen kernel   one call, on CUDA in half precision, where this torch has it

Where rows share their first tokens, what is packed are the runs of a `Forest` in place of rows. A
run's tokens then see those of its path, too: of all runs on the way to it from the root.
"""

from __future__ import annotations

import functools
import importlib.util
import inspect
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, count
from typing import Any

import torch
import torch.nn.functional as F
from torch import library as operators
from transformers import AttentionInterface

from areal_sc.engines.plain_attention import AttentionRule, attend, is_seen, with_all_heads
from areal_sc.engines.training.attention_behind import attend_behind
from areal_sc.engines.training.device_copies import to_device
from areal_sc.engines.training.process_group import ProcessGroup
from areal_sc.engines.training.sequence_parallel import SequencePart

ATTENTION_NAME = "areal_sc_packed"
COMPILED_NAME = "areal_sc_packed_compiled"
"""The same attention, for layers that torch compiles."""
# One call costs about as much as this many multiply-adds of a forward pass; measured on a CPU.
_CALL_COST_CPU = 100_000
_CALL_COST_CUDA = 100_000_000
_CALLS_OF_RUN = 30
"""As many calls one more shared run costs in a layer, with its gradients; measured on a CPU."""

_handles: weakref.WeakValueDictionary[int, LayoutHandle] = weakref.WeakValueDictionary()
"""By number. Torch would compile layers anew for other rows, if their graphs got more of them."""
_numbers = count()

_LAYOUT_TENSORS = (
    *("position_ids", "pad_index", "unpad_index", "row_starts"),
    *("key_index", "key_starts"),
)


@dataclass(frozen=True)
class Bucket:
    """Rows that share one attention call, each padded on the right to `length`.

    Attributes:
        path: the runs before each of them, from the root on; rows have none.
    """

    rows: tuple[int, ...]
    length: int
    path: tuple[int, ...] = ()


class LayoutHandle:
    """That by which compiled layers know a layout; it lives as long as a copy of the layout does.

    Attributes:
        number: [] int64, on the CPU.
        parts: attributes of the newest copy.
    """

    def __init__(self) -> None:
        self.number = torch.tensor(next(_numbers))
        self.parts: dict[str, Any] = {}
        _handles[int(self.number)] = self


@dataclass(frozen=True)
class PackedLayout:
    """Where the rows of a packed sequence are, and how their attention is computed.

    Attributes:
        lengths: tokens of each row, >= 1.
        position_ids: [1, T] int64, restarting at each row.
        buckets: every row once; in the order of the rows if each is a bucket of its own.
        pad_index: [P] token for each padded place, bucket after bucket; None if each row is a
            bucket, which is then a slice.
        unpad_index: [T] padded place of each token; None likewise.
        row_starts: [R + 1] int32, first token of each row, and T.
        longest: tokens of the longest row.
        key_index: [K] int64 where the rows are runs, for CUDA: the tokens that each run sees, its
            path and itself, run after run; None: each row sees its own.
        key_starts: [R + 1] int32, where those of each row or run begin, and K.
        longest_keys: the most that one sees.
        part: the tokens that this rank computes outside of attention; None: all of them.
        handle: of it and its copies: FSDP, for one, copies what a module gets.
    """

    lengths: tuple[int, ...]
    position_ids: torch.Tensor
    buckets: tuple[Bucket, ...]
    pad_index: torch.Tensor | None
    unpad_index: torch.Tensor | None
    row_starts: torch.Tensor
    longest: int
    key_index: torch.Tensor | None
    key_starts: torch.Tensor
    longest_keys: int
    part: SequencePart | None = None
    handle: LayoutHandle = field(default_factory=LayoutHandle)

    def __post_init__(self) -> None:
        # without the handle itself, or both would live until the next garbage collection
        parts = {name: value for name, value in vars(self).items() if name != "handle"}
        self.handle.parts = parts

    @classmethod
    def numbered(cls, number: torch.Tensor) -> PackedLayout:
        """The layout whose handle has this number."""
        handle = _handles[int(number)]
        return cls(**handle.parts, handle=handle)

    @classmethod
    def of(
        cls,
        lengths: Sequence[int],
        device: torch.device,
        attention_width: int,
        sequence: ProcessGroup | None = None,
        parents: Sequence[int] | None = None,
    ) -> PackedLayout:
        """Plans the attention of rows of these lengths, or of runs.

        Args:
            device: that computes it; the plan's own tensors are on the CPU, see `on`.
            attention_width: query heads times head dimension.
            sequence: ranks that share the tokens.
            parents: the run before each run, -1 where it begins rows; None: they are rows.
        """
        paths = _paths(parents or [-1] * len(lengths))
        max_wasted_pairs = _call_cost(device) / max(attention_width, 1)
        buckets = plan_buckets(lengths, max_wasted_pairs=max_wasted_pairs, paths=paths)
        sizes = torch.tensor(lengths, dtype=torch.int64)
        starts = torch.tensor(list(accumulate(lengths, initial=0)), dtype=torch.int64)
        before = torch.tensor([_num_tokens(path, lengths) for path in paths], dtype=torch.int64)
        position_ids = torch.arange(int(starts[-1])) + torch.repeat_interleave(
            before - starts[:-1], sizes
        )
        row_starts, key_index = starts.to(torch.int32), None
        key_starts = row_starts
        if parents is not None and device.type == "cuda":
            key_index, key_starts = _keys_of_runs(paths, starts, before + sizes)
        pad_index = unpad_index = None
        if len(buckets) == len(lengths):
            buckets = tuple(sorted(buckets, key=lambda bucket: bucket.rows))
        else:
            pad_index, unpad_index = _padding_indices(buckets, starts, sizes)
        return cls(
            tuple(lengths),
            position_ids[None],
            buckets,
            pad_index,
            unpad_index,
            row_starts,
            max(lengths),
            key_index,
            key_starts,
            int((before + sizes).max()),
            None if sequence is None else SequencePart(int(starts[-1]), sequence),
        )

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """Its tensors, by the names of the attributes."""
        found = {name: getattr(self, name) for name in _LAYOUT_TENSORS}
        return {name: values for name, values in found.items() if values is not None}

    def on(self, device: torch.device) -> PackedLayout:
        """The layout with its tensors on a device."""
        return replace(self, **to_device(self.tensors, device))

    @property
    def own_tokens(self) -> range:
        """The tokens that this rank computes, of the T tokens."""
        return range(sum(self.lengths)) if self.part is None else self.part.own

    def own_values(self, values: torch.Tensor) -> torch.Tensor:
        """[..., C] of values [..., T]: those of this rank's tokens, padded where they are few."""
        return values if self.part is None else self.part.stretch(values)


def min_saved_tokens(device: torch.device, width: int) -> float:
    """How many tokens a shared run must save, so that it costs less than it saves.

    Its attention takes further calls; a layer has about 12 parameters for each pair of channels.

    Args: width: of a token's hidden state.
    """
    return max(1.0, _CALLS_OF_RUN * _call_cost(device) / (12 * width**2))


def _call_cost(device: torch.device) -> int:
    return _CALL_COST_CUDA if device.type == "cuda" else _CALL_COST_CPU


def plan_buckets(
    lengths: Sequence[int], *, max_wasted_pairs: float, paths: Sequence[tuple[int, ...]] = ()
) -> tuple[Bucket, ...]:
    """Longest row first; rows join a bucket while padding wastes less than another call costs.

    Args:
        max_wasted_pairs: (query, key) pairs that cost as much as one more call.
        paths: of each run; only those of one path join. Empty: they are rows.
    """
    by_path: dict[tuple[int, ...], dict[int, list[int]]] = {}
    for row in sorted(range(len(lengths)), key=lambda row: (-lengths[row], row)):
        of_path = by_path.setdefault(paths[row] if paths else (), {})
        of_path.setdefault(lengths[row], []).append(row)
    buckets: list[Bucket] = []
    for path, by_length in by_path.items():
        before, joined = _num_tokens(path, lengths), list[Bucket]()
        for length, rows in by_length.items():
            num_pairs = length * (before + length)
            last = joined[-1] if joined else None
            wasted = last.length * (before + last.length) - num_pairs if last else 0
            if last and len(rows) * wasted <= max_wasted_pairs:
                joined[-1] = Bucket(last.rows + tuple(rows), last.length, path)
            elif num_pairs > max_wasted_pairs and not path:
                joined += [Bucket((row,), length) for row in rows]
            else:
                joined.append(Bucket(tuple(rows), length, path))
        buckets += joined
    return tuple(buckets)


def _paths(parents: Sequence[int]) -> list[tuple[int, ...]]:
    """The runs before each run, from the root on."""
    paths: list[tuple[int, ...]] = []
    for parent in parents:
        paths.append((*paths[parent], parent) if parent >= 0 else ())
    return paths


def _num_tokens(runs: Sequence[int], lengths: Sequence[int]) -> int:
    return sum(lengths[run] for run in runs)


def _keys_of_runs(
    paths: Sequence[tuple[int, ...]], starts: torch.Tensor, num_keys: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """`key_index` and `key_starts` of a layout."""
    seen = [
        torch.arange(int(starts[run]), int(starts[run + 1]))
        for own, path in enumerate(paths)
        for run in (*path, own)
    ]
    return torch.cat(seen), F.pad(num_keys.cumsum(0), (1, 0)).to(torch.int32)


def _padding_indices(
    buckets: Sequence[Bucket], starts: torch.Tensor, sizes: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """`pad_index` and `unpad_index` of a layout."""
    pad_pieces = []
    unpad_index = torch.empty(int(starts[-1]), dtype=torch.int64)
    first_place = 0
    for bucket in buckets:
        rows = torch.tensor(bucket.rows)
        offsets = torch.arange(bucket.length)[None]
        is_token = offsets < sizes[rows][:, None]
        # padding repeats the row's last token: finite values, whose outputs nobody reads
        tokens = starts[rows][:, None] + torch.minimum(offsets, sizes[rows][:, None] - 1)
        places = first_place + torch.arange(tokens.numel()).view_as(tokens)
        unpad_index[tokens[is_token]] = places[is_token]
        pad_pieces.append(tokens.flatten())
        first_place += tokens.numel()
    return torch.cat(pad_pieces), unpad_index


def register_packed_attention() -> None:
    """Makes the attention known to transformers, under both names."""
    AttentionInterface.register(ATTENTION_NAME, packed_attention)
    compiled = functools.partial(packed_attention, is_compiled=True)
    AttentionInterface.register(COMPILED_NAME, compiled)


def packed_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    *,
    layout: PackedLayout,
    is_compiled: bool = False,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of `query` [1, H, T, D] over `key` and `value` [1, H_kv, T, D].

    Where ranks share the tokens, T is what this one has, in all arguments and the result.

    Args:
        attention_mask: None; transformers makes none for this attention.
        softcap: tanh soft-capping of the scores (Gemma).
        s_aux: [H] sink logits (gpt-oss).
        layout: the rows in T.
        is_compiled: it is a part of the graph of a layer, which is the same for all rows. Torch
            knows the varlen kernel; all else is one operation that it does not look into.
    Returns: [1, T, H, D], and None in place of the attention weights. Dropout is not applied.
    Raises: TypeError: the model makes a mask of its own.
    """
    if attention_mask is not None:
        raise TypeError(f"{type(module).__name__} makes an attention mask of its own")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    rule = AttentionRule(scale, sliding_window, softcap, s_aux)
    has_kernel = layout.part is None and rule.is_plain and _has_varlen_kernel(query, value)
    if not is_compiled or has_kernel:
        return _attend(query, key, value, rule, layout), None
    attended = torch.ops.areal_sc.packed_attention(
        query, key, value, s_aux, layout.handle.number, scale, sliding_window, softcap
    )
    return attended, None


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    rule: AttentionRule,
    layout: PackedLayout,
) -> torch.Tensor:
    """[1, T, H, D_value] as `packed_attention`."""
    part = layout.part
    if part is not None:
        query, key, value = (part.to_heads(tensor) for tensor in (query, key, value))
        sinks = None if rule.sinks is None else part.own_heads(rule.sinks)
        rule = replace(rule, sinks=sinks)
    if rule.is_plain and _has_varlen_kernel(query, value):
        attended = _varlen_attention(query, key, value, rule.scale, rule.window, layout)
    else:
        # [T, H, D]: rows of memory, so that gathering tokens is gathering rows
        query, key, value = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
        attended = attend_rows(query, key, value, rule, layout)[None]
    return attended if part is None else part.to_tokens(attended)


def attend_rows(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    rule: AttentionRule,
    layout: PackedLayout,
) -> torch.Tensor:
    """Causal attention of `query` [T, H, D] over `key` and `value` [T, H_kv, D] in each row.

    Returns: [T, H, D].
    """
    tensors = [query, key, value]
    if layout.pad_index is not None:
        tensors = [tensor.index_select(0, layout.pad_index) for tensor in tensors]
    sizes = [len(bucket.rows) * bucket.length for bucket in layout.buckets]
    of_runs = [torch.split(tensor, list(layout.lengths)) for tensor in (key, value)]
    pieces = []
    for bucket, *parts in zip(
        layout.buckets, *(torch.split(tensor, sizes) for tensor in tensors), strict=True
    ):
        if bucket.path:
            before = [torch.cat([runs[run] for run in bucket.path]) for runs in of_runs]
            q, k, v = parts
            pieces.append(attend_behind(q, k, v, before[0], before[1], bucket.length, rule))
            continue
        q, k, v = (part.unflatten(0, (-1, bucket.length)).transpose(1, 2) for part in parts)
        pieces.append(_causal_attention(q, k, v, rule).transpose(1, 2).flatten(0, 1))
    together = pieces[0] if len(pieces) == 1 else torch.cat(pieces)
    return together if layout.unpad_index is None else together.index_select(0, layout.unpad_index)


class _Keys(torch.autograd.Function):
    """`tokens[key_index]`, whose gradients are added up in float32."""

    @staticmethod
    def forward(ctx: Any, tokens: torch.Tensor, key_index: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(key_index)
        ctx.num_tokens = len(tokens)
        return tokens.index_select(0, key_index)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        (key_index,) = ctx.saved_tensors
        added = grad.new_zeros(ctx.num_tokens, *grad.shape[1:], dtype=torch.float32)
        return added.index_add_(0, key_index, grad.float()).to(grad.dtype), None


def _causal_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, rule: AttentionRule
) -> torch.Tensor:
    """[B, H, L, D] within each batch entry."""
    places = torch.arange(query.shape[2], device=query.device)
    return attend(query, key, value, rule, lambda: is_seen(places, places, rule.window))


def _find_varlen() -> Any:
    """Torch's attention of rows one after the other, if it takes a window; else None."""
    if importlib.util.find_spec("torch.nn.attention.varlen") is None:
        return None
    from torch.nn.attention.varlen import varlen_attn

    takes_window = "window_size" in inspect.signature(varlen_attn).parameters
    return _for_few_key_heads(varlen_attn) if takes_window else None


def _for_few_key_heads(varlen: Any) -> Any:
    """The same for fewer heads of keys than of queries, which an older torch does not take."""
    if "enable_gqa" in inspect.signature(varlen).parameters:
        return functools.partial(varlen, enable_gqa=True)

    def with_all(
        query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *others: Any, **named: Any
    ) -> Any:
        key, value = with_all_heads(key, query), with_all_heads(value, query)
        return varlen(query, key, value, *others, **named)

    return with_all


# It is looked for here: what torch compiles cannot look for it.
_varlen = _find_varlen()


def _has_varlen_kernel(query: torch.Tensor, value: torch.Tensor) -> bool:
    head_dim = query.shape[-1]
    return (
        query.is_cuda
        and query.dtype in (torch.bfloat16, torch.float16)
        and head_dim <= 256
        and head_dim % 8 == 0
        and head_dim == value.shape[-1]
        and _varlen is not None
    )


def _varlen_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float,
    window: int | None,
    layout: PackedLayout,
) -> torch.Tensor:
    """[1, T, H, D] by one kernel over all rows.

    Of a run that sees more than itself, the kernel takes its last token for the last one seen.
    """
    query, key, value = (tensor[0].transpose(0, 1).contiguous() for tensor in (query, key, value))
    if layout.key_index is not None:
        key, value = (_Keys.apply(tensor, layout.key_index) for tensor in (key, value))  # type: ignore[no-untyped-call]
    outputs = _varlen(
        query,
        key,
        value,
        layout.row_starts,
        layout.key_starts,
        layout.longest,
        layout.longest_keys,
        scale=scale,
        window_size=(-1 if window is None else window - 1, 0),
    )
    return outputs[None]  # type: ignore[no-any-return]


@operators.custom_op("areal_sc::packed_attention", mutates_args=())
def _attention_by_number(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    sinks: torch.Tensor | None,
    number: torch.Tensor,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> torch.Tensor:
    """[1, T, H, D_value] as `packed_attention`; it keeps its arguments, and no scores.

    Args: number: of the layout.
    """
    rule = AttentionRule(scale, window, softcap, sinks)
    return _attend(query, key, value, rule, PackedLayout.numbered(number)).contiguous()


@_attention_by_number.register_fake
def _(query: torch.Tensor, _key: torch.Tensor, value: torch.Tensor, *_: Any) -> torch.Tensor:
    return query.new_empty(1, query.shape[2], query.shape[1], value.shape[-1])


# `custom_op` would keep autograd out of it.
operators.define(
    "areal_sc::packed_attention_backward",
    "(Tensor grad, Tensor query, Tensor key, Tensor value, Tensor? sinks, Tensor number, "
    "float scale, int? window, float? softcap) -> Tensor[]",
)


@operators.impl("areal_sc::packed_attention_backward", ("cpu", "cuda"))
def _gradients_by_number(
    grad: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    sinks: torch.Tensor | None,
    number: torch.Tensor,
    *rule: Any,
) -> list[torch.Tensor]:
    """Gradients by queries, keys, values and sinks, where there are any: computed once more."""
    scale, window, softcap = rule
    with torch.enable_grad():
        given = [it for it in (query, key, value, sinks) if it is not None]
        query, key, value, *others = inputs = [it.detach().requires_grad_() for it in given]
        of_scores = AttentionRule(scale, window, softcap, *others)
        attended = _attend(query, key, value, of_scores, PackedLayout.numbered(number))
        gradients = torch.autograd.grad(attended, inputs, grad)
    return [it.contiguous() for it in gradients]


@operators.register_fake(  # type: ignore[untyped-decorator]
    "areal_sc::packed_attention_backward"
)
def _(_grad: torch.Tensor, *arguments: Any) -> list[torch.Tensor]:
    given = (it for it in arguments[:4] if it is not None)
    return [torch.empty_like(it, memory_format=torch.contiguous_format) for it in given]


def _keep_arguments(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    ctx.save_for_backward(*inputs[:5])
    ctx.rule = inputs[5:]


def _gradients(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    found = torch.ops.areal_sc.packed_attention_backward(grad, *ctx.saved_tensors, *ctx.rule)
    of_sinks = found[3] if len(found) > 3 else None
    return *found[:3], of_sinks, *(None,) * 4


_attention_by_number.register_autograd(_gradients, setup_context=_keep_arguments)
