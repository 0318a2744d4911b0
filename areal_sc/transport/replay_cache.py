"""Replies of finished requests, kept so that a request id is never executed twice."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from areal_sc.transport.socket import Buffer


@dataclass(frozen=True, slots=True)
class FinishedRequest:
    """`reply` is the encoded answer, or None when it was too large to keep."""

    method: str
    reply: Sequence[Buffer] | None

    @property
    def num_bytes(self) -> int:
        return sum(map(len, self.reply)) if self.reply is not None else 0


class ReplayCache:
    """The newest finished requests by id, at most `max_count` of them and `max_bytes` of replies.

    A reply over `max_reply_bytes` is forgotten at once while its id stays known: a repeat is
    refused, not executed.
    """

    def __init__(
        self,
        *,
        max_count: int = 65_536,
        max_bytes: int = 32 << 20,
        max_reply_bytes: int = 256 << 10,
    ) -> None:
        self._max_count = max_count
        self._max_bytes = max_bytes
        self._max_reply_bytes = max_reply_bytes
        self._finished: OrderedDict[str, FinishedRequest] = OrderedDict()
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._finished)

    def get(self, request_id: str) -> FinishedRequest | None:
        return self._finished.get(request_id)

    def add(self, request_id: str, method: str, reply: Sequence[Buffer]) -> None:
        assert request_id not in self._finished
        finished = FinishedRequest(method, reply)
        if finished.num_bytes > self._max_reply_bytes:
            finished = FinishedRequest(method, None)
        self._finished[request_id] = finished
        self.num_bytes += finished.num_bytes
        while len(self._finished) > self._max_count or self.num_bytes > self._max_bytes:
            _, oldest = self._finished.popitem(last=False)
            self.num_bytes -= oldest.num_bytes
