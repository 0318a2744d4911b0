"""The ranks of one engine: how they find each other, agree, and fail together.

world       all ranks
rows        ranks that hold the same cut of every parameter, of which FSDP spreads the rows over
            them; each computes other tokens
sequence    ranks of `rows` that get the same rows, and compute a part of their tokens each
tensor      ranks that compute the same tokens, with a cut of every layer each

rank        0 1   2 3   4 5   6 7      data: 2, sequence: 2, tensor: 2
tensor      0 1   0 1   0 1   0 1
sequence    0 0   1 1   0 0   1 1
rows        0 0   1 1   2 2   3 3
data        0 0   0 0   1 1   1 1
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, TCPStore

from areal_sc.config.parallel_settings import ParallelConfig
from areal_sc.config.schema import Device
from areal_sc.engines.base import RankPosition
from areal_sc.errors import ConfigError, WorkerStartError
from areal_sc.sizing.machine import resolved_device
from areal_sc.transport.sockets.interface import bracketed
from areal_sc.weights.group import listening_store

RENDEZVOUS_TIMEOUT = timedelta(seconds=120)
_LEAST_DRIVERS = {"12": 525, "13": 580}
"""The oldest driver for each major version of CUDA."""
COLLECTIVE_TIMEOUT = timedelta(days=30)
"""Above every deadline of a call: the controller restarts ranks that hang, with their stacks."""


def host_rendezvous(host: str) -> tuple[TCPStore, str]:
    """The ranks' meeting point, to be kept until they have met, and its `tcp://host:port`."""
    store = listening_store(host, RENDEZVOUS_TIMEOUT)
    return store, f"tcp://{bracketed(host)}:{store.port}"


@dataclass(frozen=True)
class ProcessGroup:
    """Some ranks of an engine, as one of them sees them. One rank alone may do without torch's.

    Attributes:
        rank: this one's number within the group.
        size: number of ranks.
        device: this rank's.
        handle: torch's group; None for that of all ranks.
    """

    rank: int
    size: int
    device: torch.device
    handle: dist.ProcessGroup | None = None

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """Over the ranks, in the values' dtype and on their device."""
        return self._all_reduce(values, dist.ReduceOp.SUM)

    def max(self, values: torch.Tensor) -> torch.Tensor:
        return self._all_reduce(values, dist.ReduceOp.MAX)

    def _all_reduce(self, values: torch.Tensor, op: dist.ReduceOp.RedOpType) -> torch.Tensor:
        if self.size == 1:
            return values
        on_device = values.to(self.device)
        dist.all_reduce(on_device, op, group=self.handle)
        return on_device.to(values.device)

    def broadcast(self, value: Any) -> Any:
        """The object of the group's rank 0, on every rank."""
        box = [value]
        if self.size > 1:
            dist.broadcast_object_list(box, group=self.handle, group_src=0)
        return box[0]

    @property
    def torch_group(self) -> dist.ProcessGroup:
        """For torch's own functions."""
        found = self.handle or dist.group.WORLD
        assert found is not None
        return found

    def gather(self, value: Any) -> list[Any]:
        """Every rank's object, on every rank, in rank order."""
        values = [value] * self.size
        if self.size > 1:
            dist.all_gather_object(values, value, group=self.handle)
        return values


@dataclass(frozen=True)
class ProcessGroups:
    """The groups that this rank is in.

    Attributes:
        is_owner: this object initialised `torch.distributed` and ends it on `close`.
    """

    world: ProcessGroup
    rows: ProcessGroup
    sequence: ProcessGroup
    tensor: ProcessGroup
    is_owner: bool

    @classmethod
    def of_one_rank(cls, device: torch.device) -> ProcessGroups:
        """Without torch's groups."""
        alone = ProcessGroup(0, 1, device)
        return cls(alone, rows=alone, sequence=alone, tensor=alone, is_owner=False)

    @property
    def position(self) -> RankPosition:
        """What the controller goes by."""
        return RankPosition(
            data_rank=self.rows.rank // self.sequence.size,
            is_head=self.sequence.rank == self.tensor.rank == 0,
        )

    @property
    def is_model_split(self) -> bool:
        """Whether ranks compute one forward together."""
        return self.sequence.size * self.tensor.size > 1

    @classmethod
    def join(
        cls,
        rank: int,
        world_size: int,
        init_method: str,
        device: torch.device,
        parallel: ParallelConfig,
        *,
        hosted: TCPStore | None,
        is_needed: bool,
    ) -> ProcessGroups:
        """Meets the other ranks; gloo on the CPU, NCCL on CUDA.

        Args:
            init_method: `tcp://host:port` or `env://` (as set by torchrun); one rank ignores it.
            parallel: of its settings `tensor` and `sequence` count, the rest of the ranks share
                the rows.
            hosted: the store behind `init_method`, when this rank has opened it.
            is_needed: a single rank wants a group, too.
        Raises: WorkerStartError: the ranks did not meet in time, or are too few for the mesh.
        """
        if world_size % parallel.model_ranks:
            raise WorkerStartError(
                f"{world_size} ranks cannot be model groups of actor.parallel.sequence="
                f"{parallel.sequence} x actor.parallel.tensor={parallel.tensor}; start a multiple "
                f"of {parallel.model_ranks} ranks, or change these settings"
            )
        is_owner = join_world(rank, world_size, init_method, device, hosted, is_needed=is_needed)
        world = ProcessGroup(rank, world_size, device)
        ranks = torch.arange(world_size).view(-1, parallel.sequence, parallel.tensor)

        return cls(
            world,
            rows=_subgroup(world, ranks.flatten(0, 1).t().tolist(), is_needed=is_needed),
            sequence=_subgroup(world, ranks.transpose(1, 2).flatten(0, 1).tolist()),
            tensor=_subgroup(world, ranks.flatten(0, 1).tolist()),
            is_owner=is_owner,
        )

    def close(self) -> None:
        if self.is_owner and dist.is_initialized():
            dist.destroy_process_group()


