"""Logging set-up for entry points; every other module only does `logging.getLogger(__name__)`."""

from __future__ import annotations

import logging
import sys
from pathlib import Path


def setup_logging(role: str, path: Path | None = None) -> None:
    """Sends the process's log records to `path`, or to standard error when it is None.

    Args:
        role: prefix of every line, e.g. `rollout/0` or `controller`.
        path: log file, appended to.
    """
    handler = logging.FileHandler(path) if path else logging.StreamHandler(sys.stderr)
    formatter = logging.Formatter(
        f"%(asctime)s.%(msecs)03d %(levelname)s {role} %(name)s: %(message)s", "%H:%M:%S"
    )
    handler.setFormatter(formatter)
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.INFO)
    logging.captureWarnings(True)
