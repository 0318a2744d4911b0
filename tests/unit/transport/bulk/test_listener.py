"""Callers of the bulk port: how many, for how long, and what becomes of them."""

from __future__ import annotations

import asyncio
import logging
import resource
import socket
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager

import pytest
from unit.transport.bulk.keeping_sink import until

from areal_sc.errors import ProtocolError
from areal_sc.transport.bulk import listener as listener_module
from areal_sc.transport.bulk.handshake import receive_ticket
from areal_sc.transport.bulk.listener import MAX_CALLERS, Listener
from areal_sc.transport.refusals import Refusals

logger = logging.getLogger(__name__)


class Door:
    """Lets in whoever sends `friend`; keeps the others waiting, or turns them away."""

    def __init__(self) -> None:
        self.refused = Refusals(logger, "refused", "rollout/0")
        self.inside: list[socket.socket] = []

    async def let_in(self, connection: socket.socket) -> None:
        word = await asyncio.get_running_loop().sock_recv(connection, 10)
        if word == b"bug":
            raise RuntimeError("a bug")
        if word != b"friend":
            raise ProtocolError(f"it says {word!r}")
        self.inside.append(connection)


@asynccontextmanager
async def listening() -> AsyncIterator[tuple[Listener, Door]]:
    door = Door()
    listener = Listener("127.0.0.1", door.let_in, door.refused)
    try:
        yield listener, door
    finally:
        await listener.close()
        for connection in door.inside:
            connection.close()


def caller(listener: Listener, word: bytes = b"") -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", listener.port), timeout=20)
    connection.sendall(word)
    return connection


async def is_ended(connection: socket.socket) -> bool:
    try:
        return await asyncio.to_thread(connection.recv, 1) == b""
    except ConnectionResetError:
        return True


async def test_who_is_let_in_stays_and_the_others_are_counted() -> None:
    async with listening() as (listener, door):
        with caller(listener, b"friend") as friend, caller(listener, b"foe") as foe:
            await until(lambda: door.inside and door.refused.num)
            assert await is_ended(foe)
            await listener.close()
            door.inside[0].sendall(b"still here")
            assert friend.recv(10) == b"still here"
        assert door.refused.num == 1


async def test_the_caller_that_waits_longest_makes_room() -> None:
    async with listening() as (listener, door):
        with ExitStack() as stack:
            silent = []
            for _ in range(MAX_CALLERS + 3):
                silent.append(stack.enter_context(caller(listener)))
                await asyncio.sleep(0)
            await until(lambda: door.refused.num == 3)
            for connection in silent[:3]:
                assert await is_ended(connection)
            friend = stack.enter_context(caller(listener, b"friend"))
            await until(lambda: door.inside)
            silent[-1].sendall(b"friend")
            await until(lambda: len(door.inside) == 2)
            friend.close()


async def test_a_caller_has_little_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener_module, "HANDSHAKE_TIMEOUT_MS", 50)
    async with listening() as (listener, door):
        with caller(listener) as silent:
            await until(lambda: door.refused.num)
            assert await is_ended(silent)


async def test_one_byte_at_a_time_does_not_make_it_longer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(listener_module, "HANDSHAKE_TIMEOUT_MS", 200)
    refused = Refusals(logger, "refused", "rollout/0")

    async def let_in(connection: socket.socket) -> None:
        await receive_ticket(connection)

    listener = Listener("127.0.0.1", let_in, refused)
    with caller(listener) as slow:
        async with asyncio.timeout(20):
            while not refused.num:
                try:
                    slow.send(b"\xff")
                except OSError:
                    break
                await asyncio.sleep(0.05)
        await until(lambda: refused.num == 1)
    await listener.close()


async def test_a_bug_is_told_and_ends_one_connection(caplog: pytest.LogCaptureFixture) -> None:
    async with listening() as (listener, door):
        with caller(listener, b"bug") as unlucky:
            assert await is_ended(unlucky)
            await until(lambda: "RuntimeError: a bug" in caplog.text)
        with caller(listener, b"friend"):
            await until(lambda: door.inside)


async def test_without_file_descriptors_it_goes_on_later() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    async with listening() as (listener, door):
        with caller(listener, b"friend"):
            used = socket.socket()
            resource.setrlimit(resource.RLIMIT_NOFILE, (used.fileno(), hard))
            try:
                await until(lambda: door.refused.num)  # no descriptor for the connection
                assert not door.inside
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
                used.close()
            await until(lambda: door.inside)


async def test_closing_ends_those_who_wait() -> None:
    async with listening() as (listener, door):
        with caller(listener) as silent:
            await until(lambda: listener._callers)
            await listener.close()
            assert await is_ended(silent)
            assert not door.inside
            with pytest.raises(ConnectionRefusedError):
                caller(listener)
