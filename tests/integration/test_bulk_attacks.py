"""The bulk socket against strangers, liars and pullers that stop reading."""

from __future__ import annotations

import asyncio
import json
import os
import random
import resource
import signal
import socket
import time
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from integration.agent_forks import end_with_pipes, start_with_pipes
from integration.bulk_member import BulkMember, hello_of
from waiting import until

from areal_sc.transport.bulk import server as server_module
from areal_sc.transport.bulk.client import BulkClient
from areal_sc.transport.bulk.messages import (
    HEAD,
    HELLO,
    MAX_REPLY_BYTES,
    PREFIX,
    READ,
    ROWS,
    MessageCipher,
)
from areal_sc.transport.bulk.plan import Transfer, shard_slice
from areal_sc.transport.bulk.server import (
    CHECKS_PER_TIMEOUT,
    MAX_WAITING_REPLIES,
    BulkServer,
)
from areal_sc.transport.bulk.session import SessionGrant, ShardOwner
from areal_sc.transport.bulk.stream import connect
from areal_sc.transport.shards.store import TensorStore

PULLER_SCRIPT = Path(__file__).with_name("bulk_puller.py")
NUM_BYTES = 64 << 20
LARGE = MAX_REPLY_BYTES


@asynccontextmanager
async def serving(num_bytes: int, **options: Any) -> AsyncIterator[BulkServer]:
    store = TensorStore("rollout/0", "life1", max_bytes=1 << 30)
    values = torch.arange(num_bytes, dtype=torch.int64).to(torch.uint8)
    store.put({"x": values}, [num_bytes])
    server = BulkServer(store, **options)
    await server.start()
    try:
        yield server
    finally:
        await server.close()


class Granted:
    """A transport whose only call gives a session of the server."""

    def __init__(self, server: BulkServer) -> None:
        self._server = server

    def connect(self, *address: str) -> Granted:
        return self

    async def call(self, method: Any, puller: str, *, timeout_s: float) -> SessionGrant:
        return self._server.open_session(puller)

    async def close(self) -> None: ...


async def fetch(server: BulkServer, num_bytes: int) -> bytes:
    """The shard's first bytes, as a member of the run gets them."""
    client = BulkClient(Granted(server), "test")  # type: ignore[arg-type]
    target = memoryview(bytearray(NUM_BYTES if num_bytes > 1000 else 1000))
    owner = ShardOwner("rollout/0", "tcp://127.0.0.1:1", "life1")
    rows = shard_slice("life1.1", {"x": "uint8"}, [0], (len(target),))
    deadline = asyncio.get_running_loop().time() + 60
    await client.fetch(owner, [Transfer(rows, [target])], deadline)
    await client.close()
    return bytes(target[:num_bytes])


def expected(num_bytes: int) -> bytes:
    return bytes(i % 256 for i in range(num_bytes))


def memory_mib() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / (1 << 20)


def mutated(request: Any, rng: random.Random) -> Any:
    """The request with something at a random place of it changed, cut, doubled or nested."""
    strange: list[Any] = [
        None, True, -1, 0, 1 << 63, 2**64 - 1, 1.5, float("nan"), "", "x" * 300, b"\xff", [], {},
        [[]], "life1.1", "life1.0", "life9.1", "life1.-1", "../x",
    ]  # fmt: skip
    if not isinstance(request, list) or not request or rng.random() < 0.3:
        return rng.choice(strange)
    changed = list(request)
    place = rng.randrange(len(changed))
    match rng.randrange(5):
        case 0:
            del changed[place]
        case 1:
            changed.insert(place, rng.choice(strange))
        case 2:
            changed *= 2
        case 3:
            changed[place] = [changed[place]]
        case _:
            changed[place] = mutated(changed[place], rng)
    return changed


X = {"x": "uint8"}
REQUESTS: list[Any] = [
    [["life1.1", X, [0], [1000], 0, 12]],
    [["life1.1", X, [0], [1000], 5, 100], ["life1.1", X, [0, 0], [1000, 1000], 0, 0]],
    [],
]


async def test_a_member_that_sends_nonsense_gets_errors_and_harms_nobody() -> None:
    rng = random.Random(1)
    async with serving(1000) as server:
        before = memory_mib()
        num_answered = 0
        for _ in range(30_000):
            request = mutated(rng.choice(REQUESTS), rng)
            kind, parts = server.answer(msgspec.msgpack.encode(request))
            assert sum(map(len, parts)) <= 1000 * 40
            num_answered += kind == ROWS
        assert 0 < num_answered < 15_000
        grant = server.open_session("liar")
        liar = BulkMember(grant)
        for number in range(1, 3001):
            liar.send(liar.request(mutated(rng.choice(REQUESTS), rng)))
            if number % 50 == 0:  # it reads its answers: whoever does not is dropped
                for _ in range(50):
                    await asyncio.to_thread(liar.receive)
        liar.close()
        assert memory_mib() - before < 100
        assert await fetch(server, 256) == expected(256)


