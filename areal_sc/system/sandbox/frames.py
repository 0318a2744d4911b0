"""How a sandbox and its server talk: one message each way on a stream. Standard library alone.

8 bytes of length, then a dict as `marshal` has it: both ends are the same Python, and a program
holds neither.
"""

from __future__ import annotations

import marshal
import struct
from typing import Any, Final

LENGTH: Final = struct.Struct("!Q")


def packed(message: dict[str, Any]) -> bytes:
    """The message, its length in front."""
    body = marshal.dumps(message)
    return LENGTH.pack(len(body)) + body
