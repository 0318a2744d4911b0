"""The runs of groups on a rollout worker: each is played once, however often it is asked for.

    asked for ──► goes on ──► ended, its reply is kept ──► forgotten, with its rows
        joins ───────┘ └──────────────┘ given up

So a controller that takes over from one that died asks for the same runs again: it joins those that
go on, and gets the replies of those that have ended. A reply with rows is kept as long as the shard
of the rows is in the store. The controller forgets a shard when nobody trains on it any more, and
trains only on what its journal has on the disk, so what is forgotten is never asked for again. Of
replies without rows the newest ones are kept; a run whose reply is gone is repeated by its group.
Groups outside of training, whose ids are negative, are not taken over: nothing is kept of them.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any, Final

from areal_sc.system.waiting import cancel_all
from areal_sc.workers.calls import EndedRun, GroupAttempt, GroupReply

MAX_REPLIES_WITHOUT_ROWS: Final = 256
"""Most replies without rows, of a few KB each: far more than end between two words of a
controller."""


class GroupRuns:
    """The runs of one worker.

    Args:
        limit_s: after so long the reply of a run is that it goes on. Episodes have a limit below
            that, unless they wait for agents outside. None: a reply takes as long as the run.
    """

    def __init__(self, limit_s: float | None = None) -> None:
        self._limit_s = limit_s
        self._going: dict[GroupAttempt, asyncio.Task[GroupReply]] = {}
        self._given_up: set[GroupAttempt] = set()
        self._replies: dict[GroupAttempt, GroupReply] = {}
        self._without_rows: deque[GroupAttempt] = deque()

    @property
    def going(self) -> tuple[GroupAttempt, ...]:
        """The runs that have no reply yet."""
        return tuple(run for run in self._going if run not in self._replies)

    @property
    def ended(self) -> tuple[EndedRun, ...]:
        """The runs whose replies are kept."""
        return tuple(EndedRun(run, _shards(reply)) for run, reply in self._replies.items())

    async def join(
        self, run: GroupAttempt, play: Callable[[], Coroutine[Any, Any, GroupReply]]
    ) -> GroupReply:
        """The reply of a run. A caller that is cancelled does not end it.

        Raises: what `play` raises; the next call plays it again.
        """
        if run in self._replies:
            return self._replies[run]
        if run not in self._going:
            name = f"run of group {run.group_id}"
            self._going[run] = asyncio.create_task(self._play(run, play), name=name)
            self._going[run].add_done_callback(lambda task: self._note_end(run, task))
        going = self._going[run]
        await asyncio.wait([going], timeout=self._limit_s)
        return going.result() if going.done() else GroupReply(run, goes_on=True)

    async def give_up(self, run: GroupAttempt) -> None:
        """Ends a run that goes on. When this returns, nothing more comes of it."""
        if (going := self._going.get(run)) is not None:
            self._given_up.add(run)
            await asyncio.sleep(0)  # one that has not begun would not hear of it
            going.cancel()
            await asyncio.wait([going])

    def forget(self, is_held: Callable[[str], bool]) -> None:
        """Replies go whose rows are gone.

        Args:
            is_held: whether a shard, by its id, is in the store.
        """
        for run, reply in list(self._replies.items()):
            if not all(map(is_held, _shards(reply))):
                del self._replies[run]

    async def close(self) -> None:
        """Ends all runs."""
        await cancel_all(self._going.values())

    async def _play(
        self, run: GroupAttempt, play: Callable[[], Coroutine[Any, Any, GroupReply]]
    ) -> GroupReply:
        """Keeps the reply in the turn in which rows are sealed: whoever looks finds both, or none.

        A shard of a group that is complete, and has no reply, is nobody's for a controller that
        takes over.
        """
        try:
            reply = await play()
        except asyncio.CancelledError:
            if run not in self._given_up:
                raise
            return GroupReply(run)
        if run.group_id >= 0 and run not in self._given_up:
            self._replies[run] = reply
            if reply.batch is None:
                self._without_rows.append(run)
                if len(self._without_rows) > MAX_REPLIES_WITHOUT_ROWS:
                    self._replies.pop(self._without_rows.popleft(), None)
        return reply

    def _note_end(self, run: GroupAttempt, task: asyncio.Task[GroupReply]) -> None:
        del self._going[run]
        if run in self._given_up:
            self._given_up.discard(run)
            self._replies.pop(run, None)  # it had just ended
        _ = task.cancelled() or task.exception()  # which whoever asked for the run has got


def _shards(reply: GroupReply) -> tuple[str, ...]:
    return () if reply.batch is None else tuple(shard.shard_id for shard in reply.batch.shards)
