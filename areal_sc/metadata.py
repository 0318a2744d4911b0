"""Metadata: what controllers know about tensors that they never hold.

A batch is a table. Its rows are trajectories, its columns are fields (`input_ids`,
`behavior_logprobs`, ...). The values live in the tensor stores of workers, as shards: some rows
of some fields, packed without padding, immutable once sealed. `BatchMetadata` says which shard
holds which part of the table, and carries per row the few numbers that a controller decides with
(`RowMetadata`). All operations are pure; none touches a tensor.

    rows     0   1   2   3   4
    ids     [shard a   ][shard b]     offset 0, 3
    logp    [shard a   ][shard b]
    prox    [shard p][shard q   ]     offset 0, 2: another split, after union()
"""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from areal_sc.errors import MetadataError

TRAJECTORY_FIELDS: Mapping[str, str] = {
    "input_ids": "int32",
    "loss_mask": "bool",
    "behavior_logprobs": "float32",
    "versions": "int32",
    "temperatures": "float32",
}
"""The fields, and their dtypes, of a generated trajectory; each has one value a token."""

FIELD_ALIGNMENT_BYTES = 64
"""Each field of a shard takes whole cache lines: any dtype may be viewed in place."""


@dataclass(frozen=True, slots=True)
class WeightBroadcast:
    """Weights that a rank of the trainer broadcasts to a process group while they are published.

    Attributes:
        group: name of the group.
        root: (node_id, node_addr, incarnation) of the worker that broadcasts.
        buckets: names, dtypes and shapes of each broadcast, in their order.
    """

    group: str
    root: tuple[str, str, str]
    buckets: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class WeightsReference:
    """Where the weights of one policy version are.

    Attributes:
        version: the policy version.
        shards: (node_id, node_addr, shard_id) of each rank's sealed part; () when `folder` is set.
        folder: a Hugging Face folder that holds them; empty when they are sealed.
        broadcast: how they come to the ranks of a group; None: they are pulled.
    """

    version: int
    shards: tuple[tuple[str, str, str], ...] = ()
    folder: str = ""
    broadcast: WeightBroadcast | None = None

    def to_wire(self) -> dict[str, Any]:
        """msgpack-able; `from_wire` is its inverse."""
        sent = self.broadcast
        return {
            "version": self.version,
            "shards": [list(shard) for shard in self.shards],
            "folder": self.folder,
            "broadcast": sent and [sent.group, list(sent.root), list(sent.buckets)],
        }

    @classmethod
    def from_wire(cls, plain: Mapping[str, Any]) -> WeightsReference:
        sent = plain["broadcast"]
        return cls(
            version=int(plain["version"]),
            shards=tuple((str(n), str(a), str(s)) for n, a, s in plain["shards"]),
            folder=str(plain["folder"]),
            broadcast=sent
            and WeightBroadcast(
                str(sent[0]), (str(sent[1][0]), str(sent[1][1]), str(sent[1][2])), tuple(sent[2])
            ),
        )


@dataclass(frozen=True, slots=True)
class PromptReference:
    """A prompt by name: row `index` of registered dataset `dataset`, sampled with `seed`."""

    dataset: int
    index: int
    seed: int


@dataclass(frozen=True, slots=True)
class TensorMetadata:
    """Shape, dtype name (`float32`, `bfloat16`, ...) and device of one sealed, packed field."""

    shape: tuple[int, ...]
    dtype: str
    device: str = "cpu"


@dataclass(frozen=True, slots=True)
class RowMetadata:
    """What a controller knows of one trajectory.

    Attributes:
        group_id: the group (prompt) that the trajectory belongs to.
        attempt: which run of the group produced it; only the current attempt counts.
        sequence_length: prompt and completion, in tokens.
        reward: the trajectory's scalar reward.
        admitted_version: policy version when the group was admitted.
        version_spans: (policy version, number of trained tokens sampled by it), ascending.
        advantage: set by `TrainController.compute_advantages`; None before.
    """

    group_id: int
    attempt: int
    sequence_length: int
    reward: float
    admitted_version: int
    version_spans: tuple[tuple[int, int], ...]
    advantage: float | None = None

    @property
    def num_loss_tokens(self) -> int:
        return sum(count for _, count in self.version_spans)

    def num_loss_tokens_since(self, version: int) -> int:
        """Number of trained tokens sampled by `version` or a later one."""
        return sum(count for span_version, count in self.version_spans if span_version >= version)


