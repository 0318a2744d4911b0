"""What the machine allows: memory copies, a plain TCP socket, bare pyzmq, each as fast as it goes.

Run as `python planes_limits.py ROLE`, a role of planes_role.py.

- memcpy: one thread, source and destination warm.
- socket: the puller asks for a shard, the owner sends it, `recv_into` its place. The sizes of the
  system calls matter (2.5 to 4.9 GB/s), socket buffers do not: the kernel sizes them itself.
- zmq: ROUTER and DEALER, one request a chunk, a fixed number of them outstanding (credits), sent
  without a copy, received by one copy into its place. No authentication, no loop, no metadata. A
  blocking receive. As pyzmq comes, every message costs page faults, since glibc gives its memory
  back; `zmq-tuned` tells glibc to keep it.

Destinations are warm and used again and again.
"""

from __future__ import annotations

import ctypes
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable

import numpy as np
import zmq
from planes_role import Handlers, serve
from planes_samples import percentiles

MAX_SHARD_BYTES = 256 << 20
CHUNK_BYTES = 1 << 20
CREDITS = 8
IO_TIMEOUT_MS = 30_000
SOCKET_SEND_BYTES = 1 << 20
SOCKET_RECEIVE_BYTES = 256 << 10
ZERO_COPY_BYTES = 64 << 10

_REQUEST = struct.Struct("<QQ")
"""First byte, number of bytes."""

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3


def keep_freed_memory() -> None:
    """glibc lends freed blocks of up to 32 MiB again, and gives them back to nobody."""
    libc = ctypes.CDLL(None)
    libc.mallopt(_M_MMAP_THRESHOLD, 32 << 20)
    libc.mallopt(_M_TRIM_THRESHOLD, 1 << 30)


