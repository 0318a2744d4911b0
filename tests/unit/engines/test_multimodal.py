"""Multimodal folders are refused; docs/models.md shows how to take their language models out."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from unit.engines.families import FOUR_LAYERS, HEADS_OF_8, LINEAR_ATTENTION, SIZES
from unit.engines.model_table import PAGE

from areal_sc.errors import ModelError
from areal_sc.sizing.model_folder import check_model_folder, reads_pictures

IMAGES = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 8,
}
CONFIGS: dict[str, Callable[[], Any]] = {
    "gemma3": lambda: hf.Gemma3Config(
        text_config=HEADS_OF_8, vision_config=IMAGES, mm_tokens_per_image=4
    ),
    "mistral3": lambda: hf.Mistral3Config(
        text_config={"model_type": "mistral", **SIZES},
        vision_config={"model_type": "pixtral", **IMAGES, "head_dim": 8},
    ),
    "qwen3_5": lambda: hf.Qwen3_5Config(
        text_config={**FOUR_LAYERS, "head_dim": 8, **LINEAR_ATTENTION},
        vision_config={
            "depth": 1,
            "hidden_size": 16,
            "intermediate_size": 16,
            "num_heads": 2,
            "out_hidden_size": 32,
        },
    ),
}


@pytest.mark.parametrize("family", CONFIGS)
def test_the_language_model_of_a_multimodal_one(
    family: str, tiny_model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(tiny_model_folder, "multimodal")
    whole = hf.AutoModelForImageTextToText.from_config(CONFIGS[family](), dtype=torch.float32)
    whole.save_pretrained("multimodal")
    if not reads_pictures("multimodal"):
        with pytest.raises(ModelError, match=r"multimodal \(its config\.json has vision_config\)"):
            check_model_folder("multimodal")

    code = PAGE.read_text().partition("```python\n")[2].partition("```")[0]
    exec(compile(code, str(PAGE), "exec"), {})
    check_model_folder("text")
    text = hf.AutoModelForCausalLM.from_pretrained("text").eval()
    ids = torch.arange(3, 20)[None]
    with torch.no_grad():
        assert torch.equal(text(input_ids=ids).logits, whole.eval()(input_ids=ids).logits)
