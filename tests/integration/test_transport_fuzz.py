"""A server in a process of its own against strangers at its port, and members that send rubbish."""

from __future__ import annotations

import asyncio
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest
import zmq
from integration.message_mutations import mutated
from integration.rpc_methods import named
from integration.rpc_process import (
    PROGRAM,
    ServerProcess,
    counters,
    held_bytes,
    server_process,
)
from waiting import until

from areal_sc.errors import PeerLost
from areal_sc.transport.rpc.codec import (
    MAX_FRAMES,
    MAX_MESSAGE_BYTES,
    Reply,
    Request,
    decode,
    encode,
)
from areal_sc.transport.rpc.method import pack
from areal_sc.transport.rpc.transport import ZmqTransport
from areal_sc.transport.security.curve import CurveClient
from areal_sc.transport.security.keys import RunKeys
from areal_sc.transport.sockets.refusals import LOG_INTERVAL_S
from areal_sc.transport.sockets.zmq_socket import FRAME_BYTES

MAX_GROWTH_BYTES = 24 << 20

NUM_HOLDERS = 150
HOLDERS_BYTES = 64 << 20
"""What so many strangers may make a server hold, whatever they send."""


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ServerProcess]:
    with server_process(tmp_path) as made:
        yield made
        assert made.process.poll() is None, f"the server ended: {made.log}"


def most_lines(began_s: float) -> float:
    """Of one kind of refusal, since then."""
    return 1 + (time.monotonic() - began_s) / LOG_INTERVAL_S


# ---------------------------------------------------------------- strangers

NULL, CURVE = b"NULL".ljust(20, b"\x00"), b"CURVE".ljust(20, b"\x00")


def greeting(mechanism: bytes, version: bytes = b"\x03\x01") -> bytes:
    """What a ZMTP 3 peer sends first (RFC 23)."""
    return b"\xff" + bytes(8) + b"\x7f" + version + mechanism + b"\x00" + bytes(31)


def rubbish(rng: random.Random) -> bytes:
    """What a stranger sends at first: nothing of it opens a connection."""
    match rng.randrange(7):
        case 0:
            return greeting(CURVE)
        case 1:
            return greeting(NULL) + b"\x04\x26\x05READY" + rng.randbytes(32)
        case 2:
            return greeting(CURVE) + b"\x04\xc8\x05HELLO" + rng.randbytes(194)
        case 3:  # a command of 2^62 bytes
            return greeting(CURVE) + b"\x06" + b"\x40" + bytes(7)
        case 4:  # ZMTP 1: a frame of 2^62 bytes
            return b"\xff\x40" + bytes(7) + b"\x00"
        case 5:  # ZMTP 2
            return b"\xff" + bytes(8) + b"\x7f\x01\x06" + rng.randbytes(20)
    return rng.randbytes(rng.randrange(1, 100))


def send_frames(port: int, rng: random.Random, count: int) -> int:
    """Sends up to `count` random frames on one connection; returns how many it took."""
    with socket.create_connection(("127.0.0.1", port), timeout=10) as stranger:
        if rng.random() < 0.1:  # it goes without the end of the connection being told
            stranger.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\x00\x00\x00" + bytes(4))
        num_sent = 0
        with suppress(ConnectionError):
            stranger.sendall(rubbish(rng))
            while num_sent < count:
                body = rng.randbytes(rng.randrange(1, 300))
                stranger.sendall(rng.choice((b"\x00", b"\x01", b"\x04")) + body)
                num_sent += 1
        return num_sent


async def test_100_000_random_frames_at_the_port_change_nothing(server: ServerProcess) -> None:
    rng = random.Random(6)
    transport = ZmqTransport(client=server.member())
    member = server.connect(transport)

    def attack(num_frames: int) -> None:
        while num_frames > 0:
            num_frames -= send_frames(server.port, rng, 40)

    assert await member.call(named("echo"), {"x": 1}, timeout_s=30) == {"x": 1}
    await asyncio.to_thread(attack, 10_000)  # so that what is made once is made
    await until(lambda: server.num_connections == 1)
    num_files = server.num_open_files
    warm_bytes = await held_bytes(member)
    attacking = asyncio.create_task(asyncio.to_thread(attack, 100_000))
    while not attacking.done():  # meanwhile
        assert await member.call(named("echo"), {"x": 2}, timeout_s=30) == {"x": 2}
        await asyncio.sleep(0.05)
    await attacking
    assert await member.call(named("echo"), {"x": 3}, timeout_s=30) == {"x": 3}
    await until(lambda: server.num_connections == 1 and server.num_open_files <= num_files)
    await until(server.is_idle)
    assert await held_bytes(member) - warm_bytes < MAX_GROWTH_BYTES
    counted = await counters(member)
    assert counted["num_calls"] == counted["num_malformed"] == 0
    assert "refused node=" not in server.log
    await transport.close()


