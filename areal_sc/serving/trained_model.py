"""What a model of a client has come to by the requests until now."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

from msgspec import convert

from areal_sc.serving.journal import KnownModel, Source
from areal_sc.serving.wire import RequestRefused

ROWS_A_MODEL: Final = 1 << 22
"""Numbers of the rows of one model: the file of all has rows of earlier models, too."""
_MAX_AHEAD: Final = 1 << 12
"""Requests of a model that can be under way between two that come one after the other."""


def file_name_of(model_id: str) -> str:
    """Of the folder of a model."""
    return model_id.replace(":", "-")


class InOrder:
    """Lets requests begin in the order of their numbers, one after the other.

    Attributes:
        next: number of the one that begins, or goes on.
    """

    def __init__(self, first: int) -> None:
        self.next = first
        self._last = first
        self._begins: dict[int, asyncio.Event] = {}  # of requests that wait, by number

    def expect(self, number: int) -> None:
        """A request of that number comes.

        Raises: RequestRefused: so many could not come before it.
        """
        if number > self._last + _MAX_AHEAD:
            raise RequestRefused(f"seq_id: expected about {self._last + 1}, got {number}")
        self._last = max(self._last, number)

    @asynccontextmanager
    async def turn(self, number: int) -> AsyncIterator[None]:
        """Raises: RequestRefused: a request of that number was served."""
        if number < self.next:
            raise RequestRefused(f"seq_id: expected {self.next} or above, got {number}")
        if number > self.next:
            await self._begins.setdefault(number, asyncio.Event()).wait()
        try:
            yield
        finally:
            self.next += 1
            if (following := self._begins.pop(self.next, None)) is not None:
                following.set()


class ManyOrOne:
    """Many go on at the same time, or one alone, which waits for them and lets none begin."""

    def __init__(self) -> None:
        self._num = 0
        self._is_alone = False
        self._changed = asyncio.Condition()

    @asynccontextmanager
    async def among_many(self) -> AsyncIterator[None]:
        async with self._changed:
            await self._changed.wait_for(lambda: not self._is_alone)
            self._num += 1
        try:
            yield
        finally:
            async with self._changed:
                self._num -= 1
                self._changed.notify_all()

    @asynccontextmanager
    async def alone(self) -> AsyncIterator[None]:
        async with self._changed:
            await self._changed.wait_for(lambda: not self._is_alone)
            self._is_alone = True
        try:
            async with self._changed:
                await self._changed.wait_for(lambda: self._num == 0)
            yield
        finally:
            async with self._changed:
                self._is_alone = False
                self._changed.notify_all()


class TrainedModel:
    """A model, its place among those that are trained, and what its next step trains on.

    Args:
        model_id: which begins with the id of its session.
        source: what it begins with.

    Attributes:
        file_name: of its folder.
        first_row: number of its first row.
        num_rows: that it was given.
        asked: numbers of the rows that the next step trains on.
        num_asked_tokens: of these.
        order: of its requests.
        place: among the models that are trained; None: it rests.
        last_turn: number of the last turn that it had.
        has_had_turn: since it has this place.
        is_changed: the weights at its place are not those of `source` any more.
        saved: names of folders that it has.
        samplers: folders of weights for sampling that have no name, the newest ones last.
        is_ended: it is no more.
    """

    def __init__(self, model_id: str, tenant: str, source: Source) -> None:
        self.model_id = model_id
        self.tenant = tenant
        self.file_name = file_name_of(model_id)
        self.source = source
        digest = hashlib.blake2b(model_id.encode(), digest_size=5).digest()
        self.first_row = int.from_bytes(digest) * ROWS_A_MODEL
        self.num_rows = 0
        self.asked: list[int] = []
        self.num_asked_tokens = 0
        self.order = InOrder(first=1)
        self.place: int | None = None
        self.last_turn = 0
        self.has_had_turn = False
        self.is_changed = False
        self.saved: set[str] = set()
        self.samplers: list[str] = []
        self.is_ended = False

    @property
    def session(self) -> str:
        """Id of the session that it is of."""
        return self.model_id.partition(":")[0]

    @classmethod
    def of(cls, known: KnownModel) -> TrainedModel:
        """As an earlier server has left it, without its place."""
        model = cls(known.model_id, known.tenant, known.source)
        model.num_rows, model.num_asked_tokens = known.num_rows, known.num_asked_tokens
        model.asked, model.samplers = list(known.asked), list(known.samplers)
        model.order, model.saved = InOrder(known.next_number), set(known.saved)
        return model

    def known(self) -> KnownModel:
        """What a later server has to know, where no request of its is at its turn."""
        return convert(self, KnownModel, from_attributes=True)

    @property
    def next_number(self) -> int:
        """Of its requests."""
        return self.order.next

    def take_numbers(self, count: int) -> range:
        """Numbers of so many further rows."""
        first = self.first_row + self.num_rows
        self.num_rows += count
        return range(first, first + count)
