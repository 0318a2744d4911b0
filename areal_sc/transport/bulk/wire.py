"""The wire form of the data plane, and what keeps strangers out of it.

    request   [ head | body | tag ]
    reply     [ head | body | tag ], [ payload ]

    head      magic and protocol version (4), session id (16), sequence number (8), and the tag of
              the payload (16; zeros where there is none)
    body      msgpack: what is asked, or what was found

A session is made by a call on the (CurveZMQ) control socket, which hands over one fresh key for
each direction. It has one connection: that on which its first request comes, which must be a
`Hello`. Headers and payloads carry AES-GCM tags (GMAC where nothing is encrypted; NIST SP 800-38D).
The nonce is (sequence number, 0 for the header and 1 for the payload): numbers only grow within a
session and each direction has a key of its own, so no nonce is ever used twice. A request whose
number is not larger than the last one is a replay. Lengths are not covered by a tag: wrong ones
give headers and payloads whose tags are wrong.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from itertools import groupby
from typing import Annotated, Final, TypeVar

import msgspec
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.ciphers.algorithms import AES
from cryptography.hazmat.primitives.ciphers.modes import GCM

from areal_sc.errors import MetadataError, ProtocolError, ShardGone, TransportError
from areal_sc.transport.bulk.buffer_pool import BufferPool
from areal_sc.transport.sockets.zmq_socket import Buffer

MAGIC: Final = b"ASB"
PROTOCOL_VERSION: Final = 4
TAG_BYTES: Final = 16
SESSION_ID_BYTES: Final = 16
KEY_BYTES: Final = 32
MAX_REQUEST_BYTES: Final = 256 << 10
MAX_REPLY_HEADER_BYTES: Final = 4 << 20
MAX_REPLY_BYTES: Final = 4 << 20
"""Payload of one reply."""

MAX_REQUEST_ROWS: Final = 16_384
"""Asked for in one request, those of each field counted: an owner looks up each of them."""

MAX_HELLO_BYTES: Final = 256
"""More is not kept of a caller that has not shown a session of its own."""

JOINED_BYTES: Final = 16 << 10
"""Smaller neighbours of a payload are joined: each part costs as much as copying so much."""

_PREFIX: Final = MAGIC + bytes([PROTOCOL_VERSION])
_HEAD: Final = struct.Struct("<4s16sQ16s")
_NO_PAYLOAD: Final = bytes(TAG_BYTES)
_NONCE: Final = struct.Struct("<QI")
_FAILURES: Final = {cls.__name__: cls for cls in (MetadataError, ProtocolError, ShardGone)}

_Count = Annotated[int, msgspec.Meta(ge=0, le=(1 << 62) - 1)]


class AskedPart(msgspec.Struct, array_like=True, frozen=True):
    """Bytes of one shard: those of the rows, field by field, without the first `skip`.

    Attributes:
        fields: names.
        first, count: consecutive rows, where `rows` is empty.
        rows: of the sealed shard, in the order wanted.
    """

    shard_id: str
    fields: list[str]
    skip: _Count
    num_bytes: _Count
    first: _Count = 0
    count: _Count = 0
    rows: list[_Count] = []


class Hello(msgspec.Struct, array_like=True, frozen=True, tag=2):
    """Shows that the caller has the session's key; it is not answered."""


class Read(msgspec.Struct, array_like=True, frozen=True, tag=0):
    """Asks for the bytes of all parts, one after the other."""

    parts: list[AskedPart]


class Describe(msgspec.Struct, array_like=True, frozen=True, tag=1):
    """Asks for the fields of a shard."""

    shard_id: str


class HeldPart(msgspec.Struct, array_like=True, frozen=True):
    """What the owner holds there.

    Attributes:
        dtypes: name of each field's.
        row_lengths: values in each of the rows, in every field.
    """

    dtypes: list[str]
    row_lengths: list[_Count]


class Found(msgspec.Struct, array_like=True, frozen=True, tag=0):
    """The answer to `Read`, beside the payload."""

    parts: list[HeldPart]


class DescribedField(msgspec.Struct, array_like=True, frozen=True):
    """A field of a shard."""

    name: str
    dtype: str
    row_lengths: list[_Count]


class Description(msgspec.Struct, array_like=True, frozen=True, tag=1):
    """The answer to `Describe`."""

    fields: list[DescribedField]


class Failure(msgspec.Struct, array_like=True, frozen=True, tag=2):
    """The answer to what cannot be answered.

    Attributes:
        part: number of the part that cannot be read.
        error_type: name of the class.
    """

    part: _Count
    error_type: str
    message: str

    @classmethod
    def of(cls, error: TransportError | MetadataError, part: int = 0) -> Failure:
        return cls(part, type(error).__name__, str(error))

    @property
    def error(self) -> TransportError | MetadataError:
        return _FAILURES.get(self.error_type, TransportError)(self.message)


Request = Read | Describe | Hello
Reply = Found | Description | Failure

_requests: msgspec.msgpack.Decoder[Request] = msgspec.msgpack.Decoder(Request)
_replies: msgspec.msgpack.Decoder[Reply] = msgspec.msgpack.Decoder(Reply)
T = TypeVar("T")


def decoded_request(packed: Buffer) -> Request:
    """Raises: ProtocolError: no correct puller asks this."""
    return _decoded(_requests, packed)


def decoded_reply(packed: Buffer) -> Reply:
    """Raises: ProtocolError: no correct owner answers this."""
    return _decoded(_replies, packed)


def _decoded(decoder: msgspec.msgpack.Decoder[T], packed: Buffer) -> T:
    try:
        return decoder.decode(packed)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"not a message of the data plane: {str(error)[:200]}") from None


