"""Credit that the connections to all owners share."""

from __future__ import annotations

import asyncio

from areal_sc.transport.bulk.credits import Credits


class Connection:
    """Wants requests of some bytes; keeps in `asked` in which order all connections asked."""

    def __init__(self, name: str, sizes: list[int], asked: list[str]) -> None:
        self.name = name
        self.sizes = sizes
        self.asked = asked

    def ask(self) -> int | None:
        if not self.sizes:
            return None
        self.asked.append(self.name)
        return self.sizes.pop(0)


async def turn() -> None:
    for _ in range(3):
        await asyncio.sleep(0)


async def test_connections_take_turns_within_the_bound() -> None:
    asked: list[str] = []
    credits = Credits(max_bytes=350, request_bytes=100)
    for name, sizes in {"a": [100] * 4, "b": [100] * 2, "c": [100]}.items():
        credits.want(Connection(name, sizes, asked))
    await turn()
    assert (asked, credits.outstanding_bytes) == (["a", "b", "c"], 300)
    credits.give_back(200)
    await turn()
    assert (asked, credits.outstanding_bytes) == (["a", "b", "c", "a", "b"], 300)
    credits.give_back(300)  # c has no more, nor has b
    await turn()
    assert (asked[5:], credits.outstanding_bytes) == (["a", "a"], 200)
    credits.give_back(200)
    await turn()
    assert credits.outstanding_bytes == 0


async def test_whoever_wants_nothing_any_more_holds_up_nobody() -> None:
    asked: list[str] = []
    credits = Credits(max_bytes=100, request_bytes=100)
    first, given_up, last = (Connection(name, [100], asked) for name in ("a", "b", "c"))
    for connection in (first, given_up, last):
        credits.want(connection)
    await turn()
    given_up.sizes.clear()
    credits.give_back(100)
    await turn()
    assert asked == ["a", "c"]


async def test_a_request_over_the_bound_and_an_empty_one_are_sent() -> None:
    asked: list[str] = []
    credits = Credits(max_bytes=10, request_bytes=100)
    credits.want(Connection("a", [0, 100, 100], asked))
    await turn()
    assert (asked, credits.outstanding_bytes) == (["a", "a"], 100)
