"""The wire form of the data plane, and what keeps strangers out of it.

    request   [ head | body | tag ]
    reply     [ head | body | tag ], [ payload | tag ], [ payload | tag ], ...

    head      magic and protocol version (4), session id (16), sequence number (8)
    body      msgpack: what is asked, or what was found

A session is made by a call on the (CurveZMQ) control socket, which hands over a ticket and one
fresh key for each direction. The ticket admits one connection, once (ZMTP's PLAIN mechanism): of
others not a byte is kept. It can be seen on the wire, and opens nothing any more then. Every header
and every payload frame carries an AES-GCM tag (GMAC where nothing is encrypted; NIST SP 800-38D).
The nonce is (sequence number, frame number): numbers only grow within a session and the directions
have keys of their own, so no nonce is ever used twice. A request whose number is not larger than
the last one is a replay.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from itertools import groupby
from typing import Any, Final

import msgpack
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.ciphers.algorithms import AES
from cryptography.hazmat.primitives.ciphers.modes import GCM

from areal_sc.errors import MetadataError, ProtocolError, ShardGone, TransportError
from areal_sc.transport.bulk.buffer_pool import BufferPool
from areal_sc.transport.rpc.codec import unpack
from areal_sc.transport.socket import Buffer, Frame

MAGIC: Final = b"ASB"
PROTOCOL_VERSION: Final = 3
TAG_BYTES: Final = 16
SESSION_ID_BYTES: Final = 16
KEY_BYTES: Final = 32
MAX_REQUEST_BYTES: Final = 256 << 10
MAX_REPLY_HEADER_BYTES: Final = 4 << 20
MAX_REPLY_BYTES: Final = 16 << 20
"""Payload of one reply."""

JOINED_BYTES: Final = 16 << 10
"""Smaller neighbours of a frame are joined: each part of one costs as much as copying so much."""

MAX_REQUEST_ROWS: Final = 16_384
"""Asked for in one request, those of each field counted: an owner looks up each of them."""

MAX_ELEMENTS: Final = 1 << 20
"""In the lists of one body; a description has one for each row of each field."""

_PREFIX: Final = MAGIC + bytes([PROTOCOL_VERSION])
_HEAD: Final = struct.Struct("<4s16sQ")
_NONCE: Final = struct.Struct("<QI")
_FAILURES: Final = {cls.__name__: cls for cls in (MetadataError, ProtocolError, ShardGone)}


class Sealer:
    """Authenticates, and encrypts where the session says so, one direction of one session.

    Args:
        is_encrypted: payload and bodies are encrypted, not only authenticated.
        pool: gives the memory of encrypted payload.
    """

    def __init__(
        self,
        session_id: bytes,
        key: bytes,
        is_encrypted: bool,
        pool: BufferPool | None = None,
    ) -> None:
        self._pool = pool or BufferPool(0)
        self._session_id = session_id
        self._aead = AESGCM(key)
        self._cipher = AES(key)
        self.is_encrypted = is_encrypted

    def seal_header(self, sequence: int, body: Any) -> bytes:
        """The frame `head | body | tag`.

        Raises: ProtocolError: the body is not msgpack-able.
        """
        try:
            packed: bytes = msgpack.packb(body)
        except (TypeError, ValueError, OverflowError) as error:
            raise ProtocolError(f"cannot be sent as msgpack: {error}") from error
        head = _HEAD.pack(_PREFIX, self._session_id, sequence)
        nonce = _NONCE.pack(sequence, 0)
        if self.is_encrypted:
            return head + self._aead.encrypt(nonce, packed, head)
        return head + packed + self._aead.encrypt(nonce, b"", head + packed)

    def open_header(self, frame: Frame, sequence: int) -> Any:
        """The body of a header frame; nothing of it is looked at before its tag is right.

        Raises: ProtocolError: the tag is wrong, or the body is not msgpack.
        """
        nonce = _NONCE.pack(sequence, 0)
        head, sealed = frame[: _HEAD.size], frame[_HEAD.size :]
        try:
            if self.is_encrypted:
                packed: Buffer = self._aead.decrypt(nonce, sealed, head)
            else:
                packed = sealed[:-TAG_BYTES]
                self._aead.decrypt(nonce, sealed[-TAG_BYTES:], frame[:-TAG_BYTES])
        except InvalidTag:
            raise ProtocolError("the header's tag is wrong") from None
        return unpack(packed, MAX_ELEMENTS)

    def seal_frame(self, sequence: int, number: int, parts: Sequence[memoryview]) -> list[Buffer]:
        """The parts of a payload frame: the very same memory and its tag, or the ciphertext.

        Args:
            number: of the frame within the reply, from 1.
            parts: the payload, wherever its bytes lie; small ones are copied.
        """
        nonce = _NONCE.pack(sequence, number)
        if self.is_encrypted:
            payload = self._pool.joined(parts)
            sealed = self._pool.take(len(payload) + TAG_BYTES)
            cipher = Cipher(self._cipher, GCM(nonce)).encryptor()
            cipher.update_into(payload, sealed.data[: len(payload)])
            cipher.finalize()
            sealed.data[len(payload) :] = cipher.tag
            return [sealed.data]
        sent = self._with_small_joined(parts)
        if len(sent) == 1:
            return [sent[0], self._aead.encrypt(nonce, b"", sent[0])]
        tag = Cipher(self._cipher, GCM(nonce)).encryptor()
        for part in sent:
            tag.authenticate_additional_data(part)
        tag.finalize()
        return [*sent, tag.tag]

    def check_frame(self, sequence: int, number: int, parts: Sequence[Buffer], tag: bytes) -> None:
        """Compares the payload of a frame that is not encrypted with the tag at its end.

        Args:
            number: of the frame within the reply, from 1.
            parts: the payload, wherever its bytes lie.
            tag: [TAG_BYTES].

        Raises: ProtocolError: the tag is wrong.
        """
        nonce = _NONCE.pack(sequence, number)
        try:
            if len(parts) == 1:
                self._aead.decrypt(nonce, tag, parts[0])
            else:
                check = Cipher(self._cipher, GCM(nonce, tag)).decryptor()
                for part in parts:
                    check.authenticate_additional_data(part)
                check.finalize()
        except InvalidTag:
            raise ProtocolError(f"the tag of payload frame {number} is wrong") from None

    def decrypt_frame(self, sequence: int, number: int, frame: Buffer, into: memoryview) -> None:
        """Decrypts a payload frame, which ends with its tag.

        Args:
            number: of the frame within the reply, from 1.
            into: memory for the plain bytes, which are `TAG_BYTES` fewer.

        Raises: ProtocolError: the tag is wrong; what `into` holds then must not be used.
        """
        nonce, tag = _NONCE.pack(sequence, number), bytes(frame[-TAG_BYTES:])
        cipher = Cipher(self._cipher, GCM(nonce, tag)).decryptor()
        try:
            cipher.update_into(frame[:-TAG_BYTES], into)
            cipher.finalize()
        except InvalidTag:
            raise ProtocolError(f"the tag of payload frame {number} is wrong") from None

    def _with_small_joined(self, parts: Sequence[memoryview]) -> list[memoryview]:
        joined: list[memoryview] = []
        for is_small, neighbours in groupby(parts, lambda part: len(part) < JOINED_BYTES):
            run = list(neighbours)
            joined += [self._pool.joined(run)] if is_small else run
        return joined


def parse_head(frame: Frame, max_bytes: int) -> tuple[bytes, int]:
    """(session id, sequence number) that a header frame claims; the tag is not checked yet.

    Raises: ProtocolError: no correct peer of this protocol version sends such a frame.
    """
    least = _HEAD.size + TAG_BYTES
    if not least < len(frame) <= max_bytes:
        raise ProtocolError(f"a header has {least} to {max_bytes} bytes, got {len(frame)}")
    prefix, session_id, sequence = _HEAD.unpack_from(frame)
    if prefix[:3] != MAGIC:
        raise ProtocolError("the header does not start with the protocol's magic")
    if prefix != _PREFIX:
        raise ProtocolError(f"expected protocol version {PROTOCOL_VERSION}, got {prefix[3]}")
    return session_id, sequence


def failure_body(segment: int, error: TransportError | MetadataError) -> list[Any]:
    """The reply body that says which asked segment failed, and why."""
    return [1, segment, type(error).__name__, str(error)]


def failure_of_body(name: str, message: str) -> TransportError | MetadataError:
    """The error that a reply body names."""
    return _FAILURES.get(name, TransportError)(message)
