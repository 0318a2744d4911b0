"""The asking side of the data plane: rows of many pulls, from many owners at once."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Sequence
from functools import partial

from areal_sc.config.transport_settings import TransportConfig
from areal_sc.errors import PeerLost, RpcTimeout, ServerBusy, ShardGone
from areal_sc.transport.bulk.credits import MAX_INFLIGHT_BYTES, Credits
from areal_sc.transport.bulk.owner_connection import REOPEN_DELAY_S, Fetch, OwnerConnection
from areal_sc.transport.bulk.plan import Transfer, cut
from areal_sc.transport.bulk.session import (
    DESCRIBE,
    FieldDescription,
    ShardOwner,
    call_owner,
    request_session,
)
from areal_sc.transport.rpc.transport import Transport
from areal_sc.transport.shards.layout import check_field_name
from areal_sc.transport.sockets.refusals import Refusals

logger = logging.getLogger(__name__)


class BulkClient:
    """Fetches from any number of owners; must be used on one running event loop.

    Args:
        transport: gives the control connections, which hand over the sessions.
        puller: name of this side, for the owners' messages.
        config: how to ask.
        absence_s: an owner may be gone for so long: it is being started again.
        max_inflight_bytes: asked of all owners together and not yet received.

    Attributes:
        refused: replies dropped because no owner sent them so.
    """

    def __init__(
        self,
        transport: Transport,
        puller: str,
        config: TransportConfig | None = None,
        *,
        absence_s: float = 0.0,
        max_inflight_bytes: int = MAX_INFLIGHT_BYTES,
    ) -> None:
        self._transport = transport
        self._puller = puller
        self._config = config or TransportConfig()
        self._absence_s = absence_s
        self._credits = Credits(max_inflight_bytes, self._config.chunk_bytes)
        self.refused = Refusals(logger, "reply_refused", puller)
        self._connections: dict[ShardOwner, OwnerConnection] = {}
        self._is_closed = False

    async def fetch(
        self, owner: ShardOwner, transfers: Sequence[Transfer], deadline: float
    ) -> None:
        """Fills the destinations of all transfers.

        Args:
            deadline: on the clock of the event loop.

        Raises: the errors of `Puller.pull`.
        """
        num_bytes = sum(transfer.rows.num_bytes for transfer in transfers)
        if not num_bytes:
            return
        for name in {name for transfer in transfers for name in transfer.rows.fields}:
            check_field_name(name)
        loop = asyncio.get_running_loop()
        parts = deque(part for it in transfers for part in cut(it, self._config.chunk_bytes))
        shard_id = transfers[0].rows.shard_id
        fetch = Fetch(shard_id, parts, num_bytes, loop.create_future())
        connection = self._connection(owner)
        connection.submit(fetch)
        try:
            async with asyncio.timeout_at(deadline) as limit:
                await fetch.done
        except TimeoutError:
            if not limit.expired():
                raise
            raise RpcTimeout(
                f"shard {shard_id} on {owner.node_id}: not pulled by its deadline"
                f"{connection.trouble}"
            ) from None
        finally:
            connection.abandon(fetch)
            del fetch  # with the traceback it would keep itself, and the pull's buffer

    async def describe(
        self, owner: ShardOwner, shard_id: str, deadline: float
    ) -> list[FieldDescription]:
        """The fields of a shard. Raises: the errors of `Puller.pull`."""
        loop, where = asyncio.get_running_loop(), f"shard {shard_id} on {owner.node_id}"
        while (left_s := deadline - loop.time()) > 0:
            timeout_s = min(self._config.stalled_peer_timeout_s, left_s)
            try:
                return await call_owner(
                    self._transport, owner, DESCRIBE, shard_id, timeout_s, self._absence_s
                )
            except ServerBusy:
                await asyncio.sleep(REOPEN_DELAY_S)
            except PeerLost as error:
                raise ShardGone(f"{where} is gone with its owner: {error}") from error
        raise RpcTimeout(f"{where}: not described by the pull's deadline")

    async def close(self) -> None:
        """Ends all connections; pulls that wait, and later ones, raise ShardGone."""
        self._is_closed = True
        for connection in list(self._connections.values()):
            await connection.close()

    def _connection(self, owner: ShardOwner) -> OwnerConnection:
        if self._is_closed:
            raise ShardGone(f"nothing is pulled from {owner.node_id} any more: this side is closed")
        found = self._connections.get(owner)
        if found is None or found.is_ended:
            self._connections = {
                other: it for other, it in self._connections.items() if not it.is_ended
            }
            open_session = partial(
                request_session,
                self._transport,
                owner,
                self._puller,
                self._config,
                self._absence_s,
            )
            found = OwnerConnection(owner, self._config, open_session, self._credits, self.refused)
            self._connections[owner] = found
        return found
