"""Replies of finished requests, kept so that a request id is never executed twice."""

from __future__ import annotations

from collections import OrderedDict
from typing import Final, NamedTuple

_ENTRY_BYTES: Final = 300
"""What an entry takes beside its reply: the id, the tuple, the dict's slot."""


class FinishedRequest(NamedTuple):
    """`reply` is the encoded answer; None when it was too large to keep."""

    method: str
    reply: bytes | None


class ReplayCache:
    """The newest finished requests by id, in at most `max_bytes` of memory.

    A reply over `max_reply_bytes` is forgotten at once while its id stays known: a repeat is
    refused, not executed.
    """

    def __init__(self, *, max_bytes: int = 16 << 20, max_reply_bytes: int = 256 << 10) -> None:
        self._max_bytes = max_bytes
        self._max_reply_bytes = max_reply_bytes
        self._finished: OrderedDict[str, FinishedRequest] = OrderedDict()
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._finished)

    def get(self, request_id: str) -> FinishedRequest | None:
        return self._finished.get(request_id)

    def add(self, request_id: str, method: str, reply: bytes) -> None:
        assert request_id not in self._finished
        kept = reply if len(reply) <= self._max_reply_bytes else None
        self._finished[request_id] = FinishedRequest(method, kept)
        self.num_bytes += _ENTRY_BYTES + len(kept or b"")
        while self.num_bytes > self._max_bytes:
            _, (_, oldest) = self._finished.popitem(last=False)
            self.num_bytes -= _ENTRY_BYTES + len(oldest or b"")