async def test_garbage_at_the_port_gets_nothing_and_costs_nothing() -> None:
    rng = random.Random(3)
    async with serving(1000) as server:
        host, port = server._address.removeprefix("tcp://").split(":")
        before = memory_mib()

        def throw() -> int:
            answered = 0
            for number in range(200):
                with socket.create_connection((host, int(port)), timeout=5) as stranger:
                    try:
                        if number % 7 == 0:  # announces what nobody can keep
                            stranger.sendall(HEAD.pack(2**32 - 1, HELLO, bytes(16)))
                        for _ in range(10):
                            # 50 messages each: 100,000 in all
                            contents = [rng.randbytes(rng.randrange(1, 200)) for _ in range(50)]
                            messages = [
                                HEAD.pack(len(it), rng.randrange(4), rng.randbytes(16)) + it
                                for it in contents
                            ]
                            stranger.sendall(b"".join(messages if number % 2 else contents))
                        stranger.settimeout(5)
                        answered += len(stranger.recv(1 << 16))
                    except OSError:
                        pass
            return answered

        assert await asyncio.to_thread(throw) == 0
        await until(lambda: server.refused.num >= 200)  # each connection
        assert server.num_reads == 0
        assert memory_mib() - before < 100
        assert await fetch(server, 256) == expected(256)


@pytest.mark.parametrize(
    "announced",
    [(1 << 17, HELLO), (1 << 30, READ), (1 << 30, ROWS), (0, HELLO), (21, HELLO)],
    ids=["hello", "request", "rows", "nothing", "too long"],
)
async def test_messages_without_end_are_not_kept(announced: tuple[int, int]) -> None:
    """Nobody but a member gets as far as to send a message, let alone a long one."""
    async with serving(1000) as server:
        host, port = server._address.removeprefix("tcp://").split(":")
        before = memory_mib()

        def send() -> bool:
            with socket.create_connection((host, int(port)), timeout=10) as stranger:
                try:
                    stranger.sendall(HEAD.pack(*announced, bytes(16)))
                    for _ in range(4000):  # 500 MiB
                        stranger.sendall(bytes(1 << 17))
                except OSError:
                    return True
                return False

        assert await asyncio.to_thread(send)
        assert memory_mib() - before < 100
        await until(lambda: server.refused.num >= 1)
        assert await fetch(server, 256) == expected(256)


async def test_callers_that_show_no_session_are_put_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "MAX_CALLERS", 20)
    monkeypatch.setattr(server_module, "HANDSHAKE_TIMEOUT_MS", 300)
    async with serving(1000) as server:
        host, port = server._address.removeprefix("tcp://").split(":")
        with ExitStack() as stack:
            for _ in range(50):
                caller = await asyncio.to_thread(socket.create_connection, (host, int(port)), 10)
                stack.enter_context(caller)
                caller.sendall(b"\x40")  # the beginning of a length
                assert len(server._callers) <= 20
            await until(lambda: len(server._callers) + server.refused.num == 50)
            # a member that is held up for so long is not put out; the others' time runs already
            monkeypatch.setattr(server_module, "HANDSHAKE_TIMEOUT_MS", 60_000)
            assert await fetch(server, 256) == expected(256)
            await until(lambda: server.refused.num == 50)
            assert not server._callers


async def test_a_session_has_one_connection_once() -> None:
    async with serving(1000) as server:
        grant, other = server.open_session("test"), server.open_session("other")
        hello = hello_of(grant)
        forged = bytearray(hello)
        forged[9] ^= 1  # the tag begins at byte 8
        another_id = msgspec.structs.replace(grant, session_id=os.urandom(16))
        cipher = MessageCipher(grant.request_key, grant.is_encrypted)
        no_hello = b"".join(cipher.seal(READ, [msgspec.msgpack.encode(REQUESTS[0])]))
        for label, first in [
            ("forged", bytes(forged)),
            ("wrong key", hello_of(grant, other.request_key)),
            ("unknown session", hello_of(another_id)),
            ("no hello", no_hello),
            ("another version", hello.replace(PREFIX, PREFIX[:3] + b"\x04")),
            ("too long", b"".join(cipher.seal(HELLO, [PREFIX + grant.session_id + bytes(300)]))),
            ("right", hello),
            ("captured", hello),
        ]:
            before = server.refused.num
            member = BulkMember(grant, first)
            member.send(member.request(REQUESTS[0]))
            if label == "right":
                await until(lambda member=member: member.has_reply)
                right = member
            else:
                await until(lambda before=before: server.refused.num > before)
                await until(lambda member=member: member.is_lost)
                member.close()
        assert server.num_reads == 1
        assert await asyncio.to_thread(right.receive) == expected(12)
        right.close()