def join_world(
    rank: int,
    world_size: int,
    init_method: str,
    device: torch.device,
    hosted: TCPStore | None,
    *,
    is_needed: bool,
) -> bool:
    """Initialises `torch.distributed`; whether that was done here. As `ProcessGroups.join`.

    Raises: WorkerStartError: the ranks did not meet in time, or cannot.
    """
    if dist.is_initialized():
        found = (dist.get_rank(), dist.get_world_size())
        if found != (rank, world_size):
            raise WorkerStartError(
                f"torch.distributed runs as rank {found[0]} of {found[1]}, "
                f"expected rank {rank} of {world_size}"
            )
    if dist.is_initialized() or (world_size == 1 and not is_needed):
        return False
    arguments: dict[str, Any] = {"rank": rank, "world_size": world_size}
    started = time.monotonic()
    try:
        if world_size == 1:
            arguments["store"] = HashStore()
        elif init_method == "env://":
            arguments["init_method"] = init_method
        else:
            arguments["store"] = hosted or _connect(init_method, is_master=rank == 0)
        if device.type == "cuda":
            arguments["device_id"] = device
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo", timeout=COLLECTIVE_TIMEOUT, **arguments
        )
    except (dist.DistError, RuntimeError, ValueError) as error:
        waited_s, limit_s = time.monotonic() - started, RENDEZVOUS_TIMEOUT.total_seconds()
        what = f"did not meet the others within {limit_s:.0f} s"
        if waited_s < limit_s:  # it is no matter of time
            what = f"cannot join the others: {type(error).__name__}"
        raise WorkerStartError(
            f"rank {rank} of {world_size}, at {init_method!r}, {what}: {error}"
        ) from error
    return True


def _subgroup(
    world: ProcessGroup, lists: list[list[int]], *, is_needed: bool = False
) -> ProcessGroup:
    """The group of this rank; every rank makes all of them, which torch wants.

    Args:
        lists: the ranks of each group; every rank is in one.
        is_needed: a single rank wants a group of torch's, too.
    """
    if len(lists) == 1:
        return world
    own = next(ranks for ranks in lists if world.rank in ranks)
    group = ProcessGroup(own.index(world.rank), len(own), world.device)
    if group.size == 1 and not is_needed:
        return group
    made = [dist.new_group(ranks, timeout=COLLECTIVE_TIMEOUT) for ranks in lists]
    return replace(group, handle=made[lists.index(own)])


def place_by_torchrun(parallel: ParallelConfig) -> tuple[int, int]:
    """Rank and number of ranks, as torchrun told this process; (0, 1) if it was not torchrun's.

    Raises: ConfigError: `parallel` has another number of ranks.
    """
    rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if world_size != parallel.num_ranks:
        raise ConfigError(
            f"actor.parallel makes {parallel.num_ranks} rank(s), but this is rank {rank} of "
            f"{world_size}; set actor.parallel, or torchrun's --nproc-per-node, to fit"
        )
    return rank, world_size


def select_device(device: str, rank: int) -> torch.device:
    """The device of a rank: its own GPU where there is one and the setting allows it.

    Args:
        device: `auto`, `cpu` or `cuda`.
    Raises: ConfigError: `cuda` was asked for, and there is none.
    """
    num_devices = torch.cuda.device_count()
    if resolved_device(Device(device), num_devices, "actor.device") == Device.cpu:
        return torch.device("cpu")
    local_rank = int(os.environ.get("LOCAL_RANK", rank))
    return torch.device("cuda", local_rank % num_devices)


def memory_of(device: torch.device) -> int | None:
    """Bytes of a GPU's memory; None: it is a CPU."""
    if device.type != "cuda":
        return None
    return int(torch.cuda.get_device_properties(device).total_memory)


def take_device(rank: int, device: torch.device) -> None:
    """Begins to use a rank's GPU; on a CPU nothing.

    Raises: WorkerStartError: CUDA's own words, and the driver that this torch needs.
    """
    if device.type != "cuda":
        return
    try:
        torch.cuda.set_device(device)
        torch.cuda.init()  # type: ignore[no-untyped-call]
    except (RuntimeError, AssertionError) as error:
        built_for = torch.version.cuda or "no CUDA"
        least = _LEAST_DRIVERS.get(built_for.partition(".")[0])
        needs = f", and needs an NVIDIA driver of at least {least}" if least else ""
        raise WorkerStartError(
            f"rank {rank} cannot use {device}: {error}; torch {torch.__version__} is built for "
            f"{built_for}{needs} (nvidia-smi names the driver that is installed)"
        ) from error


def _connect(init_method: str, *, is_master: bool) -> TCPStore:
    address = urlsplit(init_method)
    if address.scheme != "tcp" or not address.hostname or not address.port:
        raise ValueError(f"expected tcp://host:port or env://, got {init_method!r}")
    host, port = address.hostname, address.port
    return TCPStore(
        host, port, is_master=is_master, wait_for_workers=False, timeout=RENDEZVOUS_TIMEOUT
    )
