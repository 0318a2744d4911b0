"""One call to many servers, without a task for each.

consumes     the calls; the replies, as they come
waits for    one future, which counts down the replies
unblocked by the last reply or failure, or the one deadline

A task, a future and a timer for each of thousands of calls would cost the caller twice as much as
the messages themselves.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from msgspec import Raw

from areal_sc.errors import ArealError
from areal_sc.transport.rpc.client import RequestIds, RpcClient
from areal_sc.transport.rpc.method import A, Method, R, pack
from areal_sc.transport.socket import SEND_RETRY_S

CALLS_PER_TURN: Final = 64
"""Calls begun, or given up, without giving the event loop a turn: about a millisecond."""


class _Gather:
    """Outcomes in the order of the calls; `done` once none is missing, or one ends all.

    Attributes:
        is_stopped: a call failed, and the others do not matter any more.
    """

    def __init__(self, num_calls: int, done: asyncio.Future[None], *, stops_at_error: bool) -> None:
        self.outcomes: list[Any] = [None] * num_calls
        self.done = done
        self.is_stopped = False
        self._num_missing = num_calls
        self._stops_at_error = stops_at_error

    def put(self, index: int, outcome: Any) -> None:
        self.outcomes[index] = outcome
        self._num_missing -= 1
        if self._num_missing == 0:
            self.finish()

    def put_error(self, index: int, error: ArealError) -> None:
        if self.is_stopped:
            return  # the first one is the cause
        self.is_stopped = self._stops_at_error
        self.put(index, error)
        if self.is_stopped:
            self.finish()

    def finish(self) -> None:
        if not self.done.done():
            self.done.set_result(None)


@dataclass(eq=False, slots=True)
class _Share:
    """One call's part of the whole."""

    gather: _Gather
    index: int
    client: RpcClient
    method: Method[Any, Any]
    request_id: str
    is_open: bool = True

    def settle(self, value: Any) -> None:
        if self.is_open:
            self.is_open = False
            self.gather.put(self.index, value)

    def fail(self, error: ArealError) -> None:
        if self.is_open:
            self.is_open = False
            self.gather.put_error(self.index, error)

    def abandon(self) -> None:
        if self.is_open:
            self.client.abandon(self.request_id, self)


async def fan_out(
    calls: Sequence[tuple[RpcClient, A]],
    method: Method[A, R],
    *,
    timeout_s: float,
    new_request_id: RequestIds,
    stops_at_error: bool = False,
) -> list[R | ArealError]:
    """What each call returned, or the error that it would have raised; see `RpcClient.call`.

    Arguments that are one and the same object are encoded once. With `stops_at_error` the first
    error ends the wait at once: the other calls are cancelled, and their outcomes mean nothing.
    """
    if not calls:
        return []
    loop = asyncio.get_running_loop()
    gather = _Gather(len(calls), loop.create_future(), stops_at_error=stops_at_error)
    shares: list[_Share] = []
    deadline = loop.call_later(timeout_s, gather.finish)
    try:
        unsent = await _begin(calls, method, gather, shares, new_request_id)
        while unsent and not gather.done.done():  # queues are full
            await asyncio.wait((gather.done,), timeout=SEND_RETRY_S)
            unsent = [(share, frame) for share, frame in unsent if not _is_settled(share, frame)]
        await gather.done
        if gather.is_stopped:
            await _give_up(shares)
        else:
            await _expire(shares, timeout_s)
    except asyncio.CancelledError:
        for share in shares:
            share.abandon()
        raise
    finally:
        deadline.cancel()
    return gather.outcomes


async def _begin(
    calls: Sequence[tuple[RpcClient, A]],
    method: Method[A, Any],
    gather: _Gather,
    shares: list[_Share],
    new_request_id: RequestIds,
) -> list[tuple[_Share, bytes]]:
    """Sends the requests; returns those for which there was no room."""
    unsent = []
    packed_args: A | None = None
    packed: Raw | None = None
    for index, (client, args) in enumerate(calls):
        if index and index % CALLS_PER_TURN == 0:
            await asyncio.sleep(0)
        if gather.is_stopped:
            break
        share = _Share(gather, index, client, method, new_request_id())
        shares.append(share)
        try:
            if packed is None or args is not packed_args:
                packed_args, packed = args, pack(args)
            frame = client.frame_of(share.request_id, method, packed)
            if not client.begin(share.request_id, frame, share):
                unsent.append((share, frame))
        except ArealError as error:
            share.fail(error)
    return unsent


def _is_settled(share: _Share, frame: bytes) -> bool:
    """Whether the request needs no further attempt to send it."""
    try:
        return not share.is_open or share.client.send(frame)
    except ArealError as error:
        share.fail(error)
        return True


async def _give_up(shares: Sequence[_Share]) -> None:
    """Cancels what is still open."""
    for number, share in enumerate([share for share in shares if share.is_open], start=1):
        share.abandon()
        share.is_open = False
        if number % CALLS_PER_TURN == 0:
            await asyncio.sleep(0)


async def _expire(shares: Sequence[_Share], timeout_s: float) -> None:
    """Gives up what is still open at the deadline."""
    late = [share for share in shares if share.is_open]
    for number, share in enumerate(late, start=1):
        share.abandon()
        share.fail(share.client.timeout_error(share.method, timeout_s))
        if number % CALLS_PER_TURN == 0:
            await asyncio.sleep(0)
