"""The methods of ranks: name, arguments, reply and deadline of each, declared once. No torch.

A method whose arguments are a `Change` changes the rank's state, or writes: the change names its
operation, which runs once however often it is asked for (see `operations`). What a rank does is in
files by subject: `rank_updates`, `begun_writes`, and `weights/rank_weights.py`, whose methods are
declared in `weights/methods.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from types import NoneType
from typing import Self

from msgspec import Struct
from msgspec.structs import replace

from areal_sc.config.optimizer_settings import OptimizerConfig
from areal_sc.engines.base import AdapterBeginning, RankPosition
from areal_sc.metadata import BatchMetadata
from areal_sc.token_fields import TOP_LOGPROBS, TOP_TOKENS
from areal_sc.transport.rpc.method import Method
from areal_sc.workers.calls import Numbers, SealedShard
from areal_sc.workers.operations import Operation

BatchMap = Callable[[BatchMetadata], BatchMetadata]


class RankCall(Struct, frozen=True, array_like=True):
    """What the ranks of a model are asked to do, and asked again after a death."""

    @property
    def batches(self) -> tuple[BatchMetadata, ...]:
        """The rows that it reads."""
        return ()

    def on(self, current: BatchMap) -> Self:
        """The same call on rows that may lie in other shards by now."""
        return self


class Change(RankCall, frozen=True, array_like=True):
    """What a method that changes state is asked to do."""

    operation: Operation


class InitializeRank(Struct, frozen=True, array_like=True):
    """What a rank needs to join the others and to build the model.

    Attributes:
        init_method: the ranks' meeting point; "" where there is one rank.
        lineage: of the weights that it begins with; 0: none, a snapshot is loaded next.
    """

    rank: int
    world_size: int
    init_method: str
    lineage: int


class Compute(RankCall, frozen=True, array_like=True):
    """What the model says of the rows of this rank, as new fields of theirs.

    Attributes:
        batch: the rows, with the fields that the model reads.
        output: an argument of `TrainEngine.forward`; or the number of a registered token function,
            which reads the rows alone.
        field: name of the new field.
        num_left_out: rows at the beginning that it does without, and holds NaN.
        top_k: not 0: in place of all that, `TOP_LOGPROBS` and `TOP_TOKENS` of so many tokens.
    """

    batch: BatchMetadata
    output: str | int
    field: str
    num_left_out: int = 0
    top_k: int = 0

    @property
    def types(self) -> dict[str, str]:
        """The new fields, and their types."""
        if not self.top_k:
            return {self.field: "float32"}
        return {TOP_LOGPROBS: f"float32[{self.top_k}]", TOP_TOKENS: f"int32[{self.top_k}]"}

    @property
    def batches(self) -> tuple[BatchMetadata, ...]:
        return (self.batch,)

    def on(self, current: BatchMap) -> Self:
        return replace(self, batch=current(self.batch))


class Demonstrations(Struct, frozen=True):
    """Rows `indices` of a registered dataset, each a demonstration or a pair of them.

    Attributes:
        places: of each among those of all ranks.
        adapters: the place of each row's adapter; (): of all rows that is 0.
    """

    dataset: int
    indices: tuple[int, ...]
    places: tuple[int, ...]
    adapters: tuple[int, ...] = ()


class ScoreRows(RankCall, frozen=True, array_like=True):
    """What the model says of these rows, which stay where they are.

    Attributes:
        output: `logprobs`: a row's is the sum over its trained tokens, in nats; `scores`, of a
            model with a value head: that of its last trained token.
        per_token: in place of that, one a token, [T]; 0 where it is not trained.
    """

    rows: Demonstrations
    output: str = "logprobs"
    per_token: bool = False


class TryLoss(RankCall, frozen=True, array_like=True):
    """A registered loss is called once, on a row that is made up: so what is wrong is known."""

    loss: int


Rows = tuple[BatchMetadata, ...] | Demonstrations
"""What an update trains on: the minibatches of a batch, or one of demonstrations."""


class Update(Change, frozen=True, array_like=True):
    """One optimizer update for each minibatch, of the rows of this rank.

    Attributes:
        loss: number of the registered loss.
        rows: of this rank's share.
        advances: it makes the next version by itself.
        optimizers: of this update alone, by the place of an adapter; None: that of the model.
    """

    loss: int
    rows: Rows
    advances: bool
    optimizers: dict[int, OptimizerConfig] | None = None

    @property
    def batches(self) -> tuple[BatchMetadata, ...]:
        return () if isinstance(self.rows, Demonstrations) else self.rows

    def on(self, current: BatchMap) -> Self:
        if isinstance(self.rows, Demonstrations):
            return self
        return replace(self, rows=tuple(map(current, self.rows)))


class FillAdapter(Change, frozen=True, array_like=True):
    """See `TrainEngine.fill_adapter`; the script names the folder."""

    place: int
    beginning: AdapterBeginning


class SnapshotPlace(StrEnum):
    """Where a state is that ranks begin from.

    disk: a snapshot in the run folder.
    memory: a snapshot in the memory of the node, which is gone with the node.
    initial: the model that the engine was built with.
    """

    disk = "disk"
    memory = "memory"
    initial = "initial"


class Write(Change, frozen=True, array_like=True):
    """The kind of the operation says what is written: a snapshot to the disk, or a Hugging Face
    folder.

    Attributes:
        call: names the call of the script, whose repeats join the write.
        adapter: the place whose adapter alone is written; None: the model.
        with_optimizer: and what AdamW knows of it.
    """

    call: str
    adapter: int | None = None
    with_optimizer: bool = False


class KeepState(Change, frozen=True, array_like=True):
    """The state of the operation's version is copied to the memory of the node.

    Attributes:
        beside: version whose copy there stays; -1: none has to.
    """

    beside: int


class Load(Change, frozen=True, array_like=True):
    """The snapshot of the operation's version is loaded from a place."""

    place: SnapshotPlace


