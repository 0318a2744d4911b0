"""A module that only workers import, and cannot."""

from __future__ import annotations

import os

KEY = os.environ["AREAL_SC_NO_SUCH_VARIABLE"]


def agent(row: dict[str, str]) -> float:
    return float(len(KEY))
