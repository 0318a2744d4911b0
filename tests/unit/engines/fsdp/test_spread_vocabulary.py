"""Embeddings and output layers of which no rank has all are exact, in pieces of any size."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from unit.engines.fsdp.largest_tensor import LargestTensor

from areal_sc.algorithms import logprobs
from areal_sc.algorithms.logprobs import (
    VocabularyPart,
    chunked_logprobs,
    chunked_top_logprobs,
)
from areal_sc.algorithms.vocabulary_sums import VocabularySums
from areal_sc.engines.fsdp import spread_vocabulary as spread
from areal_sc.engines.training.process_group import ProcessGroup

TIMEOUT = timedelta(seconds=30)
WIDTH, VOCABULARY, PADDING = 6, 11, 3
NUM_TOKENS = (9, 0, 4, 1)  # of each rank
PIECES = [1, 4 * WIDTH * 5, 1 << 20]
SMALL = 4 * WIDTH * 4
CPU = torch.device("cpu")


def draw(*sizes: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*sizes, generator=torch.Generator().manual_seed(seed))


WEIGHT, BIAS = 2 * draw(VOCABULARY, WIDTH), draw(VOCABULARY, seed=1)
HIDDEN = [draw(count, WIDTH, seed=2 + rank) for rank, count in enumerate(NUM_TOKENS)]
TOKENS = [(torch.arange(count) * 7 + rank) % VOCABULARY for rank, count in enumerate(NUM_TOKENS)]
UPSTREAM = [torch.linspace(-1, 2, count) for count in NUM_TOKENS]
TEMPERATURES = [0.5 + torch.arange(count) / 4 for count in NUM_TOKENS]


def weighed(logprobs: torch.Tensor, entropy: torch.Tensor, rank: int) -> torch.Tensor:
    return (logprobs * UPSTREAM[rank] + entropy * UPSTREAM[rank].flip(0)).sum()


def on_ranks(size: int, action: Callable[[ProcessGroup], Any]) -> list[Any]:
    store = dist.HashStore()

    def run(rank: int) -> Any:
        handle = dist.ProcessGroupGloo(store, rank, size, TIMEOUT)
        return action(ProcessGroup(rank, size, CPU, handle))

    with ThreadPoolExecutor(size) as threads:
        return list(threads.map(run, range(size)))


def own_rows(whole: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
    share = -(-len(whole) // group.size)
    rows = whole[group.rank * share : (group.rank + 1) * share]
    return rows.detach().clone().requires_grad_()


def gradients(*tensors: torch.Tensor) -> list[torch.Tensor]:
    found = [tensor.grad for tensor in tensors if tensor.grad is not None]
    assert len(found) == len(tensors)
    return found


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize(
    ("piece_bytes", "most_tokens", "meets_once"),
    [*((it, 0, False) for it in PIECES), (1, max(NUM_TOKENS), False), (1, 9, True)],
)
def test_embeddings(size: int, piece_bytes: int, most_tokens: int, meets_once: bool) -> None:
    """Also where rows are looked up by the ranks that have them, and over two micro-batches."""
    weight, tokens = draw(40, WIDTH), [(ids * 5 + 3) % 40 for ids in TOKENS]

    def embed(group: ProcessGroup) -> tuple[torch.Tensor, ...]:
        rows = spread.SpreadRows(len(weight), group, torch.float32, piece_bytes, most_tokens)
        rows.meets_once = meets_once
        own, found = own_rows(weight, group), []
        assert rows.moves_less(own, tokens[group.rank]) == (most_tokens > 0 and not meets_once)
        for factor in (1.0, 2.0):
            found.append(spread.spread_embedding(own, tokens[group.rank], rows, PADDING))
            (found[-1] * HIDDEN[group.rank]).sum().mul(factor).backward()
        assert (own.grad is None) == meets_once
        rows.finish()
        return found[0].detach(), found[1].detach(), *gradients(own)

    expected = weight.clone().requires_grad_()
    ranks = on_ranks(size, embed)
    for rank, (first, second, _) in enumerate(ranks):
        whole = F.embedding(tokens[rank], expected, PADDING)
        assert torch.equal(first, whole)
        assert torch.equal(second, whole)
        (whole * HIDDEN[rank]).sum().mul(3.0).backward()
    assert expected.grad is not None
    gradient = torch.cat([own for *_, own in ranks])
    assert torch.allclose(gradient, expected.grad / size, atol=1e-6)
    assert not gradient[PADDING].any()


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize(
    ("piece_bytes", "meets_once"), [*((it, False) for it in PIECES), (1, True)]
)
@pytest.mark.parametrize("chunk_tokens", [2, 100])
def test_logprobs(size: int, piece_bytes: int, chunk_tokens: int, meets_once: bool) -> None:
    """With gradients of the mean over the ranks, against all logits in float64."""

    def compute(group: ProcessGroup) -> list[torch.Tensor]:
        rank = group.rank
        hidden, bias = HIDDEN[rank].clone().requires_grad_(), BIAS.clone().requires_grad_()
        own = own_rows(WEIGHT, group)
        rows = spread.SpreadRows(VOCABULARY, group, torch.float32, piece_bytes)
        rows.meets_once = meets_once
        logprobs, entropy = chunked_logprobs(
            hidden,
            own,
            TOKENS[rank],
            bias=bias,
            temperatures=TEMPERATURES[rank],
            chunk_tokens=chunk_tokens,
            rows=rows,
        )
        weighed(logprobs, entropy, rank).backward()
        rows.finish()
        return [logprobs.detach(), entropy.detach(), *gradients(hidden, bias, own)]

    check_against_all_logits(on_ranks(size, compute))


def check_against_all_logits(ranks: list[list[torch.Tensor]]) -> None:
    weight = WEIGHT.double().requires_grad_()
    for rank, (*found, bias_grad, _) in enumerate(ranks):
        hidden = HIDDEN[rank].double().requires_grad_()
        bias = BIAS.double().requires_grad_()
        logits = F.linear(hidden, weight, bias) / TEMPERATURES[rank][:, None]
        distribution = torch.distributions.Categorical(logits=logits, validate_args=False)
        logprobs = distribution.log_prob(TOKENS[rank])
        weighed(logprobs, distribution.entropy(), rank).backward()
        expected = [logprobs, distribution.entropy(), hidden.grad, bias.grad]
        for value, right in zip([*found, bias_grad], expected, strict=True):
            assert right is not None
            assert torch.allclose(value.double(), right, atol=2e-5)
    assert weight.grad is not None
    gradient = torch.cat([own for *_, own in ranks]).double()
    assert torch.allclose(gradient, weight.grad / len(ranks), atol=2e-5)


@pytest.mark.parametrize("piece_bytes", PIECES)
def test_several_targets_of_a_token(piece_bytes: int) -> None:
    """Of a vocabulary that is split over tensor ranks, with gradients; and of a spread one."""
    targets, upstream = (torch.arange(27).view(9, 3) * 7) % VOCABULARY, draw(9, 3, seed=5)

    def compute(group: ProcessGroup) -> list[torch.Tensor]:
        hidden = HIDDEN[0].clone().requires_grad_()
        part = slice(0, 5) if group.rank == 0 else slice(5, None)
        own, place = WEIGHT[part].clone().requires_grad_(), VocabularyPart(part.start, group.handle)
        split, _ = chunked_logprobs(hidden, own, targets, chunk_tokens=4, vocabulary=place)
        (split * upstream).sum().backward()
        rows = spread.SpreadRows(VOCABULARY, group, torch.float32, piece_bytes)
        with torch.no_grad():
            of_spread, _ = chunked_logprobs(hidden, own_rows(WEIGHT, group), targets, rows=rows)
        return [split.detach(), of_spread, *gradients(hidden, own)]

    first, second = on_ranks(2, compute)
    hidden, weight = (it.double().requires_grad_() for it in (HIDDEN[0], WEIGHT))
    expected = (hidden @ weight.t()).log_softmax(-1).gather(1, targets)
    (expected * upstream).sum().backward()
    for split, of_spread, of_hidden, _ in (first, second):
        for value, right in ((split, expected), (of_spread, expected), (of_hidden, hidden.grad)):
            assert torch.allclose(value.double(), right, atol=2e-5)
    assert torch.allclose(torch.cat([first[3], second[3]]).double(), weight.grad, atol=2e-5)


@pytest.mark.parametrize("piece_bytes", PIECES)
@pytest.mark.parametrize("top_k", [3, VOCABULARY])
def test_most_probable_tokens_of_a_spread_vocabulary(piece_bytes: int, top_k: int) -> None:
    """In pieces on two ranks, and on two tensor ranks of which neither has all k."""

    def compute(group: ProcessGroup) -> list[tuple[torch.Tensor, torch.Tensor]]:
        rank, border = group.rank, 5
        rows = spread.SpreadRows(VOCABULARY, group, torch.float32, piece_bytes)
        part = slice(0, border) if rank == 0 else slice(border, None)
        spread_over = chunked_top_logprobs(
            HIDDEN[rank], own_rows(WEIGHT, group), top_k, bias=BIAS, chunk_tokens=4, rows=rows
        )
        split = chunked_top_logprobs(
            HIDDEN[0],
            WEIGHT[part],
            top_k,
            bias=BIAS[part],
            chunk_tokens=4,
            vocabulary=VocabularyPart(part.start, group.handle),
        )
        return [spread_over, split]

    ranks = on_ranks(2, compute)
    for hidden, (values, tokens) in [
        *((HIDDEN[rank], found[0]) for rank, found in enumerate(ranks)),
        *((HIDDEN[0], found[1]) for found in ranks),
    ]:
        logits = F.linear(hidden.double(), WEIGHT.double(), BIAS.double())
        expected = logits.log_softmax(-1).topk(top_k)
        assert torch.equal(tokens, expected.indices)
        assert torch.allclose(values.double(), expected.values, atol=2e-5)


@pytest.mark.parametrize("piece_bytes", PIECES)
@pytest.mark.parametrize("chunk_tokens", [4, 100])
def test_a_vocabulary_that_is_split_over_tensor_ranks(piece_bytes: int, chunk_tokens: int) -> None:
    """Ranks 0 and 1 have other tokens of the vocabulary, and the same hidden states; 2 and 3, too.

    The rows of what 0 has are spread over 0 and 2, those of 1 over 1 and 3.
    """
    border, stores = 5, [dist.HashStore() for _ in range(4)]

    def group_of(number: int, rank: int) -> ProcessGroup:
        handle = dist.ProcessGroupGloo(stores[number], rank, 2, TIMEOUT)
        return ProcessGroup(rank, 2, CPU, handle)

    def compute(world: ProcessGroup) -> list[torch.Tensor]:
        rows_rank, tensor_rank = divmod(world.rank, 2)
        part = slice(0, border) if tensor_rank == 0 else slice(border, None)
        group, tensor = group_of(tensor_rank, rows_rank), group_of(2 + rows_rank, tensor_rank)
        rows = spread.SpreadRows(len(WEIGHT[part]), group, torch.float32, piece_bytes)
        hidden, own = HIDDEN[rows_rank].clone().requires_grad_(), own_rows(WEIGHT[part], group)
        bias = BIAS[part].clone().requires_grad_()
        logprobs, entropy = chunked_logprobs(
            hidden,
            own,
            TOKENS[rows_rank],
            bias=bias,
            temperatures=TEMPERATURES[rows_rank],
            chunk_tokens=chunk_tokens,
            vocabulary=VocabularyPart(part.start, tensor.handle),
            rows=rows,
        )
        weighed(logprobs, entropy, rows_rank).backward()
        rows.finish()
        return [logprobs.detach(), entropy.detach(), *gradients(hidden, bias, own)]

    ranks = on_ranks(4, compute)
    found = []
    for first, second in (ranks[:2], ranks[2:]):
        for index in range(3):
            assert torch.equal(first[index], second[index])
        found.append([*first[:3], torch.cat([first[3], second[3]])])
    gradient = torch.cat([ranks[rank][4] for rank in (0, 2, 1, 3)])
    check_against_all_logits([[*found[0], gradient], [*found[1], gradient[:0]]])


def test_an_output_layer_that_is_not_trained_has_no_gradient(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And none is sent."""
    monkeypatch.setattr(dist.ProcessGroupGloo, "_reduce_scatter_base", None)  # its calls fail

    def compute(group: ProcessGroup) -> tuple[bool, torch.Tensor]:
        hidden = HIDDEN[group.rank].clone().requires_grad_()
        own = own_rows(WEIGHT, group).requires_grad_(False)
        rows = spread.SpreadRows(VOCABULARY, group, torch.float32, SMALL)
        logprobs, entropy = chunked_logprobs(hidden, own, TOKENS[group.rank], rows=rows)
        weighed(logprobs, entropy, group.rank).backward()
        return own.grad is None, gradients(hidden)[0]

    for rank, (has_none, found) in enumerate(on_ranks(2, compute)):
        hidden = HIDDEN[rank].double().requires_grad_()
        distribution = torch.distributions.Categorical(
            logits=F.linear(hidden, WEIGHT.double()), validate_args=False
        )
        logprobs = distribution.log_prob(TOKENS[rank])
        weighed(logprobs, distribution.entropy(), rank).backward()
        assert hidden.grad is not None
        assert has_none
        assert torch.allclose(found.double(), hidden.grad, atol=2e-5)


