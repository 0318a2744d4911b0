"""The methods of workers that bring weights from ranks to generation. No torch.

Of the ranks of a trainer: `seal`, `save` and `broadcast`. Of rollout workers: `adopt`, `copy`, and
being in a weight group.
"""

from __future__ import annotations

from types import NoneType

from msgspec import Struct

from areal_sc.transport.rpc.method import Method
from areal_sc.transport.security.passes import CONTROLLER, Caller
from areal_sc.transport.shards.ids import parse_shard_id
from areal_sc.weights.published import (
    BucketLayout,
    ShardReference,
    WeightChanges,
    WeightGroup,
    WeightsReference,
)
from areal_sc.workers.calls import SealedShard
from areal_sc.workers.rank_methods import Change


class SealWeights(Change, frozen=True, array_like=True):
    """The weights are sealed, and the policy version becomes `version`."""

    version: int


class SaveWeights(SealWeights, frozen=True, array_like=True):
    """The weights are written to a folder, and the policy version becomes `version`.

    Attributes:
        oldest: version that somebody may still read; the folders of earlier ones go.
        run: folder of the run; tells its folders from those of other runs.
    """

    oldest: int
    run: str


class SavedWeights(Struct, frozen=True, array_like=True):
    """Weights in a folder; `last_sequence`: see `SealedShard`."""

    folder: str
    last_sequence: int


class SealedWeights(SealedShard, frozen=True, array_like=True):
    """A rank's part of a version.

    Attributes:
        num_bytes: of the whole part.
        changes: since the version that the rank has published before, in one shard.
    """

    num_bytes: int = 0
    changes: WeightChanges | None = None

    @property
    def live(self) -> tuple[int, ...]:
        """Numbers of the shards."""
        shards = [self.shard, *(self.changes.shards if self.changes else ())]
        return tuple(parse_shard_id(shard.shard_id)[1] for shard in shards)


class OpenWeightGroup(Struct, frozen=True, array_like=True):
    """A weight group of rank 0 and the generating ranks, which rank 0 is to open.

    Attributes:
        is_cuda: all generating ranks compute on GPUs.
        devices: names of their GPUs by `own_devices`, as far as they are known.
    """

    name: str
    world_size: int
    is_cuda: bool
    devices: tuple[str, ...]


class SentWeights(Struct, frozen=True, array_like=True):
    """The end of a broadcast; `failure` says why not all was sent, "" if it was."""

    num_bytes: int
    failure: str


class WeightRanks(Struct, frozen=True, array_like=True):
    """What the engine of a worker needs in a weight group.

    Attributes:
        devices: names of its GPUs by `own_devices`.
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
        base: a copy of the version that `weights.changes` are of, on its node.
    """

    weights: WeightsReference
    spare_bytes: int
    base: ShardReference | None = None


SEAL_WEIGHTS = Method("seal_weights", SealWeights, SealedWeights)
SAVE_WEIGHTS = Method("save_weights", SaveWeights, SavedWeights, writes=True)
"""Also waits for a snapshot that is being written."""
OPEN_WEIGHT_GROUP = Method("open_weight_group", OpenWeightGroup, WeightGroup)
MEET_WEIGHT_GROUP = Method("meet_weight_group", int, NoneType)
"""Its argument is the number of ranks."""
WEIGHT_LAYOUTS = Method("weight_layouts", NoneType, tuple[BucketLayout, ...])
BROADCAST_WEIGHTS = Method("broadcast_weights", NoneType, SentWeights)
CANCEL_BROADCAST = Method("cancel_broadcast", str, NoneType, callers=CONTROLLER | {Caller.rollout})
"""Its argument is the weight group. Also called by rollout workers, whose servers have refused."""
ADOPT_WEIGHTS = Method("adopt_weights", WeightsReference, NoneType)
"""The engine of the worker has these weights when this replies."""
COPY_WEIGHTS = Method("copy_weights", CopyWeights, tuple[ShardReference, ...])
"""Its reply is the copy, which the worker serves until it has newer weights; and one of the changes
behind it, if it has them."""
WEIGHT_RANKS = Method("weight_ranks", str, WeightRanks)
"""Its argument is the weight group."""
JOIN_WEIGHT_GROUP = Method("join_weight_group", JoinWeightGroup, NoneType)
LEAVE_WEIGHT_GROUP = Method("leave_weight_group", str, NoneType)
