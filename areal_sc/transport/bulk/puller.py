"""Lazy pull: tensors move from the worker that holds them to the one that needs them, when it does.

Only the asked fields and rows move, each by the shortest way there is:

    own store                 copied
    arena on this node        mapped: a view where the rows lie together in one shard, else copied
    anywhere else             in chunks over the owner's bulk socket, from all owners at once

Whatever is copied is copied once, to its final place in one pooled buffer.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import (
    AsyncIterator,
    Callable,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from typing import Final, TypeVar

import torch

from areal_sc.errors import ProtocolError, ShardGone
from areal_sc.metadata import BatchMetadata
from areal_sc.system.waiting import all_of
from areal_sc.token_fields import field_type
from areal_sc.transport.bulk.buffer_pool import BufferPool
from areal_sc.transport.bulk.client import BulkClient
from areal_sc.transport.bulk.copies import Copy, run_copies
from areal_sc.transport.bulk.plan import (
    OwnedSlice,
    RowLengths,
    Transfer,
    copy_layout,
    find_bytes,
    first_of_run,
    owner_of,
    shard_slice,
    slices_of,
    transfers_to,
)
from areal_sc.transport.bulk.session import FieldDescription, ShardOwner
from areal_sc.transport.packed_rows import PackedRows, RowValues
from areal_sc.transport.shards.arena_map import ArenaMap, MappedShard
from areal_sc.transport.shards.ids import parse_shard_id
from areal_sc.transport.shards.layout import SealedField
from areal_sc.transport.shards.store import TensorStore
from areal_sc.transport.tensor_bytes import ValueType, tensor_over, type_named
from areal_sc.weights.published import WeightsReference

_ALIGNMENT: Final = 64

MAX_QUICK_SLICES: Final = 250
"""What is done for each slice takes some 30 us. For more of them it is done in a thread, so that
the event loop goes on."""

T = TypeVar("T")


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

    async def pull(self, batch: BatchMetadata) -> PackedRows:
        """The columns and rows of a batch, in its row order.

        The tensors may be views of another worker's shared memory: reading is all that may be done
        with them (a write ends the process).

        Raises:
            ShardGone: an owner has died, or says that it does not hold the shard (any more).
            RpcTimeout: the pull passed its deadline.
            PeerSilent: an owner gives no sign of life, long before that deadline.
            ProtocolError: an owner holds other sizes or dtypes than the metadata says.
        """
        deadline = self._deadline()
        types = {name: field_type(it) for name, it in batch.dtypes.items()}
        held = await self._row_lengths(batch, deadline)
        slices, spans = await _computed(len(batch.shards), lambda: slices_of(batch, held))
        stored = {name: it.type_name for name, it in types.items()}
        tensors = await self._tensors(stored, slices, deadline)
        of_rows = {it: RowValues(tensors.pop(it), spans[it], types[it]) for it in spans}
        advantages = [row.advantage for row in batch.rows if row.advantage is not None]
        has_advantages = bool(advantages) and len(advantages) == len(batch.rows)
        return PackedRows(
            tensors,
            batch.sequence_lengths,
            tuple(advantages) if has_advantages else None,
            batch.rows,
            of_rows,
        )

    async def pull_weights(
        self, weights: WeightsReference, *, max_bucket_bytes: int = 256 << 20
    ) -> AsyncIterator[tuple[str, list[torch.Tensor]]]:
        """Each parameter's name and its flat parts, of the ranks that hold one, in their order.

        Parameters come in buckets of at most `max_bucket_bytes` (or one larger parameter): whoever
        drops the parts before asking for the next needs no more memory than that. Parts on this
        node are views of the rank's shared memory and need none. What the caller does between two
        parts does not count against the deadline.

        Raises: the errors of `pull`.
        """
        loop, deadline = asyncio.get_running_loop(), self._deadline()
        ranks = await all_of(self._parameters(*shard, deadline) for shard in weights.shards)
        for bucket in _buckets(ranks, max_bucket_bytes):
            of_ranks = [[rank[name] for name in bucket if name in rank] for rank in ranks]
            pulled = await all_of(self._tensors({}, slices, deadline) for slices in of_ranks)
            handed_over = loop.time()
            for name in bucket:
                yield name, [parts.pop(name) for parts in pulled if name in parts]
            deadline += loop.time() - handed_over

    async def copy_weights(self, weights: WeightsReference, *, spare_bytes: int) -> str:
        """Pulls all parameters into one shard of the own store; returns its id.

        A parameter that several ranks hold parts of is joined, in their order.

        Args:
            spare_bytes: of the store's memory so much must stay free beside a new copy.
        Raises: the errors of `pull`. StoreFull: there is no room for a copy.
        """
        store, deadline = self._local_store, self._deadline()
        assert store is not None
        ranks = await all_of(self._parameters(*shard, deadline) for shard in weights.shards)
        layout = copy_layout(ranks)
        # in a thread: to reserve gigabytes takes a while
        block = await asyncio.to_thread(store.begin, layout, spare_bytes=spare_bytes)
        try:
            transfers = transfers_to(ranks, layout, block.memory)
            await self._fill(transfers, self._deadline())
            return store.seal(block)
        except BaseException:
            store.give_up(block)
            raise

    async def close(self) -> None:
        """Closes the connections to owners."""
        await self._bulk.close()

    def _deadline(self) -> float:
        return asyncio.get_running_loop().time() + self._timeout_s

    async def _tensors(
        self, dtypes: Mapping[str, str], slices: Sequence[OwnedSlice], deadline: float
    ) -> dict[str, torch.Tensor]:
        """Each field's tensor: a view where that is possible, else a copy.

        Args:
            dtypes: of fields that may have no slices; they come first.
        """
        views, copied = await _computed(len(slices), lambda: self._views(slices))
        self.mapped_bytes += sum(view.nbytes for view in views.values())
        dtypes = {**dtypes, **{f: dtype for it in slices for f, dtype in it.rows.fields.items()}}
        rest = {f: type_named(dtype) for f, dtype in dtypes.items() if f not in views}
        if rest:
            copies, transfers = await _computed(len(copied), lambda: self._allocated(rest, copied))
            await self._fill(transfers, deadline)
            views |= copies
        return {name: views[name] for name in dtypes}

    def _allocated(
        self, dtypes: Mapping[str, ValueType], slices: Iterable[OwnedSlice]
    ) -> tuple[dict[str, torch.Tensor], dict[ShardOwner, list[Transfer]]]:
        """The tensors, not filled yet, joined in one buffer, and what is to fill them."""
        numel = dict.fromkeys(dtypes, 0)
        for _, rows, _ in slices:
            num_values = sum(rows.lengths)
            for name in rows.fields:
                numel[name] += num_values
        starts, size = {}, 0
        for name, dtype in dtypes.items():
            starts[name] = size
            size += -(-numel[name] * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT
        buffer = self._pool.take_buffer(size)
        memory = buffer.data
        transfers: dict[ShardOwner, list[Transfer]] = {}
        for owner, rows, offset in slices:
            num_values = sum(rows.lengths)
            destinations = []
            for name in rows.fields:
                itemsize = dtypes[name].itemsize
                start = starts[name] + offset * itemsize
                destinations.append(memory[start : start + num_values * itemsize])
            if rows.num_bytes:
                transfers.setdefault(owner, []).append(Transfer(rows, destinations))
        tensors = {
            name: tensor_over(buffer, dtype, numel[name] * dtype.itemsize, starts[name])
            for name, dtype in dtypes.items()
        }
        return tensors, transfers

    def _views(
        self, slices: Sequence[OwnedSlice]
    ) -> tuple[dict[str, torch.Tensor], list[OwnedSlice]]:
        """(the tensors that lie in one stretch in an arena of this node, the other slices)."""
        num_slices = Counter(name for owned in slices for name in owned.rows.fields)
        views: dict[str, torch.Tensor] = {}
        others = []
        for owned in slices:
            owner, rows, _ = owned
            first = first_of_run(rows.rows)
            is_alone = all(num_slices[name] == 1 for name in rows.fields)
            if first is None or not is_alone or not self._is_mapped(owner):
                others.append(owned)
                continue
            shard = self._open_mapped(owner, rows.shard_id)
            find_bytes(shard.fields, rows, owner.node_id)  # as promised?
            for name in rows.fields:
                start = sum(shard.fields[name].row_lengths[:first])
                views[name] = shard.tensor(name)[start : start + sum(rows.lengths)]
        return views, others

    async def _fill(self, transfers: Mapping[ShardOwner, list[Transfer]], deadline: float) -> None:
        """Fills all destinations or raises the first failure; the rest is then cancelled."""
        readable, elsewhere = {}, {}
        for owner, its in transfers.items():
            num_bytes = sum(transfer.rows.num_bytes for transfer in its)
            if self._is_own(owner):
                readable[owner] = its
                self.local_bytes += num_bytes
            elif self._is_mapped(owner):
                readable[owner] = its
                self.mapped_bytes += num_bytes
            else:
                elsewhere[owner] = its
                self.pulled_bytes += num_bytes
        if readable:
            num_slices = sum(map(len, readable.values()))
            await run_copies(await _computed(num_slices, lambda: self._planned(readable)))
        await all_of(self._bulk.fetch(*each, deadline) for each in elsewhere.items())

    def _planned(self, transfers: Mapping[ShardOwner, Iterable[Transfer]]) -> list[Copy]:
        """The copies out of shards that this process can read."""
        copies = []
        for owner, its in transfers.items():
            shards: dict[str, Mapping[str, SealedField]] = {}
            for rows, destinations in its:
                held = shards.get(rows.shard_id)
                if held is None:
                    held = shards[rows.shard_id] = self._held(owner, rows.shard_id)
                found = find_bytes(held, rows, owner.node_id)
                for parts, destination in zip(found, destinations, strict=True):
                    start = 0
                    for part in parts:
                        copies.append((part, destination[start : start + len(part)]))
                        start += len(part)
        return copies

    async def _parameters(
        self, node_id: str, node_addr: str, shard_id: str, deadline: float
    ) -> dict[str, OwnedSlice]:
        """Each parameter of one rank's shard, as its owner describes it."""
        owner = ShardOwner(node_id, node_addr, parse_shard_id(shard_id)[0])
        described = await self._described(owner, shard_id, deadline)
        for name, dtype, _ in described:
            if type_named(dtype).shape:
                raise ProtocolError(
                    f"weights {name!r} in shard {shard_id} on {node_id}: expected one number at "
                    f"each place, got {dtype}"
                )
        return {
            name: OwnedSlice(
                owner, shard_slice(shard_id, {name: dtype}, range(len(lengths)), lengths)
            )
            for name, dtype, lengths in described
        }

    async def _described(
        self, owner: ShardOwner, shard_id: str, deadline: float
    ) -> list[FieldDescription]:
        if self._is_own(owner) or self._is_mapped(owner):
            held = self._held(owner, shard_id).items()
            return [FieldDescription(name, it.dtype, it.row_lengths) for name, it in held]
        return await self._bulk.describe(owner, shard_id, deadline)

    async def _row_lengths(self, batch: BatchMetadata, deadline: float) -> RowLengths:
        """Of the shards that have a field whose values have lengths of their own."""
        shards = {
            (shard.node_id, shard.shard_id): owner_of(shard)
            for columns in batch.columns
            if any(field_type(it).has_own_length for it in columns.dtypes.values())
            for shard in columns.shards
        }
        asked = (self._described(owner, key[1], deadline) for key, owner in shards.items())
        return {
            key: {name: lengths for name, _, lengths in described}
            for key, described in zip(shards, await all_of(asked), strict=True)
        }

    def _held(self, owner: ShardOwner, shard_id: str) -> Mapping[str, SealedField]:
        """The fields of a shard that this process can read."""
        if self._is_own(owner):
            assert self._local_store is not None
            return self._local_store.describe(shard_id)
        return self._open_mapped(owner, shard_id).fields

    def _open_mapped(self, owner: ShardOwner, shard_id: str) -> MappedShard:
        assert self._arenas is not None
        try:
            return self._arenas.open_shard(shard_id)
        except ShardGone as error:
            why = str(error).removeprefix(f"shard {shard_id} is gone: ")
            raise ShardGone(f"shard {shard_id} on {owner.node_id} is gone: {why}") from error

    def _is_own(self, owner: ShardOwner) -> bool:
        store = self._local_store
        return store is not None and (store.node_id, store.incarnation) == (
            owner.node_id,
            owner.incarnation,
        )

    def _is_mapped(self, owner: ShardOwner) -> bool:
        arenas = self._arenas
        return arenas is not None and not self._is_own(owner) and arenas.find(owner.incarnation)


async def _computed(num_slices: int, function: Callable[[], T]) -> T:
    return function() if num_slices <= MAX_QUICK_SLICES else await asyncio.to_thread(function)


def _buckets(ranks: Sequence[Mapping[str, OwnedSlice]], max_bytes: int) -> Iterator[list[str]]:
    """Consecutive names whose parts on all ranks take `max_bytes` together, or one larger one."""
    sizes: Counter[str] = Counter()
    for rank in ranks:
        for name, owned in rank.items():
            sizes[name] += owned.rows.num_bytes
    bucket: list[str] = []
    num_bytes = 0
    for name, size in sizes.items():
        if bucket and num_bytes + size > max_bytes:
            yield bucket
            bucket, num_bytes = [], 0
        bucket.append(name)
        num_bytes += size
    if bucket:
        yield bucket
