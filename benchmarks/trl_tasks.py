"""The rewards of `against_trl.py`. Both sides import this file, so it needs Python alone."""

from __future__ import annotations

import re
from collections.abc import Mapping


def exact_text(prompt: Mapping[str, str], completion: str) -> float:
    """1 where the completion is the answer, character by character, else 0."""
    return float(completion == prompt["answer"])


def last_number(prompt: Mapping[str, str], completion: str) -> float:
    """1 where the last whole number of the completion is the answer, else 0."""
    return float(re.findall(r"-?\d+", completion)[-1:] == [prompt["answer"]])


REWARDS = {"exact_text": exact_text, "last_number": last_number}
