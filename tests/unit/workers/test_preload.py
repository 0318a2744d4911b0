"""What a fork server does so that workers start fast."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import conversion_mapping

from areal_sc.config.schema import Dtype
from areal_sc.engines.local.model import load_folder
from areal_sc.nodes.agent import PRELOAD
from areal_sc.workers.entry import prepare_model_loading


def test_a_model_is_loaded_without_compiling_patterns(
    monkeypatch: pytest.MonkeyPatch, tiny_model_folder: Path
) -> None:
    assert f"{prepare_model_loading.__module__}:{prepare_model_loading.__name__}" in PRELOAD
    compiled: list[str] = []
    build = conversion_mapping._build_checkpoint_conversion_mapping
    monkeypatch.setattr(conversion_mapping, "_checkpoint_conversion_mapping_cache", None)
    monkeypatch.setattr(
        conversion_mapping,
        "_build_checkpoint_conversion_mapping",
        lambda: (compiled.append("all"), build())[1],
    )
    prepare_model_loading()
    assert compiled == ["all"]
    load_folder(str(tiny_model_folder), torch.device("cpu"), Dtype.float32)
    assert compiled == ["all"]
