"""The methods of the workers: name, arguments, reply and deadline of each, declared once. No torch.

The methods of every worker come first, then those of train workers, then those of rollout workers.
A method whose arguments are a `Change` changes the worker's state, or writes: the change names its
operation, which runs once however often it is asked for (see `operations`).
"""

from __future__ import annotations

from enum import StrEnum
from types import NoneType
from typing import Final

from msgspec import Struct
from msgspec.structs import asdict

from areal_sc.engines.base import RankPosition
from areal_sc.metadata import BatchMetadata, PromptReference
from areal_sc.rejection import Rejection
from areal_sc.transport.plane_stats import PlaneStats
from areal_sc.transport.rpc.method import Method
from areal_sc.transport.security.passes import CONTROLLER, Caller
from areal_sc.weights import BucketLayout, ShardReference, WeightGroup, WeightsReference
from areal_sc.workers.operations import Operation

SAMPLE_TIMEOUT_S: Final = 10.0
"""Samples that are not there by then are missing."""

SHUTDOWN_TIMEOUT_S: Final = 2.0
"""A worker that has not answered by then is ended."""

Numbers = dict[str, int | float]
"""Metrics, or counters, by name; whole numbers stay whole."""


class Change(Struct, frozen=True, array_like=True):
    """What a method that changes state is asked to do."""

    operation: Operation


class Sweep(Struct, frozen=True, array_like=True):
    """Which shards to forget: those in `dead`, and those up to `acknowledged` that are not live.

    Attributes:
        live, dead: numbers of the worker's own shards.
        adopted_live: ids of those to keep of an earlier life of the worker; None keeps all.
    """

    acknowledged: int
    live: tuple[int, ...] = ()
    dead: tuple[int, ...] = ()
    adopted_live: tuple[str, ...] | None = None


class WorkerStats(Struct, frozen=True):
    """Counters of a worker.

    Attributes:
        plane: of its store and data plane.
        control_refused: connections and calls of strangers, calls of those who may not make them,
            and messages that no correct peer sends, on the control socket.
        engine: of its engine, which has its own names for them.
        warnings: in its log since it was asked before, each once.
    """

    plane: PlaneStats
    control_refused: int = 0
    engine: Numbers = {}
    warnings: tuple[str, ...] = ()

    def as_metrics(self) -> dict[str, float]:
        """All of them by name."""
        return {**asdict(self.plane), "control_refused": self.control_refused, **self.engine}


PING = Method("ping", NoneType, NoneType)
SWEEP = Method("sweep", Sweep, int)
"""Its reply is the number of the newest shard in the store."""
ADOPTED_SHARDS = Method("adopted_shards", NoneType, tuple[str, ...])
"""Ids of the shards of earlier lives of the worker that it has taken over, and still holds."""
STATS = Method("stats", NoneType, WorkerStats)
SHUTDOWN = Method("shutdown", NoneType, NoneType, deadline_s=SHUTDOWN_TIMEOUT_S)


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


class SealedShard(Struct, frozen=True, array_like=True):
    """A new shard, whose id is "" if there was nothing to seal.

    Attributes:
        last_sequence: number of the newest shard in the store.
    """

    shard: ShardReference
    last_sequence: int


class Compute(Struct, frozen=True, array_like=True):
    """What the model says of the rows of this rank, as a new field of theirs.

    Attributes:
        batch: the rows, with the fields that the model reads.
        output: as `TrainEngine.forward` takes it.
        field: name of the new field.
    """

    batch: BatchMetadata
    output: str
    field: str


class PPOUpdate(Change, frozen=True, array_like=True):
    """One optimizer update for each minibatch, of the rows of this rank."""

    minibatches: tuple[BatchMetadata, ...]


class SFTUpdate(Change, frozen=True, array_like=True):
    """One optimizer update on rows `indices` of a registered dataset; makes the next version."""

    dataset: int
    indices: tuple[int, ...]


class SealWeights(Change, frozen=True, array_like=True):
    """The weights are sealed, and the policy version becomes `version`."""

    version: int


class SaveWeights(Change, frozen=True, array_like=True):
    """The weights are written to a folder, and the policy version becomes `version`.

    Attributes:
        oldest: version that somebody may still read; the folders of earlier ones go.
        run: folder of the run; tells its folders from those of other runs.
    """

    version: int
    oldest: int
    run: str


