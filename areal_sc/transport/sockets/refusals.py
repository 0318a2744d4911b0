"""A count of what was refused, and a log line that a flood cannot turn into a flood."""

from __future__ import annotations

import logging
import time
from typing import Final

LOG_INTERVAL_S: Final = 10.0


class Refusals:
    """Counts messages that are not served; at most one log line in `LOG_INTERVAL_S` tells of them.

    Args:
        logger: of the module that refuses.
        event: first word of the line.
        node_id: who refuses.

    Attributes:
        num: refused so far.
    """

    def __init__(self, logger: logging.Logger, event: str, node_id: str) -> None:
        self.num = 0
        self._logger = logger
        self._event = event
        self._node_id = node_id
        self._next_line_s = float("-inf")

    def add(self, reason: object) -> None:
        """Counts one; the line names the newest reason and the count so far."""
        self.num += 1
        now_s = time.monotonic()
        if now_s >= self._next_line_s:
            self._next_line_s = now_s + LOG_INTERVAL_S
            self._logger.warning(
                "%s node=%s count=%d reason=%s",
                self._event,
                self._node_id,
                self.num,
                reason,
            )