async def test_strangers_that_hold_connections_open_are_put_out(server: ServerProcess) -> None:
    transport = ZmqTransport(client=server.member())
    member = server.connect(transport)
    assert await member.call(named("echo"), {}, timeout_s=30) == {}
    before_bytes = await held_bytes(member)
    strangers = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(500)]
    try:
        for i, stranger in enumerate(strangers):
            stranger.sendall(greeting(CURVE)[: i % 64])
        assert await member.call(named("echo"), {"x": 1}, timeout_s=30) == {"x": 1}
        for stranger in strangers:
            stranger.settimeout(30)
            with suppress(ConnectionError):
                while stranger.recv(4096):  # until the server closes it
                    pass
    finally:
        for stranger in strangers:
            stranger.close()
    assert await member.call(named("echo"), {"x": 2}, timeout_s=30) == {"x": 2}
    assert await held_bytes(member) - before_bytes < MAX_GROWTH_BYTES
    await transport.close()


def hold(port: int, num_bytes: int) -> socket.socket:
    """A stranger who announces a frame of so many bytes, and keeps the last of them back."""
    stranger = socket.create_connection(("127.0.0.1", port), timeout=30)
    with suppress(ConnectionError):  # the server does not take so large a frame
        stranger.sendall(greeting(CURVE) + b"\x06" + num_bytes.to_bytes(8, "big"))
        stranger.sendall(bytes(num_bytes - 1))
    return stranger


@pytest.mark.parametrize("num_bytes", [16 << 20, 1 << 20, FRAME_BYTES])
async def test_strangers_with_long_frames_fill_no_memory(
    server: ServerProcess, num_bytes: int
) -> None:
    transport = ZmqTransport(client=server.member())
    member = server.connect(transport)
    assert await member.call(named("echo"), {}, timeout_s=30) == {}
    before_bytes = server.memory_bytes
    with ExitStack() as strangers:
        for number in range(NUM_HOLDERS):
            strangers.enter_context(await asyncio.to_thread(hold, server.port, num_bytes))
            assert server.memory_bytes - before_bytes < HOLDERS_BYTES
            if number % 10 == 0:  # members are served meanwhile, also with what takes many frames
                large = {"x": bytes(3 << 20)}
                assert await member.call(named("echo"), large, timeout_s=30) == large
    await transport.close()


async def test_a_caller_with_the_keys_of_another_run_is_told_so(server: ServerProcess) -> None:
    transport = ZmqTransport(client=CurveClient.of_controller(RunKeys.create()))
    with pytest.raises(PeerLost, match=r"the handshake failed: .* the keys of another run"):
        await server.connect(transport).call(named("count"), {}, timeout_s=30)
    await transport.close()


# ---------------------------------------------------------------- members


