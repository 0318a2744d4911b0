"""Methods that are called over a connection. Each is declared once, for callers and servers.

    PING = Method("ping", NoneType, NoneType)
    RUN_GROUP = Method("run_group", RunGroup, GroupReply)

    reply = await connection.call(RUN_GROUP, RunGroup(...), timeout_s=60)      the caller
    RpcServer([PING.served_by(self.ping), RUN_GROUP.served_by(self.run_group)])   the server

Arguments and replies are msgspec structs, dataclasses or plain types. They travel as msgpack, and
their types are checked while they are decoded.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Final, Generic, TypeVar

import msgspec
from msgspec import Raw

from areal_sc.errors import ProtocolError
from areal_sc.system.json_lines import UNDECODABLE
from areal_sc.transport.security.passes import CONTROLLER, Caller

A = TypeVar("A")
R = TypeVar("R")

Handler = Callable[[A], Coroutine[Any, Any, R] | R]
"""Takes the arguments and returns the reply. The coroutine of a coroutine function runs as a task.
A plain function is answered in the turn in which its request arrives, so it must be quick."""

MAX_ERROR_CHARS: Final = 200

T = TypeVar("T")

_encoder: Final = msgspec.msgpack.Encoder()


class Method(Generic[A, R]):
    """A declared method.

    Args:
        name: names it on the wire.
        args: type of the arguments; `NoneType` for a method without any.
        reply: type of the reply.
        deadline_s: seconds that a call may take where its caller does not say; None: the
            `transport.call_timeout_s` of the run.
        writes: it waits for a disk: `transport.write_timeout_s` is its deadline.
        ships: it waits for files, where nodes do not share those of the script: its deadline is
            later there, by the `shipping_timeout_s` of the scheduler.
        callers: those that may call it.
    """

    __slots__ = ("_args", "_reply", "callers", "deadline_s", "name", "ships", "writes")

    def __init__(
        self,
        name: str,
        args: type[A],
        reply: type[R],
        *,
        deadline_s: float | None = None,
        writes: bool = False,
        ships: bool = False,
        callers: frozenset[Caller] = CONTROLLER,
    ) -> None:
        self.name = name
        self.callers = callers
        self.deadline_s = deadline_s
        self.writes = writes
        self.ships = ships
        self._args = msgspec.msgpack.Decoder(args)
        self._reply = msgspec.msgpack.Decoder(reply)

    def __repr__(self) -> str:
        return f"Method({self.name!r})"

    def read_args(self, packed: Raw) -> A:
        """Raises: ProtocolError: these are not the declared arguments."""
        return self._decoded(self._args, packed, "the arguments are")

    def read_reply(self, packed: Raw) -> R:
        """Raises: ProtocolError: this is not the declared reply."""
        return self._decoded(self._reply, packed, "the reply is")

    def served_by(self, handler: Handler[A, R]) -> Served:
        """What a server needs to serve the method."""
        return Served(self, handler)

    def served_to(self, handler: Callable[[A, str], Coroutine[Any, Any, R] | R]) -> Served:
        """Serves like `served_by`; the handler also gets the caller's public key, "" for none."""
        return Served(self, handler, takes_key=True)

    def _decoded(self, decoder: msgspec.msgpack.Decoder[T], packed: Raw, what: str) -> T:
        try:
            return decoder.decode(packed)
        except UNDECODABLE as error:
            raise ProtocolError(
                f"{self.name}: {what} not of the declared type: {short_text(error)}"
            ) from None


@dataclass(frozen=True, slots=True)
class Served:
    """A method, and the function of a server that answers its calls.

    Attributes:
        takes_key: its function is told who calls.
    """

    method: Method[Any, Any]
    handler: Callable[..., Any]
    takes_key: bool = False


def short_text(error: Exception) -> str:
    """What a decoder says, in few characters: some errors repeat the whole input."""
    return f"{type(error).__name__}: {error}"[:MAX_ERROR_CHARS]


def pack(value: Any) -> Raw:
    """Arguments, or a reply, as they travel.

    Raises: ProtocolError: the value has no msgpack form.
    """
    try:
        return Raw(_encoder.encode(value))
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise ProtocolError(f"cannot be sent as msgpack: {error}") from error