class SavedWeights(Struct, frozen=True, array_like=True):
    """Weights in a folder; `last_sequence` as in `SealedShard`."""

    folder: str
    last_sequence: int


class SnapshotPlace(StrEnum):
    """Where a state is that ranks begin from.

    disk: a snapshot in the run folder.
    memory: a snapshot in the memory of the node, which is gone with the node.
    initial: the model that the engine was built with.
    """

    disk = "disk"
    memory = "memory"
    initial = "initial"


class Snapshot(Change, frozen=True, array_like=True):
    """A snapshot of the operation's version is written to a place, or loaded from it.

    Attributes:
        kept: before one is written in memory, those there go but for that of this version.
    """

    place: SnapshotPlace
    kept: int = -1


MEMORY_SNAPSHOT: Final = "memory_snapshot"
"""Name of the operation that writes one in memory."""


class OpenWeightGroup(Struct, frozen=True, array_like=True):
    """A weight group of rank 0 and the generating ranks, which rank 0 is to open.

    Attributes:
        is_cuda: all generating ranks compute on GPUs.
        devices: their GPUs, as far as they are known, as `own_devices` names them.
    """

    name: str
    world_size: int
    is_cuda: bool
    devices: tuple[str, ...]


class SentWeights(Struct, frozen=True, array_like=True):
    """The end of a broadcast; `failure` says why not all was sent, "" if it was."""

    num_bytes: int
    failure: str


CREATE_RENDEZVOUS = Method("create_rendezvous", NoneType, str)
INITIALIZE_RANK = Method("initialize_rank", InitializeRank, RankPosition)
COMPUTE = Method("compute", Compute, SealedShard)
"""The head of each model group seals the field of its rows."""
PPO_UPDATE = Method("ppo_update", PPOUpdate, Numbers)
SFT_UPDATE = Method("sft_update", SFTUpdate, Numbers)
SEAL_WEIGHTS = Method("seal_weights", SealWeights, SealedShard)
SAVE_WEIGHTS = Method("save_weights", SaveWeights, SavedWeights, writes=True)
"""Also waits for a snapshot that is being written."""
OPEN_WEIGHT_GROUP = Method("open_weight_group", OpenWeightGroup, WeightGroup)
MEET_WEIGHT_GROUP = Method("meet_weight_group", int, NoneType)
"""Its argument is the number of ranks."""
WEIGHT_LAYOUTS = Method("weight_layouts", NoneType, tuple[BucketLayout, ...])
BROADCAST_WEIGHTS = Method("broadcast_weights", NoneType, SentWeights)
CANCEL_BROADCAST = Method("cancel_broadcast", str, NoneType, callers=CONTROLLER | {Caller.rollout})
"""Its argument is the weight group. Also called by rollout workers, whose servers have refused."""
BEGIN_SAVE_HF = Method("begin_save_hf", Change, str, writes=True)
"""Takes the weights for a Hugging Face folder below the run folder, and names that folder."""
BEGIN_SNAPSHOT = Method("begin_snapshot", Snapshot, NoneType, writes=True)
"""Takes this rank's part of a snapshot; one on the disk is completed by the controller."""
DROP_MEMORY_SNAPSHOTS = Method("drop_memory_snapshots", NoneType, NoneType)
"""Drops this model's snapshots in memory on the node: what cannot be spared needs their room."""
FINISH_WRITE = Method("finish_write", Change, NoneType, writes=True)
"""Replies when what the operation took is on the disk."""
LOAD_SNAPSHOT = Method("load_snapshot", Snapshot, NoneType, ships=True)
"""Goes to the state of the operation's version, in its lineage."""


class RunGroup(Struct, frozen=True, array_like=True):
    """Episodes of one prompt, to be run beside each other."""

    group_id: int
    attempt: int
    admitted_version: int
    prompt: PromptReference
    workflow: int
    group_size: int


class RejectedEpisodes(Struct, frozen=True, array_like=True):
    """Episodes of a group that were rejected for the same cause, and the first of them."""

    num_episodes: int
    first: Rejection


class GroupAttempt(Struct, frozen=True, array_like=True):
    """One run of a group."""

    group_id: int
    attempt: int


