"""What admits a puller to an owner's bulk socket, and how it gets it.

The call goes over the owner's CurveZMQ control socket, so only members of the run get a grant, and
nobody else sees its keys.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Annotated, Final

from msgspec import Meta, Struct

from areal_sc.errors import PeerSilent, ProtocolError, RpcTimeout
from areal_sc.transport.bulk.wire import KEY_BYTES, SESSION_ID_BYTES
from areal_sc.transport.pull_plan import Owner
from areal_sc.transport.rpc.codec import ANY_INCARNATION
from areal_sc.transport.rpc.method import Method
from areal_sc.transport.rpc.transport import Transport


@dataclass(frozen=True, slots=True)
class BulkOptions:
    """How a puller asks.

    Attributes:
        puller: name of this side, for the owners' messages.
        chunk_bytes: payload of one request, at most; it has one tag.
        max_inflight_chunks: so much is asked for and not yet here, of one owner, over all pulls.
        is_encrypted: as the owners are configured; another one is refused.
        stalled_timeout_s: how long an owner that gives no sign of life may take to answer its
            control socket.
    """

    puller: str
    chunk_bytes: int = 4 << 20
    max_inflight_chunks: int = 4
    is_encrypted: bool = False
    stalled_timeout_s: float = 30.0

    @property
    def inflight_bytes(self) -> int:
        """Payload asked for and not yet here, at most."""
        return self.chunk_bytes * self.max_inflight_chunks


_SessionId = Annotated[bytes, Meta(min_length=SESSION_ID_BYTES, max_length=SESSION_ID_BYTES)]
_Key = Annotated[bytes, Meta(min_length=KEY_BYTES, max_length=KEY_BYTES)]


class SessionGrant(Struct, array_like=True, frozen=True):
    """What a puller gets from an owner's control socket.

    Attributes:
        address: the owner's bulk socket.
        session_id: names the session.
        request_key, reply_key: AES-256 keys, one for each direction.
        is_encrypted: payload and bodies are encrypted, not only authenticated.
    """

    address: str
    session_id: _SessionId
    request_key: _Key
    reply_key: _Key
    is_encrypted: bool

    @classmethod
    def create(cls, address: str, is_encrypted: bool) -> SessionGrant:
        keys = os.urandom(KEY_BYTES), os.urandom(KEY_BYTES)
        return cls(address, os.urandom(SESSION_ID_BYTES), *keys, is_encrypted)

    def __repr__(self) -> str:
        return f"SessionGrant(address={self.address!r})"  # its keys belong in no log


OPEN_SESSION: Final = Method("bulk.open", str, SessionGrant)
"""Its argument names the puller, for messages."""


async def request_grant(transport: Transport, owner: Owner, options: BulkOptions) -> SessionGrant:
    """Asks whoever serves at the owner's address for a session.

    That may be a later life of the worker, which has adopted the shards of the one before: what it
    holds it tells itself when it is asked for it.

    Raises: PeerLost: nobody serves there any more. PeerSilent: no answer in time. ProtocolError:
        it encrypts and this side does not, or the other way round; ArealError: as `RpcClient.call`.
    """
    timeout_s = options.stalled_timeout_s
    control = transport.connect(owner.node_addr, owner.node_id, ANY_INCARNATION)
    try:
        grant = await control.call(OPEN_SESSION, options.puller, timeout_s=timeout_s)
    except RpcTimeout as error:
        raise PeerSilent(
            f"{owner.node_id} at {owner.node_addr} gives no sign of life: its control socket did "
            f"not answer within {timeout_s:g} s; it is stopped, cut off, or its event loop is stuck"
        ) from error
    finally:
        await control.close()
    if grant.is_encrypted != options.is_encrypted:
        raise ProtocolError(
            f"transport.encrypt is {options.is_encrypted} here and {grant.is_encrypted} on "
            f"{owner.node_id}: it has to be the same in the whole run"
        )
    return grant
