"""The messages of the data plane, and what keeps strangers out of it.

    message   [ length of the content (4) | kind (4) | tag (16) ][ content ]

    HELLO     puller: magic, protocol version and session id; the first message of a connection
    READ      puller: a msgpack list of `ShardSlice`; answered in the order of the requests
    ROWS      owner: the bytes of all slices, one after the other
    FAILURE   owner: msgpack of a `PullFailure`

A session is made by a call on the (CurveZMQ) control socket, which hands over one fresh key for
each direction. It has one connection: that on which its `HELLO` comes first. Every content carries
an AES-GCM tag (GMAC where nothing is encrypted; NIST SP 800-38D). The nonce is the number of the
message in its direction, which both sides count, and its kind; each direction has a key of its own,
so no nonce is ever used twice. A message that was repeated, left out, moved, cut or changed has a
wrong tag.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Annotated, Final, TypeVar

import msgspec
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.ciphers.algorithms import AES
from cryptography.hazmat.primitives.ciphers.modes import GCM

from areal_sc.errors import MetadataError, ProtocolError, ShardGone, TransportError
from areal_sc.system.json_lines import UNDECODABLE
from areal_sc.transport.bulk.buffer_pool import BufferPool
from areal_sc.transport.sockets.zmq_socket import Buffer

HELLO, READ, ROWS, FAILURE = range(4)
PREFIX: Final = b"ASB\x05"
"""Magic and protocol version; what a `HELLO` begins with."""

SESSION_ID_BYTES: Final = 16
HELLO_BYTES: Final = len(PREFIX) + SESSION_ID_BYTES
KEY_BYTES: Final = 32
TAG_BYTES: Final = 16
HEAD: Final = struct.Struct(f"<II{TAG_BYTES}s")

MAX_REQUEST_ROWS: Final = 16_384
"""Asked for in one request, those of each field counted: an owner looks up each of them."""

MAX_REQUEST_FIELDS: Final = 256
MAX_REQUEST_BYTES: Final = 512 << 10
"""Requests within the two limits above, with names of at most `MAX_NAME_BYTES`, are smaller."""

MAX_REPLY_BYTES: Final = 4 << 20
MAX_FAILURE_BYTES: Final = 64 << 10
_MAX_FAILURE_CHARS: Final = 8_000

_JOINED_BYTES: Final = 16 << 10
"""Parts that are smaller on average are joined: each costs as much as copying so much."""

_NONCE: Final = struct.Struct("<QI")
_FAILURES: Final = {cls.__name__: cls for cls in (MetadataError, ProtocolError, ShardGone)}
T = TypeVar("T")
_Count = Annotated[int, msgspec.Meta(ge=0, le=(1 << 62) - 1)]


class ShardSlice(msgspec.Struct, array_like=True, frozen=True):
    """Rows of a shard: the bytes of its fields, one field after the other.

    Attributes:
        fields: name -> name of the dtype that the metadata promises.
        rows: of the sealed shard, in the order wanted.
        lengths: values in each of the rows, in every field, as the metadata promises.
        skip: bytes at the beginning that are not wanted.
        num_bytes: from there on.
    """

    shard_id: str
    fields: dict[str, str]
    rows: list[_Count]
    lengths: tuple[_Count, ...]
    skip: _Count
    num_bytes: _Count

    @property
    def num_rows(self) -> int:
        """Rows of all fields together."""
        return len(self.rows) * len(self.fields)


class PullFailure(msgspec.Struct, array_like=True, frozen=True):
    """Why a request cannot be answered.

    Attributes:
        slice_number: of the slice that cannot be read.
        error_type: name of the class.
    """

    slice_number: _Count
    error_type: str
    message: str

    @classmethod
    def of(cls, error: TransportError | MetadataError, slice_number: int = 0) -> PullFailure:
        return cls(slice_number, type(error).__name__, str(error)[:_MAX_FAILURE_CHARS])

    @property
    def error(self) -> TransportError | MetadataError:
        return _FAILURES.get(self.error_type, TransportError)(self.message)


REQUESTS: Final = msgspec.msgpack.Decoder(list[ShardSlice])
FAILURES: Final = msgspec.msgpack.Decoder(PullFailure)


def decoded(decoder: msgspec.msgpack.Decoder[T], content: Buffer) -> T:
    """Raises: ProtocolError: no correct peer sends this."""
    try:
        return decoder.decode(content)
    except UNDECODABLE as error:
        raise ProtocolError(f"not a message of the data plane: {str(error)[:200]}") from None


class MessageCipher:
    """Authenticates the messages of one direction of one session, or encrypts them.

    Args:
        is_encrypted: all but `HELLO` is encrypted, not only authenticated.
        pool: gives memory for what is encrypted.
    """

    def __init__(self, key: bytes, is_encrypted: bool, pool: BufferPool | None = None) -> None:
        self._pool = pool or BufferPool(0)
        self._aead = AESGCM(key)
        self._aes = AES(key)
        self._is_encrypted = is_encrypted
        self._num_messages = 0

    def seal(self, kind: int, parts: Sequence[Buffer]) -> list[Buffer]:
        """The next message, as it is sent.

        Args:
            parts: the content, wherever it lies; large parts are not copied.
        """
        is_encrypted = self._is_encrypted and kind != HELLO
        nonce = self._next_nonce(kind)
        num_bytes = sum(map(len, parts))
        if len(parts) > 1 and num_bytes < len(parts) * _JOINED_BYTES:
            parts = [b"".join(parts)]
        if len(parts) == 1 and not is_encrypted:  # a third of the time, where the part is small
            return [HEAD.pack(num_bytes, kind, self._aead.encrypt(nonce, b"", parts[0])), *parts]
        cipher = Cipher(self._aes, GCM(nonce)).encryptor()
        if is_encrypted:
            sealed, end = self._pool.take_buffer(num_bytes).data, 0
            for part in parts:
                end += cipher.update_into(part, sealed[end:])
            parts = [sealed]
        else:
            for part in parts:
                cipher.authenticate_additional_data(part)
        cipher.finalize()
        return [HEAD.pack(num_bytes, kind, cipher.tag), *parts]

    def open(self, kind: int, tag: bytes, parts: Sequence[memoryview]) -> None:
        """Checks the next message, and decrypts it where it lies, if it is encrypted.

        Raises: ProtocolError: the tag is wrong; the content must not be used.
        """
        nonce = self._next_nonce(kind)
        is_encrypted = self._is_encrypted and kind != HELLO
        try:
            if len(parts) == 1 and not is_encrypted:
                self._aead.decrypt(nonce, tag, parts[0])
                return
            cipher = Cipher(self._aes, GCM(nonce, tag)).decryptor()
            for part in parts:
                if is_encrypted:
                    cipher.update_into(part, part)
                else:
                    cipher.authenticate_additional_data(part)
            cipher.finalize()
        except InvalidTag:
            raise ProtocolError("the tag of a message is wrong") from None

    def _next_nonce(self, kind: int) -> bytes:
        nonce = _NONCE.pack(self._num_messages, kind)
        self._num_messages += 1
        return nonce
