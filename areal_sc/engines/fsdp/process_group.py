"""The ranks of one engine: how they find each other, agree, and fail together.

world    all ranks
data     ranks that hold the same part of the model, and compute different rows
model    ranks that hold one model together, and get the same rows
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, TCPStore

from areal_sc.config.machine import resolved_device
from areal_sc.config.schema import Device
from areal_sc.engines.base import RankPosition
from areal_sc.engines.weight_group import listening_store
from areal_sc.errors import WorkerStartError

RENDEZVOUS_TIMEOUT = timedelta(seconds=120)
COLLECTIVE_TIMEOUT = timedelta(minutes=10)
"""A rank that waits longer for the others in one collective operation gives up with an error."""


def host_rendezvous(host: str) -> tuple[TCPStore, str]:
    """The ranks' meeting point, to be kept until they have met, and its `tcp://host:port`."""
    store = listening_store(host, RENDEZVOUS_TIMEOUT)
    return store, f"tcp://{host}:{store.port}"


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

    def gather(self, value: Any) -> list[Any]:
        """Every rank's object, on every rank, in rank order."""
        values = [value] * self.size
        if self.size > 1:
            dist.all_gather_object(values, value, group=self.handle)
        return values


@dataclass(frozen=True)
class ProcessGroups:
    """The groups that this rank is in. FSDP knows data parallelism alone: `data` is `world`.

    Attributes:
        is_owner: this object initialised `torch.distributed` and ends it on `close`.
    """

    world: ProcessGroup
    data: ProcessGroup
    model: ProcessGroup
    is_owner: bool

    @property
    def position(self) -> RankPosition:
        """What the controller goes by."""
        return RankPosition(data_rank=self.data.rank, is_head=self.model.rank == 0)

    @classmethod
    def join(
        cls,
        rank: int,
        world_size: int,
        init_method: str,
        device: torch.device,
        *,
        hosted: TCPStore | None,
        is_needed: bool,
    ) -> ProcessGroups:
        """Meets the other ranks; gloo on the CPU, NCCL on CUDA.

        Args:
            init_method: `tcp://host:port` or `env://` (as set by torchrun); one rank ignores it.
            hosted: the store behind `init_method`, when this rank has opened it.
            is_needed: a single rank wants a group, too.
        Raises: WorkerStartError: the ranks did not meet in time.
        """
        world = ProcessGroup(rank, world_size, device)
        alone = ProcessGroup(0, 1, device)
        if dist.is_initialized():
            found = (dist.get_rank(), dist.get_world_size())
            if found != (rank, world_size):
                raise WorkerStartError(
                    f"torch.distributed runs as rank {found[0]} of {found[1]}, "
                    f"expected rank {rank} of {world_size}"
                )
        if dist.is_initialized() or (world_size == 1 and not is_needed):
            return cls(world, data=world, model=alone, is_owner=False)
        arguments: dict[str, Any] = {"rank": rank, "world_size": world_size}
        try:
            if world_size == 1:
                arguments["store"] = HashStore()
            elif init_method == "env://":
                arguments["init_method"] = init_method
            else:
                arguments["store"] = hosted or _connect(init_method, is_master=rank == 0)
            if device.type == "cuda":
                torch.cuda.set_device(device)
                arguments["device_id"] = device
            dist.init_process_group(
                "nccl" if device.type == "cuda" else "gloo", timeout=COLLECTIVE_TIMEOUT, **arguments
            )
        except (dist.DistError, RuntimeError, ValueError) as error:
            raise WorkerStartError(
                f"rank {rank} of {world_size} did not meet the others at {init_method!r} within "
                f"{RENDEZVOUS_TIMEOUT.total_seconds():.0f} s: {error}"
            ) from error
        return cls(world, data=world, model=alone, is_owner=True)

    def close(self) -> None:
        if self.is_owner and dist.is_initialized():
            dist.destroy_process_group()


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


def _connect(init_method: str, *, is_master: bool) -> TCPStore:
    address = urlsplit(init_method)
    if address.scheme != "tcp" or not address.hostname or not address.port:
        raise ValueError(f"expected tcp://host:port or env://, got {init_method!r}")
    host, port = address.hostname, address.port
    return TCPStore(
        host, port, is_master=is_master, wait_for_workers=False, timeout=RENDEZVOUS_TIMEOUT
    )
