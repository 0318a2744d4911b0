"""The secrets of one run: who holds them is served, and nobody else.

Two CURVE key pairs, made anew at each start of a script. Workers own the server pair: a caller
knows by it that it talks to the run. The client pair is shown by every caller: only its public key
is admitted. Keys travel in a file that only its owner can read, or in the environment, from which
they are taken out when they are read; never in a command line, a log or a message.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import MutableMapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Final

import msgspec
import zmq

from areal_sc.durable import replace_file
from areal_sc.errors import TransportError

KEYS_VARIABLE: Final = "AREAL_SC_RUN_KEYS"
"""Holds the content of a key file, where workers and the script share no folder."""

MAX_FILE_BYTES: Final = 4096


@dataclass(frozen=True, repr=False, slots=True)
class RunKeys:
    """Both CURVE pairs of a run; each key is 40 bytes of Z85.

    Its text never shows a secret, so that no log does.
    """

    server_public: bytes
    server_secret: bytes
    client_public: bytes
    client_secret: bytes

    def __post_init__(self) -> None:
        for side, public, secret in (
            ("server", self.server_public, self.server_secret),
            ("client", self.client_public, self.client_secret),
        ):
            if not _is_pair(public, secret):
                raise TransportError(f"the {side} keys of the run are not a CURVE pair")

    def __repr__(self) -> str:
        return f"RunKeys(server_public={self.server_public.decode()!r}, …)"

    @classmethod
    def create(cls) -> RunKeys:
        """Fresh keys."""
        return cls(*zmq.curve_keypair(), *zmq.curve_keypair())

    def write(self, path: Path) -> None:
        """Puts the keys into a file that only this user can read, at no moment anyone else.

        Raises: TransportError: the folder cannot be written.
        """
        content = {field.name: getattr(self, field.name).decode() for field in fields(self)}
        try:
            with replace_file(path, mode=0o600) as file:
                file.write(json.dumps(content).encode())
        except OSError as error:
            raise TransportError(f"the run's keys cannot be written to {path}: {error}") from error

    @classmethod
    def read(cls, path: Path) -> RunKeys:
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
        return cls._parse(content, str(path))

    @classmethod
    def from_environment(cls, environ: MutableMapping[str, str]) -> RunKeys | None:
        """Takes the keys out of the environment, so that no child inherits them; None: none there.

        Raises: TransportError: the variable is not a run's keys.
        """
        content = environ.pop(KEYS_VARIABLE, None)
        if content is None:
            return None
        return cls._parse(content.encode("utf-8", "surrogateescape"), KEYS_VARIABLE)

    @classmethod
    def _parse(cls, content: bytes, source: str) -> RunKeys:
        try:
            if len(content) <= MAX_FILE_BYTES:
                keys = msgspec.json.decode(content, type=dict[str, str])
                return cls(**{name: key.encode("ascii") for name, key in keys.items()})
        except (msgspec.MsgspecError, ValueError, TypeError, TransportError):
            pass  # no cause is kept: that of a parser quotes what it could not read
        raise TransportError(f"{source} does not hold the keys of a run; start it anew")


def _is_pair(public: bytes, secret: bytes) -> bool:
    try:
        return len(secret) == 40 and zmq.curve_public(secret) == public
    except (zmq.ZMQError, ValueError, KeyError):
        return False


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