class Sealer:
    """Authenticates, and encrypts where the session says so, one direction of one session.

    Args:
        is_encrypted: payload and bodies are encrypted, not only authenticated.
        pool: gives the memory of encrypted payload.
    """

    def __init__(
        self, session_id: bytes, key: bytes, is_encrypted: bool, pool: BufferPool | None = None
    ) -> None:
        self._pool = pool or BufferPool(0)
        self._session_id = session_id
        self._aead = AESGCM(key)
        self._cipher = AES(key)
        self.is_encrypted = is_encrypted

    def seal(
        self, sequence: int, body: Request | Reply, payload: Sequence[memoryview] = ()
    ) -> tuple[bytes, Sequence[Buffer]]:
        """(the header, the payload as it is sent: the very same memory, or its ciphertext).

        Args:
            payload: wherever its bytes lie; small parts are copied.

        Raises: ProtocolError: the body holds what no message can.
        """
        try:
            packed = msgspec.msgpack.encode(body)
        except (TypeError, ValueError, OverflowError) as error:
            raise ProtocolError(f"cannot be sent as msgpack: {error}") from error
        tag = _NO_PAYLOAD
        sent: Sequence[Buffer] = payload
        if payload:
            tag, sent = self._sealed_payload(_NONCE.pack(sequence, 1), payload)
        head = _HEAD.pack(_PREFIX, self._session_id, sequence, tag)
        nonce = _NONCE.pack(sequence, 0)
        if self.is_encrypted:
            return head + self._aead.encrypt(nonce, packed, head), sent
        return head + packed + self._aead.encrypt(nonce, b"", head + packed), sent

    def open(self, header: Buffer, sequence: int) -> Buffer:
        """The body of a header, msgpack; nothing of it is looked at before its tag is right.

        Raises: ProtocolError: the tag is wrong.
        """
        nonce = _NONCE.pack(sequence, 0)
        view = memoryview(header)
        head, sealed = view[: _HEAD.size], view[_HEAD.size :]
        try:
            if self.is_encrypted:
                return self._aead.decrypt(nonce, sealed, head)
            self._aead.decrypt(nonce, sealed[-TAG_BYTES:], view[:-TAG_BYTES])
            return sealed[:-TAG_BYTES]
        except InvalidTag:
            raise ProtocolError("the header's tag is wrong") from None

    def check_payload(self, header: Buffer, sequence: int, payload: Sequence[Buffer]) -> None:
        """Compares a payload that is not encrypted with the tag in its header.

        Args:
            header: was opened before.
            payload: wherever its bytes lie.

        Raises: ProtocolError: the tag is wrong.
        """
        nonce, tag = _NONCE.pack(sequence, 1), _HEAD.unpack_from(header)[3]
        try:
            if len(payload) == 1:
                self._aead.decrypt(nonce, tag, payload[0])
            else:
                check = Cipher(self._cipher, GCM(nonce, tag)).decryptor()
                for part in payload:
                    check.authenticate_additional_data(part)
                check.finalize()
        except InvalidTag:
            raise ProtocolError("the payload's tag is wrong") from None

    def decrypt_payload(
        self, header: Buffer, sequence: int, payload: Buffer, places: Sequence[memoryview]
    ) -> None:
        """Decrypts a payload to places of its size together, one after the other.

        Args:
            header: was opened before.

        Raises: ProtocolError: the tag is wrong; what lies in the places then must not be used.
        """
        nonce, tag = _NONCE.pack(sequence, 1), _HEAD.unpack_from(header)[3]
        plain = places[0] if len(places) == 1 else self._pool.take(len(payload)).data
        try:
            cipher = Cipher(self._cipher, GCM(nonce, tag)).decryptor()
            cipher.update_into(payload, plain)
            cipher.finalize()
        except InvalidTag:
            raise ProtocolError("the payload's tag is wrong") from None
        if len(places) != 1:
            for place in places:
                place[:], plain = plain[: len(place)], plain[len(place) :]

    def _sealed_payload(
        self, nonce: bytes, payload: Sequence[memoryview]
    ) -> tuple[bytes, Sequence[Buffer]]:
        if self.is_encrypted:
            plain = self._pool.joined(payload)
            sealed = self._pool.take(len(plain)).data
            cipher = Cipher(self._cipher, GCM(nonce)).encryptor()
            cipher.update_into(plain, sealed)
            cipher.finalize()
            return cipher.tag, [sealed]
        sent: list[memoryview] = []
        for is_small, group in groupby(payload, lambda part: len(part) < JOINED_BYTES):
            neighbours = list(group)
            sent += [self._pool.joined(neighbours)] if is_small else neighbours
        if len(sent) == 1:
            return self._aead.encrypt(nonce, b"", sent[0]), sent
        tag = Cipher(self._cipher, GCM(nonce)).encryptor()
        for part in sent:
            tag.authenticate_additional_data(part)
        tag.finalize()
        return tag.tag, sent


def parse_head(header: Buffer, max_bytes: int) -> tuple[bytes, int]:
    """(session id, sequence number) that a header claims; the tag is not checked yet.

    Raises: ProtocolError: no correct peer of this protocol version sends such a header.
    """
    least = _HEAD.size + TAG_BYTES
    if not least < len(header) <= max_bytes:
        raise ProtocolError(f"a header has {least} to {max_bytes} bytes, got {len(header)}")
    prefix, session_id, sequence, _ = _HEAD.unpack_from(header)
    if prefix[:3] != MAGIC:
        raise ProtocolError("the header does not start with the protocol's magic")
    if prefix != _PREFIX:
        raise ProtocolError(f"expected protocol version {PROTOCOL_VERSION}, got {prefix[3]}")
    return session_id, sequence
