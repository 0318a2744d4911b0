"""Adapters of one model, each with the model that it makes: merged, in float64."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from areal_sc.config.lora_settings import LoraConfig
from areal_sc.engines.training.adapters.adapter_files import write_adapter
from areal_sc.engines.training.adapters.lora import named_linear


@dataclass(frozen=True)
class Merged:
    """What transformers computes with one adapter.

    Attributes:
        folder: of the adapter; "": the model alone.
        model: float64, the adapter in its weights.
    """

    folder: str
    model: Any

    def logprobs(self, tokens: Sequence[int], temperature: float = 1.0) -> npt.NDArray[Any]:
        """[T - 1, V] nats, of what comes after each token but the last one."""
        with torch.no_grad():
            logits = self.model(torch.tensor([tokens])).logits[0, :-1] / temperature
        return torch.log_softmax(logits, dim=-1).numpy()


def add_adapter(
    model: Any,
    folder: Path,
    *,
    seed: int,
    rank: int,
    alpha: float = 16.0,
    targets: Sequence[str] = (),
    size: float = 0.15,
) -> Merged:
    """Writes an adapter of random values.

    Args:
        targets: ends of the names of its layers; none: all that there are.
    """
    generator = torch.Generator().manual_seed(seed)
    merged, values = copy.deepcopy(model).double(), dict[str, torch.Tensor]()
    for name, layer in named_linear(merged).items():
        if targets and not name.endswith(tuple(targets)):
            continue
        a = torch.randn(rank, layer.in_features, generator=generator) * size
        b = torch.randn(layer.out_features, rank, generator=generator) * size
        values |= {f"{name}.lora_A": a, f"{name}.lora_B": b}
        layer.weight.data += alpha / rank * b.double() @ a.double()
    folder.mkdir(parents=True)
    write_adapter(folder, LoraConfig(rank=rank, alpha=alpha), "base", values)
    return Merged(str(folder), merged)


def of_the_model(model: Any) -> Merged:
    """No adapter."""
    return Merged("", copy.deepcopy(model).double())


def check_answer(
    merged: Merged,
    prompt: Sequence[int],
    answer: Any,
    temperature: float,
    *,
    tolerance: float,
    num_top: int = 0,
) -> None:
    """Compares all log-probabilities of a `Completion` with these."""
    tokens = [*prompt, *answer.token_ids]
    start, places = len(prompt) - 1, np.arange(len(tokens) - 1)
    at_1, sampled = merged.logprobs(tokens), merged.logprobs(tokens, temperature)[start:]
    of_tokens = at_1[places, tokens[1:]]
    own = sampled[places[: len(sampled)], answer.token_ids]
    np.testing.assert_allclose(answer.logprobs, own, rtol=0, atol=tolerance)
    assert np.isnan(answer.prompt_logprobs[0])
    np.testing.assert_allclose(
        answer.prompt_logprobs[1:], of_tokens[:start], rtol=0, atol=tolerance
    )
    if num_top:
        assert answer.prompt_top[0] == []
        for told, expected in ((answer.prompt_top[1:], at_1[:start]), (answer.top, sampled)):
            assert len(told) == len(expected)
            for pairs, row in zip(told, expected, strict=True):
                ranked = np.sort(row)[::-1][:num_top]
                np.testing.assert_allclose([it[1] for it in pairs], ranked, rtol=0, atol=tolerance)
                named = row[[it[0] for it in pairs]]
                np.testing.assert_allclose(named, ranked, rtol=0, atol=tolerance)
                assert len({it[0] for it in pairs}) == num_top
