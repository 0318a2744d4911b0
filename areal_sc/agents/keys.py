"""Keys of a run's sessions, and the key of the run's address. No torch.

    areal-WORKER-LIFE-NUMBER-CODE   of a session
    areal-run-CODE                  of the run: whoever has it claims episodes

The code is made with a secret that the run's workers share. So whoever has the secret knows,
without a list of all that ever were, whether a key was made in this run, and by which life of which
worker.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from typing import Final, NamedTuple

_CODE_CHARS: Final = 32
_RUN: Final = "areal-run"


class SessionName(NamedTuple):
    """Which session a key is of.

    Attributes:
        life: incarnation of the worker.
        number: of the session in that life.
    """

    worker: str
    life: str
    number: int


class SessionKeys:
    """Makes keys, and reads them.

    Args:
        secret: of the run; b"": one of this object's own.
    """

    def __init__(self, secret: bytes = b"") -> None:
        self._secret = secret or secrets.token_bytes(32)
        self.run_key = self._with_code(_RUN)

    def key_of(self, name: SessionName) -> str:
        """The key of a session."""
        return self._with_code(f"areal-{name.worker}-{name.life}-{name.number}")

    def read(self, key: str) -> SessionName | None:
        """Which session it is of; None: no session has, or had, this key."""
        named = key.rpartition("-")[0]
        if not _is_equal(key, self._with_code(named)):
            return None
        parts = named.removeprefix("areal-").rsplit("-", 2)
        return SessionName(parts[0], parts[1], int(parts[2])) if len(parts) == 3 else None

    def is_run_key(self, key: str) -> bool:
        """Whether it is the run's."""
        return _is_equal(key, self.run_key)

    def _with_code(self, named: str) -> str:
        code = hmac.new(self._secret, named.encode(errors="replace"), hashlib.sha256)
        return f"{named}-{code.hexdigest()[:_CODE_CHARS]}"


def _is_equal(told: str, key: str) -> bool:
    """In constant time: a guess tells nothing of how near it is."""
    return hmac.compare_digest(told.encode(errors="replace"), key.encode(errors="replace"))
