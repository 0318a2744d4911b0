"""Answers in parts: what is told, kept and counted, whatever happens to their servers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest
from asked_servers import Asked, PretendedServer

from areal_sc.engines.servers.requests import AnswerPart, CompletionRequest
from areal_sc.errors import PeerLost, ProtocolError

PART_TOKENS = 3


class StreamingServer(PretendedServer):
    """Gives the tokens behind those of the request, three in a part; it tells versions at the end.

    Attributes:
        is_aborted: it was told to end its answer.
    """

    num_parts = 0
    is_aborted = False

    async def stream_answer(self, request: CompletionRequest, _: None) -> AsyncIterator[AnswerPart]:
        start, num_tokens = len(request.token_ids), request.num_asked_tokens
        self.asked.append(num_tokens)
        given: list[int] = []
        while len(given) < num_tokens and not self.is_aborted:
            await asyncio.sleep(0)
            self.num_parts += 1
            self.before(self.num_parts)
            more = min(PART_TOKENS, num_tokens - len(given))
            tokens = list(range(start + len(given), start + len(given) + more))
            given += tokens
            if len(given) < num_tokens:
                yield AnswerPart(tokens, [-float(it) for it in tokens], [], "", "", 0, 0)
        finish = "abort" if self.is_aborted else "length"
        last = [] if self.is_aborted else tokens
        self.is_aborted = False
        exact = [100 + it for it in given]
        yield AnswerPart(last, [-float(it) for it in last], exact, finish, "", 1 + start, start)

    async def abort(self, request_id: str) -> None:
        self.is_aborted = True


async def test_parts_are_told_as_they_come_and_the_last_one_knows_the_versions() -> None:
    asked = Asked(StreamingServer(), 8, is_told=True)
    num_told: list[int] = []
    asked.server.before = lambda number: num_told.append(len(asked.told))
    answer = await asked.answer()
    assert answer.token_ids == asked.told == list(range(8))
    assert answer.logprobs == [-float(token) for token in range(8)]
    assert answer.versions == [100 + token for token in range(8)]
    assert answer.finish_reason == "length"
    assert num_told[0] == 0 < num_told[-1]
    counters = asked.completer.counters
    assert (counters.generated_tokens, counters.cancelled_tokens) == (8, 0)
    assert (counters.prefill_tokens, counters.shared_prompt_tokens) == (1, 0)
    assert asked.server.places.num_running == 0


async def test_a_stop_string_ends_the_stream_and_nothing_behind_it_is_told() -> None:
    asked = Asked(StreamingServer(), 500, "9,10", is_told=True)
    answer = await asked.answer()
    assert answer.token_ids == asked.told == list(range(11))
    assert (answer.finish_reason, answer.stop) == ("stop", ("9,10",))
    assert answer.versions == [100 + token for token in range(11)]
    assert asked.server.asked == [500]
    counters = asked.completer.counters
    assert counters.generated_tokens == 11 + counters.cancelled_tokens
    assert counters.cancelled_tokens < 2 * PART_TOKENS


async def test_a_lost_server_s_tokens_stay_and_are_told_once() -> None:
    """Their versions are those that the server had when they came."""

    def lose(number: int) -> None:
        if number == 3:
            raise PeerLost("gone")

    asked = Asked(StreamingServer(lose), 9, is_told=True)
    answer = await asked.answer()
    assert answer.token_ids == asked.told == list(range(9))
    assert answer.versions == [4] * 6 + [106, 107, 108]
    assert asked.server.asked == [9, 3]
    counters = asked.completer.counters
    assert (counters.generated_tokens, counters.lost_requests) == (9, 1)


@pytest.mark.parametrize(
    ("parts", "max_new_tokens", "ends", "versions"),
    [
        ([([5, 6], ""), ([2], "stop")], 9, "stop", [101, 102, 103]),
        ([([5, 6], ""), ([7], "length")], 3, "length", [101, 102, 103]),
        ([([5, 6], ""), ([2], "")], 9, "stop", [4, 4, 4]),  # a stop token, without its reason
        ([([5, 6], ""), ([7], "")], 3, "length", [4, 4, 4]),
        ([([5, 9], ""), ([10, 11], "")], 9, "stop", [4, 4, 4]),  # a stop string
    ],
)
async def test_a_whole_answer_stays_whole_when_its_stream_breaks_off(
    parts: list[tuple[list[int], str]], max_new_tokens: int, ends: str, versions: list[int]
) -> None:
    server: Any = StreamingServer()

    async def stream(*_: Any) -> AsyncIterator[AnswerPart]:
        server.asked.append(1)
        for tokens, finish in parts:
            exact = [101, 102, 103] if finish else []
            yield AnswerPart(tokens, [-1.0] * len(tokens), exact, finish, "", 0, 0)
        raise PeerLost("gone")

    server.stream_answer = stream
    asked = Asked(server, max_new_tokens, "9,10", is_told=True)
    asked.request.stop_token_ids = (2,)
    answer = await asked.answer()
    whole = [token for tokens, _ in parts for token in tokens][:3]
    assert answer.token_ids == asked.told == whole
    assert (answer.finish_reason, answer.versions, len(server.asked)) == (ends, versions, 1)
    assert asked.completer.counters.lost_requests == 0


async def test_an_interrupted_stream_goes_on() -> None:
    """As on a server that cannot hold its answers while it gets new weights."""
    server = StreamingServer()

    def interrupt(number: int) -> None:
        if number == 2:
            server.is_aborted, server.num_pauses, server.version = True, 1, 5

    server.before = interrupt
    asked = Asked(server, 9, is_told=True)
    answer = await asked.answer()
    assert answer.token_ids == asked.told == list(range(9))
    assert answer.versions == [100 + token for token in range(9)]
    assert asked.completer.counters.continued_requests == 1


@pytest.mark.parametrize("how", ["task", "callback"])
async def test_an_answer_is_given_up_in_the_middle(how: str) -> None:
    def cancel(number: int) -> None:
        if number == 3 and how == "task":
            answer.cancel()

    asked = Asked(StreamingServer(cancel), 500, is_told=True)
    if how == "callback":

        class Told(list[int]):
            def extend(self, tokens: Any) -> None:
                super().extend(tokens)
                if len(self) > PART_TOKENS:
                    raise LookupError("enough")

        asked.told = Told()
    answer = asyncio.create_task(asked.answer())
    with pytest.raises(LookupError if how == "callback" else asyncio.CancelledError):
        await answer
    async with asyncio.timeout(30):
        await asked.server.places.is_empty.wait()
        await asyncio.gather(*asked.completer._background)
    num_told = len(asked.told)
    assert asked.told == list(range(num_told))
    assert 0 < num_told < 50
    counters = asked.completer.counters
    assert counters.cancelled_tokens == counters.generated_tokens >= num_told


async def test_a_stream_without_a_reason_to_end_is_refused() -> None:
    server: Any = StreamingServer()
    whole = server.stream_answer

    async def stream(*arguments: Any) -> AsyncIterator[AnswerPart]:
        async for part in whole(*arguments):
            yield replace(part, finish="")

    server.stream_answer = stream
    with pytest.raises(ProtocolError, match="does not tell why an answer ended"):
        await Asked(server, 5, is_told=True).answer()
