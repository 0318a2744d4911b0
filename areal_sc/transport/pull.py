"""Lazy pull: tensors move from the worker that holds them to the one that needs them, when it does.

Only the asked fields and rows move, each by the shortest way there is:

    own store                 copied
    arena on this node        mapped: a view where the rows lie together in one shard, else copied
    anywhere else             in chunks over the owner's bulk socket, from all owners at once

Whatever is copied is copied once, to its final place in one pooled buffer.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, TypeVar

import torch

from areal_sc.errors import ShardGone
from areal_sc.metadata import BatchMetadata
from areal_sc.transport.bulk.buffer_pool import BufferPool, Bytes
from areal_sc.transport.bulk.client import BulkClient
from areal_sc.transport.copies import Copy, field_of, plan_copy, run_copies
from areal_sc.transport.packed_rows import PackedRows
from areal_sc.transport.pull_plan import (
    Owner,
    Piece,
    Segment,
    Source,
    sources_of,
)
from areal_sc.transport.shards.arena_map import ArenaMap, MappedShard
from areal_sc.transport.shards.ids import parse_shard_id
from areal_sc.transport.shards.layout import SealedField
from areal_sc.transport.shards.store import TensorStore
from areal_sc.transport.slices import Slices
from areal_sc.transport.tensor_bytes import dtype_named
from areal_sc.weights import WeightsReference

_ALIGNMENT: Final = 64

MAX_QUICK_SHARDS: Final = 1000
"""The metadata of larger batches is taken apart in a thread: it takes some 10 us a shard."""

K = TypeVar("K")


@dataclass(frozen=True, slots=True)
class _Wanted:
    """A tensor to make, of `numel` values."""

    dtype: str
    numel: int


class Puller:
    """Pulls rows and weights for one worker.

    Args:
        bulk: fetches from owners elsewhere.
        local_store: the worker's own store, which is read directly.
        arenas: shared memory of the other workers on this node.
        timeout_s: deadline of a pull.
        idle_buffer_bytes: destinations kept for later pulls.

    Attributes:
        pulled_bytes: payload asked of owners elsewhere.
        mapped_bytes: payload found in shared memory, copied or not.
        local_bytes: payload copied out of the own store.
    """

    def __init__(
        self,
        bulk: BulkClient,
        *,
        local_store: TensorStore | None = None,
        arenas: ArenaMap | None = None,
        timeout_s: float = 300.0,
        idle_buffer_bytes: int = 1 << 30,
    ) -> None:
        self.pulled_bytes = 0
        self.mapped_bytes = 0
        self.local_bytes = 0
        self._bulk = bulk
        self._local_store = local_store
        self._arenas = arenas
        self._timeout_s = timeout_s
        self._pool = BufferPool(idle_buffer_bytes)

    async def pull(
        self,
        batch: BatchMetadata,
        fields: Sequence[str] | None = None,
        rows: Sequence[int] | None = None,
    ) -> PackedRows:
        """The asked columns and rows of a batch, in its row order (or that of `rows`).

        The tensors may be views of another worker's shared memory: reading is all that may be done
        with them (a write ends the process). A batch without rows has no shards and so no dtypes:
        asked fields come back empty, those of a trajectory with their dtype, others as float32.

        Raises:
            ShardGone: an owner has died, or says that it does not hold the shard (any more).
            RpcTimeout: the pull passed its deadline.
            PeerSilent: an owner gives no sign of life, long before that deadline.
            ProtocolError: an owner holds other sizes or dtypes than the metadata says.
            MetadataError: a field or row is not in the batch.
        """
        deadline = self._deadline()
        if len(batch.shards) <= MAX_QUICK_SHARDS:
            batch, dtypes, sources = sources_of(batch, fields, rows)
        else:
            batch, dtypes, sources = await asyncio.to_thread(sources_of, batch, fields, rows)
        lengths = batch.sequence_lengths
        numel = sum(lengths)
        names = fields if fields is not None else dtypes
        wanted = {name: _Wanted(dtypes[name], numel) for name in names}
        tensors = await self._tensors(wanted, sources, deadline)
        advantages = [row.advantage for row in batch.rows if row.advantage is not None]
        has_advantages = bool(advantages) and len(advantages) == len(batch.rows)
        return PackedRows(tensors, lengths, tuple(advantages) if has_advantages else None)

    async def pull_weights(
        self, weights: WeightsReference, *, max_bucket_bytes: int = 256 << 20
    ) -> AsyncIterator[tuple[str, list[torch.Tensor]]]:
        """Each parameter's name and its flat parts, of the ranks that hold one, in their order.

        Parameters come in buckets of at most `max_bucket_bytes` (or one larger parameter): whoever
        drops the parts before asking for the next needs no more memory than that. Parts on this
        node are views of the rank's shared memory and need none. What the caller does between two
        parts does not count against the deadline.

        Raises: as `pull`.
        """
        loop, deadline = asyncio.get_running_loop(), self._deadline()
        ranks = await asyncio.gather(
            *(self._weights_pieces(*shard, deadline) for shard in weights.shards)
        )
        held: dict[str, list[Piece]] = {}
        for name, piece in (item for pieces in ranks for item in pieces.items()):
            held.setdefault(name, []).append(piece)
        for bucket in _buckets(held, max_bucket_bytes):
            sources = {
                (name, number): piece for name in bucket for number, piece in enumerate(held[name])
            }
            parts = await self._tensors(
                {
                    key: _Wanted(piece.fields[key[0]], piece.num_values)
                    for key, piece in sources.items()
                },
                [Source(piece, {key[0]: key}) for key, piece in sources.items()],
                deadline,
            )
            handed_over = loop.time()
            for name in bucket:
                yield name, [parts.pop((name, number)) for number in range(len(held[name]))]
            deadline += loop.time() - handed_over

    async def close(self) -> None:
        """Closes the connections to owners."""
        await self._bulk.close()

    def _deadline(self) -> float:
        return asyncio.get_running_loop().time() + self._timeout_s

    async def _tensors(
        self, wanted: Mapping[K, _Wanted], sources: Sequence[Source[K]], deadline: float
    ) -> dict[K, torch.Tensor]:
        """The tensors: each a view where that is possible, else a copy."""
        found: dict[K, torch.Tensor] = {}
        slices = Slices()
        num_sources = Counter(key for source in sources for key in source.keys.values())
        if any(num_sources[key] == 1 for key in wanted):
            for source in sources:
                alone = {f: key for f, key in source.keys.items() if num_sources[key] == 1}
                found |= self._views(source.piece, alone)
                await slices.step()
        copied = {key: entry for key, entry in wanted.items() if key not in found}
        if copied:
            found |= await self._copied(copied, sources, deadline)
        return {key: found[key] for key in wanted}

    async def _copied(
        self, wanted: Mapping[K, _Wanted], sources: Iterable[Source[K]], deadline: float
    ) -> dict[K, torch.Tensor]:
        """The tensors, joined in one buffer."""
        buffer, starts = self._allocate(wanted)
        memory = buffer.data
        segments: dict[Owner, list[Segment]] = {}
        slices = Slices()
        for source in sources:
            missing = {f: key for f, key in source.keys.items() if key in starts}
            piece = source.piece
            if len(missing) < len(piece.fields):
                piece = replace(piece, fields={f: piece.fields[f] for f in missing})
            num_values, destinations = piece.num_values, []
            for name, key in missing.items():
                itemsize = dtype_named(piece.fields[name]).itemsize
                start = starts[key] + source.first * itemsize
                destinations.append(memory[start : start + num_values * itemsize])
            if num_values and destinations:
                segments.setdefault(piece.owner, []).append(Segment(piece, destinations))
            await slices.step()
        await self._fill(segments, deadline)
        return {key: _tensor(buffer, starts[key], entry) for key, entry in wanted.items()}

    def _views(self, piece: Piece, keys: Mapping[str, K]) -> dict[K, torch.Tensor]:
        """The fields where they lie, if that is in an arena of this node and in one stretch."""
        if not keys or not self._is_mapped(piece.owner) or not piece.is_run:
            return {}
        shard = self._open_mapped(piece.owner, piece.shard_id)
        first, stop = piece.rows[0], piece.rows[-1] + 1
        views = {}
        for name, key in keys.items():
            held = field_of(shard.fields, piece, name)
            piece.check(name, held.dtype, held.row_lengths[first:stop])
            start = sum(held.row_lengths[:first])
            view = views[key] = shard.tensor(name)[start : start + piece.num_values]
            self.mapped_bytes += view.nbytes
        return views

    async def _fill(self, segments: Mapping[Owner, Sequence[Segment]], deadline: float) -> None:
        """Fills all destinations or raises the first failure; the rest is then cancelled."""
        copies: list[Copy] = []
        fetches = []
        slices, begun_s = Slices(), time.perf_counter()
        for owner, wanted in segments.items():
            if self._is_own(owner) or self._is_mapped(owner):
                for shard_id, of_shard in _by_shard(wanted):
                    self._plan_copies(owner, shard_id, of_shard, copies)
                    await slices.step()
            else:
                fetches.append((owner, wanted))
                self.pulled_bytes += sum(segment.num_bytes for segment in wanted)
        if copies:
            await run_copies(copies)
            self._bulk.seconds.copying += time.perf_counter() - begun_s
        if len(fetches) == 1:
            await self._bulk.fetch(*fetches[0], deadline)
        elif fetches:
            await self._fetch_all(fetches, deadline)

    def _plan_copies(
        self, owner: Owner, shard_id: str, segments: Iterable[Segment], copies: list[Copy]
    ) -> None:
        """Adds the copies out of one shard that this process can read."""
        if self._is_own(owner):
            assert self._local_store is not None
            fields: Mapping[str, SealedField] = self._local_store.describe(shard_id)
            for segment in segments:
                self.local_bytes += plan_copy(segment, fields, None, copies)
        else:
            shard = self._open_mapped(owner, shard_id)
            for segment in segments:
                self.mapped_bytes += plan_copy(segment, shard.fields, shard, copies)

    async def _fetch_all(
        self, fetches: Iterable[tuple[Owner, Sequence[Segment]]], deadline: float
    ) -> None:
        failure: BaseException | None = None
        try:
            async with asyncio.TaskGroup() as group:
                for owner, wanted in fetches:
                    group.create_task(self._bulk.fetch(owner, wanted, deadline))
        except BaseExceptionGroup as group_error:
            failure = group_error.exceptions[0]  # the others followed from it, or came after it
        try:
            if failure is not None:
                raise failure
        finally:
            del failure  # with the traceback it would keep itself, and the pull's buffer

    async def _weights_pieces(
        self, node_id: str, node_addr: str, shard_id: str, deadline: float
    ) -> dict[str, Piece]:
        """Each parameter of one rank's shard, as its owner describes it."""
        owner = Owner(node_id, node_addr, parse_shard_id(shard_id)[0])
        fields: Mapping[str, SealedField] | None = None
        if self._is_own(owner):
            assert self._local_store is not None
            fields = self._local_store.describe(shard_id)
        elif self._is_mapped(owner):
            fields = self._open_mapped(owner, shard_id).fields
        if fields is not None:
            described = [
                (name, field.dtype, list(field.row_lengths)) for name, field in fields.items()
            ]
        else:
            answer = await self._bulk.describe(owner, shard_id, deadline)
            described = [(field.name, field.dtype, field.row_lengths) for field in answer]
        return {
            name: Piece(owner, shard_id, {name: dtype}, range(len(lengths)), lengths)
            for name, dtype, lengths in described
        }

    def _allocate(self, wanted: Mapping[K, _Wanted]) -> tuple[Bytes, dict[K, int]]:
        """One buffer for all, and the first byte of each in it."""
        starts = {}
        position = 0
        for key, entry in wanted.items():
            starts[key] = position
            end = position + entry.numel * dtype_named(entry.dtype).itemsize
            position = -(-end // _ALIGNMENT) * _ALIGNMENT
        return self._pool.take(position), starts

    def _open_mapped(self, owner: Owner, shard_id: str) -> MappedShard:
        assert self._arenas is not None
        try:
            return self._arenas.open_shard(shard_id)
        except ShardGone as error:
            why = str(error).removeprefix(f"shard {shard_id} is gone: ")
            raise ShardGone(f"shard {shard_id} on {owner.node_id} is gone: {why}") from error

    def _is_own(self, owner: Owner) -> bool:
        store = self._local_store
        return store is not None and (store.node_id, store.incarnation) == (
            owner.node_id,
            owner.incarnation,
        )

    def _is_mapped(self, owner: Owner) -> bool:
        arenas = self._arenas
        return arenas is not None and not self._is_own(owner) and arenas.find(owner.incarnation)


def _by_shard(segments: Iterable[Segment]) -> Iterable[tuple[str, list[Segment]]]:
    """The segments of each shard, which is looked up but once."""
    found: dict[str, list[Segment]] = {}
    for segment in segments:
        found.setdefault(segment.piece.shard_id, []).append(segment)
    return found.items()


def _tensor(buffer: Bytes, start: int, wanted: _Wanted) -> torch.Tensor:
    dtype = dtype_named(wanted.dtype)
    if not wanted.numel:
        return torch.empty(0, dtype=dtype)
    return torch.frombuffer(buffer, dtype=dtype, count=wanted.numel, offset=start)


def _buckets(held: Mapping[str, Sequence[Piece]], max_bytes: int) -> Iterator[list[str]]:
    """Consecutive names whose parts on all ranks take `max_bytes` together, or one larger one."""
    bucket: list[str] = []
    num_bytes = 0
    for name, pieces in held.items():
        size = sum(piece.num_bytes for piece in pieces)
        if bucket and num_bytes + size > max_bytes:
            yield bucket
            bucket, num_bytes = [], 0
        bucket.append(name)
        num_bytes += size
    if bucket:
        yield bucket
