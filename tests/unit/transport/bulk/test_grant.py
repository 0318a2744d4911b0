"""What a puller gets before it may ask."""

from __future__ import annotations

import pytest

from areal_sc.errors import ProtocolError
from areal_sc.transport.bulk.grant import SessionGrant


def test_grants_cross_the_wire_and_hide_their_keys() -> None:
    grant = SessionGrant.create("tcp://10.0.0.1:5", True)
    assert SessionGrant.from_wire(grant.to_wire()) == grant
    assert str(grant.request_key) not in repr(grant)
    assert str(grant.reply_key) not in repr(grant)
    assert len({grant.session_id, SessionGrant.create("", True).session_id}) == 2
    for broken in (None, [], grant.to_wire()[:4], ["a", b"", b"", b"", True]):
        with pytest.raises(ProtocolError, match="grant"):
            SessionGrant.from_wire(broken)
