from __future__ import annotations

import itertools
import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AttentionInterface

from areal_sc.algorithms.shared_prefixes import Forest, share_prefixes
from areal_sc.engines.training import packed_attention as subject
from areal_sc.engines.training.packed_attention import PackedLayout, packed_attention, plan_buckets

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
NUM_HEADS, NUM_KEY_HEADS, HEAD_DIM = 4, 2, 8


def by_hand(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    lengths: list[int],
    *,
    scaling: float = HEAD_DIM**-0.5,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
) -> torch.Tensor:
    """[1, T, H, D] in float64: each token looks at the earlier ones of its row, one by one."""
    outputs = torch.zeros(query.shape[2], NUM_HEADS, HEAD_DIM, dtype=torch.float64)
    starts = list(itertools.accumulate(lengths, initial=0))
    for start, end in itertools.pairwise(starts):
        for token in range(start, end):
            first = start if sliding_window is None else max(start, token - sliding_window + 1)
            for head in range(NUM_HEADS):
                shared = head * NUM_KEY_HEADS // NUM_HEADS
                keys = key[0, shared, first : token + 1]
                scores = keys @ query[0, head, token] * scaling
                if softcap is not None:
                    scores = softcap * torch.tanh(scores / softcap)
                if s_aux is not None:
                    scores = torch.cat([scores, s_aux[head : head + 1]])
                weights = scores.softmax(0)[: len(keys)]
                outputs[token, head] = weights @ value[0, shared, first : token + 1]
    return outputs[None]


