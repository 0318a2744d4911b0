"""Where names come from, when nothing else is injected."""

from __future__ import annotations

import uuid


def random_id() -> str:
    """12 hexadecimal digits."""
    return uuid.uuid4().hex[:12]