@dataclass(frozen=True, slots=True)
class ShardMetadata:
    """Some rows of one sealed shard, placed at consecutive rows of a batch.

    Attributes:
        node_id: name of the worker whose store owns the shard, e.g. `rollout/0`.
        node_addr: ZMQ endpoint of that worker.
        shard_id: names the shard within the owner; it contains the owner's incarnation.
        batch_size: number of rows of this piece.
        offset: first row of this piece within the batch.
        fields: the fields held, with the metadata of the whole sealed (packed) field.
        shard_rows: rows of the sealed shard, in batch order; length `batch_size`.
    """

    node_id: str
    node_addr: str
    shard_id: str
    batch_size: int
    offset: int
    fields: Mapping[str, TensorMetadata]
    shard_rows: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.shard_rows) != self.batch_size:
            raise MetadataError(
                f"shard {self.shard_id} on {self.node_id}: batch_size is {self.batch_size}, "
                f"but shard_rows names {len(self.shard_rows)} rows"
            )


Balance = Literal["tokens", "rows"]


@dataclass(frozen=True, slots=True)
class BatchMetadata:
    """The shards that together make one batch.

    Attributes:
        batch_id: unique within the run.
        global_step: the training step that the batch was formed for.
        total_batch_size: number of rows.
        shards: pieces; for each field they cover every row exactly once.
        rows: per-row metadata, length `total_batch_size`.
        min_token_version: tokens sampled by an earlier version are not trained; None trains all.
    """

    batch_id: str
    global_step: int
    total_batch_size: int
    shards: tuple[ShardMetadata, ...]
    rows: tuple[RowMetadata, ...]
    min_token_version: int | None = None

    def __post_init__(self) -> None:
        if len(self.rows) != self.total_batch_size:
            raise MetadataError(
                f"batch {self.batch_id}: total_batch_size is {self.total_batch_size}, "
                f"but there is metadata of {len(self.rows)} rows"
            )
        for name in self.fields:
            pieces = sorted(
                (shard.offset, shard.batch_size) for shard in self.shards if name in shard.fields
            )
            next_row = 0
            for offset, size in pieces:
                if offset != next_row:
                    raise MetadataError(
                        f"batch {self.batch_id}, field {name!r}: expected a shard at row "
                        f"{next_row}, got one at row {offset}"
                    )
                next_row += size
            if next_row != self.total_batch_size:
                raise MetadataError(
                    f"batch {self.batch_id}, field {name!r}: shards hold {next_row} rows, "
                    f"the batch has {self.total_batch_size}"
                )

    @property
    def fields(self) -> tuple[str, ...]:
        """Names of the fields, in the order in which shards first name them."""
        return tuple(dict.fromkeys(name for shard in self.shards for name in shard.fields))

    @property
    def sequence_lengths(self) -> tuple[int, ...]:
        return tuple(row.sequence_length for row in self.rows)

    @property
    def num_tokens(self) -> int:
        return sum(self.sequence_lengths)

    @property
    def group_ids(self) -> tuple[int, ...]:
        """Distinct groups, in order of their first row."""
        return tuple(dict.fromkeys(row.group_id for row in self.rows))

    def select(self, fields: Sequence[str]) -> BatchMetadata:
        """The same rows with only the named fields.

        Raises: MetadataError: a field is not in the batch.
        """
        missing = [name for name in fields if name not in self.fields]
        if missing:
            raise MetadataError(
                f"batch {self.batch_id} has fields {list(self.fields)}, not {missing}"
            )
        kept = []
        for shard in self.shards:
            shard_fields = {name: shard.fields[name] for name in fields if name in shard.fields}
            if shard_fields:
                kept.append(replace(shard, fields=shard_fields))
        return replace(self, shards=tuple(kept))

    def take(self, rows: Sequence[int]) -> BatchMetadata:
        """The named rows, in the given order.

        Raises: MetadataError: a row is out of range or named twice.
        """
        for row in rows:
            if not 0 <= row < self.total_batch_size:
                raise MetadataError(
                    f"batch {self.batch_id} has rows 0..{self.total_batch_size - 1}, not {row}"
                )
        if len(set(rows)) != len(rows):
            raise MetadataError(
                f"batch {self.batch_id}: rows are named twice in take({list(rows)})"
            )
        # ascending, so that a shard finds its own: one row of a large batch costs little
        taken = sorted((row, position) for position, row in enumerate(rows))
        taken_rows = [row for row, _ in taken]
        shards = []
        for shard in self.shards:
            first = bisect_left(taken_rows, shard.offset)
            stop = bisect_left(taken_rows, shard.offset + shard.batch_size)
            # (row in the new batch, row of the sealed shard), ascending in the new batch
            moved = sorted(
                (position, shard.shard_rows[row - shard.offset])
                for row, position in taken[first:stop]
            )
            # a run of consecutive new rows has a constant difference to its rank
            for _, run in itertools.groupby(enumerate(moved), lambda item: item[1][0] - item[0]):
                pieces = [item for _, item in run]
                shards.append(
                    replace(
                        shard,
                        batch_size=len(pieces),
                        offset=pieces[0][0],
                        shard_rows=tuple(shard_row for _, shard_row in pieces),
                    )
                )
        shards.sort(key=lambda shard: shard.offset)
        return replace(
            self,
            total_batch_size=len(rows),
            shards=tuple(shards),
            rows=tuple(self.rows[row] for row in rows),
        )

    def union(self, other: BatchMetadata) -> BatchMetadata:
        """These rows with the fields of both batches.

        Raises: MetadataError: the rows differ, or a field is in both.
        """
        if self.total_batch_size != other.total_batch_size:
            raise MetadataError(
                f"union: batch {self.batch_id} has {self.total_batch_size} rows, "
                f"batch {other.batch_id} has {other.total_batch_size}"
            )
        for i, (mine, theirs) in enumerate(zip(self.rows, other.rows, strict=True)):
            if _identity(mine) != _identity(theirs):
                raise MetadataError(
                    f"union: row {i} is {_identity(mine)} (group, attempt, length) in batch "
                    f"{self.batch_id}, but {_identity(theirs)} in batch {other.batch_id}"
                )
        twice = sorted(set(self.fields) & set(other.fields))
        if twice:
            raise MetadataError(
                f"union: batches {self.batch_id} and {other.batch_id} both hold {twice}"
            )
        return replace(self, shards=self.shards + other.shards)

    def with_advantages(self, advantages: Sequence[float]) -> BatchMetadata:
        """The same batch with one advantage per row.

        Raises: MetadataError: the number of advantages is not the number of rows, or the batch has
            a field of advantages.
        """
        if "advantages" in self.fields:
            raise MetadataError(f"batch {self.batch_id} has advantages of its tokens already")
        if len(advantages) != self.total_batch_size:
            raise MetadataError(
                f"batch {self.batch_id} has {self.total_batch_size} rows, "
                f"got {len(advantages)} advantages"
            )
        rows = tuple(
            replace(row, advantage=float(a)) for row, a in zip(self.rows, advantages, strict=True)
        )
        return replace(self, rows=rows)

    def partition(self, n: int, balance: Balance = "tokens") -> list[list[int]]:
        """Row numbers of `n` parts; every row is in exactly one, ascending within its part.

        `tokens` puts the longest rows first into the lightest part, so parts differ by at most one
        longest row; rows of advantage 0 count as 0 tokens there, since nothing is computed on
        them. `rows` cuts consecutive runs whose sizes differ by at most one. Parts may be empty
        when there are fewer rows than parts.

        Raises: MetadataError: n < 1.
        """
        if n < 1:
            raise MetadataError(f"batch {self.batch_id}: cannot be split into {n} parts")
        if balance == "rows":
            bounds = [self.total_batch_size * i // n for i in range(n + 1)]
            return [list(range(a, b)) for a, b in itertools.pairwise(bounds)]
        lengths = [0 if row.advantage == 0 else row.sequence_length for row in self.rows]
        parts: list[list[int]] = [[] for _ in range(n)]
        loads = [0] * n
        for row in sorted(range(self.total_batch_size), key=lambda row: (-lengths[row], row)):
            lightest = min(range(n), key=lambda part: (loads[part], len(parts[part]), part))
            parts[lightest].append(row)
            loads[lightest] += lengths[row]
        return [sorted(part) for part in parts]

    def split(self, n: int, balance: Balance = "tokens") -> list[BatchMetadata]:
        """The batch as `n` batches; see `partition`."""
        return [self.take(rows) for rows in self.partition(n, balance)]


def concat(
    batches: Sequence[BatchMetadata],
    *,
    batch_id: str,
    global_step: int,
    min_token_version: int | None = None,
) -> BatchMetadata:
    """The rows of all batches, one after the other.

    Raises: MetadataError: no batches, or batches with different fields.
    """
    if not batches:
        raise MetadataError("concat needs at least one batch, got 0")
    filled = [batch for batch in batches if batch.total_batch_size]
    for batch in filled[1:]:
        if set(batch.fields) != set(filled[0].fields):
            raise MetadataError(
                f"concat: batch {filled[0].batch_id} has fields {sorted(filled[0].fields)}, "
                f"batch {batch.batch_id} has {sorted(batch.fields)}"
            )
    shards: list[ShardMetadata] = []
    rows: list[RowMetadata] = []
    for batch in filled:
        shards += [replace(shard, offset=shard.offset + len(rows)) for shard in batch.shards]
        rows += batch.rows
    return BatchMetadata(
        batch_id, global_step, len(rows), tuple(shards), tuple(rows), min_token_version
    )


def _identity(row: RowMetadata) -> tuple[int, int, int]:
    return row.group_id, row.attempt, row.sequence_length
