"""A guarded socket serves whom it knows, tells who that is, and nobody else."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress

import pytest
import zmq
from waiting import until

from areal_sc.transport.security.curve import CurveClient, CurveServer
from areal_sc.transport.security.keys import KeyPair, RunKeys
from areal_sc.transport.security.passes import Caller, KnownCallers, Passes
from areal_sc.transport.sockets.zmq_socket import AsyncSocket, Frame, configure_socket

LIMIT_S = 30.0


@pytest.fixture(scope="module")
def keys() -> RunKeys:
    return RunKeys.create()


class GuardedEcho:
    """Sends back what it gets.

    Attributes:
        received: what has arrived, of whomever.
        senders: keys of these connections.
    """

    def __init__(self, security: CurveServer) -> None:
        self.received: list[bytes] = []
        self.senders: list[str] = []
        self.security = security
        self.context = zmq.Context()
        raw = self.context.socket(zmq.ROUTER)
        configure_socket(raw)
        self.guard = security.configure(self.context, raw)
        self.port = raw.bind_to_random_port("tcp://127.0.0.1")
        self.socket = AsyncSocket(raw, self._on_message, knows_senders=True)

    def _on_message(self, frames: list[Frame]) -> None:
        self.received.append(bytes(frames[1]))
        self.senders.append(self.socket.sender)
        self.socket.send(frames)

    def close(self) -> None:
        self.guard.close()
        self.socket.close()
        self.context.term()


@asynccontextmanager
async def guarded_echo(
    keys: RunKeys, security: CurveServer | None = None
) -> AsyncIterator[GuardedEcho]:
    """As an agent guards its socket: it takes no passes."""
    known = KnownCallers(keys.controller.public)
    echo = GuardedEcho(security or CurveServer(keys.workers, known, "train/0"))
    try:
        yield echo
    finally:
        echo.close()


@contextmanager
def caller(
    echo: GuardedEcho, configure: Callable[[zmq.Socket[bytes]], None] = lambda socket: None
) -> Iterator[zmq.Socket[bytes]]:
    """A connected DEALER with a context of its own."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        configure_socket(dealer)
        configure(dealer)
        dealer.connect(f"tcp://127.0.0.1:{echo.port}")
        yield dealer


async def answer(dealer: zmq.Socket[bytes], word: bytes) -> bytes:
    dealer.send(word)
    assert await asyncio.to_thread(dealer.poll, LIMIT_S * 1000), "no answer"
    return dealer.recv()


def controller(keys: RunKeys) -> Callable[[zmq.Socket[bytes]], None]:
    return shown(CurveClient.of_controller(keys))


def shown(client: CurveClient) -> Callable[[zmq.Socket[bytes]], None]:
    def configure(socket: zmq.Socket[bytes]) -> None:
        client.configure(socket)
        client.expect(socket, "")

    return configure


async def test_each_message_comes_with_the_key_of_its_connection(keys: RunKeys) -> None:
    """Also where callers give themselves names: a name that was another's is nobody's."""
    passes = Passes(keys)
    worker = passes.issue("rollout/0", Caller.rollout)
    server = passes.issue("train/0", Caller.train)
    async with guarded_echo(keys, CurveServer.of_worker(server, "train/0")) as echo:
        for configure in (controller(keys), shown(CurveClient.of_worker(worker))):
            with caller(echo, lambda dealer, do=configure: (do(dealer), named(dealer))) as dealer:
                assert await answer(dealer, b"a") == b"a"
        assert echo.senders == [keys.controller.public.decode(), worker.own.public.decode()]


def named(dealer: zmq.Socket[bytes]) -> None:
    dealer.setsockopt(zmq.ROUTING_ID, b"one name")


def no_keys(keys: RunKeys, dealer: zmq.Socket[bytes]) -> None: ...


def keys_of_another_run(keys: RunKeys, dealer: zmq.Socket[bytes]) -> None:
    controller(RunKeys.create())(dealer)


def wrong_server_key(keys: RunKeys, dealer: zmq.Socket[bytes]) -> None:
    controller(keys)(dealer)
    dealer.curve_serverkey = RunKeys.create().workers.public


def unknown_key(keys: RunKeys, dealer: zmq.Socket[bytes]) -> None:
    shown(CurveClient(KeyPair.create(), keys.workers.public))(dealer)


