"""The secrets of one run, which its script alone has: agents and workers get no part of them.

Made when the run starts, and kept as long as a process of it may live, in a file of the run folder
that only its owner can read: so a script that is started again goes on with them. What they are
for:

    controller   the script calls agents and workers with it, and agents join it. Its public half is
                 all that an agent is started with
    workers      all workers serve with this pair: a caller knows by it that it talks to the run
    signing      says which key a worker calls with, and as what: see `passes`
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
import struct
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Final, Self

import msgspec
import zmq
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from zmq.utils import z85

from areal_sc.errors import TransportError
from areal_sc.system.durable import replace_file

MAX_FILE_BYTES: Final = 4096
_SESSIONS: Final = b"areal_sc sessions 1"
KEY_CHARS: Final = 40
"""Characters of Z85 in which the 32 bytes of a key are written."""


@dataclass(frozen=True, repr=False, slots=True)
class KeyPair:
    """A CURVE key pair; each half is 40 bytes of Z85. Its text never shows the secret.

    Raises: TransportError: they are not a pair.
    """

    public: bytes
    secret: bytes

    def __post_init__(self) -> None:
        try:
            if len(self.secret) == KEY_CHARS and zmq.curve_public(self.secret) == self.public:
                return
        except (zmq.ZMQError, ValueError, KeyError):
            pass  # no cause is kept: it may quote the key
        raise TransportError("these two keys are not a CURVE pair")

    def __repr__(self) -> str:
        return f"KeyPair(public={self.public.decode()!r}, …)"

    @classmethod
    def create(cls) -> Self:
        """A fresh one."""
        return cls(*zmq.curve_keypair())


@dataclass(frozen=True, repr=False, slots=True)
class RunKeys:
    """All secrets of a run, each 40 bytes of Z85.

    Its text never shows a secret, so that no log does.

    Attributes:
        controller_secret, workers_secret: of CURVE.
        signing_seed: of Ed25519.
        controller, workers: the pairs.
        authority: public half of `signing_seed`, Z85.
    """

    controller_secret: bytes
    workers_secret: bytes
    signing_seed: bytes
    controller: KeyPair = field(init=False, compare=False)
    workers: KeyPair = field(init=False, compare=False)
    authority: bytes = field(init=False, compare=False)

    def __post_init__(self) -> None:
        for name in ("controller", "workers"):
            secret = getattr(self, f"{name}_secret")
            object.__setattr__(self, name, KeyPair(zmq.curve_public(secret), secret))
        public = self.signing_key().public_key().public_bytes_raw()
        object.__setattr__(self, "authority", z85.encode(public))

    def __repr__(self) -> str:
        return f"RunKeys(controller={self.controller!r}, …)"

    @property
    def run_id(self) -> str:
        """Names the run that has these keys, also in shared memory: 12 hexadecimal digits."""
        return hashlib.sha256(self.controller.public).hexdigest()[:12]

    @classmethod
    def create(cls) -> Self:
        """Fresh keys."""
        seed = z85.encode(Ed25519PrivateKey.generate().private_bytes_raw())
        return cls(zmq.curve_keypair()[1], zmq.curve_keypair()[1], seed)

    @property
    def sessions_secret(self) -> bytes:
        """With it all workers make the keys of their agents' sessions."""
        return hashlib.blake2b(self.signing_seed, key=_SESSIONS, digest_size=32).digest()

    def signing_key(self) -> Ed25519PrivateKey:
        """What passes are signed with."""
        return Ed25519PrivateKey.from_private_bytes(z85.decode(self.signing_seed))

    def write(self, path: Path) -> None:
        """Puts the keys into a file that only this user can read, at no moment anyone else.

        Raises: TransportError: the folder cannot be written.
        """
        secrets = [it.name for it in fields(self) if it.init]
        content = {name: getattr(self, name).decode() for name in secrets}
        try:
            with replace_file(path, mode=0o600) as file:
                file.write(json.dumps(content).encode())
        except OSError as error:
            raise TransportError(f"the run's keys cannot be written to {path}: {error}") from error

    @classmethod
    def read(cls, path: Path) -> Self:
        """The keys that `write` left.

        Raises: TransportError: there is no such file, another user owns it or may touch it, or its
            content is not a run's keys.
        """
        try:
            fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
            with open(fd, "rb") as file:
                _check_private(os.fstat(fd), path)
                content = file.read(MAX_FILE_BYTES + 1)
        except OSError as error:
            raise TransportError(f"the run's keys cannot be read from {path}: {error}") from error
        return cls._parse(content, path)

    @classmethod
    def _parse(cls, content: bytes, path: Path) -> Self:
        try:
            if len(content) <= MAX_FILE_BYTES:
                keys = msgspec.json.decode(content, type=dict[str, str])
                return cls(**{name: key.encode("ascii") for name, key in keys.items()})
        except (msgspec.MsgspecError, zmq.ZMQError, ValueError, TypeError, KeyError, struct.error):
            pass  # no cause is kept: that of a parser quotes what it could not read
        raise TransportError(f"{path} does not hold the keys of a run; start it anew")


def _check_private(status: os.stat_result, path: Path) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise TransportError(f"{path} holds the run's keys and must be a regular file")
    if status.st_uid != os.geteuid():
        raise TransportError(
            f"{path} holds the run's keys: expected the owner {os.geteuid()}, got {status.st_uid}"
        )
    if status.st_mode & 0o077:
        raise TransportError(
            f"{path} holds the run's keys: expected mode 0600, got "
            f"{stat.S_IMODE(status.st_mode):04o}; others may know them: start the run anew"
        )
