"""A short secret for the owner of one key pair, over a channel that others can read.

    owner    KeyPair.create() ── public half ──► sender
    sender   seal(secret, public) ── anybody may carry, read and keep it ──► owner: unseal

HPKE (RFC 9180) with X25519, HKDF-SHA256 and ChaCha20-Poly1305. Nothing says who has sealed it.
"""

from __future__ import annotations

import base64
from typing import Final

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.hpke import AEAD, KDF, KEM, Suite
from zmq.utils import z85

from areal_sc.errors import TransportError
from areal_sc.transport.security.keys import KeyPair

_SUITE: Final = Suite(KEM.X25519, KDF.HKDF_SHA256, AEAD.CHACHA20_POLY1305)
_PURPOSE: Final = b"areal_sc sealed 2\0"


def seal(text: bytes, public: bytes) -> bytes:
    """The text, as only the owner of the pair with this public half reads it: ASCII of one line.

    Raises: TransportError: that is no public key.
    """
    try:
        owner = X25519PublicKey.from_public_bytes(z85.decode(public))
        sealed = _SUITE.encrypt(text, owner, _PURPOSE)
    except (ValueError, KeyError, IndexError) as error:
        raise TransportError("expected a public key of 40 characters of Z85") from error
    return base64.urlsafe_b64encode(sealed)


def unseal(sealed: bytes, own: KeyPair) -> bytes:
    """What was sealed for this pair.

    Raises: TransportError: it was sealed for another one, or is damaged.
    """
    secret = X25519PrivateKey.from_private_bytes(z85.decode(own.secret))
    try:
        content = base64.b64decode(sealed, altchars=b"-_", validate=True)
        return _SUITE.decrypt(content, secret, _PURPOSE)
    except (ValueError, InvalidTag) as error:
        raise TransportError("this was not sealed for the key of this process") from error