def pattern(num_bytes: int = MAX_SHARD_BYTES) -> np.ndarray:
    """[num_bytes] uint8 that every role can make and compare; a multiple of 8."""
    return np.arange(num_bytes // 8, dtype=np.uint64).view(np.uint8)


def check(destination: np.ndarray, num_bytes: int) -> None:
    """Raises: ValueError: the first `num_bytes` are not those of the pattern."""
    if not np.array_equal(destination[:num_bytes], pattern(num_bytes)):
        raise ValueError(f"{num_bytes} bytes arrived changed")


def timed(work: Callable[[], object], count: int = 1) -> float:
    """Seconds to do it so often."""
    start = time.perf_counter()
    for _ in range(count):
        work()
    return time.perf_counter() - start


def memcpy_role() -> Handlers:
    source, destination = pattern(), np.zeros(MAX_SHARD_BYTES, np.uint8)

    def pull(num_bytes: int, count: int) -> float:
        """Seconds for `count` copies of a shard."""
        into, of = destination[:num_bytes], source[:num_bytes]
        return timed(lambda: np.copyto(into, of), count)

    def touch_fresh(num_bytes: int) -> float:
        """Seconds to write memory that the system has just given: what any fresh place costs."""
        return timed(lambda: np.empty(num_bytes, np.uint8).fill(1))

    return {
        "pull": pull,
        "touch_fresh": touch_fresh,
        "check": lambda num_bytes: check(destination, num_bytes),
    }


def socket_owner_role() -> Handlers:
    listener = socket.create_server(("127.0.0.1", 0))
    shard = memoryview(pattern())

    def serve_one() -> None:
        connection, _ = listener.accept()
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with connection:
            while len(request := connection.recv(_REQUEST.size, socket.MSG_WAITALL)) > 0:
                start, num_bytes = _REQUEST.unpack(request)
                for first in range(start, start + num_bytes, SOCKET_SEND_BYTES):
                    stop = min(first + SOCKET_SEND_BYTES, start + num_bytes)
                    connection.sendall(shard[first:stop])

    threading.Thread(target=serve_one, daemon=True).start()
    return {"address": listener.getsockname}


def socket_puller_role() -> Handlers:
    connection = socket.socket()
    connection.settimeout(IO_TIMEOUT_MS / 1000)
    destination = np.zeros(MAX_SHARD_BYTES, np.uint8)
    memory = memoryview(destination)

    def connect(address: tuple[str, int]) -> None:
        connection.connect(tuple(address))
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def fetch(num_bytes: int) -> None:
        connection.sendall(_REQUEST.pack(0, num_bytes))
        position = 0
        while position < num_bytes:
            stop = min(position + SOCKET_RECEIVE_BYTES, num_bytes)
            received = connection.recv_into(memory[position:stop])
            if not received:
                raise ConnectionError("the owner has closed the connection")
            position += received

    return {
        "connect": connect,
        "pull": lambda num_bytes, count: timed(lambda: fetch(num_bytes), count),
        "check": lambda num_bytes: check(destination, num_bytes),
    }


def tuned(role: Callable[[], Handlers]) -> Callable[[], Handlers]:
    """The role in a process whose freed memory is kept."""

    def tuned_role() -> Handlers:
        keep_freed_memory()
        return role()

    return tuned_role


def zmq_owner_role() -> Handlers:
    router = zmq.Context.instance().socket(zmq.ROUTER)
    router.setsockopt(zmq.ROUTER_MANDATORY, 1)
    port = router.bind_to_random_port("tcp://127.0.0.1")
    shard = memoryview(pattern())

    def serve_all() -> None:
        while True:
            puller, request = router.recv_multipart()
            start, num_bytes = _REQUEST.unpack(request)
            router.send(puller, zmq.SNDMORE)
            # what is small costs less to copy than to track
            router.send(shard[start : start + num_bytes], copy=num_bytes < ZERO_COPY_BYTES)

    threading.Thread(target=serve_all, daemon=True).start()
    return {"address": lambda: f"tcp://127.0.0.1:{port}"}


def zmq_puller_role() -> Handlers:
    dealer = zmq.Context.instance().socket(zmq.DEALER)
    dealer.setsockopt(zmq.LINGER, 0)
    dealer.setsockopt(zmq.RCVTIMEO, IO_TIMEOUT_MS)
    dealer.setsockopt(zmq.SNDTIMEO, IO_TIMEOUT_MS)
    destination = np.zeros(MAX_SHARD_BYTES, np.uint8)
    memory = memoryview(destination)

    def connect(address: str) -> None:
        dealer.connect(address)

    def fetch(num_bytes: int) -> None:
        asked = 0
        for start in range(0, num_bytes, CHUNK_BYTES):
            while asked < min(start + CREDITS * CHUNK_BYTES, num_bytes):
                dealer.send(_REQUEST.pack(asked, min(CHUNK_BYTES, num_bytes - asked)))
                asked += CHUNK_BYTES
            dealer.recv_into(memory[start : start + CHUNK_BYTES])

    def latencies(num_bytes: int, count: int) -> dict[str, float]:
        """Of single requests, one at a time; 1 byte stands for an empty reply."""
        request, into = _REQUEST.pack(0, num_bytes), memory[:num_bytes]

        def ping() -> None:
            dealer.send(request)
            dealer.recv_into(into)

        return percentiles([timed(ping) for _ in range(count)])

    def pipelined(num_bytes: int, count: int, max_inflight: int) -> float:
        """Seconds for `count` requests of which `max_inflight` are outstanding."""

        def work() -> None:
            for sent in range(count + max_inflight):
                if sent < count:
                    dealer.send(_REQUEST.pack(0, num_bytes))
                if sent >= max_inflight:
                    dealer.recv_into(memory[:num_bytes])

        return timed(work)

    return {
        "connect": connect,
        "pull": lambda num_bytes, count: timed(lambda: fetch(num_bytes), count),
        "latencies": latencies,
        "pipelined": pipelined,
        "check": lambda num_bytes: check(destination, num_bytes),
    }


ROLES: dict[str, Callable[[], Handlers]] = {
    "memcpy": memcpy_role,
    "socket-owner": socket_owner_role,
    "socket-puller": socket_puller_role,
    "zmq-owner": zmq_owner_role,
    "zmq-puller": zmq_puller_role,
    "zmq-tuned-owner": tuned(zmq_owner_role),
    "zmq-tuned-puller": tuned(zmq_puller_role),
}

if __name__ == "__main__":
    serve(ROLES[sys.argv[1]]())
