"""What a version of the weights is, as controllers and workers tell each other; without values.

It is whole in the ranks' sealed shards, of an adapter or of all parameters, with what has changed
since another version beside them; or in a folder; or broadcast meanwhile.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Literal, NamedTuple

from msgspec import Struct

from areal_sc.errors import MetadataError, ModelError


class ShardReference(NamedTuple):
    """Where a sealed shard is; see `ShardMetadata`."""

    node_id: str
    node_addr: str
    shard_id: str


class BucketLayout(Struct, frozen=True, array_like=True):
    """The parameters of one broadcast, in the order of its bytes: the widest dtypes first."""

    names: tuple[str, ...]
    dtypes: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        if not len(self.names) == len(self.dtypes) == len(self.shapes):
            raise MetadataError(
                f"a bucket of {len(self.names)} names, {len(self.dtypes)} dtypes and "
                f"{len(self.shapes)} shapes"
            )


class WeightGroup(Struct, frozen=True, array_like=True):
    """What a rank needs to join the process group that weights are broadcast to.

    Attributes:
        name: a new one for every group.
        master_address, master_port: where rank 0, the trainer's, listens.
        world_size: that rank, and the generating ones.
        backend: `gloo` where a rank computes on a CPU.
    """

    name: str
    master_address: str
    master_port: int
    world_size: int
    backend: Literal["nccl", "gloo"]


class WeightBroadcast(Struct, frozen=True, array_like=True):
    """Weights that are broadcast to the process group `group` while they are published.

    Attributes:
        root: the shard of the rank that broadcasts.
        buckets: the broadcasts, in their order.
    """

    group: str
    root: ShardReference
    buckets: tuple[BucketLayout, ...]


class WeightChanges(Struct, frozen=True, array_like=True):
    """What makes the weights of a version of those of another one; see `changes`.

    Attributes:
        base: (lineage, version) of the other one.
        shards: each rank's sealed part.
        num_bytes: of all of them.
    """

    base: tuple[int, int]
    shards: tuple[ShardReference, ...]
    num_bytes: int


class WeightsReference(Struct, frozen=True, array_like=True):
    """Where the weights of one policy version are.

    Attributes:
        lineage, version: name the policy; 0 where a lineage is of no interest.
        shards: each rank's sealed part; () when `folder` is set.
        folder: a Hugging Face folder that holds them; "" when they are sealed. Where there are
            neither, they are those of the model's own folder.
        nodes: tokens of the nodes whose shared memory the shards lie in.
        broadcast: how they come to the ranks of a group; None: they are pulled.
        changes: which whoever has their base pulls in place of the shards; None: there are none.
    """

    version: int
    shards: tuple[ShardReference, ...] = ()
    folder: str = ""
    broadcast: WeightBroadcast | None = None
    lineage: int = 0
    nodes: tuple[str, ...] = ()
    changes: WeightChanges | None = None

    @property
    def is_of_model_folder(self) -> bool:
        """Whether they are those that an engine begins with."""
        return not (self.shards or self.folder or self.broadcast)

    @property
    def policy(self) -> tuple[int, int]:
        """(lineage, version), which name it."""
        return self.lineage, self.version


def check_shapes(
    given: Mapping[str, tuple[int, ...]], expected: Mapping[str, tuple[int, ...]], whose: str
) -> None:
    """Compares parameters by name and shape, which may be flat.

    Args:
        expected: of the model; when empty, nothing is known or compared.
        whose: for the message.
    Raises: ModelError: a parameter is missing, unknown, or of another shape.
    """
    if not expected:
        return
    if given.keys() != expected.keys():
        missing, unknown = sorted(expected.keys() - given), sorted(given.keys() - expected)
        raise ModelError(
            f"{whose} do not fit the model: {len(missing)} parameters are missing "
            f"({', '.join(missing[:3])}), {len(unknown)} unknown ({', '.join(unknown[:3])})"
        )
    for name, shape in given.items():
        if shape not in (expected[name], (prod(expected[name]),)):
            raise ModelError(
                f"{whose} do not fit the model: {name} has shape {shape}, expected {expected[name]}"
            )
