"""Each worker's tensor store: shards that are written once, read by peers, and swept.

    put      reserve bytes -> copy -> seal (numbered) -> read by anyone
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
from areal_sc.transport.shard_ids import make_shard_id, parse_shard_id
from areal_sc.transport.shard_layout import SealedField, ShardLayout
from areal_sc.transport.tensor_bytes import copy_to_bytes


class StoreBlock:
    """The memory of one shard, in the process itself. Called from any thread.

    Attributes:
        memory: as many bytes as were asked for, to be written until the block is sealed.
    """

    def __init__(self, memory: memoryview) -> None:
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

    def allocate(self, layout: ShardLayout) -> StoreBlock:
        """A new block.

        Raises: StoreFull: there is no memory for it.
        """
        return StoreBlock(torch.empty(layout.num_bytes, dtype=torch.uint8).numpy().data)

    def reclaim(self) -> None:
        """Takes back the memory of freed shards that nobody reads any more."""

    def end_sweep(self) -> None:
        """Reclaims, and returns to the system what was not needed lately."""

    def adopt(self) -> Sequence[AdoptedShard]:
        """Sealed shards of dead predecessors, each of them once."""
        return ()

    def close(self) -> None:
        """Gives up all memory that no view is left of."""


@dataclass(frozen=True, slots=True)
class AdoptedShard:
    """A shard that an earlier incarnation sealed."""

    incarnation: str
    sequence: int
    layout: ShardLayout
    block: StoreBlock


@dataclass(frozen=True, slots=True)
class _Shard:
    block: StoreBlock
    num_bytes: int
    fields: dict[str, SealedField]


class TensorStore:
    """The shards of one incarnation of a worker, and those it adopted. Safe across threads.

    Args:
        node_id: the worker's name, for messages.
        incarnation: this life of it; the prefix of the ids of all shards that it seals.
        max_bytes: limit of all shards together.
        backend: where the bytes live; closed with the store.

    Attributes:
        num_sealed: shards that were ever sealed here.
        num_swept: shards that a sweep has dropped.
        swept_bytes: bytes of those.
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
        self.num_sealed = 0
        self.num_swept = 0
        self.swept_bytes = 0
        self._backend = backend or StoreBackend()
        self._lock = threading.Lock()
        self._sealing = threading.Lock()
        self._shards: dict[int, _Shard] = {}
        self._adopted: dict[str, _Shard] = {}
        self._last_sequence = 0
        self._held_bytes = 0

    @property
    def last_sequence(self) -> int:
        """Sequence number of the newest shard; 0 before the first."""
        return self._last_sequence

    @property
    def num_shards(self) -> int:
        """Shards that can be read."""
        return len(self._shards) + len(self._adopted)

    @property
    def num_bytes(self) -> int:
        """Bytes of all shards: being written, readable, adopted, and gone but still read."""
        return self._held_bytes + self._backend.retired_bytes

    @property
    def mapped_retired_bytes(self) -> int:
        """Bytes of shards that are gone, but that somebody still reads."""
        return self._backend.retired_bytes

    def put(
        self,
        fields: Mapping[str, torch.Tensor],
        row_lengths: Mapping[str, Sequence[int]] | Sequence[int],
        *,
        values: Iterable[torch.Tensor] | None = None,
    ) -> str:
        """Copies the fields into a new shard, seals it and returns its id.

        Args:
            fields: name -> [T] tensor on any device, T = sum of the field's row lengths.
            row_lengths: of each field, or common to all.
            values: what is copied, in the order of the fields, one tensor at a time; the fields
                themselves may then be on `meta`. None: the fields.

        Raises:
            MetadataError: a tensor is not 1-D, or its size is not that of its rows.
            StoreFull: the shard does not fit under `max_bytes`, or there is no memory for it.
        """
        layout = ShardLayout.of(fields, row_lengths)
        self._reserve(layout.num_bytes)
        try:
            block = self._backend.allocate(layout)
            try:
                _copy(fields.values() if values is None else values, layout, block.memory)
                sequence = self._seal(block, layout)
            except BaseException:
                block.free()
                raise
        except BaseException:
            with self._lock:
                self._held_bytes -= layout.num_bytes
            raise
        return make_shard_id(self.incarnation, sequence)

    def adopt(self) -> int:
        """Takes over what dead incarnations of this worker have sealed; returns how many shards.

        They are kept until a sweep says which of them are live, even if they exceed `max_bytes`.

        Raises: TransportError: their memory cannot be mapped.
        """
        found = self._backend.adopt()
        with self._lock:
            for adopted in found:
                layout = adopted.layout
                fields = layout.over(adopted.block.memory.toreadonly())
                shard_id = make_shard_id(adopted.incarnation, adopted.sequence)
                self._adopted[shard_id] = _Shard(adopted.block, layout.num_bytes, fields)
                self._held_bytes += layout.num_bytes
        return len(found)

    def describe(self, shard_id: str) -> dict[str, SealedField]:
        """The fields of a shard.

        Raises: ShardGone: this store does not hold it (any more).
        """
        incarnation, sequence = parse_shard_id(shard_id)
        with self._lock:
            if incarnation == self.incarnation:
                shard = self._shards.get(sequence)
            else:
                shard = self._adopted.get(make_shard_id(incarnation, sequence))
        if shard is not None:
            return shard.fields
        if incarnation != self.incarnation:
            why = f"the worker was restarted (its incarnation is {self.incarnation} now)"
        elif sequence <= self._last_sequence:
            why = "it was swept"
        else:
            why = "it was never sealed"
        raise ShardGone(f"shard {shard_id} on {self.node_id} is gone: {why}")

    def remove(self, shard_id: str) -> None:
        """Drops one shard; nothing happens when it is already gone."""
        incarnation, sequence = parse_shard_id(shard_id)
        if incarnation == self.incarnation:
            self._drop([sequence], [])
        else:
            self._drop([], [make_shard_id(incarnation, sequence)])

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
        """
        kept, named = set(live), set(dead)
        kept_ids = None if adopted_live is None else set(adopted_live)
        with self._lock:
            own = [n for n in self._shards if n in named or (n <= acknowledged and n not in kept)]
            adopted = [] if kept_ids is None else [n for n in self._adopted if n not in kept_ids]
        num_dropped, dropped_bytes = self._drop(own, adopted)
        self._backend.end_sweep()
        with self._lock:
            self.num_swept += num_dropped
            self.swept_bytes += dropped_bytes
        return num_dropped

    def close(self) -> None:
        """Drops all shards, and gives up their memory."""
        with self._lock:
            self._shards, self._adopted, self._held_bytes = {}, {}, 0
        self._backend.close()

    def _seal(self, block: StoreBlock, layout: ShardLayout) -> int:
        """The shard's number, given in the order of sealing.

        So a number below `last_sequence` is never still being written, and a mark that
        acknowledges it knows the shard.
        """
        # a lock of its own: writing the ticket must not hold up those who read
        with self._sealing:
            sequence = self._last_sequence + 1
            block.seal(sequence)
            fields = layout.over(block.memory.toreadonly())
            with self._lock:
                self._last_sequence = sequence
                self._shards[sequence] = _Shard(block, layout.num_bytes, fields)
                self.num_sealed += 1
        return sequence

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
            if self.num_bytes + num_bytes > self.max_bytes:
                return False
            self._held_bytes += num_bytes
            return True

    def _drop(self, own: Iterable[int], adopted: Iterable[str]) -> tuple[int, int]:
        """How many shards and bytes were dropped; somebody else may have dropped some."""
        with self._lock:
            found = [self._shards.pop(n, None) for n in own]
            found += [self._adopted.pop(shard_id, None) for shard_id in adopted]
            # the fields are let go here, so that only others' views keep a block from being reused
            blocks = [(shard.block, shard.num_bytes) for shard in found if shard is not None]
            del found
        num_bytes = 0
        for block, block_bytes in blocks:
            block.free()
            num_bytes += block_bytes
        with self._lock:
            self._held_bytes -= num_bytes
        return len(blocks), num_bytes


def _copy(tensors: Iterable[torch.Tensor], layout: ShardLayout, memory: memoryview) -> None:
    for values, field in zip(tensors, layout.fields.values(), strict=True):
        copy_to_bytes(values, memory[field.start : field.stop])
