"""Takes requests to a server until they are complete.

A request may need the server several times: when its answer was aborted for a weight update, or its
connection was lost, it goes on from what was sampled. Only what the server has answered counts, so
no token is sampled twice or lost in between.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from contextlib import aclosing
from dataclasses import dataclass, replace

from areal_sc.engines.base import Completion
from areal_sc.engines.servers.requests import ABORTED, AnswerPart, CompletionRequest
from areal_sc.engines.servers.server import ServerLife
from areal_sc.errors import ArealError, EngineFailed, PeerLost, ProtocolError, ServerBusy
from areal_sc.system.waiting import cancel_all

logger = logging.getLogger(__name__)

MAX_LOSSES = 4
"""Attempts of one request that may bring nothing: it could be what breaks its connections."""

_BUSY_WAIT_S = 0.2
_LONGEST_BUSY_WAIT_S = 5.0
_MAX_BUSY_S = 600.0
_ABANDONED_TIMEOUT_S = 30.0


@dataclass
class Counters:
    """Since the start; the names are those of the engine's `stats`.

    Attributes:
        prefill_tokens: prompt tokens that the server computed.
        shared_prompt_tokens: and those that its cache had.
        cancelled_tokens: sampled for requests that nobody waits for any more, or behind a stop
            string.
        lost_requests: attempts whose connection was lost.
        continued_requests: attempts that went on from an aborted answer.
    """

    generated_tokens: float = 0
    prefill_tokens: float = 0
    shared_prompt_tokens: float = 0
    finished_requests: float = 0
    cancelled_requests: float = 0
    cancelled_tokens: float = 0
    lost_requests: float = 0
    continued_requests: float = 0


class Completer:
    """Runs requests; any number at a time.

    Attributes:
        num_running: requests that have a place on the server, or wait for one.
    """

    def __init__(self, server: ServerLife, vocab_size: int) -> None:
        self.counters = Counters()
        self.num_running = 0
        self._server = server
        self._vocab_size = vocab_size
        self._background: set[asyncio.Task[None]] = set()

    async def complete(self, request: CompletionRequest) -> Completion:
        """Raises: EngineFailed: it could not be completed, or the server is lost."""
        self.num_running += 1
        try:
            completion = await self._complete(request)
        except asyncio.CancelledError:
            self.counters.cancelled_requests += 1
            self.counters.cancelled_tokens += len(request.token_ids)
            raise
        finally:
            self.num_running -= 1
        self.counters.finished_requests += 1
        return completion

    async def close(self) -> None:
        await cancel_all(self._background)

    async def _complete(self, request: CompletionRequest) -> Completion:
        server = self._server
        while True:
            await server.places.enter()
            num_pauses = server.num_pauses
            try:
                part = await self._ask(request)
            except PeerLost as error:
                if reason := request.end_reason:  # only the server's last word is missing
                    return request.completion(reason)
                self._note_loss(request, error)
                continue
            except ServerBusy as error:
                await self._wait_while_busy(request, error)
                continue
            request.busy_since_s = None
            if part.finish == "stop":
                return request.completion("stop")
            if request.num_missing_tokens <= 0:
                return request.completion(request.length_reason)
            if part.finish != ABORTED and not request.needs_next_piece(part):
                raise EngineFailed(
                    f"{server.name} ended an answer {request.num_missing_tokens} tokens "
                    "before its limit: its context or its KV cache is too small for "
                    "rollout.max_context_tokens"
                )
            self.counters.continued_requests += 1
            if not part.token_ids and server.num_pauses == num_pauses:
                self._note_loss(request, EngineFailed(f"it was aborted: {part.reason}"))

    async def _ask(self, request: CompletionRequest) -> AnswerPart:
        """One attempt. Whoever gives it up leaves it to end in the background."""
        request.request_id = uuid.uuid4().hex
        attempt = asyncio.create_task(self._attempt(request))
        try:
            return await asyncio.shield(attempt)
        except asyncio.CancelledError:
            request.is_given_up = True
            task = asyncio.create_task(self._abandon(request, attempt, len(request.token_ids)))
            self._background.add(task)
            task.add_done_callback(self._background.discard)
            raise

    async def _attempt(self, request: CompletionRequest) -> AnswerPart:
        """Extends the answer; returns its last part.

        Its place is free again when the server is done with it: between two pieces it keeps it, so
        that the server has its prompt cached, and new weights wait for its end if they shall.
        """
        server = self._server
        try:
            max_support = None
            if request.is_truncated:
                max_support = min(server.max_support(request.sampling), self._vocab_size)
            while True:
                if request.on_tokens is None:
                    async with server.asking() as client:
                        whole = await client.answer(request, max_support)
                    part = request.extend(whole)
                    self._count(whole, part)
                else:
                    part = await self._stream(request, max_support)
                is_wanted = not (server.is_paused or request.is_given_up)
                if not (is_wanted and request.needs_next_piece(part)):
                    return part
                request.request_id = uuid.uuid4().hex
        finally:
            server.places.leave()

    async def _stream(self, request: CompletionRequest, max_support: int | None) -> AnswerPart:
        """Extends the answer with each part of a stream; returns all of them together.

        What was sampled counts as soon as it is told, so that it stays when the stream breaks off.
        A stream that breaks off behind its last part has lost nothing.
        """
        server, start = self._server, len(request.token_ids)
        has_stopped = is_whole = False
        try:
            async with (
                server.asking() as client,
                aclosing(client.stream_answer(request, max_support)) as parts,
            ):
                async for told in parts:
                    whole = replace(told, versions=[server.version] * len(told.token_ids))
                    part = whole.cut(0) if has_stopped else request.extend(whole)
                    self._count(whole, part)
                    is_whole = bool(told.finish)
                    if is_whole:  # it knows better which weights sampled which token
                        request.versions[start:] = told.versions[: len(request.token_ids) - start]
                    elif part.finish and not has_stopped:  # at a stop string
                        has_stopped = True
                        await server.abort(request.request_id)
        except PeerLost:
            if not is_whole:
                raise
        if not is_whole:
            raise ProtocolError(f"{server.name} does not tell why an answer ended")
        return replace(
            part,
            token_ids=request.token_ids[start:],
            logprobs=request.logprobs[start:],
            versions=request.versions[start:],
        )

    def _count(self, whole: AnswerPart, part: AnswerPart) -> None:
        self.counters.generated_tokens += len(whole.token_ids)
        self.counters.cancelled_tokens += len(whole.token_ids) - len(part.token_ids)
        self.counters.shared_prompt_tokens += whole.num_cached_tokens
        self.counters.prefill_tokens += whole.num_prompt_tokens - whole.num_cached_tokens

    async def _abandon(
        self, request: CompletionRequest, attempt: asyncio.Task[AnswerPart], num_counted: int
    ) -> None:
        """Ends a request that nobody waits for; until then it takes its place.

        Args:
            num_counted: of its tokens that are counted as cancelled already.
        """
        try:
            async with asyncio.timeout(_ABANDONED_TIMEOUT_S):
                await self._server.abort(request.request_id)
                await attempt
            self.counters.cancelled_tokens += len(request.token_ids) - num_counted
        except (ArealError, TimeoutError) as error:
            logger.info("abandoned request=%s %s", request.request_id, error)
        finally:
            await cancel_all([attempt])

    async def _wait_while_busy(self, request: CompletionRequest, error: ServerBusy) -> None:
        """A server that is full for the moment, or a router before it, has lost nothing.

        Raises: EngineFailed: it has been busy for too long.
        """
        now_s = asyncio.get_running_loop().time()
        if request.busy_since_s is None:
            request.busy_since_s = now_s
        busy_s = now_s - request.busy_since_s
        if busy_s > _MAX_BUSY_S:
            raise EngineFailed(
                f"{self._server.name} has refused a request for {busy_s:.0f} s, the last time as: "
                f"{error}; give it fewer requests (rollout.max_running_sequences)"
            ) from error
        await asyncio.sleep(min(_BUSY_WAIT_S + busy_s, _LONGEST_BUSY_WAIT_S))

    def _note_loss(self, request: CompletionRequest, error: ArealError) -> None:
        request.num_losses += 1
        self.counters.lost_requests += 1
        if request.num_losses > MAX_LOSSES:
            raise EngineFailed(
                f"a request failed on {request.num_losses} attempts, the last time as {error}"
            ) from error