@contextmanager
def raw_member(server: ServerProcess) -> Iterator[zmq.Socket[bytes]]:
    """An admitted socket that sends whatever it is given."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.setsockopt(zmq.LINGER, 0)
        server.member().configure(dealer)
        server.member().expect(dealer, "")
        dealer.connect(server.address)
        yield dealer


def receive(dealer: zmq.Socket[bytes]) -> bytes:
    assert dealer.poll(30_000), "no reply"
    return dealer.recv()


async def test_mutated_messages_of_a_member_are_counted_and_end_nothing(
    server: ServerProcess,
) -> None:
    rng = random.Random(7)
    transport = ZmqTransport(client=server.member())
    client = server.connect(transport)

    def send(dealer: zmq.Socket[bytes], count: int) -> None:
        for i in range(count):
            match i % 10:
                case 0:
                    dealer.send(rng.randbytes(rng.randrange(100)))
                case 1:
                    dealer.send_multipart([mutated(rng)[:FRAME_BYTES] for _ in range(4)])
                case _:
                    message = mutated(rng)
                    starts = range(0, max(1, len(message)), FRAME_BYTES)
                    dealer.send_multipart([message[at : at + FRAME_BYTES] for at in starts])
            if i % 100 == 0:  # what was refused with a reply
                while dealer.poll(0):
                    dealer.recv()

    began_s = time.monotonic()
    with raw_member(server) as dealer:
        await asyncio.to_thread(send, dealer, 2_000)
        assert await client.call(named("echo"), {"x": 1}, timeout_s=30) == {"x": 1}
        warm_bytes = await held_bytes(client)
        await asyncio.to_thread(send, dealer, 20_000)
        # the server has them all once it answers what was sent after them
        dealer.send(encode(Request("last", "life1", "echo", pack({"last": 1}))))
        async with asyncio.timeout(60):
            while True:
                frame = await asyncio.to_thread(receive, dealer)
                message = decode([memoryview(frame)])
                if message == Reply("last", pack({"last": 1})):
                    break
        assert await client.call(named("echo"), {"x": 2}, timeout_s=30) == {"x": 2}
    counted = await counters(client)
    assert 10_000 < counted["num_malformed"] < 22_000
    assert counted["num_calls"] == 0
    assert await held_bytes(client) - warm_bytes < MAX_GROWTH_BYTES
    assert 1 <= server.log.count("malformed_message") <= most_lines(began_s)
    assert max(map(len, server.log.splitlines())) < 600
    await transport.close()


async def test_oversized_truncated_and_foreign_messages_are_refused(server: ServerProcess) -> None:
    good = encode(Request("id", "life1", "count", pack({})))
    refused = [
        [good[:-1]],
        [good[:3]],
        [b""],
        [good[:4] + bytes([good[4] + 1]) + good[5:]],  # another protocol version
        [good + b"\x00"],
        [good, good],
        [good] * 1000,
        [bytes(FRAME_BYTES)] * MAX_FRAMES,
        [*[bytes(FRAME_BYTES)] * MAX_FRAMES, b"\x00"],
    ]
    transport = ZmqTransport(client=server.member())
    client = server.connect(transport)
    with raw_member(server) as dealer:
        for frames in refused:
            dealer.send_multipart(frames)
        dealer.send(encode(Request("after", "life1", "echo", pack({}))))
        answer = await asyncio.to_thread(receive, dealer)
        assert decode([memoryview(answer)]) == Reply("after", pack({}))
        counted = await counters(client)
        assert (counted["num_malformed"], counted["num_calls"]) == (len(refused), 0)
        # ZMQ ends the connection before there is room for a frame that is too long
        before_bytes = server.memory_bytes
        dealer.send(bytes(MAX_MESSAGE_BYTES))
        dealer.send(encode(Request("lost", "life1", "count", pack({}))))
        assert await client.call(named("echo"), {}, timeout_s=30) == {}
        assert server.memory_bytes - before_bytes < MAX_MESSAGE_BYTES // 2
    counted = await counters(client)
    assert counted["num_malformed"] == len(refused)
    await transport.close()


async def test_a_stopped_caller_delays_nobody_and_is_dropped(server: ServerProcess) -> None:
    transport = ZmqTransport(client=server.member())
    client = server.connect(transport)
    assert await client.call(named("blob"), {"size": 1_000_000}, timeout_s=30)
    warm_bytes = await held_bytes(client)
    caller = await asyncio.create_subprocess_exec(
        *(sys.executable, str(PROGRAM), "call", str(server.keys_path), server.address),
        stdout=subprocess.PIPE,
    )
    assert caller.stdout is not None
    try:
        assert await caller.stdout.readline() == b"calling\n"
        async with asyncio.timeout(60):
            while server.memory_bytes - warm_bytes < 20 << 20:  # until many replies wait for it
                caller.send_signal(signal.SIGCONT)
                await asyncio.sleep(0.02)
                caller.send_signal(signal.SIGSTOP)
                await asyncio.sleep(0.05)
        is_there, x = True, {"x": 1}
        while is_there:  # until it is dropped
            is_there = server.num_connections == 2
            assert await client.call(named("echo"), x, timeout_s=30) == x
            assert server.memory_bytes - warm_bytes < 200 << 20  # what it asks for at a time
        await until(lambda: server.num_connections == 1)  # it may have begun another one
        async with asyncio.timeout(60):
            while await held_bytes(client) - warm_bytes >= 20 << 20:  # noqa: ASYNC110 - likewise
                await asyncio.sleep(0.05)
        await until(server.is_idle)
        # it finds out when it goes on, and calls again
        caller.send_signal(signal.SIGCONT)
        await until(lambda: server.num_connections == 2)
        assert await client.call(named("echo"), {}, timeout_s=30) == {}
    finally:
        caller.kill()
        await caller.wait()
    await transport.close()
