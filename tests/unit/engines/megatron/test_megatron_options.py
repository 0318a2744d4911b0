"""What Megatron-core is told depends on the device: fused kernels are CUDA's."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from transformers import Qwen3Config

from areal_sc.config.parallel_settings import TrainEngineKind
from areal_sc.config.schema import ActorConfig
from areal_sc.engines.megatron.family import ModelSizes

FUSIONS = ("apply_rope_fusion", "bias_activation_fusion", "bias_dropout_fusion")


@pytest.mark.filterwarnings("ignore")  # of what Megatron-core imports
@pytest.mark.parametrize(("device", "is_fused"), [("cpu", False), ("cuda", True)])
def test_fusions(device: str, is_fused: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """TransformerEngine, which has them, is not needed to know what is asked for."""
    rope: Any = importlib.import_module("megatron.core.models.common.embeddings.rope_utils")
    monkeypatch.setattr(rope, "fused_apply_rotary_pos_emb_thd", lambda *_: None)
    model: Any = importlib.import_module("areal_sc.engines.megatron.model")
    actor = ActorConfig(engine=TrainEngineKind.megatron, path="model")
    sizes = ModelSizes.of(Qwen3Config(num_hidden_layers=2).to_dict())
    rotary = model.Rotary(torch.ones(64), 1.0)
    config = model.transformer_config(actor, sizes, rotary, torch.device(device))
    assert [getattr(config, name) for name in FUSIONS] == [is_fused] * len(FUSIONS)
