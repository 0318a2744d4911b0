"""What is sealed for a key is read by its owner alone, and by nobody when it was changed."""

from __future__ import annotations

import base64

import pytest

from areal_sc.errors import TransportError
from areal_sc.transport.security.keys import KeyPair
from areal_sc.transport.security.sealed import seal, unseal


def test_the_owner_reads_what_was_sealed_and_nobody_else_does() -> None:
    own, other = KeyPair.create(), KeyPair.create()
    text = b"the invitation"
    sealed = seal(text, own.public)
    assert unseal(sealed, own) == text
    assert text not in base64.urlsafe_b64decode(sealed)
    assert b"\n" not in sealed
    assert seal(text, own.public) != sealed, "each is sealed by a key of its own"
    with pytest.raises(TransportError, match="not sealed for the key of this process"):
        unseal(sealed, other)


def test_what_was_changed_or_cut_is_refused() -> None:
    own = KeyPair.create()
    content = base64.urlsafe_b64decode(seal(b"x", own.public))
    damaged = [
        *(bytes([*content[:i], content[i] ^ 1, *content[i + 1 :]]) for i in range(len(content))),
        *(content[:length] for length in range(len(content))),
        bytes(len(content)),  # a public key of which nothing secret can be made
    ]
    for it in damaged:
        with pytest.raises(TransportError, match="not sealed"):
            unseal(base64.urlsafe_b64encode(it), own)
    with pytest.raises(TransportError, match="not sealed"):
        unseal(b"no base64", own)


@pytest.mark.parametrize("key", [b"", b"short", b"~" * 40, b"0" * 35, b"0" * 40])
def test_what_is_no_key_is_refused(key: bytes) -> None:
    with pytest.raises(TransportError, match="expected a public key"):
        seal(b"x", key)
