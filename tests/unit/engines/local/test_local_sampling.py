"""Sampling against float64 references computed token by token."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from areal_sc.engines.local.random import stream_key, uniforms
from areal_sc.engines.local.sampling import sample


def reference_distribution(
    logits: np.ndarray, temperature: float, top_p: float, top_k: int
) -> np.ndarray:
    """float64 probabilities of one row, by the definitions and a plain loop."""
    scaled = logits.astype(np.float64) / temperature
    probabilities = np.exp(scaled - scaled.max())
    probabilities /= probabilities.sum()
    order = sorted(range(len(logits)), key=lambda i: (-probabilities[i], i))
    kept = order[:top_k] if top_k else order
    total, mass, nucleus = sum(probabilities[i] for i in kept), 0.0, []
    for i in kept:
        nucleus.append(i)
        mass += probabilities[i] / total
        if mass >= top_p:
            break
    result = np.zeros(len(logits))
    result[nucleus] = probabilities[nucleus] / probabilities[nucleus].sum()
    return result


SETTINGS = [
    (1.0, 1.0, 0),
    (0.5, 1.0, 0),
    (1.7, 0.9, 0),
    (1.0, 0.35, 0),
    (1.0, 1.0, 3),
    (0.8, 0.7, 5),
    (1.0, 1e-6, 0),
    (1.3, 1.0, 1),
    (1.0, 1.0, 99),
]


def test_rows_of_one_batch_follow_their_own_settings() -> None:
    rng = np.random.default_rng(0)
    num_draws, vocabulary = 4000, 11
    logits = rng.normal(size=(len(SETTINGS), vocabulary)).astype(np.float32) * 2
    rows = np.repeat(np.arange(len(SETTINGS)), num_draws)
    temperature, top_p, top_k = (np.array(column)[rows] for column in zip(*SETTINGS, strict=True))
    random = rng.random(len(rows), dtype=np.float32)

    tokens, logprobs = sample(
        torch.from_numpy(logits[rows]),
        random,
        temperature.astype(np.float32),
        top_p.astype(np.float32),
        top_k,
    )

    for row, setting in enumerate(SETTINGS):
        expected = reference_distribution(logits[row], *setting)
        drawn = tokens[rows == row].numpy()
        assert (expected[drawn] > 0).all(), setting
        np.testing.assert_allclose(
            logprobs[rows == row].numpy(), np.log(expected[drawn]), atol=2e-6, err_msg=str(setting)
        )
        counts = np.bincount(drawn, minlength=vocabulary)
        likely = expected > 0
        expected_counts = expected[likely] * num_draws
        deviation = counts[likely] - expected_counts
        chi_square = float((deviation**2 / expected_counts).sum())
        # far in the tail for every number of tokens up to 11; the draws are fixed
        assert chi_square < 40, setting


def test_greedy_rows_take_the_most_probable_token_at_temperature_one() -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0], [5.0, 0.0, 0.0]])
    tokens, logprobs = sample(
        logits,
        np.array([0.999, 0.999], dtype=np.float32),
        np.array([0, 1], dtype=np.float32),
        np.array([0.1, 1], dtype=np.float32),  # without effect on the greedy row
        np.array([1, 0]),
    )
    assert tokens.tolist() == [1, 2]
    expected = 3 - math.log(1 + math.exp(3) + math.exp(1))
    assert logprobs[0].item() == pytest.approx(expected, abs=1e-6)


def test_extreme_draws_never_select_impossible_tokens() -> None:
    logits = torch.tensor([[-math.inf, 0.0, 0.0, -math.inf]]).repeat(2, 1)
    ones = np.ones(2, dtype=np.float32)
    largest = np.float32(1 - 2.0**-23)
    tokens, logprobs = sample(
        logits, np.array([0, largest], dtype=np.float32), ones, ones, np.zeros(2, dtype=np.int64)
    )
    assert tokens.tolist() == [1, 2]
    np.testing.assert_allclose(logprobs.numpy(), math.log(0.5), atol=1e-6)


@pytest.mark.parametrize(("top_p", "top_k"), [(0.8, 0), (1.0, 2)])
def test_a_draw_near_one_stays_within_the_kept_tokens(
    top_p: float, top_k: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the scan rounds to: on CUDA it is parallel, and may grow where nothing is added."""
    exact_cumsum = torch.Tensor.cumsum

    def rounded_cumsum(values: torch.Tensor, dim: int) -> torch.Tensor:
        cumulated = exact_cumsum(values, dim=dim)
        cumulated[:, -2:] *= 1 + 2.0**-22
        return cumulated

    monkeypatch.setattr(torch.Tensor, "cumsum", rounded_cumsum)
    logits = torch.tensor([[0.0, 3.0, -2.0, 2.0, -3.0]])
    largest = np.array([1 - 2.0**-23], dtype=np.float32)
    ones = np.ones(1, dtype=np.float32)
    tokens, logprobs = sample(logits, largest, ones, ones * np.float32(top_p), np.array([top_k]))
    assert tokens.tolist() == [3]
    expected = 2 - math.log(math.exp(3) + math.exp(2))
    assert logprobs.item() == pytest.approx(expected, abs=1e-6)


def test_random_streams_are_uniform_and_independent() -> None:
    keys = np.array([stream_key(7, request) for request in range(64)], dtype=np.uint64)
    table = np.stack([uniforms(keys, np.full(64, position)) for position in range(512)])
    assert table.min() >= 0
    assert table.max() < 1
    assert len(np.unique(table)) > 0.99 * table.size
    counts, _ = np.histogram(table, bins=16, range=(0, 1))
    expected = table.size / 16
    assert ((counts - expected) ** 2 / expected).sum() < 45  # 15 degrees of freedom
    # of neighbours in a stream, and of streams side by side: 1/sqrt(32,000) is 0.006
    assert abs(np.corrcoef(table[:-1].ravel(), table[1:].ravel())[0, 1]) < 0.03
    assert abs(np.corrcoef(table[:, :-1].ravel(), table[:, 1:].ravel())[0, 1]) < 0.03


def test_random_streams_differ_by_seed_and_repeat() -> None:
    def stream(seed: int) -> list[float]:
        keys = np.array([stream_key(seed, 3)] * 8, dtype=np.uint64)
        return uniforms(keys, np.arange(8)).tolist()

    assert stream(1) == stream(1)
    assert stream(1) != stream(2)
    assert stream(-1) != stream(1)  # any integer is a seed
