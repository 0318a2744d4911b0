"""What a model folder says of its tokens, read without transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def tokens_of(folder: Path) -> dict[str, int] | None:
    """Token -> number, of `tokenizer.json`; None where that is not there, or has none."""
    try:
        content: Any = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
        vocabulary = content["model"]["vocab"]
        if isinstance(vocabulary, list):  # with a score each
            vocabulary = {token: number for number, (token, _) in enumerate(vocabulary)}
        added = {token["content"]: token["id"] for token in content.get("added_tokens", ())}
        return {**vocabulary, **added}
    except (OSError, ValueError, KeyError, TypeError):
        return None
