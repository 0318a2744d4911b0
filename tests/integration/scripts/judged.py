"""Rewards of `test_evaluate.py`, by import path: one that waits for a file, and its opposite."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any


async def vowels(prompt: dict[str, Any], completion: str) -> float:
    """1 where the answer has a vowel; rows that name a gate wait until the file is there."""
    # the file is of another process: there is no event to wait for
    while not _is_open(prompt["gate"]):  # noqa: ASYNC110
        await asyncio.sleep(0.02)
    return float(bool(set(completion) & set("aeiou")))


def _is_open(gate: str) -> bool:
    return not gate or Path(gate).exists()


def no_vowels(prompt: dict[str, Any], completion: str) -> float:
    return float(not set(completion) & set("aeiou"))
