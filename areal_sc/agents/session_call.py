"""One call of an agent, and the clients that wait for it. No torch."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import cast

from areal_sc.agents.calls import CallRefused, ModelAnswer, ModelCall
from areal_sc.workflows.chat_format import Message
from areal_sc.workflows.chat_turn import TurnNode


class SessionCall:
    """A call of the agent, for which one or more clients wait.

    Attributes:
        digest: of what the client sent.
        attempt: of the client that came last; 0: its first, or it does not say.
        number: of the session's calls, in the order in which they began.
        same: by which a retry finds it; "": none does.
        answer_id: unique in the run.
        created_s: Unix time.
        model: that the call named: the role of the agent.
        node: what it came to; None: it runs, or failed.
        after: the call that it goes on from.
        kept: messages that it adds to the conversation of `kept_after`, with the answer, without
            instructions; None: nothing is kept.
        kept_after: the call that it goes on from, where that is kept without as many instructions;
            None: `kept` is the whole conversation.
    """

    def __init__(self, call: ModelCall, digest: str, attempt: int) -> None:
        self.digest = digest
        self.attempt = attempt
        self.number = 0
        self.same = ""
        self.answer_id = secrets.token_hex(16)
        self.created_s = int(time.time())
        self.model = call.model
        self.num_instructions = call.num_instructions
        self.node: TurnNode | None = None
        self.after: SessionCall | None = None
        self.kept: list[Message] | None = None
        self.kept_after: SessionCall | None = None
        self._was_delivered = False
        self._is_unsure = False
        self._passed_on = set[str]()
        self._num_sending = 0
        self._num_clients = 0
        self._text = ""
        self._changed = asyncio.Event()
        self._answer: asyncio.Future[ModelAnswer] = asyncio.get_running_loop().create_future()

    @property
    def answered(self) -> TurnNode:
        """What it came to; only where it has an answer."""
        assert self.node is not None
        return self.node

    @property
    def message(self) -> Message:
        """The model's answer."""
        return self.answered.turn.message

    @property
    def num_messages(self) -> int:
        """How many messages the conversation has with the answer."""
        return self.answered.num_messages

    @property
    def conversation(self) -> list[Message]:
        """The messages up to its answer, without instructions, where it is kept."""
        found, call = list[Message](), cast("SessionCall | None", self)
        while call and call.kept:
            found[:0], call = call.kept, call.kept_after
        return found

    @property
    def is_delivered(self) -> bool:
        """Whether a client has the answer, is about to have it, or may have it."""
        has_it = self._was_delivered or self._is_unsure
        return has_it or bool(self._passed_on) or self._num_sending > 0

    @property
    def is_left(self) -> bool:
        """Whether no client is known to have the answer, or waits for it."""
        return not self._num_clients and (self._is_unsure or not self.is_delivered)

    @contextmanager
    def client(self) -> Iterator[None]:
        """Around what a client has of the call, from its beginning on."""
        self._num_clients += 1
        try:
            yield
        finally:
            self._num_clients -= 1

    async def texts(self) -> AsyncIterator[str]:
        """The content while it is sampled, piece by piece; ends when the call does."""
        num_given = 0
        while True:
            if added := self._text[num_given:]:
                num_given += len(added)
                yield added
            elif self._answer.done():
                return
            else:
                self._changed.clear()
                await self._changed.wait()

    async def answer(self) -> ModelAnswer:
        """The whole answer; the call goes on for a retry, though this client may go.

        Raises: CallRefused: there is none.
        """
        return await asyncio.shield(self._answer)

    @contextmanager
    def delivering(self, delivery: str = "") -> Iterator[None]:
        """Around sending the last byte of the answer, whose client may be done before it ends.

        Where that raises, the answer counts as lost, unless another client has it.

        Args:
            delivery: names it for `note_undelivered`, where the client passes the answer on.
        """
        self._num_sending += 1
        try:
            yield
            self._is_unsure = False
            if delivery:
                self._passed_on.add(delivery)
            else:
                self.note_delivered()
        finally:
            self._num_sending -= 1

    def note_delivered(self) -> None:
        """A client has the answer."""
        self._was_delivered, self._is_unsure = True, False

    def note_undelivered(self, delivery: str) -> None:
        """An answer could not be passed on."""
        self._passed_on.discard(delivery)

    def note_unsure(self) -> None:
        """Whoever passed the answer on has died: who asks the same again has not had it."""
        self._is_unsure = not self._was_delivered

    def add_text(self, text: str) -> None:
        """Takes the next piece of the answer's content."""
        self._text += text
        self._changed.set()

    def finish(self, answer: ModelAnswer | CallRefused) -> None:
        """Gives all clients what they wait for; the first word counts."""
        if self._answer.done():
            return
        self._changed.set()
        if isinstance(answer, ModelAnswer):
            self._answer.set_result(answer)
        else:
            self._answer.set_exception(answer)
            self._answer.exception()  # maybe nobody waits for it
