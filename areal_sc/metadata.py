"""Metadata: what controllers know about tensors that they never hold.

A batch is a table. Its rows are trajectories: an episode gives one or several. Its columns are
fields (`input_ids`, `behavior_logprobs`, ...). The values live in the tensor stores of workers, as
shards: some rows of some fields, packed without padding, immutable once sealed. `BatchMetadata`
says which shard holds which part of the table, and carries per row the few numbers that a
controller decides with (`RowMetadata`). All operations are pure; none touches a tensor.

These types travel as they are, as compact msgpack lists: a row takes some 40 bytes.

    rows     0   1   2   3   4
    ids     [shard a   ][shard b]     offset 0, 3
    logp    [shard a   ][shard b]
    prox    [shard p][shard q   ]     offset 0, 2: another split, after union()
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from statistics import fmean
from typing import Literal, NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from areal_sc.balance import GroupRows, spread_groups
from areal_sc.errors import MetadataError
from areal_sc.reward_signal import have_signal
from areal_sc.token_fields import TensorMetadata as TensorMetadata  # a public name here, too
from areal_sc.token_fields import field_type

MAX_RETURNS = 32
"""Answers of a row that may have returns of their own: each takes some 50 bytes of what travels."""


class PromptReference(Struct, frozen=True, array_like=True):
    """A prompt by name: row `index` of registered dataset `dataset`, sampled with `seed`."""

    dataset: int
    index: int
    seed: int


class RowMetadata(Struct, frozen=True, array_like=True, gc=False):
    """What a controller knows of one trajectory.

    Attributes:
        group_id: the group (prompt) that the trajectory belongs to.
        attempt: which run of the group produced it; only the current attempt counts.
        sequence_length: prompt and completion, in tokens.
        reward: the trajectory's scalar reward.
        admitted_version: policy version when the group was admitted.
        version_spans: (policy version, number of trained tokens sampled by it), ascending.
        episode: which of the group's episodes the trajectory is a row of, from 0.
        advantage: set by `TrainController.compute_advantages`; None before. A tuple has one
            for each of the row's returns.
        row: number within the episode, from 0.
        returns: (return, number of trained tokens) of each answer in the row, in their order; empty
            where the reward is that of all of them.
        shaping: the part of the reward, and of each return, that says nothing of how good the
            answer is: of its length, or of its distance to a reference.
        reward_parts: (name, value, weight) of each part of the reward; weight 0: it was measured
            alone. Empty where the reward is one number.
        prompt_length: tokens before the first trained one; 0: not known. The rows of a group are
            taken to begin with the same tokens, as many as the shortest of their prompts has.
    """

    group_id: int
    attempt: int
    sequence_length: int
    reward: float
    admitted_version: int
    version_spans: tuple[tuple[int, int], ...]
    episode: int
    advantage: float | tuple[float, ...] | None = None
    row: int = 0
    returns: tuple[tuple[float, int], ...] = ()
    shaping: float = 0.0
    reward_parts: tuple[tuple[str, float, float], ...] = ()
    prompt_length: int = 0

    @property
    def num_loss_tokens(self) -> int:
        return sum(count for _, count in self.version_spans)

    @property
    def parts(self) -> tuple[tuple[float, int], ...]:
        """(return, number of trained tokens): of each answer, or of the row."""
        return self.returns or ((self.reward, self.num_loss_tokens),)

    @property
    def judged(self) -> tuple[float, ...]:
        """What each of the parts has earned before anything shaped it."""
        return tuple(value - self.shaping for value, _ in self.parts)

    def with_more_reward(self, added: float, *, is_shaping: bool) -> RowMetadata:
        """The same row, whose reward and returns are so much more."""
        returns = tuple((value + added, size) for value, size in self.returns)
        shaping = self.shaping + added if is_shaping else self.shaping
        return replace(self, reward=self.reward + added, returns=returns, shaping=shaping)

    def num_loss_tokens_since(self, version: int) -> int:
        """Number of trained tokens sampled by `version` or a later one."""
        return sum(count for span_version, count in self.version_spans if span_version >= version)


class RowRun(NamedTuple):
    """Consecutive rows of a shard at consecutive rows of a batch.

    Attributes:
        offset: first of the rows within the batch.
        first: the same row within the shard; of fields of groups, that of all the rows.
        num_rows: at least 1.
    """

    offset: int
    first: int
    num_rows: int


class ShardMetadata(Struct, frozen=True, array_like=True):
    """A sealed shard, and where its rows stand in a batch.

    Attributes:
        node_id: name of the worker whose store owns the shard, e.g. `rollout/0`.
        node_addr: ZMQ endpoint of that worker.
        shard_id: names the shard within the owner; it contains the owner's incarnation.
        runs: its rows that are in the batch, ascending in the batch.
    """

    node_id: str
    node_addr: str
    shard_id: str
    runs: tuple[RowRun, ...]


class Columns(Struct, frozen=True, array_like=True):
    """Fields of a batch whose values lie together, in the same shards.

    Attributes:
        dtypes: field -> type (`float32`, `uint8[48x8]`, `row:int32[?]`, ...), see `field_type`.
            Fields of groups lie in columns of their own.
        shards: their runs cover every row of the batch exactly once.
        is_computed: a model has computed the values from the rows' other fields; computed again,
            they lie in other shards.
    """

    dtypes: dict[str, str]
    shards: tuple[ShardMetadata, ...]
    is_computed: bool = False

    @property
    def are_of_groups(self) -> bool:
        """Whether all rows of a run have the same values."""
        return any(field_type(name).per == "group" for name in self.dtypes.values())


Balance = Literal["tokens", "episodes"]


class BatchMetadata(Struct, frozen=True, array_like=True):
    """The shards that together make one batch.

    Attributes:
        batch_id: unique within the run.
        global_step: the training step that the batch was formed for.
        columns: the fields, and where their values are; each field is in one of them.
        rows: per-row metadata.
        min_token_version: tokens sampled by an earlier version are not trained; None trains all.
        has_model_rewards: models have a part in the rows' rewards; computed again, these may differ
            by rounding.
    """

    batch_id: str
    global_step: int
    columns: tuple[Columns, ...]
    rows: tuple[RowMetadata, ...]
    min_token_version: int | None = None
    has_model_rewards: bool = False

    def __post_init__(self) -> None:
        if sum(len(columns.dtypes) for columns in self.columns) != len(self.fields):
            raise MetadataError(f"batch {self.batch_id}: a field is named twice")
        for columns in self.columns:
            next_row = 0
            for offset, first, count in sorted(run for s in columns.shards for run in s.runs):
                if offset != next_row or first < 0 or count < 1:
                    raise MetadataError(
                        f"batch {self.batch_id}, fields {list(columns.dtypes)}: expected rows of a "
                        f"shard at row {next_row}, got {count} from row {first} at row {offset}"
                    )
                next_row += count
            if next_row != self.total_batch_size:
                raise MetadataError(
                    f"batch {self.batch_id}, fields {list(columns.dtypes)}: shards hold {next_row} "
                    f"rows, the batch has {self.total_batch_size}"
                )

    @property
    def shards(self) -> tuple[ShardMetadata, ...]:
        """The shards of all columns."""
        return tuple(shard for columns in self.columns for shard in columns.shards)

    @property
    def dtypes(self) -> dict[str, str]:
        """Field -> its type, see `field_type`."""
        return {name: dtype for columns in self.columns for name, dtype in columns.dtypes.items()}

    @property
    def total_batch_size(self) -> int:
        """Number of rows."""
        return len(self.rows)

    @property
    def fields(self) -> tuple[str, ...]:
        """Names of the fields."""
        return tuple(self.dtypes)

    @property
    def sequence_lengths(self) -> tuple[int, ...]:
        """Tokens of each row."""
        return tuple(row.sequence_length for row in self.rows)

    @property
    def num_tokens(self) -> int:
        """Tokens of all rows."""
        return sum(self.sequence_lengths)

    @property
    def group_ids(self) -> tuple[int, ...]:
        """Distinct groups, in order of their first row."""
        return tuple(dict.fromkeys(row.group_id for row in self.rows))

    @property
    def groups_with_signal(self) -> set[int]:
        """Groups whose episodes differ in what they have earned; the others teach nothing.

        What shapes a reward, as a penalty for its length does, is no difference.
        """
        rewards: dict[int, list[tuple[float, ...]]] = {}
        for rows in self.episodes:
            its = tuple(value for row in rows for value in self.rows[row].judged)
            rewards.setdefault(self.rows[rows[0]].group_id, []).append(its)
        return {group for group, its in rewards.items() if have_signal(its)}

    @property
    def episodes(self) -> tuple[tuple[int, ...], ...]:
        """Row numbers of each episode, in order of its first row."""
        episodes: dict[tuple[int, int], list[int]] = {}
        for number, row in enumerate(self.rows):
            episodes.setdefault((row.group_id, row.episode), []).append(number)
        return tuple(map(tuple, episodes.values()))

    @property
    def episode_rewards(self) -> list[float]:
        """The reward of each episode, the mean over its rows; in the order of `episodes`."""
        return [fmean(self.rows[row].reward for row in rows) for rows in self.episodes]

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
        for columns in self.columns:
            dtypes = {name: columns.dtypes[name] for name in fields if name in columns.dtypes}
            if dtypes:
                kept.append(replace(columns, dtypes=dtypes))
        return replace(self, columns=tuple(kept))

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
        kept = []
        for columns in self.columns:
            shards, step = [], 0 if columns.are_of_groups else 1
            for shard in columns.shards:
                moved = []  # (row in the new batch, row of the sealed shard)
                for offset, first, count in shard.runs:
                    start = bisect_left(taken_rows, offset)
                    stop = bisect_left(taken_rows, offset + count, start)
                    its = taken[start:stop]
                    moved += [(new, first + step * (row - offset)) for row, new in its]
                if moved:
                    shards.append(replace(shard, runs=runs_of(moved, step)))
            kept.append(replace(columns, shards=tuple(shards)))
        return replace(self, columns=tuple(kept), rows=tuple(self.rows[row] for row in rows))

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
        return replace(self, columns=self.columns + other.columns)

    def add_rewards(self, rewards: Sequence[float], *, is_shaping: bool = False) -> BatchMetadata:
        """The same batch, with what models say of each row added to its reward.

        Args:
            is_shaping: they say nothing of how good an answer is, as the KL to a reference does
                not: rewards that differ in them alone have no signal.
        Raises: MetadataError: the number of rewards is not the number of rows, or one is not
            finite.
        """
        if len(rewards) != self.total_batch_size or not all(map(math.isfinite, rewards)):
            raise MetadataError(
                f"batch {self.batch_id} has {self.total_batch_size} rows: expected a finite number "
                f"for each, got {len(rewards)}: {list(rewards)!s:.200}"
            )
        pairs = zip(self.rows, rewards, strict=True)
        rows = tuple(row.with_more_reward(added, is_shaping=is_shaping) for row, added in pairs)
        return replace(self, rows=rows, has_model_rewards=True)

    def with_advantages(self, advantages: Sequence[float | tuple[float, ...]]) -> BatchMetadata:
        """The same batch with one advantage per row, or a tuple of one for each of its returns.

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
            replace(row, advantage=a if isinstance(a, tuple) else float(a))
            for row, a in zip(self.rows, advantages, strict=True)
        )
        return replace(self, rows=rows)

    def without_advantages(self) -> BatchMetadata:
        """The same batch, with no row's advantage known."""
        return replace(self, rows=tuple(replace(row, advantage=None) for row in self.rows))

    def partition(
        self, n: int, balance: Balance = "tokens", *, min_saved_tokens: float = math.inf
    ) -> list[list[int]]:
        """Row numbers of `n` parts; every row is in exactly one, ascending within its part.

        `tokens` gives all parts nearly equally many tokens to compute, and leaves the rows of a
        group together as far as that goes, see `spread_groups`. Rows of advantage 0 count as 0
        tokens, since nothing is computed on them. `episodes` keeps the rows of an episode together,
        and cuts consecutive runs whose numbers of episodes differ by at most one. Parts may be
        empty when there are fewer rows that count, or episodes, than parts.

        Args: min_saved_tokens: a group's prompt counts once in each part, if that saves so many
            tokens where the group is whole.
        Raises: MetadataError: n < 1.
        """
        if n < 1:
            raise MetadataError(f"batch {self.batch_id}: cannot be split into {n} parts")
        if balance == "episodes":
            episodes = self.episodes
            bounds = [len(episodes) * i // n for i in range(n + 1)]
            runs = (episodes[a:b] for a, b in itertools.pairwise(bounds))
            return [sorted(itertools.chain.from_iterable(run)) for run in runs]
        groups: dict[tuple[int, bool], list[int]] = {}
        for number, row in enumerate(self.rows):
            groups.setdefault((row.group_id, row.advantage == 0), []).append(number)
        given = []
        for number, ((_, is_left_out), rows) in enumerate(groups.items()):
            prompt = min(self.rows[row].prompt_length for row in rows)
            if is_left_out or (len(rows) - 1) * prompt < min_saved_tokens:
                prompt = 0
            own = (0 if is_left_out else self.rows[row].sequence_length - prompt for row in rows)
            in_order = sorted(zip(own, rows, strict=True), key=lambda it: (-it[0], it[1]))
            given.append(GroupRows(number, prompt, in_order))
        return spread_groups(given, n)

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
        if [c.dtypes for c in batch.columns] != [c.dtypes for c in filled[0].columns]:
            raise MetadataError(
                f"concat: batch {filled[0].batch_id} has fields {filled[0].dtypes}, "
                f"batch {batch.batch_id} has {batch.dtypes}"
            )
    starts = itertools.accumulate((batch.total_batch_size for batch in filled), initial=0)
    moves = list(zip(starts, filled, strict=False))  # the last one is the end of all
    columns = []
    for i, of_first in enumerate(filled[0].columns if filled else ()):
        shards = tuple(
            replace(shard, runs=tuple(RowRun(run.offset + by, *run[1:]) for run in shard.runs))
            for by, batch in moves
            for shard in batch.columns[i].shards
        )
        columns.append(replace(of_first, shards=shards))
    rows = tuple(row for batch in filled for row in batch.rows)
    return BatchMetadata(
        batch_id,
        global_step,
        tuple(columns),
        rows,
        min_token_version,
        has_model_rewards=any(batch.has_model_rewards for batch in filled),
    )


def runs_of(moved: Iterable[tuple[int, int]], step: int = 1) -> tuple[RowRun, ...]:
    """The runs of (row in the batch, row of the shard), which is `step` more at each next row."""
    runs = []
    # in a run both numbers grow as the place in the sorted list does
    places = enumerate(sorted(moved))
    for _, run in itertools.groupby(places, lambda at: (at[1][0] - at[0], at[1][1] - step * at[0])):
        pairs = [pair for _, pair in run]
        runs.append(RowRun(*pairs[0], len(pairs)))
    return tuple(runs)


def _identity(row: RowMetadata) -> tuple[int, int, int]:
    return row.group_id, row.attempt, row.sequence_length
