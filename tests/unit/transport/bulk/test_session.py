"""What a puller gets before it may ask."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from areal_sc.errors import ProtocolError
from areal_sc.transport.bulk.session import OPEN_SESSION, SessionGrant
from areal_sc.transport.rpc.method import pack


def test_grants_cross_the_wire_and_hide_their_keys() -> None:
    grant = SessionGrant.create("tcp://10.0.0.1:5", True)
    assert OPEN_SESSION.read_reply(pack(grant)) == grant
    assert str(grant.request_key) not in repr(grant)
    assert str(grant.reply_key) not in repr(grant)
    assert len({grant.session_id, SessionGrant.create("", True).session_id}) == 2
    for broken in (None, [], {"address": "a"}, replace(grant, request_key=b"short")):
        with pytest.raises(
            ProtocolError, match=r"bulk\.open: the reply is not of the declared type"
        ):
            OPEN_SESSION.read_reply(pack(broken))
