"""Answers that a stop string may end: servers are asked for them piece by piece."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
from asked_servers import Asked, PretendedServer

from areal_sc.engines.servers.requests import AnswerPart, CompletionRequest
from areal_sc.errors import EngineFailed, PeerLost


class Server(PretendedServer):
    """Gives the tokens 0, 1, 2, ... behind the prompt, as many as it is asked for."""

    def __init__(self, before: Callable[[int], None] = lambda number: None) -> None:
        super().__init__(before)
        self.ids: list[str] = []

    async def answer(self, request: CompletionRequest, _: None) -> AnswerPart:
        start, num_tokens = len(request.token_ids), request.num_asked_tokens
        self.asked.append(num_tokens)
        self.ids.append(request.request_id)
        self.before(len(self.asked))
        await asyncio.sleep(0)
        tokens = list(range(start, start + num_tokens))
        logprobs = [-float(token) for token in tokens]
        return AnswerPart(tokens, logprobs, [4] * num_tokens, "length", "", 1 + start, start)


async def test_an_answer_ends_with_the_token_that_completes_the_string() -> None:
    server = Server()
    asked = Asked(server, 500, "68,69,7", "900")
    answer = await asked.answer()
    assert answer.token_ids == list(range(71))  # the last one has text behind the string
    assert answer.logprobs == [-float(token) for token in range(71)]
    assert (answer.versions, answer.finish_reason) == ([4] * 71, "stop")
    assert answer.stop == ("68,69,7", "900")
    assert server.asked == [64, 64]
    assert len(set(server.ids)) == 2
    counters = asked.completer.counters
    assert (counters.generated_tokens, counters.cancelled_tokens) == (128, 128 - 71)
    assert server.places.num_running == 0


@pytest.mark.parametrize(
    ("limit", "stop", "pieces"), [(130, "x", [64, 64, 2]), (64, "x", [64]), (130, "", [130])]
)
async def test_the_limit_of_an_answer(limit: int, stop: str, pieces: list[int]) -> None:
    server = Server()
    answer = await Asked(server, limit, *filter(None, [stop])).answer()
    assert (len(answer.token_ids), answer.finish_reason) == (limit, "length")
    assert server.asked == pieces


@pytest.mark.parametrize(
    ("least", "stop", "pieces"),
    [(30, "x", [30, 64, 36]), (70, "x", [64, 6, 60]), (70, "", [70, 60]), (200, "", [130])],
)
async def test_tokens_that_nothing_may_end_are_a_piece(
    least: int, stop: str, pieces: list[int]
) -> None:
    server = Server()
    asked = Asked(server, 130, *filter(None, [stop]), min_new_tokens=least)
    answer = await asked.answer()
    assert answer.token_ids == list(range(130))
    assert server.asked == pieces


async def test_new_weights_wait_for_the_whole_answer_or_interrupt_it() -> None:
    """A server that takes no new answers ends its own; a paused one lets them wait."""

    def hold_and_pause(number: int) -> None:
        server.places.set_open(False)
        assert not server.places.is_empty.is_set()
        server.is_paused = number == 2

    server = Server(hold_and_pause)
    asked = Asked(server, 500, "127,128,")  # on both sides of the pause
    answer = asyncio.create_task(asked.answer())
    await asyncio.sleep(0)  # it is placed
    async with asyncio.timeout(30):
        await server.places.is_empty.wait()
    assert (server.asked, answer.done()) == ([64, 64], False)
    server.before, server.is_paused = lambda number: None, False
    server.places.set_open(True)
    assert (await answer).token_ids == list(range(129))


async def test_nothing_more_is_asked_for_a_cancelled_answer() -> None:
    def cancel(number: int) -> None:
        if number == 2:
            answer.cancel()

    server = Server(cancel)
    asked = Asked(server, 500, "x")
    answer = asyncio.create_task(asked.answer())
    with pytest.raises(asyncio.CancelledError):
        await answer
    async with asyncio.timeout(30):
        await server.places.is_empty.wait()
    for _ in range(9):
        await asyncio.sleep(0)
    assert server.asked == [64, 64]
    assert asked.completer.counters.cancelled_tokens == 128


async def test_what_a_lost_server_gave_stays_and_a_short_piece_is_refused() -> None:
    def lose(number: int) -> None:
        if number == 2:
            raise PeerLost("gone")

    asked = Asked(Server(lose), 500, "63,64,")
    assert (await asked.answer()).token_ids == list(range(65))
    assert asked.server.asked == [64, 64, 64]

    short = Asked(Server(), 500, "x")

    async def answer(*_: object) -> AnswerPart:
        return AnswerPart([1], [0.0], [4], "length", "", 1, 0)

    short.server.answer = answer  # type: ignore[method-assign]
    with pytest.raises(EngineFailed, match="ended an answer 499 tokens before its limit"):
        await short.answer()
