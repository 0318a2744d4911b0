"""Each worker's tensor store: shards that are written once, read by peers, and swept.

    put      reserve bytes -> copy -> seal (numbered) -> read by anyone
    begin    the same in parts, for what arrives from elsewhere
    sweep    what the controller's mark does not name is freed; its memory comes back once it is
             read by nobody

A shard holds some fields, each a packed 1-D tensor with its own or the common row lengths, in one
block of memory. It is immutable once sealed. Shards of an earlier incarnation of the worker that
its memory outlived are adopted: they keep their ids, and live until they are named live no more.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from areal_sc.errors import ShardGone, StoreFull
from areal_sc.transport.shards.ids import make_shard_id, parse_shard_id
from areal_sc.transport.shards.layout import SealedField, ShardLayout
from areal_sc.transport.tensor_bytes import copy_to_bytes

ShardKey = tuple[str, int]
"""Incarnation and sequence number: one shard, however its id was spelled."""


class StoreBlock:
    """The memory of one shard, in the process itself. Called from any thread.

    Attributes:
        memory: the shard's bytes, to be written until the block is sealed.
    """

    def __init__(self, layout: ShardLayout, memory: memoryview) -> None:
        self.layout = layout
        self.memory = memory

    def seal(self, sequence: int) -> None:
        """Makes the shard visible outside of the process, whole, where others can see it."""

    def free(self) -> None:
        """Gives the block back, sealed or not; views of it that are being sent stay readable."""


class StoreBackend:
    """Where the bytes of shards live. Called from any thread.

    Here it is ordinary memory, which is freed when the last view of it is dropped.

    Attributes:
        retired_bytes: of freed shards whose memory is not back yet, because somebody reads it.
    """

    retired_bytes = 0

    def allocate(self, layout: ShardLayout, spare_bytes: int = 0) -> StoreBlock:
        """A new block.

        Args:
            spare_bytes: of a memory that others share, so much must stay free beside it.
        Raises: StoreFull: there is no memory for it.
        """
        return StoreBlock(layout, torch.empty(layout.num_bytes, dtype=torch.uint8).numpy().data)

    def reclaim(self) -> None:
        """Takes back the memory of freed shards that nobody reads any more."""

    def end_sweep(self) -> None:
        """Reclaims, and returns to the system what was not needed lately."""

    def adopt(self) -> dict[ShardKey, StoreBlock]:
        """Sealed shards of dead predecessors, each of them once."""
        return {}

    def close(self) -> None:
        """Gives up all memory that no view is left of."""


@dataclass(frozen=True, slots=True)
class _StoredShard:
    block: StoreBlock
    fields: dict[str, SealedField]


class TensorStore:
    """The shards of one incarnation of a worker, and those it adopted. Safe across threads.

    Args:
        node_id: the worker's name, for messages.
        incarnation: this life of it; the prefix of the ids of all shards that it seals.
        max_bytes: limit of all shards together; 0: there is none but the memory's own.
        backend: where the bytes live; closed with the store.

    Attributes:
        last_sequence: number of the newest shard, and of all that were ever sealed here.
    """

    def __init__(
        self,
        node_id: str,
        incarnation: str,
        *,
        max_bytes: int,
        backend: StoreBackend | None = None,
    ) -> None:
        self.node_id = node_id
        self.incarnation = incarnation
        self.max_bytes = max_bytes
        self.last_sequence = 0
        self._backend = backend or StoreBackend()
        self._lock = threading.Lock()
        self._sealing = threading.Lock()
        self._shards: dict[ShardKey, _StoredShard] = {}
        self._held_bytes = 0

    @property
    def num_shards(self) -> int:
        """Shards that can be read."""
        return len(self._shards)

    def __contains__(self, shard_id: str) -> bool:
        """Whether the shard can be read."""
        return parse_shard_id(shard_id) in self._shards

    @property
    def num_bytes(self) -> int:
        """Bytes of shards, but for copies: being written, readable, adopted, and gone but read."""
        return self._held_bytes + self._backend.retired_bytes

    @property
    def mapped_retired_bytes(self) -> int:
        """Bytes of shards that are gone but still read."""
        return self._backend.retired_bytes

    def put(
        self,
        fields: Mapping[str, torch.Tensor],
        row_lengths: Mapping[str, Sequence[int]] | Sequence[int],
        *,
        values: Iterable[torch.Tensor] | None = None,
        note: bytes = b"",
    ) -> str:
        """Copies the fields into a new shard, seals it and returns its id.

        Args:
            fields: name -> [T] tensor on any device, T = sum of the field's row lengths.
            row_lengths: of each field, or common to all.
            values: what is copied, in the order of the fields, one tensor at a time; the fields
                themselves may then be on `meta`. None: the fields.
            note: see `ShardLayout`.

        Raises:
            MetadataError: a tensor is not 1-D, or its size is not that of its rows.
            StoreFull: the shard does not fit under `max_bytes`, or there is no memory for it.
        """
        block = self.begin(ShardLayout.of(fields, row_lengths, note=note))
        try:
            tensors = fields.values() if values is None else values
            for tensor, field in zip(tensors, block.layout.fields.values(), strict=True):
                copy_to_bytes(tensor, block.memory[field.start : field.stop])
            return self.seal(block)
        except BaseException:
            self.give_up(block)
            raise

    def begin(self, layout: ShardLayout, *, spare_bytes: int = 0) -> StoreBlock:
        """Memory for a new shard; `seal` or `give_up` follows.

        A shard that is a copy does not count against `max_bytes`, and no mark that a sweep is given
        reaches it: whoever makes copies bounds their number, and removes them.

        Args:
            spare_bytes: of a memory that others share, so much must stay free beside it.
        Raises: StoreFull: it does not fit under `max_bytes`, or there is no memory for it.
        """
        self._reserve(layout.counted_bytes)
        try:
            return self._backend.allocate(layout, spare_bytes)
        except BaseException:
            with self._lock:
                self._held_bytes -= layout.counted_bytes
            raise

    def seal(self, block: StoreBlock) -> str:
        """The id of the new shard, which can be read from now on.

        Numbers are given in the order of sealing. So a number below `last_sequence` is never still
        being written, and a mark that acknowledges it knows the shard.

        Raises: StoreFull, TransportError: other processes cannot be told of it; it is not sealed.
        """
        # a lock of its own: writing the ticket must not hold up those who read
        with self._sealing:
            sequence = self.last_sequence + 1
            block.seal(sequence)
            shard = _shard_in(block)
            with self._lock:
                self.last_sequence = sequence
                self._shards[self.incarnation, sequence] = shard
        return make_shard_id(self.incarnation, sequence)

    def give_up(self, block: StoreBlock) -> None:
        """Gives back what was not sealed."""
        block.free()
        with self._lock:
            self._held_bytes -= block.layout.counted_bytes

    def adopt(self) -> int:
        """Takes over what dead incarnations of this worker have sealed; returns how many shards.

        They are kept until a sweep says which of them are live, even if they exceed `max_bytes`.

        Raises: TransportError: their memory cannot be mapped.
        """
        found = self._backend.adopt()
        with self._lock:
            for key, block in found.items():
                self._shards[key] = _shard_in(block)
                self._held_bytes += block.layout.counted_bytes
        return len(found)

    @property
    def notes(self) -> dict[str, bytes]:
        """What was noted with each shard that can be read, by its id."""
        with self._lock:
            return {make_shard_id(*key): it.block.layout.note for key, it in self._shards.items()}

    def describe(self, shard_id: str) -> dict[str, SealedField]:
        """The fields of a shard.

        Raises: ShardGone: this store does not hold it (any more).
        """
        return self._shard(shard_id).fields

    def tensors(self, shard_id: str) -> dict[str, torch.Tensor]:
        """Each field of a shard, [T], as it lies in the store: only to be read.

        Raises: ShardGone: see `describe`.
        """
        block = self._shard(shard_id).block
        fields = block.layout.fields.items()
        return {name: field.tensor_in(block.memory) for name, field in fields}

    def bytes_of(self, shard_id: str) -> int:
        """What its fields take together. Raises: ShardGone: see `describe`."""
        return sum(len(field.values) for field in self._shard(shard_id).fields.values())

    def remove(self, shard_id: str) -> None:
        """Drops one shard; nothing happens when it is already gone."""
        self._drop([parse_shard_id(shard_id)])

    def sweep(
        self,
        live: Iterable[int],
        acknowledged: int,
        dead: Iterable[int] = (),
        adopted_live: Collection[str] | None = None,
    ) -> int:
        """Drops every shard up to `acknowledged` that is not live; returns how many.

        Args:
            live: sequence numbers that are still referenced.
            acknowledged: all shards up to this number are known to whoever made `live`; younger
                ones may still be on their way to it, and are kept.
            dead: sequence numbers that are dropped whatever their age.
            adopted_live: ids of the adopted shards that are still referenced; None keeps all.
        Own copies are dropped only if they are named `dead`.
        """
        kept, named = set(live), set(dead)
        kept_adopted = None if adopted_live is None else set(map(parse_shard_id, adopted_live))

        def is_dropped(key: ShardKey) -> bool:
            incarnation, sequence = key
            if incarnation != self.incarnation:
                return kept_adopted is not None and key not in kept_adopted
            is_old = sequence <= acknowledged and not self._shards[key].block.layout.is_copy
            return sequence in named or (is_old and sequence not in kept)

        with self._lock:
            dropped = list(filter(is_dropped, self._shards))
        num_dropped = self._drop(dropped)
        self._backend.end_sweep()
        return num_dropped

    def close(self) -> None:
        """Drops all shards, and gives up their memory."""
        with self._lock:
            self._shards, self._held_bytes = {}, 0
        self._backend.close()

    def _shard(self, shard_id: str) -> _StoredShard:
        incarnation, sequence = parse_shard_id(shard_id)
        with self._lock:
            shard = self._shards.get((incarnation, sequence))
        if shard is not None:
            return shard
        if incarnation != self.incarnation:
            why = f"the worker was restarted (its incarnation is {self.incarnation} now)"
        elif sequence <= self.last_sequence:
            why = "it was swept"
        else:
            why = "it was never sealed"
        raise ShardGone(f"shard {shard_id} on {self.node_id} is gone: {why}")

    def _reserve(self, num_bytes: int) -> None:
        if not self._try_reserve(num_bytes):
            self._backend.reclaim()
            if not self._try_reserve(num_bytes):
                raise StoreFull(
                    f"the tensor store of {self.node_id} is full: a shard of {num_bytes} bytes "
                    f"does not fit beside the {self.num_bytes} bytes held, the limit is "
                    f"{self.max_bytes} bytes; raise the limit or keep fewer rows in flight"
                )

    def _try_reserve(self, num_bytes: int) -> bool:
        with self._lock:
            if self.max_bytes and self.num_bytes + num_bytes > self.max_bytes:
                return False
            self._held_bytes += num_bytes
            return True

    def _drop(self, keys: Iterable[ShardKey]) -> int:
        """How many shards were dropped; somebody else may have dropped some."""
        with self._lock:
            # the fields are let go here, so that only others' views keep a block from being reused
            blocks = [self._shards.pop(key).block for key in keys if key in self._shards]
        for block in blocks:
            block.free()
        with self._lock:
            self._held_bytes -= sum(block.layout.counted_bytes for block in blocks)
        return len(blocks)


def _shard_in(block: StoreBlock) -> _StoredShard:
    return _StoredShard(block, block.layout.over(block.memory.toreadonly()))