class GroupReply(Struct, frozen=True, array_like=True):
    """What became of a group.

    Attributes:
        run: of which this is the end.
        batch: its rows; None if all were rejected, or the group was given up meanwhile.
        rejected: one for each cause.
        metrics: metric of the workflow -> (sum, number of episodes).
        warning: what the user should know of the prompt; "" if there is nothing.
        num_waiting: answers that wait for a place in the engine.
    """

    run: GroupAttempt
    batch: BatchMetadata | None = None
    rejected: tuple[RejectedEpisodes, ...] = ()
    metrics: dict[str, tuple[float, int]] = {}
    warning: str = ""
    num_waiting: int = 0


class RunEvaluation(Struct, frozen=True, array_like=True):
    """One episode of which nothing is kept.

    Attributes:
        temperature: replaces that of the run; None keeps it.
    """

    prompt: PromptReference
    workflow: int
    temperature: float | None = None


class EvaluationReply(Struct, frozen=True, array_like=True):
    """What an evaluated episode gave.

    Attributes:
        reward: None where the episode was rejected.
        versions: lowest and highest policy version that sampled a token.
    """

    reward: float | None
    metrics: dict[str, float] = {}
    versions: tuple[int, int] = (0, 0)
    rejection: Rejection | None = None


class Waiting(Struct, frozen=True, array_like=True):
    """Running episodes that wait for the same, and for how long the first of them does."""

    what: str
    num_episodes: int
    longest_s: float


class EpisodesReport(Struct, frozen=True, array_like=True):
    """What the episodes of a worker do, those of evaluations included.

    Attributes:
        num_kept, num_rejected: those that have ended, since the worker's start.
        new_causes: the first rejection of each cause that no earlier report told.
    """

    waiting: tuple[Waiting, ...] = ()
    num_kept: int = 0
    num_rejected: int = 0
    new_causes: tuple[Rejection, ...] = ()


class WeightRanks(Struct, frozen=True, array_like=True):
    """What the engine of a worker needs in a weight group.

    Attributes:
        devices: its GPUs, as `own_devices` names them.
        is_member: all its ranks are in the group that was asked for.
    """

    num_ranks: int
    is_cuda: bool
    devices: tuple[str, ...]
    is_member: bool


class JoinWeightGroup(Struct, frozen=True, array_like=True):
    """A weight group to join, with consecutive ranks."""

    group: WeightGroup
    first_rank: int


class CopyWeights(Struct, frozen=True, array_like=True):
    """Published weights of which the worker is to keep a copy, in place of the one before.

    Attributes:
        spare_bytes: of its node's shared memory, so much must stay free for rows.
    """

    weights: WeightsReference
    spare_bytes: int


class ReadTexts(Struct, frozen=True, array_like=True):
    """Rows that lie in the worker's own store, to be read as text.

    Attributes:
        batch: the rows, with `input_ids` and `loss_mask` alone.
        max_chars: longer texts are cut.
    """

    batch: BatchMetadata
    max_chars: int


class RowText(Struct, frozen=True, array_like=True):
    """A row as text, with special tokens.

    Attributes:
        prompt: what stands before the first trained token.
        answer: all that follows.
        metrics: what the workflow reports of the row.
    """

    prompt: str
    answer: str
    metrics: dict[str, float]


INITIALIZE_ENGINE = Method("initialize_engine", NoneType, NoneType)
"""Once; a repeat waits for the first one."""
RUN_GROUP = Method("run_group", RunGroup, GroupReply)
"""A run is played once: a repeat joins it, or gets its reply again; see `group_runs`."""
GIVE_UP_GROUP = Method("give_up_group", GroupAttempt, NoneType)
"""Ends a run, if it goes on; nothing more comes of it when this replies."""
EPISODES = Method("episodes", NoneType, EpisodesReport)
RUN_EVALUATION = Method("run_evaluation", RunEvaluation, EvaluationReply)
READ_TEXTS = Method("read_texts", ReadTexts, tuple[RowText, ...], deadline_s=SAMPLE_TIMEOUT_S)
UPDATE_WEIGHTS = Method("update_weights", WeightsReference, NoneType)
COPY_WEIGHTS = Method("copy_weights", CopyWeights, ShardReference)
"""Its reply is the copy, which the worker serves until it has newer weights."""
WEIGHT_RANKS = Method("weight_ranks", str, WeightRanks)
"""Its argument is the weight group."""
JOIN_WEIGHT_GROUP = Method("join_weight_group", JoinWeightGroup, NoneType)
LEAVE_WEIGHT_GROUP = Method("leave_weight_group", str, NoneType)
PAUSE = Method("pause", NoneType, NoneType)
RESUME = Method("resume", NoneType, NoneType)
