"""Policy versions that are adapters of one model, as trainers publish them."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from integration.sglang.policies import Policies

from areal_sc.config.lora_settings import LoraConfig
from areal_sc.engines.likely_rows import likely_rows
from areal_sc.engines.training.adapters.adapter_probe import PROBE_NAME, AdapterProbe
from areal_sc.weights.group import NamedTensor

LORA = LoraConfig(rank=4, alpha=8.0, publish_merged=False)


class AdapterPolicies(Policies):
    """Each version is the model with an adapter merged; its tensors are the adapter's, and flat."""

    def __init__(self, folder: Path, *, change: float = 1.0) -> None:
        super().__init__(folder, change=change)
        self._adapters: dict[int, list[NamedTensor]] = {}

    def add(self) -> int:
        version = self.newest + 1
        model, tensors = copy.deepcopy(self._models[0]), list[NamedTensor]()
        generator = torch.Generator().manual_seed(version)
        for name, layer in model.model.named_modules():
            if isinstance(layer, torch.nn.Linear):
                outputs, inputs = layer.weight.shape
                a = torch.randn(LORA.rank, inputs, generator=generator) / inputs**0.5
                b = torch.randn(outputs, LORA.rank, generator=generator) * 0.2 * self.change
                with torch.no_grad():
                    layer.weight += LORA.alpha / LORA.rank * b @ a
                tensors.append((f"model.{name}.lora_A", a.flatten()))
                tensors.append((f"model.{name}.lora_B", b.flatten()))
        self._models[version], self._adapters[version] = model, tensors
        return version

    def named_tensors(self, version: int) -> list[NamedTensor]:
        return [*self._adapters[version], (PROBE_NAME, self.probe(version).tensor.flatten())]

    def probe(self, version: int) -> AdapterProbe:
        model, base = self._models[version], self._models[0]

        def measure(token_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return _logprobs(base, token_ids), _logprobs(model, token_ids)

        return AdapterProbe.measured(likely_rows(base)[0], measure)


def _logprobs(model: Any, token_ids: torch.Tensor) -> torch.Tensor:
    """[P] of a row [P]; that of the first is 0."""
    with torch.no_grad():
        logits = model(token_ids[None], use_cache=False).logits[0].double()
    of_tokens = logits[:-1].log_softmax(-1).gather(1, token_ids[1:, None])[:, 0]
    return torch.cat([torch.zeros(1), of_tokens.float()])