def borrowed_key(keys: RunKeys, dealer: zmq.Socket[bytes]) -> None:
    controller(keys)(dealer)
    dealer.curve_secretkey = KeyPair.create().secret


def password(keys: RunKeys, dealer: zmq.Socket[bytes]) -> None:
    dealer.plain_username = b"member"
    dealer.plain_password = keys.controller.public


@pytest.mark.parametrize(
    "stranger", [no_keys, keys_of_another_run, wrong_server_key, borrowed_key, password]
)
async def test_who_does_not_know_the_server_gets_nothing(
    keys: RunKeys, stranger: Callable[[RunKeys, zmq.Socket[bytes]], None]
) -> None:
    async with guarded_echo(keys) as echo:
        with (
            caller(echo, controller(keys)) as member,
            caller(echo, lambda dealer: stranger(keys, dealer)) as dealer,
            dealer.get_monitor_socket(zmq.EVENT_DISCONNECTED) as ended,
        ):
            dealer.send(b"let me in")
            assert await asyncio.to_thread(ended.poll, LIMIT_S * 1000), "it was not put out"
            assert await answer(member, b"meanwhile") == b"meanwhile"
            assert not dealer.poll(0)
            dealer.disable_monitor()
        assert echo.received == [b"meanwhile"]


async def test_strangers_who_know_the_server_are_counted_and_get_nothing(
    keys: RunKeys, caplog: pytest.LogCaptureFixture
) -> None:
    async with guarded_echo(keys) as echo:
        with (
            caller(echo, controller(keys)) as member,
            caller(echo, lambda dealer: unknown_key(keys, dealer)) as dealer,
        ):
            dealer.send(b"let me in")
            await until(lambda: echo.security.refused.num >= 1)
            assert await answer(member, b"meanwhile") == b"meanwhile"
            assert not dealer.poll(0)
        assert echo.received == [b"meanwhile"]
    (line,) = (r for r in caplog.records if r.levelno == logging.WARNING)
    assert line.getMessage().startswith("refused node=train/0 count=1 reason=")
    assert "127.0.0.1 shows a key that is not the run's" in line.getMessage()
    for secret in (keys.controller_secret, keys.workers_secret):
        assert secret.decode() not in line.getMessage()


@pytest.mark.parametrize(
    "greeting",
    [
        b"",
        b"GET / HTTP/1.1\r\n\r\n",
        b"\x01\x00",  # ZMTP 1.0, which has no security
        b"\xff" + bytes(8) + b"\x7f\x01\x05",  # ZMTP 2.0, likewise
        b"\xff" + bytes(8) + b"\x7f\x03\x00NULL".ljust(54, b"\0"),
        b"\xff" + bytes(8) + b"\x7f\x03\x00CURVE".ljust(54, b"\0") + b"\x04\xff" * 200,
    ],
)
async def test_strangers_without_zmq_are_put_out(keys: RunKeys, greeting: bytes) -> None:
    async with guarded_echo(keys) as echo:
        for _ in range(5):
            with socket.create_connection(("127.0.0.1", echo.port), LIMIT_S) as stranger:
                stranger.sendall(greeting)
                with suppress(OSError):  # the server may have ended it
                    stranger.shutdown(socket.SHUT_WR)
                    while await asyncio.to_thread(stranger.recv, 1 << 16):
                        pass
        with caller(echo, controller(keys)) as member:
            assert await answer(member, b"still there") == b"still there"
        assert echo.received == [b"still there"]


async def test_a_closed_guard_admits_nobody(keys: RunKeys) -> None:
    """Also with the right keys: without a list everybody would be on it."""
    member = controller(keys)
    async with guarded_echo(keys) as echo:
        with caller(echo, member) as before:
            assert await answer(before, b"a") == b"a"
            echo.guard.close()
            assert await answer(before, b"b") == b"b"
            with caller(echo, member) as after:
                monitor = after.get_monitor_socket(
                    zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED
                )
                try:
                    after.send(b"c")
                    assert await asyncio.to_thread(monitor.poll, LIMIT_S * 1000)
                    assert not after.poll(0)
                finally:
                    after.disable_monitor()
                    monitor.close()
        assert echo.received == [b"a", b"b"]
