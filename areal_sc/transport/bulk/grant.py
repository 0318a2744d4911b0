"""What admits a puller to an owner's bulk socket, and how it gets it.

The call goes over the owner's CurveZMQ control socket, so only members of the run get a grant, and
nobody else sees its keys.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Annotated, Final

from msgspec import Meta

from areal_sc.errors import PeerSilent, ProtocolError, RpcTimeout
from areal_sc.transport.bulk.jobs import BulkOptions
from areal_sc.transport.bulk.wire import KEY_BYTES, SESSION_ID_BYTES
from areal_sc.transport.pull_plan import Owner
from areal_sc.transport.rpc.codec import ANY_INCARNATION
from areal_sc.transport.rpc.method import Method
from areal_sc.transport.rpc.transport import Transport

_Id = Annotated[bytes, Meta(min_length=SESSION_ID_BYTES, max_length=SESSION_ID_BYTES)]
_Key = Annotated[bytes, Meta(min_length=KEY_BYTES, max_length=KEY_BYTES)]


@dataclass(frozen=True, slots=True)
class SessionGrant:
    """What a puller gets from an owner's control socket.

    Attributes:
        address: the owner's bulk socket.
        session_id: [16] names the session.
        password: [16] admits one connection to the bulk socket, once.
        request_key, reply_key: [32] AES-256 keys, one for each direction.
        is_encrypted: payload and bodies are encrypted, not only authenticated.
    """

    address: str
    session_id: _Id
    password: _Id = field(repr=False)
    request_key: _Key = field(repr=False)
    reply_key: _Key = field(repr=False)
    is_encrypted: bool

    @classmethod
    def create(cls, address: str, is_encrypted: bool) -> SessionGrant:
        names = os.urandom(SESSION_ID_BYTES), os.urandom(SESSION_ID_BYTES)
        return cls(address, *names, os.urandom(KEY_BYTES), os.urandom(KEY_BYTES), is_encrypted)

    @property
    def ticket(self) -> tuple[str, str]:
        """Name and password to connect with."""
        return self.session_id.hex(), self.password.hex()


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
