"""Keys of sessions. No torch.

    areal-WORKER-NUMBER-MAC

The worker's name is for whoever passes calls on to it. The code makes sure that a key was made
here, without a list of all that ever were.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from typing import Final

_CODE_CHARS: Final = 32


class SessionKeys:
    """Makes the keys of one worker, and reads them."""

    def __init__(self, worker: str) -> None:
        self._worker = worker
        self._secret = secrets.token_bytes(32)

    def key_of(self, number: int) -> str:
        """The key of the session of this number."""
        named = f"areal-{self._worker}-{number}"
        code = hmac.new(self._secret, named.encode(), hashlib.sha256)
        return f"{named}-{code.hexdigest()[:_CODE_CHARS]}"

    def read(self, key: str) -> int | None:
        """The number of its session; None: no session has, or had, this key."""
        number = key.rpartition("-")[0].rpartition("-")[2]
        if not (number.isascii() and number.isdecimal() and len(number) <= 18):
            return None
        # in constant time: a guess tells nothing of how near it is
        is_ours = hmac.compare_digest(
            key.encode(errors="replace"), self.key_of(int(number)).encode()
        )
        return int(number) if is_ours else None