def test_no_rank_ever_has_all_rows() -> None:
    tokens = torch.tensor([1, 4, 10])

    def compute(group: ProcessGroup) -> int:
        own, rows = (
            own_rows(WEIGHT, group),
            spread.SpreadRows(VOCABULARY, group, torch.float32, SMALL),
        )
        with LargestTensor() as largest:
            hidden = spread.spread_embedding(own, tokens, rows)
            chunked_logprobs(hidden, own, tokens, chunk_tokens=2, rows=rows)[0].sum().backward()
        return largest.count

    assert on_ranks(2, compute) == [6 * WIDTH, 5 * WIDTH]  # a rank's own share


def test_without_a_backward_pass_no_piece_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    alive, most = weakref.WeakSet[torch.Tensor](), list[int]()
    sums_over = logprobs.sums_over

    def watched(*arguments: Any) -> tuple[VocabularySums, torch.Tensor]:
        sums, exponentials = sums_over(*arguments)
        alive.add(exponentials)
        most.append(len(alive))
        return sums, exponentials

    monkeypatch.setattr(logprobs, "sums_over", watched)

    def compute(group: ProcessGroup) -> None:
        own, rows = (
            own_rows(WEIGHT, group),
            spread.SpreadRows(VOCABULARY, group, torch.float32, SMALL),
        )
        with torch.no_grad():
            chunked_logprobs(HIDDEN[0], own, TOKENS[0], rows=rows)

    on_ranks(1, compute)
    assert len(most) == 11 // 4 + 1
    assert max(most) <= 2  # this one, and the one before


def test_what_is_gathered_is_small() -> None:
    rows = spread.SpreadRows(VOCABULARY, ProcessGroup(1, 2, CPU), torch.float32, SMALL)
    assert list(rows.pieces(WIDTH)) == [range(0, 2), range(2, 4), range(4, 6)]
    found = [rows.rows_in(piece, CPU).tolist() for piece in rows.pieces(WIDTH)]
    assert found == [[0, 1, 6, 7], [2, 3, 8, 9], [4, 5, 10]]
