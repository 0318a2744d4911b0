"""What admits a puller to an owner's bulk socket, and what else it asks the owner's control socket.

Only members of the run can call that (CurveZMQ), so only they get a session, and nobody else sees
its keys.
"""

from __future__ import annotations

import asyncio
import os
from typing import Annotated, Final, NamedTuple

from msgspec import Meta, Struct

from areal_sc.config.transport_settings import TransportConfig
from areal_sc.errors import PeerLost, PeerSilent, ProtocolError, RpcTimeout
from areal_sc.transport.bulk.messages import KEY_BYTES, SESSION_ID_BYTES
from areal_sc.transport.rpc.codec import ANY_INCARNATION
from areal_sc.transport.rpc.method import A, Method, R
from areal_sc.transport.rpc.transport import Transport
from areal_sc.transport.security.passes import WORKERS

OWNER_ABSENCE_S: Final = 30.0
"""Time that those who pull from a worker wait while it is started again. On the same node they read
its rows without it."""

RETRY_S: Final = 0.2
"""Between two calls of an owner that is being started again."""


class ShardOwner(NamedTuple):
    """One life of the worker that holds a shard."""

    node_id: str
    node_addr: str
    incarnation: str


_SessionId = Annotated[bytes, Meta(min_length=SESSION_ID_BYTES, max_length=SESSION_ID_BYTES)]
_Key = Annotated[bytes, Meta(min_length=KEY_BYTES, max_length=KEY_BYTES)]


class SessionGrant(Struct, array_like=True, frozen=True):
    """A session with an owner.

    Attributes:
        address: the owner's bulk socket.
        session_id: names the session.
        request_key, reply_key: AES-256 keys, one for each direction.
        is_encrypted: contents are encrypted, not only authenticated.
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


_Count = Annotated[int, Meta(ge=0)]


class FieldDescription(NamedTuple):
    """A field of a shard, and the values in each of its rows."""

    name: str
    dtype: str
    row_lengths: tuple[_Count, ...]


OPEN_SESSION: Final = Method("bulk.open", str, SessionGrant, callers=WORKERS)
"""Its argument names the puller, for messages."""

DESCRIBE: Final = Method("bulk.describe", str, list[FieldDescription], callers=WORKERS)
"""Its argument is the id of a shard."""


async def request_session(
    transport: Transport,
    owner: ShardOwner,
    puller: str,
    config: TransportConfig,
    absence_s: float = 0.0,
) -> SessionGrant:
    """Raises: ProtocolError: it encrypts and this side does not, or the other way round. Else as
    `call_owner`."""
    timeout_s = config.stalled_peer_timeout_s
    grant = await call_owner(transport, owner, OPEN_SESSION, puller, timeout_s, absence_s)
    if grant.is_encrypted != config.encrypt:
        raise ProtocolError(
            f"transport.encrypt is {config.encrypt} here and {grant.is_encrypted} on "
            f"{owner.node_id}: it has to be the same in the whole run"
        )
    return grant


async def call_owner(
    transport: Transport,
    owner: ShardOwner,
    method: Method[A, R],
    argument: A,
    timeout_s: float,
    absence_s: float = 0.0,
) -> R:
    """Calls whoever serves at the owner's address.

    That may be a later life of the worker, which has adopted the shards of the one before; it says
    itself which shards it holds.

    Args:
        absence_s: nobody may serve there for so long, while the worker is started again.
    Raises: PeerLost: nobody serves there any more. PeerSilent: no answer in time. ArealError: as
        `RpcClient.call`.
    """
    loop = asyncio.get_running_loop()
    give_up_s = loop.time() + absence_s
    while True:
        control = transport.connect(owner.node_addr, owner.node_id, ANY_INCARNATION)
        try:
            return await control.call(method, argument, timeout_s=timeout_s)
        except RpcTimeout as error:
            raise PeerSilent(
                f"{owner.node_id} at {owner.node_addr} gives no sign of life: its control socket "
                f"did not answer within {timeout_s:g} s; it is stopped, cut off, or its event loop "
                "is stuck"
            ) from error
        except PeerLost:
            if loop.time() >= give_up_s:
                raise
        finally:
            await control.close()
        await asyncio.sleep(RETRY_S)
