"""What runs inside a reward process: load the user's function, call it, say what came of it.

Messages are msgpack lists on a stream socket, one request at a time:

    ["load", key, reference]   -> ["loaded", key] | ["failed", what, details]
    ["call", key, arguments]   -> ["value", number] | ["failed", what, details]

where the arguments are `values.dumps([prompt, completion, extra])`, and the details are the
attributes of a RewardError; and one ["ready"] at the start. The process ends with the
connection, or by SIGKILL.
"""

from __future__ import annotations

import inspect
import math
import socket
from collections.abc import Callable, Iterator
from typing import Any

import msgpack

from areal_sc.errors import RewardError
from areal_sc.workflows.base import DECLARATION, RewardDeclaration
from areal_sc.workflows.reference import ObjectReference, resolve
from areal_sc.workflows.rejection import RejectionKind, last_frames, place_of
from areal_sc.workflows.values import loads

MAX_MESSAGE_BYTES = 256 << 20
_MAX_TEXT = 2000


def pack(message: list[Any]) -> bytes:
    """Text may hold what no UTF-8 can, e.g. half a surrogate pair that a model sampled."""
    packed: bytes = msgpack.packb(message, unicode_errors="surrogatepass")
    return packed


def make_unpacker() -> Any:
    return msgpack.Unpacker(
        max_buffer_size=MAX_MESSAGE_BYTES, strict_map_key=False, unicode_errors="surrogatepass"
    )


def finite_reward(value: Any) -> float:
    """`value` as a float: a Python, numpy or one-element torch number.

    Raises: RewardError: it is no number, or NaN or infinite.
    """
    if inspect.isawaitable(value):
        if inspect.iscoroutine(value):
            value.close()
        raise RewardError(
            "the reward function returned an awaitable: declare it with `async def`, "
            "or return a number",
            kind=RejectionKind.bad_reward,
        )
    if isinstance(value, str | bytes) or not hasattr(value, "__float__"):
        raise RewardError(
            f"the reward function returned {type(value).__name__} {str(value)[:80]!r}: "
            "expected a finite number",
            kind=RejectionKind.bad_reward,
        )
    number = float(value)
    if not math.isfinite(number):
        raise RewardError(
            f"the reward function returned {number}: expected a finite number",
            kind=RejectionKind.bad_reward,
        )
    return number


def describe(error: BaseException) -> str:
    """`ValueError: the message`, shortened; a RewardError's message alone."""
    text = str(error) if isinstance(error, RewardError) else f"{type(error).__name__}: {error}"
    return text[:_MAX_TEXT]


def details_of(error: BaseException) -> dict[str, str]:
    """What a RewardError says beside its message about a reward that raised this."""
    if isinstance(error, RewardError):
        return {"kind": error.kind}
    return {
        "kind": RejectionKind.reward_error.value,
        "error_type": type(error).__name__,
        "place": place_of(error),
        "frames": last_frames(error),
    }


def run_reward_process(spec: dict[str, Any]) -> int:
    """Entry point; `spec["fd"]` is the socket to the pool. Returns at its end of file."""
    rewards: dict[int, Callable[..., Any]] = {}
    with socket.socket(fileno=spec["fd"]) as connection:
        connection.setblocking(True)
        connection.sendall(pack(["ready"]))
        for request in _requests(connection):
            connection.sendall(pack(_answer(request, rewards)))
    return 0


def _requests(connection: socket.socket) -> Iterator[list[Any]]:
    unpacker = make_unpacker()
    while received := connection.recv(1 << 16):
        unpacker.feed(received)
        yield from unpacker


def _answer(request: list[Any], rewards: dict[int, Callable[..., Any]]) -> list[Any]:
    kind, key, *rest = request
    try:
        if kind == "load":
            rewards[key] = resolve(ObjectReference.from_wire(rest[0]))
            declaration: RewardDeclaration | None = getattr(rewards[key], DECLARATION, None)
            if declaration is not None:
                declaration.prepare()
            return ["loaded", key]
        prompt, completion, extra = loads(rest[0])
        return ["value", finite_reward(rewards[key](prompt, completion, **extra))]
    except (Exception, SystemExit) as error:  # the user's code: whatever it raises is its answer
        return ["failed", describe(error), details_of(error)]
