"""Weights that rank 0 of the trainer broadcasts to a process group of all generating ranks."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from itertools import accumulate
from typing import Any, Final

from msgspec.structs import replace

from areal_sc.errors import EngineFailed, TransportError, WorkerError
from areal_sc.fleet.member import Member
from areal_sc.transport.rpc.method import A, Method, R
from areal_sc.weights import methods
from areal_sc.weights.channel import PullChannel, WeightsReader
from areal_sc.weights.published import BucketLayout, WeightBroadcast, WeightsReference
from areal_sc.workers.operations import Operation

logger = logging.getLogger(__name__)

SENT_AFTER_S: Final = 10.0
"""Rank 0 notices within this time that all ranks have received, unless some of them pulled."""

JOIN_MARGIN_S: Final = 60.0
"""Joining a weight group may take this much longer than the engines' own time limit."""

MAX_MEETINGS: Final = 3
"""Attempts to form one weight group: servers may come and go meanwhile."""

MAX_BROADCASTS_IN_VAIN: Final = 3
"""Groups in a row of which nothing was received; then the ranks cannot reach each other at all, as
where their versions of NCCL differ, and each further try would cost its time limit."""


class CollectiveChannel(PullChannel):
    """`weight_update.method: collective`. Whoever is not in the group pulls."""

    _group = ""
    _world_size = 0  # of that group
    _layouts: tuple[BucketLayout, ...] = ()
    _num_in_vain = 0

    async def seal(
        self, operation: Operation, version: int, reader: WeightsReader, oldest: int
    ) -> WeightsReference:
        """Forms the group first: whom the weights reach is known then."""
        await self._forget_earlier()
        has_members = reader.updates.current_members
        if not has_members or self._num_in_vain == MAX_BROADCASTS_IN_VAIN:
            return await self._seal(operation, version)
        with self.times.adding_to("publish_meet_s"):
            await self._ensure_group(reader)
        sealed = await self._seal(operation, version)
        sent = WeightBroadcast(self._group, sealed.shards[0], self._layouts)
        return replace(sealed, broadcast=sent)

    async def send(self, weights: WeightsReference, reader: WeightsReader) -> None:
        """Returns when rank 0 has sent the weights, or has given that up."""
        if weights.broadcast is None:
            return await super().send(weights, reader)
        with self.times.adding_to("publish_broadcast_s"):
            result = await self._broadcast(weights, reader)
        self.times.published_bytes += result.num_bytes
        if result.failure:
            logger.warning("version=%d broadcast failed: %s", weights.version, result.failure)
            self.times.failed_broadcasts += 1
            self._group = ""
        self._note_outcome(result)

    def note_new_ranks(self) -> None:
        """They are in no weight group either."""
        super().note_new_ranks()
        self._group = ""

    async def _broadcast(
        self, weights: WeightsReference, reader: WeightsReader
    ) -> methods.SentWeights:
        reader.adopt_weights(weights)  # first, and at once: see `Channel.send`
        sending = asyncio.create_task(
            self._fleet.call_all(
                methods.BROADCAST_WEIGHTS,
                None,
                timeout_s=(len(self._layouts) + 1) * self._config.weight_update.step_timeout_s,
            )
        )
        received = asyncio.create_task(reader.wait_for_weights_async())
        tasks: list[asyncio.Task[Any]] = [sending, received]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if received.done() and received.exception() is None:
                await asyncio.wait({sending}, timeout=SENT_AFTER_S)
            if not sending.done():  # nobody is left who would receive it
                await self._call_root(methods.CANCEL_BROADCAST, self._group)
            return (await sending)[0]
        finally:
            for task in tasks:  # the ranks may have died meanwhile
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)  # failures are the reader's own

    def _note_outcome(self, result: methods.SentWeights) -> None:
        """Counts broadcasts of which not even the first part has arrived."""
        self._num_in_vain = self._num_in_vain + 1 if result.failure and not result.num_bytes else 0
        if self._num_in_vain == MAX_BROADCASTS_IN_VAIN:
            logger.warning(
                "weight_update.method=collective acts as pull from here on: %d weight groups in a "
                "row could not broadcast anything; the last one: %s",
                self._num_in_vain,
                result.failure,
            )

    async def _ensure_group(self, reader: WeightsReader) -> None:
        """The generating ranks, all of them, are in a group with rank 0.

        Raises: EngineFailed: repeated attempts to form one have failed.
        """
        if not self._layouts:
            self._layouts = await self._call_root(methods.WEIGHT_LAYOUTS, None)
        for attempt in range(MAX_MEETINGS):
            workers = reader.updates.current_members
            ranks = await reader.fleet.call_living(methods.WEIGHT_RANKS, self._group, workers)
            num_ranks = 1 + sum(worker.num_ranks for worker in ranks.values())
            is_whole = all(worker.is_member for worker in ranks.values())
            if self._group and is_whole and num_ranks == self._world_size:  # else one has left
                return
            if self._group:
                await reader.fleet.call_living(methods.LEAVE_WEIGHT_GROUP, self._group, workers)
            try:
                self._group = await self._form_group(reader, ranks)
                return
            except (WorkerError, TransportError) as error:
                self._group = ""
                if attempt == MAX_MEETINGS - 1:
                    raise EngineFailed(
                        f"no weight group could be formed in {MAX_MEETINGS} attempts: {error}. "
                        "weight_update.method: pull or disk need none"
                    ) from error
                logger.warning("weight group not formed, attempt %d: %s", attempt + 1, error)

    async def _form_group(
        self, reader: WeightsReader, workers: Mapping[Member, methods.WeightRanks]
    ) -> str:
        ranks = list(workers.values())
        *first_ranks, world_size = accumulate((worker.num_ranks for worker in ranks), initial=1)
        name = f"weights-{self._new_id()}"
        group = await self._call_root(
            methods.OPEN_WEIGHT_GROUP,
            methods.OpenWeightGroup(
                name,
                world_size,
                is_cuda=all(worker.is_cuda for worker in ranks),
                devices=tuple(device for worker in ranks for device in worker.devices),
            ),
        )
        meetings = await asyncio.gather(
            self._call_root(methods.MEET_WEIGHT_GROUP, world_size),
            reader.fleet.call_each(
                methods.JOIN_WEIGHT_GROUP,
                [methods.JoinWeightGroup(group, rank) for rank in first_ranks],
                members=list(workers),
                timeout_s=self._config.weight_update.step_timeout_s + JOIN_MARGIN_S,
            ),
            return_exceptions=True,
        )
        for meeting in meetings:
            if isinstance(meeting, BaseException):
                raise meeting
        self._world_size = world_size
        logger.info("weight_group=%s world_size=%d backend=%s", name, world_size, group.backend)
        return name

    async def _call_root(self, method: Method[A, R], args: A) -> R:
        return await self._fleet.call(self._fleet.members[0], method, args)
