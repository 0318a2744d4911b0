"""Published weights: what controllers and workers tell each other of them. They never hold one.

The types travel as they are, as msgpack lists.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from msgspec import Struct

from areal_sc.errors import MetadataError


class ShardReference(NamedTuple):
    """Where a sealed shard is; see `ShardMetadata`."""

    node_id: str
    node_addr: str
    shard_id: str


class BucketLayout(Struct, frozen=True, array_like=True):
    """What one broadcast of weights holds, in the order of its bytes.

    Attributes:
        names, dtypes, shapes: of the parameters, the widest types first.
    """

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
        name: of the group; a new one for every group.
        master_address, master_port: where rank 0 listens.
        world_size: 1, and the generating ranks.
        backend: `gloo` where a rank computes on a CPU.
    """

    name: str
    master_address: str
    master_port: int
    world_size: int
    backend: Literal["nccl", "gloo"]


class WeightBroadcast(Struct, frozen=True, array_like=True):
    """Weights that a rank of the trainer broadcasts to a process group while they are published.

    Attributes:
        group: name of the group.
        root: the shard of the rank that broadcasts.
        buckets: the broadcasts, in their order.
    """

    group: str
    root: ShardReference
    buckets: tuple[BucketLayout, ...]


class WeightsReference(Struct, frozen=True, array_like=True):
    """Where the weights of one policy version are.

    Attributes:
        version: the policy version.
        shards: each rank's sealed part; () when `folder` is set.
        folder: a Hugging Face folder that holds them; empty when they are sealed.
        broadcast: how they come to the ranks of a group; None: they are pulled.
    """

    version: int
    shards: tuple[ShardReference, ...] = ()
    folder: str = ""
    broadcast: WeightBroadcast | None = None