def tensors(num_tokens: int, dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [NUM_HEADS, NUM_KEY_HEADS, NUM_KEY_HEADS]
    return [
        torch.randn(1, heads, num_tokens, HEAD_DIM, generator=generator, dtype=torch.float64)
        .to(dtype)
        .requires_grad_()
        for heads in shapes
    ]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"scaling": 0.2},
        {"sliding_window": 3},
        {"softcap": 0.7},
        {"s_aux": torch.tensor([0.5, -1.0, 2.0, 0.0], dtype=torch.float64)},
    ],
    ids=str,
)
@pytest.mark.parametrize("call_cost", [0, 2_000, 10**9], ids=["alone", "buckets", "one_bucket"])
@pytest.mark.parametrize("name", [subject.ATTENTION_NAME, subject.COMPILED_NAME])
def test_rows_attend_within_themselves(
    options: dict[str, Any], call_cost: int, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    subject.register_packed_attention()
    attention = AttentionInterface()[name]
    monkeypatch.setattr(subject, "_CALL_COST_CPU", call_cost)
    lengths = [5, 1, 9, 5, 6, 12]
    layout = PackedLayout.of(lengths, CPU, NUM_HEADS * HEAD_DIM)
    assert (layout.pad_index is None) == (call_cost == 0 and len(set(lengths)) == len(lengths)) or (
        layout.pad_index is None
    ) == all(len(bucket.rows) == 1 for bucket in layout.buckets)
    found_inputs = tensors(sum(lengths), torch.float64)
    exact_inputs = tensors(sum(lengths), torch.float64)
    torch.manual_seed(0)
    upstream = torch.randn(1, sum(lengths), NUM_HEADS, HEAD_DIM, dtype=torch.float64)
    found, _ = attention(
        torch.nn.Module(), *found_inputs, None, layout=layout, dropout=0.5, **options
    )
    expected = by_hand(*exact_inputs, lengths, **options)
    assert torch.allclose(found, expected, atol=1e-6)  # the sinks' softmax is float32
    (found * upstream).sum().backward()
    (expected * upstream).sum().backward()
    for one, other in zip(found_inputs, exact_inputs, strict=True):
        assert torch.allclose(one.grad, other.grad, atol=1e-6)


SHAPES = ["abcdefgh abcdefgk abcdefxyz abcdr ab x abcdefgh", "xy xyz u"]
"""Rows, each letter a token; some begin others, two are the same."""


def forest_of(words: str) -> tuple[list[int], Forest]:
    """The lengths of the rows, and how they share their first tokens."""
    rows = [np.array([ord(letter) for letter in word]) for word in words.split()]
    forest = share_prefixes([rows], 1)
    assert forest is not None
    return list(map(len, rows)), forest


def layout_of(forest: Forest, device: torch.device = CPU) -> PackedLayout:
    return PackedLayout.of(forest.lengths, device, NUM_HEADS * HEAD_DIM, parents=forest.parents)


def assert_attends_as_rows(
    found: torch.Tensor,
    inputs: list[torch.Tensor],
    lengths: list[int],
    forest: Forest,
    tolerance: float,
    **options: Any,
) -> None:
    """Of [1, C, H, D] and the gradients of the `inputs`, against rows that share nothing."""
    computed = torch.from_numpy(forest.computed_index)
    exact_inputs = [it.detach().double().requires_grad_() for it in inputs]
    of_rows = [it[:, :, computed] for it in exact_inputs]
    expected = by_hand(*of_rows, lengths, **options)
    torch.manual_seed(0)
    upstream = torch.randn(expected.shape, dtype=torch.float64)
    torch.testing.assert_close(found[:, computed].double(), expected, atol=tolerance, rtol=0)
    (found[:, computed] * upstream.to(found.dtype)).sum().backward()
    (expected * upstream).sum().backward()
    for one, other in zip(inputs, exact_inputs, strict=True):
        torch.testing.assert_close(one.grad.double(), other.grad, atol=tolerance, rtol=0)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"scaling": 0.2},
        {"sliding_window": 3},
        {"sliding_window": 9},
        {"softcap": 0.7},
        {"s_aux": torch.tensor([0.5, -1.0, 2.0, 0.0], dtype=torch.float64)},
    ],
    ids=str,
)
@pytest.mark.parametrize("call_cost", [0, 2_000, 10**9], ids=["alone", "buckets", "one_bucket"])
@pytest.mark.parametrize("name", [subject.ATTENTION_NAME, subject.COMPILED_NAME])
def test_runs_attend_along_their_path(
    options: dict[str, Any], call_cost: int, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    subject.register_packed_attention()
    monkeypatch.setattr(subject, "_CALL_COST_CPU", call_cost)
    for words in SHAPES:
        lengths, forest = forest_of(words)
        inputs, layout = tensors(forest.num_tokens, torch.float64), layout_of(forest)
        found, _ = AttentionInterface()[name](
            torch.nn.Module(), *inputs, None, layout=layout, **options
        )
        assert_attends_as_rows(found, inputs, lengths, forest, 1e-10, **options)


@pytest.mark.parametrize("value_dim", [HEAD_DIM, 6])
def test_random_forests_attend_as_rows_that_share_nothing(value_dim: int) -> None:
    """Values of another size than queries, as of latent attention, take another way."""
    for seed in range(40):
        chance = random.Random(seed)
        words = [
            "".join(
                chance.choice("ab"[: chance.randint(1, 2)]) for _ in range(chance.randint(1, 12))
            )
            for _ in range(9)
        ]
        lengths, forest = forest_of(" ".join(words))
        computed = torch.from_numpy(forest.computed_index)
        query, key, value = tensors(forest.num_tokens, torch.float64)
        inputs = query, key, value[..., :value_dim]
        shared, _ = packed_attention(torch.nn.Module(), *inputs, None, layout=layout_of(forest))
        of_rows = (it[:, :, computed] for it in inputs)
        layout = PackedLayout.of(lengths, CPU, NUM_HEADS * HEAD_DIM)
        apart, _ = packed_attention(torch.nn.Module(), *of_rows, None, layout=layout)
        torch.testing.assert_close(shared[:, computed], apart, atol=1e-12, rtol=0)
        upstream = torch.randn(apart.shape, dtype=torch.float64)
        found, expected = (
            torch.autograd.grad((it * upstream).sum(), (query, key, value))
            for it in (shared[:, computed], apart)
        )
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, atol=1e-12, rtol=0)


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 0.1)], ids=str
)
def test_runs_in_less_than_float64(dtype: torch.dtype, tolerance: float) -> None:
    """Sums of 15 products of numbers of about 1, with 24 and with 8 bits."""
    for words in SHAPES:
        lengths, forest = forest_of(words)
        inputs = tensors(forest.num_tokens, dtype)
        found, _ = packed_attention(torch.nn.Module(), *inputs, None, layout=layout_of(forest))
        assert_attends_as_rows(found, inputs, lengths, forest, tolerance)


def test_positions_go_on_along_the_path() -> None:
    lengths, forest = forest_of("abcd abce f abcef")
    layout = layout_of(forest)
    positions = layout.position_ids[0][torch.from_numpy(forest.computed_index)]
    assert positions.tolist() == [place for length in lengths for place in range(length)]
    # f stands apart, and what follows abc shares a call
    assert {bucket.path for bucket in layout.buckets} == {(), (0,), (0, 2)}