class RankDescription(Struct, frozen=True, array_like=True):
    """Where a rank stands.

    Attributes:
        position: None: it has not joined the others yet.
        world_size: of the ranks that it has joined.
        broken: why its weights are between two versions; "" if they are not.
        operations: those that it has done, or was asked for, at its version and the one before.
        num_computed: times that it was asked to compute a field of rows.
        is_computing: some of these calls go on.
        in_memory: versions of this lineage whose snapshots in memory are whole.
    """

    lineage: int
    version: int
    position: RankPosition | None = None
    world_size: int = 0
    broken: str = ""
    operations: tuple[Operation, ...] = ()
    num_computed: int = 0
    is_computing: bool = False
    in_memory: tuple[int, ...] = ()


CREATE_RENDEZVOUS = Method("create_rendezvous", NoneType, str)
INITIALIZE_RANK = Method("initialize_rank", InitializeRank, RankPosition, writes=True)
"""It reads the model and tries it, which takes the longer the larger the model is."""
COMPUTE = Method("compute", Compute, SealedShard)
"""The head of each model group seals the field of its rows."""
SCORE = Method("score", ScoreRows, tuple[tuple[float, ...], ...])
"""One number a demonstration; two a pair, of chosen and rejected; or one a token."""
SCORE_BATCH = Method("score_batch", Compute, tuple[float, ...])
"""A number a row, the sum of the field over its trained tokens, which stays where it is; of
`scores`, which a model has with a value head, the one behind the last trained token."""
TRY_LOSS = Method("try_loss", TryLoss, tuple[str, ...])
"""The names of its metrics."""
UPDATE = Method("update", Update, Numbers)
FILL_ADAPTER = Method("fill_adapter", FillAdapter, Numbers)
"""As an update it changes weights, and has no numbers to tell."""
BEGIN_WRITE = Method("begin_write", Write, str, writes=True)
"""Takes this rank's part of what is written, and names its folder. A snapshot on the disk is
completed by the controller."""
KEEP_STATE = Method("keep_state", KeepState, NoneType)
"""Takes a snapshot in memory, which is whole when this replies."""
DROP_MEMORY_SNAPSHOTS = Method("drop_memory_snapshots", NoneType, NoneType)
"""Drops this model's snapshots in memory on the node: what cannot be spared needs their room."""
FINISH_WRITE = Method("finish_write", Change, NoneType, writes=True)
"""Replies when what the operation took is on the disk."""
LOAD_SNAPSHOT = Method("load_snapshot", Load, NoneType, ships=True)
"""Goes to the state of the operation's version, in its lineage."""
DESCRIBE_RANK = Method("describe_rank", NoneType, RankDescription)
"""What it tells a controller that takes it over."""
