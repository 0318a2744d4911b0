"""Decides who may read large trees from one process at a time, be it the script's or a node's.

    who wants a file ── TAKE_TURN ──► True: reads it, piece by piece; each one keeps the turn
                                 ──► False: asks another one that has the tree, or later

A turn that nothing is read in ends by itself, so whoever dies holds up nobody for long.
"""

from __future__ import annotations

import time
from typing import Final

MAX_TURNS: Final = 2
"""The sum of what all nodes get grows with each that has the tree; more at once slow down each."""
IDLE_S: Final = 5.0
"""A node looks at the hash of a file before it reads the next one."""


class TreeTurns:
    """The turns at one process; used from one event loop."""

    def __init__(self) -> None:
        self._read_s: dict[str, float] = {}  # monotonic, of the last piece, by who reads

    def take_turn(self, reader: str) -> bool:
        """Whether the reader has a turn, from now on if it had none."""
        now_s = time.monotonic()
        self._read_s = {it: s for it, s in self._read_s.items() if now_s < s + IDLE_S}
        if reader not in self._read_s and len(self._read_s) >= MAX_TURNS:
            return False
        self._read_s[reader] = now_s
        return True

    def note_read(self, reader: str) -> None:
        """The reader gets a piece."""
        if reader in self._read_s:
            self._read_s[reader] = time.monotonic()

    def end(self, reader: str) -> None:
        """The reader has all."""
        self._read_s.pop(reader, None)