@pytest.mark.filterwarnings("default")  # torch's compiler warns of its own code
def test_one_graph_serves_rows_of_any_lengths() -> None:
    """Sinks have a gradient, too; it is that of the attention that is not compiled."""
    subject.register_packed_attention()
    attention = AttentionInterface()[subject.COMPILED_NAME]
    torch._dynamo.reset()
    graphs = list[torch.fx.GraphModule]()

    def note_graph(graph: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    @torch.compile(backend=note_graph, fullgraph=True, dynamic=True)
    def layer(tensors: list[torch.Tensor], sinks: torch.Tensor, layout: PackedLayout) -> Any:
        query, key, value = (tensor * 1.5 for tensor in tensors)
        return attention(torch.nn.Module(), query, key, value, None, s_aux=sinks, layout=layout)[0]

    torch.manual_seed(0)
    for lengths in ([5, 1, 9], [7], [3, 3, 3, 3, 8, 2], [4, 11]):
        layout = PackedLayout.of(lengths, CPU, NUM_HEADS * HEAD_DIM)
        replace(layout)  # a copy that does not live on, as FSDP makes
        found_inputs, exact_inputs = (tensors(sum(lengths), torch.float64) for _ in range(2))
        found_sinks, exact_sinks = (
            torch.linspace(-1, 1, NUM_HEADS, dtype=torch.float64).requires_grad_() for _ in range(2)
        )
        upstream = torch.randn(1, sum(lengths), NUM_HEADS, HEAD_DIM, dtype=torch.float64)
        (layer(found_inputs, found_sinks, layout) * upstream).sum().backward()
        expected = by_hand(*(it * 1.5 for it in exact_inputs), lengths, s_aux=exact_sinks)
        (expected * upstream).sum().backward()
        pairs = [*zip(found_inputs, exact_inputs, strict=True), (found_sinks, exact_sinks)]
        for one, other in pairs:
            # the sinks' softmax is float32, which moved these by up to 2.7e-6 over 12 seeds
            assert torch.allclose(one.grad, other.grad, atol=1e-5)
    assert len(graphs) == 1


@pytest.mark.filterwarnings("default")  # torch's compiler warns of its own code
def test_the_varlen_kernel_is_in_the_same_graph_for_all_rows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Traced with tensors that have no values, as torch's own kernel is for CUDA alone."""
    monkeypatch.setattr(subject, "_has_varlen_kernel", lambda query, value: True)
    subject.register_packed_attention()
    attention = AttentionInterface()[subject.COMPILED_NAME]
    torch._dynamo.reset()
    operations = list[list[str]]()

    def note_graph(graph: torch.fx.GraphModule, _: Any) -> Any:
        operations.append([str(node.target) for node in graph.graph.nodes])
        return lambda *inputs: (torch.zeros(()),)

    @torch.compile(backend=note_graph, fullgraph=True, dynamic=True)
    def layer(tensors: list[torch.Tensor], layout: PackedLayout) -> torch.Tensor:
        attended, _ = attention(torch.nn.Module(), *tensors, None, layout=layout)
        return attended.sum()

    # the first has another number of rows than there are heads: torch takes what is equal for one
    for lengths in ([5, 1, 9, 2, 4], [3, 3, 3, 3, 8, 2], [4, 12]):
        layout = PackedLayout.of(lengths, CPU, NUM_HEADS * HEAD_DIM)
        layer(tensors(sum(lengths), torch.bfloat16), layout)
    assert len(operations) == 1
    for words in SHAPES:
        forest = forest_of(words)[1]
        layer(tensors(forest.num_tokens, torch.bfloat16), layout_of(forest, CUDA))
    assert len(operations) == 2  # rows that share their first tokens have a graph of their own
    for found in operations:
        assert sum("varlen_attn" in name for name in found) == 1


def test_a_mask_of_the_model_s_own_is_refused() -> None:
    layout = PackedLayout.of([7], CPU, NUM_HEADS * HEAD_DIM)
    with pytest.raises(TypeError, match="Module makes an attention mask of its own"):
        packed_attention(
            torch.nn.Module(), *tensors(7, torch.float64), torch.zeros(1, 1, 7, 7), layout=layout
        )


def test_buckets_hold_every_row_once_and_are_long_enough() -> None:
    lengths = [3, 100, 7, 7, 8, 50, 3, 2]
    for waste in (0, 10, 300, 1e9):
        buckets = plan_buckets(lengths, max_wasted_pairs=waste)
        assert sorted(row for bucket in buckets for row in bucket.rows) == list(range(8))
        for bucket in buckets:
            assert bucket.length == max(lengths[row] for row in bucket.rows)
    assert len(plan_buckets(lengths, max_wasted_pairs=1e9)) == 1
    assert len(plan_buckets(lengths, max_wasted_pairs=0)) == 8
    # 8, 7 and 7 share a call (waste 30), as do 3, 3 and 2 (waste 5)
    few = plan_buckets(lengths, max_wasted_pairs=100)
    assert [bucket.rows for bucket in few] == [(1,), (5,), (4, 2, 3), (0, 6, 7)]


def test_positions_restart_at_each_row() -> None:
    layout = PackedLayout.of([3, 1, 2], CPU, 8)
    assert layout.position_ids.tolist() == [[0, 1, 2, 0, 0, 1]]
    assert layout.row_starts.tolist() == [0, 3, 4, 6]


def by_the_kernel(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seq_q: torch.Tensor,
    cu_seq_k: torch.Tensor,
    max_q: int,
    max_k: int,
    *,
    scale: float | None,
    window_size: tuple[int, int],
    enable_gqa: bool = False,
) -> torch.Tensor:
    """What torch's kernel, which only CUDA has, says that it computes; all of it is [T, H, D]."""
    assert enable_gqa or key.shape[1] == query.shape[1]
    assert max_q == int(cu_seq_q.diff().max())
    assert max_k == int(cu_seq_k.diff().max())
    assert query.is_contiguous()
    assert cu_seq_q.dtype == cu_seq_k.dtype == torch.int32
    window = None if window_size[0] < 0 else window_size[0] + 1
    lengths, own = cu_seq_k.diff().tolist(), cu_seq_q.diff().tolist()
    # the last query of a row is that of its last key
    own_keys = torch.cat(
        [torch.arange(many) >= many - few for many, few in zip(lengths, own, strict=True)]
    )
    queries = query.new_zeros(len(key), *query.shape[1:])
    queries[own_keys] = query
    query = queries
    shared = query.shape[1] // key.shape[1]
    # the two heads of keys that `by_hand` reads
    key, value = (t.repeat_interleave(shared, 1)[:, ::2].transpose(0, 1) for t in (key, value))
    whole = (query.transpose(0, 1)[None], key[None], value[None])
    scale = scale or HEAD_DIM**-0.5
    return by_hand(*whole, lengths, scaling=scale, sliding_window=window)[0, own_keys]


def before_gqa(*args: Any, scale: float | None, window_size: tuple[int, int]) -> torch.Tensor:
    """That of an older torch, which wants as many heads of keys as of queries."""
    return by_the_kernel(*args, scale=scale, window_size=window_size)


@pytest.mark.parametrize("kernel", [by_the_kernel, before_gqa])
@pytest.mark.parametrize("window", [None, 3])
def test_the_varlen_kernel_gets_the_heads_that_it_takes(
    kernel: Any, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subject, "_varlen", subject._for_few_key_heads(kernel))
    monkeypatch.setattr(subject, "_has_varlen_kernel", lambda query, value: True)
    lengths = [5, 1, 9]
    inputs = tensors(sum(lengths), torch.float64)
    layout = PackedLayout.of(lengths, CPU, NUM_HEADS * HEAD_DIM)
    found, _ = packed_attention(
        torch.nn.Module(), *inputs, None, layout=layout, sliding_window=window
    )
    torch.testing.assert_close(found, by_hand(*inputs, lengths, sliding_window=window))


@pytest.mark.parametrize("window", [None, 3, 9])
def test_the_varlen_kernel_gets_what_runs_see(
    window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subject, "_varlen", subject._for_few_key_heads(by_the_kernel))
    monkeypatch.setattr(subject, "_has_varlen_kernel", lambda query, value: True)
    for words in SHAPES:
        lengths, forest = forest_of(words)
        inputs, layout = tensors(forest.num_tokens, torch.float64), layout_of(forest, CUDA)
        found, _ = packed_attention(
            torch.nn.Module(), *inputs, None, layout=layout, sliding_window=window
        )
        # gradients of keys are added up in float32
        assert_attends_as_rows(found, inputs, lengths, forest, 1e-5, sliding_window=window)
