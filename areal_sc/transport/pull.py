"""Lazy pull: tensors move from the worker that holds them to the one that needs them, when it does.

Only the asked fields and rows move, from all owners at once, in chunks. The receiver drives: it
has at most `max_inflight_chunks` chunk requests outstanding at an owner, so nothing is queued that
it did not ask for, and every chunk is copied once, to its final place.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch

from areal_sc.errors import IncarnationMismatch, PeerLost, ProtocolError, RpcTimeout, ShardGone
from areal_sc.metadata import TRAJECTORY_FIELDS, BatchMetadata
from areal_sc.transport.packed_rows import PackedRows
from areal_sc.transport.pull_plan import (
    Chunk,
    Owner,
    Segment,
    chunks_of,
    field_dtypes,
    plan_batch,
    segment_of,
)
from areal_sc.transport.rpc import Connection, Frame, Frames, Handler, Transport
from areal_sc.transport.shard_ids import parse_shard_id
from areal_sc.transport.tensor_bytes import bytes_of, dtype_named
from areal_sc.transport.tensor_store import SealedField, TensorStore

READ: Final = "store.read"
DESCRIBE: Final = "store.describe"

_ZERO_COPY_BYTES: Final = 64 << 10
"""Smaller slices are joined into one frame: a frame costs more than copying them."""


def pull_handlers(store: TensorStore, *, max_read_bytes: int = 16 << 20) -> dict[str, Handler]:
    """RPC methods that serve a store; they are reads, and hold at most one chunk a request."""

    async def read(args: dict[str, Any], frames: list[Frame]) -> Frames:
        start, stop = args.get("start"), args.get("stop")
        if not isinstance(start, int) or not isinstance(stop, int) or not 0 <= start <= stop:
            raise ProtocolError(f"{READ}: {start!r} to {stop!r} is not a window of bytes")
        if stop - start > max_read_bytes:
            raise ProtocolError(
                f"{READ}: a window of {stop - start} bytes, the limit is {max_read_bytes}"
            )
        held = []
        slices: list[memoryview] = []
        for segment in args.get("segments", ()):
            field, rows = _asked_rows(store, segment)
            slices += field.slices(rows)
            held.append([field.dtype, [field.row_lengths[row] for row in rows]])
        return Frames(held, _joined(_window(slices, start, stop)))

    async def describe(args: dict[str, Any], frames: list[Frame]) -> list[Any]:
        fields = store.describe(str(args.get("shard_id")))
        return [[name, field.dtype, list(field.row_lengths)] for name, field in fields.items()]

    return {READ: read, DESCRIBE: describe}


class Puller:
    """Pulls rows and weights for one worker.

    Args:
        transport: gives the connections to owners.
        local_store: the worker's own store, which is read directly.
        chunk_bytes: payload of one request.
        max_inflight_chunks: requests outstanding at one owner, over all pulls.
        timeout_s: deadline of a pull.

    Attributes:
        pulled_bytes: payload received from other workers.
        local_bytes: payload copied out of the own store.
    """

    def __init__(
        self,
        transport: Transport,
        *,
        local_store: TensorStore | None = None,
        chunk_bytes: int = 1 << 20,
        max_inflight_chunks: int = 8,
        timeout_s: float = 300.0,
    ) -> None:
        self.pulled_bytes = 0
        self.local_bytes = 0
        self._transport = transport
        self._local_store = local_store
        self._chunk_bytes = chunk_bytes
        self._max_inflight_chunks = max_inflight_chunks
        self._timeout_s = timeout_s
        self._links: dict[Owner, _Link] = {}

    async def pull(
        self,
        batch: BatchMetadata,
        fields: Sequence[str] | None = None,
        rows: Sequence[int] | None = None,
    ) -> PackedRows:
        """The asked columns and rows of a batch, in its row order (or that of `rows`).

        A batch without rows has no shards and so no dtypes: asked fields come back empty, those of
        a trajectory with their dtype, others as float32.

        Raises:
            ShardGone: an owner has died, was restarted, or swept the shard.
            RpcTimeout: the pull passed its deadline.
            ProtocolError: an owner holds other sizes or dtypes than the metadata says.
            MetadataError: a field or row is not in the batch.
        """
        if fields is not None and batch.total_batch_size:
            batch = batch.select(fields)
        dtypes = field_dtypes(batch)
        if not batch.total_batch_size:
            dtypes = {name: TRAJECTORY_FIELDS.get(name, "float32") for name in fields or ()}
        if rows is not None:
            batch = batch.take(rows)
        tensors = {
            name: torch.empty(batch.num_tokens, dtype=dtype_named(dtypes[name]))
            for name in (fields if fields is not None else dtypes)
        }
        await self._fill(plan_batch(batch, tensors))
        advantages = [row.advantage for row in batch.rows if row.advantage is not None]
        has_advantages = bool(advantages) and len(advantages) == len(batch.rows)
        return PackedRows(
            tensors, batch.sequence_lengths, tuple(advantages) if has_advantages else None
        )

    async def pull_shard(
        self, node_id: str, node_addr: str, shard_id: str
    ) -> dict[str, torch.Tensor]:
        """All fields of one shard, each a flat tensor; raises as `pull` does."""
        incarnation, _ = parse_shard_id(shard_id)
        owner = Owner(node_id, node_addr, incarnation)
        tensors: dict[str, torch.Tensor] = {}
        segments = []
        for name, dtype, lengths in await self._describe(owner, shard_id):
            tensor = torch.empty(sum(lengths), dtype=dtype_named(dtype))
            rows = range(len(lengths))
            segments.append(segment_of(shard_id, name, rows, dtype, lengths, bytes_of(tensor)))
            tensors[name] = tensor
        await self._fill({owner: segments})
        return tensors

    async def close(self) -> None:
        """Closes the connections to owners."""
        links, self._links = self._links, {}
        for link in links.values():
            await link.connection.close()

    async def _describe(self, owner: Owner, shard_id: str) -> list[tuple[str, str, list[int]]]:
        if self._is_local(owner):
            assert self._local_store is not None
            held = self._local_store.describe(shard_id)
            return [(name, field.dtype, list(field.row_lengths)) for name, field in held.items()]
        link = self._link(owner)
        try:
            answer = await link.connection.call(
                DESCRIBE, {"shard_id": shard_id}, timeout_s=self._timeout_s
            )
        except (PeerLost, IncarnationMismatch) as error:
            raise await self._gone(owner, shard_id, error) from error
        fields = []
        for entry in answer if isinstance(answer, list) else [answer]:
            match entry:
                case [str(name), str(dtype), [*lengths]] if all(map(_is_count, lengths)):
                    fields.append((name, dtype, lengths))
                case _:
                    raise ProtocolError(
                        f"shard {shard_id} on {owner.node_id}: expected name, dtype and row "
                        f"lengths of a field, got {entry!r}"
                    )
        return fields

    async def _fill(self, plan: dict[Owner, list[Segment]]) -> None:
        """Fills all destinations or raises the first failure; the rest is then cancelled."""
        deadline = asyncio.get_running_loop().time() + self._timeout_s
        failure: BaseException | None = None
        try:
            async with asyncio.TaskGroup() as group:
                for owner, segments in plan.items():
                    if self._is_local(owner):
                        self._copy_local(owner, segments)
                        continue
                    num_bytes = sum(len(segment.destination) for segment in segments)
                    num_chunks = -(-num_bytes // self._chunk_bytes)
                    chunks = chunks_of(segments, self._chunk_bytes)
                    for _ in range(min(num_chunks, self._max_inflight_chunks)):
                        group.create_task(self._fetch_all(owner, chunks, deadline))
        except BaseExceptionGroup as group_error:
            failure = _first(group_error)
        if failure is not None:
            raise failure

    def _copy_local(self, owner: Owner, segments: Iterable[Segment]) -> None:
        assert self._local_store is not None
        for segment in segments:
            field = self._local_store.field(segment.shard_id, segment.field)
            slices = field.slices(segment.rows)
            segment.check(owner, field.dtype, [field.row_lengths[row] for row in segment.rows])
            position = 0
            for values in slices:
                segment.destination[position : position + len(values)] = values
                position += len(values)
            self.local_bytes += position

    async def _fetch_all(self, owner: Owner, chunks: Iterator[Chunk], deadline: float) -> None:
        link = self._link(owner)
        for chunk in chunks:
            async with link.credits:
                await self._fetch(owner, link.connection, chunk, deadline)

    async def _fetch(
        self, owner: Owner, connection: Connection, chunk: Chunk, deadline: float
    ) -> None:
        segment = chunk.parts[0].segment
        window = {
            "segments": chunk.to_wire(),
            "start": chunk.start,
            "stop": chunk.start + chunk.num_bytes,
        }
        try:
            held, frames = await connection.call_frames(
                READ, window, timeout_s=max(deadline - asyncio.get_running_loop().time(), 0.0)
            )
        except (PeerLost, IncarnationMismatch) as error:
            raise await self._gone(owner, segment.shard_id, error) from error
        except RpcTimeout as error:
            raise RpcTimeout(
                f"shard {segment.shard_id} on {owner.node_id}, field {segment.field!r}: not "
                f"pulled within {self._timeout_s:g} s"
            ) from error
        chunk.check(owner, held, frames)
        chunk.fill(frames)
        self.pulled_bytes += chunk.num_bytes

    async def _gone(self, owner: Owner, shard_id: str, error: Exception) -> ShardGone:
        """Forgets an owner that has ended."""
        link = self._links.pop(owner, None)
        if link is not None:
            await link.connection.close()
        return ShardGone(f"shard {shard_id} on {owner.node_id} is gone with its owner: {error}")

    def _is_local(self, owner: Owner) -> bool:
        store = self._local_store
        return store is not None and (store.node_id, store.incarnation) == (
            owner.node_id,
            owner.incarnation,
        )

    def _link(self, owner: Owner) -> _Link:
        if owner not in self._links:
            self._links[owner] = _Link(
                self._transport.connect(owner.node_addr, owner.node_id, owner.incarnation),
                asyncio.Semaphore(self._max_inflight_chunks),
            )
        return self._links[owner]


@dataclass(frozen=True, slots=True)
class _Link:
    """A connection to an owner, and the receiver's credits there."""

    connection: Connection
    credits: asyncio.Semaphore


