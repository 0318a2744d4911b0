"""How a sandbox and its server talk: one message each way on a stream. Standard library alone.

8 bytes of length, then a line of JSON, then bytes objects whose lengths stand in the JSON.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable
from typing import Any, Final

LENGTH: Final = struct.Struct("!Q")


def packed(header: dict[str, Any], parts: Iterable[bytes] = ()) -> bytes:
    """The message, its length in front."""
    parts = list(parts)
    line = json.dumps({**header, "parts": [len(part) for part in parts]}).encode()
    body = b"".join((line, b"\n", *parts))
    return LENGTH.pack(len(body)) + body


def unpacked(body: bytes) -> tuple[dict[str, Any], list[bytes]]:
    """Header and parts of a message without the length in front."""
    line, _, rest = body.partition(b"\n")
    header = json.loads(line)
    parts, at = [], 0
    for length in header.pop("parts"):
        parts.append(rest[at : at + length])
        at += length
    return header, parts
