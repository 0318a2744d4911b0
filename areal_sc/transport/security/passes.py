"""A pass says who a worker is: the script signs it, and the worker shows it.

    script   Passes.issue(name, caller) ─► WorkerKeys ── LAUNCH ─► agent ─► worker
    worker   calls with its own key, and shows its pass with each request
    callee   KnownCallers: the key of the connection is the pass's (CURVE proves it), the signature
             is the run's (Ed25519), and no later life of the worker has been started

A pass needs nobody else to be there when it is checked: no list of members is kept up to date, and
a restarted script, which has the same keys, need not tell anybody. What has to be told is only
which workers have been started again: the pass of a life before is void from then on.
"""

from __future__ import annotations

import hmac
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

import msgspec
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from msgspec import Struct
from zmq.utils import z85

from areal_sc.errors import NotPermitted, TransportError
from areal_sc.transport.security.keys import KEY_CHARS, KeyPair, RunKeys

MAX_PASS_BYTES: Final = 512

_SIGNATURE_BYTES: Final = 64
_PURPOSE: Final = b"areal_sc pass 1\0"
"""Signed with each pass: a signature that was made for anything else is none of a pass."""
_TERM_BITS: Final = 32


class Caller(StrEnum):
    """The role in which a process calls another one.

    controller: the script, or a command of its user, who has the run's keys.
    train, rollout: a worker.
    newcomer: an agent that joins, of which nothing is known yet.
    """

    controller = "controller"
    train = "train"
    rollout = "rollout"
    newcomer = "newcomer"


CONTROLLER: Final = frozenset((Caller.controller,))
WORKERS: Final = frozenset((Caller.controller, Caller.train, Caller.rollout))


class Pass(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What is signed.

    Attributes:
        key: public key that the worker calls with.
        name: of the worker, such as `rollout/0`.
        number: the later a pass was issued in the run, the higher.
    """

    key: bytes
    caller: Caller
    name: str
    number: int


_decoder: Final = msgspec.msgpack.Decoder(Pass)


@dataclass(frozen=True, repr=False)
class WorkerKeys:
    """What one life of a worker needs to call others, and to serve them. Its text shows no secret.

    Attributes:
        own: the pair that it calls with.
        shown_pass: says whose key that is.
        servers: all workers serve with this pair.
        controller, authority: public keys of the run; see `RunKeys`.
        sessions: see `RunKeys.sessions_secret`.
    """

    own: KeyPair
    shown_pass: bytes
    servers: KeyPair
    controller: bytes
    authority: bytes
    sessions: bytes

    def __repr__(self) -> str:
        return f"WorkerKeys(own={self.own!r}, …)"


class Passes:
    """Issues the passes of a run; one a process, for all its controllers and their threads.

    Args:
        term: of this process in the run. Of two passes the one of the later term is the later one.
        is_first: no earlier process has issued passes of these keys.

    Attributes:
        replaced: number of the newest pass of each worker that has had another one, by name. It is
            another object whenever its content is another one.
        on_replaced: is called then, in the thread of who issues the pass.
    """

    def __init__(self, keys: RunKeys, term: int = 0, *, is_first: bool = True) -> None:
        self.replaced: dict[str, int] = {}
        self.on_replaced: Callable[[], object] = lambda: None
        self._keys = keys
        self._signing_key = keys.signing_key()
        self._term = term
        self._is_first = is_first
        self._issued: set[str] = set()
        self._count = 0
        self._one_issues = threading.Lock()

    def issue(self, name: str, caller: Caller) -> WorkerKeys:
        """A key pair and pass for a new life of a worker; those of the life before are void."""
        with self._one_issues:
            self._count += 1
            number = self._term << _TERM_BITS | self._count
            if name in self._issued or not self._is_first:
                self.replaced = {**self.replaced, name: number}
                self.on_replaced()
            self._issued.add(name)
        own = KeyPair.create()
        content = msgspec.msgpack.encode(Pass(own.public, caller, name, number))
        return WorkerKeys(
            own=own,
            shown_pass=self._signing_key.sign(_PURPOSE + content) + content,
            servers=self._keys.workers,
            controller=self._keys.controller.public,
            authority=self._keys.authority,
            sessions=self._keys.sessions_secret,
        )


class KnownCallers:
    """The known callers of a server, by the public key of the connection, which CURVE has proved.

    Args:
        controller: public key; whoever has it may call everything.
        authority: public key of those who issue passes; b"": no pass is taken.
        takes_newcomers: keys that nobody knows are served, too, as far as newcomers may call.

    Attributes:
        known: key -> caller, of keys and passes that were shown; it stays the same object.
    Raises: TransportError: the controller's is no key.
    """

    def __init__(
        self, controller: bytes, authority: bytes = b"", *, takes_newcomers: bool = False
    ) -> None:
        if len(controller) != KEY_CHARS:
            raise TransportError(f"a public key has {KEY_CHARS} characters, not {len(controller)}")
        self.known: dict[str, Caller] = {controller.decode("ascii"): Caller.controller}
        self._takes_newcomers = takes_newcomers
        self._authority: Ed25519PublicKey | None = None
        if authority:
            self._authority = Ed25519PublicKey.from_public_bytes(z85.decode(authority))
        self._newest: dict[str, tuple[int, str]] = {}  # number and key of a pass, by name
        self._names: dict[str, str] = {}  # by key

    def may_connect(self, key: str) -> bool:
        """Whether a connection with this key is made, on which its caller may show more."""
        return self._takes_newcomers or self._authority is not None or key in self.known

    def find(self, key: str, shown_pass: bytes) -> Caller | None:
        """The role in which the owner of the key calls; None: nobody knows.

        Raises: NotPermitted: it is that of a worker that has been started again since.
        """
        caller = self.known.get(key)
        if caller is None and shown_pass:
            return self._check(key, shown_pass)
        if caller is None and self._takes_newcomers:
            return Caller.newcomer
        return caller

    def name_of(self, key: str) -> str:
        """The worker with this public key. Raises: NotPermitted: it has no pass that is valid."""
        if key not in self._names:
            raise NotPermitted("the key is that of no worker")
        return self._names[key]

    def note_replaced(self, replaced: Mapping[str, int]) -> None:
        """These workers have newer passes, by name: older ones are void."""
        for name, number in replaced.items():
            self._note(name, number, "")

    def _check(self, key: str, shown_pass: bytes) -> Caller | None:
        signature, content = shown_pass[:_SIGNATURE_BYTES], shown_pass[_SIGNATURE_BYTES:]
        if self._authority is None or len(shown_pass) > MAX_PASS_BYTES:
            return None
        try:
            self._authority.verify(signature, _PURPOSE + content)
        except InvalidSignature:
            return None
        found = _decoder.decode(content)  # the script has made it
        if not hmac.compare_digest(found.key, key.encode("ascii")):
            return None
        newest, _ = self._newest.get(found.name, (0, ""))
        if found.number < newest:
            raise NotPermitted(
                f"the key is that of an earlier life of {found.name}, which has been started again"
            )
        self._note(found.name, found.number, key)
        self.known[key], self._names[key] = found.caller, found.name
        return found.caller

    def _note(self, name: str, number: int, key: str) -> None:
        newest, newest_key = self._newest.get(name, (0, ""))
        if number > newest:
            self.known.pop(newest_key, None)
            self._names.pop(newest_key, None)
            self._newest[name] = number, key
        elif number == newest and key:  # its number was told before it was shown
            self._newest[name] = number, key