def _asked_rows(store: TensorStore, segment: Any) -> tuple[SealedField, Sequence[int]]:
    """The field that a wire segment names, and its rows, checked before they are counted out."""
    match segment:
        case [str(shard_id), str(name), [*rows]] if all(map(_is_count, rows)):
            return store.field(shard_id, name), rows
        case [str(shard_id), str(name), int(first), int(count)]:
            field = store.field(shard_id, name)
            if 0 <= first <= first + count <= len(field.row_lengths):
                return field, range(first, first + count)
            raise ProtocolError(
                f"shard {shard_id} on {store.node_id} has {len(field.row_lengths)} rows, "
                f"not {first}..{first + count - 1}"
            )
    raise ProtocolError(f"{READ}: not a segment: {segment!r:.200}")


def _window(slices: Iterable[memoryview], start: int, stop: int) -> list[memoryview]:
    """Bytes `start` to `stop` of the concatenation.

    Raises: ProtocolError: the concatenation is shorter.
    """
    found = []
    position = 0
    for part in slices:
        inside = part[max(start - position, 0) : max(stop - position, 0)]
        if len(inside):
            found.append(inside)
        position += len(part)
    if stop > position:
        raise ProtocolError(f"{READ}: the segments have {position} bytes, not {stop}")
    return found


def _joined(slices: Iterable[memoryview]) -> list[bytes | memoryview]:
    frames: list[bytes | memoryview] = []
    small: list[memoryview] = []
    for part in slices:
        if len(part) < _ZERO_COPY_BYTES:
            small.append(part)
            continue
        if small:
            frames.append(b"".join(small))
            small = []
        frames.append(part)
    if small:
        frames.append(b"".join(small))
    return frames


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and value >= 0


def _first(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The failure that came first; the others follow from it or happened beside it."""
    first = group.exceptions[0]
    return _first(first) if isinstance(first, BaseExceptionGroup) else first