@pytest.mark.parametrize("max_inflight_chunks", [2, 64], ids=["idle socket", "full socket"])
async def test_a_stopped_puller_is_dropped_and_blocks_nobody(max_inflight_chunks: int) -> None:
    async with serving(NUM_BYTES, reply_timeout_s=1e6) as server:
        grant = server.open_session("stopped")
        keys = [grant.session_id, grant.request_key, grant.reply_key]
        arguments = json.dumps([grant.address, *(key.hex() for key in keys), False])
        puller = start_with_pipes(PULLER_SCRIPT, arguments, max_inflight_chunks)
        try:
            assert puller.stdout is not None
            line = await asyncio.to_thread(puller.stdout.readline)
            assert line == b"pulled\n"
            puller.send_signal(signal.SIGSTOP)
            # the others are served as if it were not there
            for _ in range(3):
                assert await fetch(server, NUM_BYTES) == expected(256) * (NUM_BYTES // 256)

            def is_given_up() -> bool:
                server._check_lives()
                return num_connections(server) == 0

            await until(is_given_up)  # the connection, and the queue of replies with it
        finally:
            end_with_pipes(puller)


@asynccontextmanager
async def asking(server: BulkServer, num_requests: int) -> AsyncIterator[socket.socket]:
    """A puller that asks for `LARGE` bytes, so many times; it reads only when told to."""
    grant = server.open_session("greedy")
    cipher = MessageCipher(grant.request_key, False)
    request = msgspec.msgpack.encode([["life1.1", X, [0], [NUM_BYTES], 0, LARGE]])
    messages = [cipher.seal(HELLO, [PREFIX + grant.session_id])]
    messages += [cipher.seal(READ, [request]) for _ in range(num_requests)]
    with await connect(grant.address) as connection:
        for message in messages:
            await asyncio.get_running_loop().sock_sendall(connection, b"".join(message))
        yield connection


async def test_a_slow_puller_costs_no_memory_and_stays_as_long_as_it_reads() -> None:
    loop = asyncio.get_running_loop()
    async with serving(NUM_BYTES, reply_timeout_s=1e6) as server:
        before = memory_mib()
        async with asking(server, 60) as puller:  # 240 MiB
            await until(lambda: bool(server._pullers))
            [session] = server._pullers
            await until(lambda: session.stream.num_waiting > 50)
            for _ in range(3 * CHECKS_PER_TIMEOUT):  # three times what a stopped one has
                moved = session.stream.moved_bytes
                async with asyncio.timeout(60):
                    while session.stream.moved_bytes == moved:
                        await loop.sock_recv(puller, 1 << 17)
                server._check_lives()
            assert session.stream.num_waiting > 0
            assert server.num_dropped == 0
            assert memory_mib() - before < 40

            def is_dropped() -> bool:
                server._check_lives()
                return server.num_dropped == 1

            await until(is_dropped)  # now it reads no more
        assert await fetch(server, NUM_BYTES) == expected(256) * (NUM_BYTES // 256)


async def test_who_asks_for_more_than_it_reads_is_put_out() -> None:
    async with serving(NUM_BYTES) as server, asking(server, 8 + MAX_WAITING_REPLIES):
        await until(lambda: server.refused.num == 1)
        await until(lambda: num_connections(server) == 0)
        assert await fetch(server, NUM_BYTES) == expected(256) * (NUM_BYTES // 256)


def num_connections(server: BulkServer) -> int:
    """Established connections to the server's port, as the kernel lists them."""
    port = int(server._address.rpartition(":")[2])
    lines = Path("/proc/net/tcp").read_text().splitlines()[1:]
    wanted = f"0100007F:{port:04X}"
    return sum(1 for line in lines if line.split()[1] == wanted and line.split()[3] == "01")


async def test_an_idle_server_uses_no_cpu_after_an_attack() -> None:
    async with serving(1000) as server:
        for number in range(100):
            member = BulkMember(server.open_session("test"))
            member.send(os.urandom(100))
            await until(lambda number=number: server.refused.num == number + 1)
            member.close()
        used_s: list[float] = []
        while len(used_s) < 20 and min(used_s, default=1.0) >= 0.1:  # others are in this process
            before = time.process_time()
            await asyncio.sleep(0.2)
            used_s.append(time.process_time() - before)
        assert min(used_s) < 0.1, used_s
