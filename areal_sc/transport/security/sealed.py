"""A short secret for the owner of one key pair, over a channel that others can read.

    owner    KeyPair.create() ── public half ──► sender
    sender   seal(secret, public) ── anybody may carry, read and keep it ──► owner: unseal

X25519 with a fresh pair of the sender, HKDF-SHA256, ChaCha20-Poly1305: each key seals once, so its
nonce is constant. Nothing says who has sealed it.
"""

from __future__ import annotations

import base64
import binascii
from typing import Final

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from zmq.utils import z85

from areal_sc.errors import TransportError
from areal_sc.transport.security.keys import KeyPair

_KEY_BYTES: Final = 32
_NONCE: Final = bytes(12)
_PURPOSE: Final = b"areal_sc sealed 1\0"


def seal(text: bytes, public: bytes) -> bytes:
    """The text, as only the owner of the pair with this public half reads it: ASCII of one line.

    Raises: TransportError: that is no public key.
    """
    own = X25519PrivateKey.generate()
    sender = own.public_key().public_bytes_raw()
    try:
        owner = z85.decode(public)
        shared = own.exchange(X25519PublicKey.from_public_bytes(owner))
    except (ValueError, KeyError, IndexError) as error:
        raise TransportError("expected a public key of 40 characters of Z85") from error
    sealed = ChaCha20Poly1305(_key(shared, sender, owner)).encrypt(_NONCE, text, None)
    return base64.urlsafe_b64encode(sender + sealed)


def unseal(sealed: bytes, own: KeyPair) -> bytes:
    """What was sealed for this pair.

    Raises: TransportError: it was sealed for another one, or is damaged.
    """
    try:
        content = base64.b64decode(sealed, altchars=b"-_", validate=True)
        sender, rest = content[:_KEY_BYTES], content[_KEY_BYTES:]
        secret = X25519PrivateKey.from_private_bytes(z85.decode(own.secret))
        shared = secret.exchange(X25519PublicKey.from_public_bytes(sender))
        key = _key(shared, sender, z85.decode(own.public))
        return ChaCha20Poly1305(key).decrypt(_NONCE, rest, None)
    except (binascii.Error, ValueError, InvalidTag) as error:
        raise TransportError("this was not sealed for the key of this process") from error


def _key(shared: bytes, sender: bytes, owner: bytes) -> bytes:
    info = _PURPOSE + sender + owner
    return HKDF(algorithm=SHA256(), length=_KEY_BYTES, salt=None, info=info).derive(shared)
