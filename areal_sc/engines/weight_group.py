"""A process group of one trainer rank and all generating ranks: rank 0 broadcasts, all receive.

The trainer's side (`WeightBroadcaster`) and the receivers' (`WeightReceiver` in a worker, SGLang's
weight-update group in its servers) cut the same buckets, and each bucket is one broadcast of
bytes. A broadcast waits for all ranks; every wait here has a limit and can be given up.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from datetime import timedelta
from math import prod
from typing import Any, Final, Literal

import torch
from torch import distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore

from areal_sc.errors import EngineFailed
from areal_sc.transport.sockets.interface import family_of
from areal_sc.weights import BucketLayout, WeightGroup

NamedTensor = tuple[str, torch.Tensor]

NCCL: Final = "nccl"
GLOO: Final = "gloo"
Backend = Literal["nccl", "gloo"]
MEETING_TIMEOUT_S = 120.0
_POLL_S = 0.001
_DROP_POLL_S = 1.0
_BACKLOG = 1024


def layout_of(bucket: Sequence[NamedTensor]) -> BucketLayout:
    """Of tensors, on whatever device, also `meta`."""
    ordered = in_byte_order(bucket)
    return BucketLayout(
        names=tuple(name for name, _ in ordered),
        dtypes=tuple(str(tensor.dtype).removeprefix("torch.") for _, tensor in ordered),
        shapes=tuple(tuple(tensor.shape) for _, tensor in ordered),
    )


def split_into_buckets(
    named_tensors: Iterable[NamedTensor], bucket_bytes: int
) -> Iterator[list[NamedTensor]]:
    """Tensors in their order, as many together as fit; one that is larger comes alone."""
    bucket: list[NamedTensor] = []
    size = 0
    for name, tensor in named_tensors:
        if bucket and size + tensor.nbytes > bucket_bytes:
            yield bucket
            bucket, size = [], 0
        bucket.append((name, tensor))
        size += tensor.nbytes
    if bucket:
        yield bucket


def in_byte_order(bucket: Iterable[NamedTensor]) -> list[NamedTensor]:
    """The widest types first, so that in flat bytes each tensor starts where its type may."""
    return sorted(bucket, key=lambda item: -item[1].element_size())


def cut(flat: torch.Tensor, layout: BucketLayout) -> list[NamedTensor]:
    """The tensors of a bucket, as views of its bytes, [n] uint8."""
    dtypes = [getattr(torch, dtype) for dtype in layout.dtypes]
    parts = torch.split(flat, _sizes(layout))
    each = zip(layout.names, parts, dtypes, layout.shapes, strict=True)
    return [(name, part.view(dtype).view(shape)) for name, part, dtype, shape in each]


def _sizes(layout: BucketLayout) -> list[int]:
    """Bytes of each tensor."""
    both = zip(layout.shapes, layout.dtypes, strict=True)
    return [prod(shape) * getattr(torch, dtype).itemsize for shape, dtype in both]


class _GroupMember:
    """A rank of a weight group. Blocking: to be used from a thread."""

    def __init__(self, name: str, backend: Backend, timeout_s: float) -> None:
        self.name = name
        self._is_nccl = backend == NCCL
        self._timeout = timedelta(seconds=timeout_s)
        self._group: Any = None
        self._work: Any = None

    def close(self) -> None:
        """Leaves, at once; a broadcast that goes on ends by itself, or at its time limit."""
        group, self._group = [self._group], None
        work, self._work = self._work, None  # which keeps the connections, too
        if group[0] is not None:
            _leave(group, work, is_nccl=self._is_nccl)

    def _broadcast(self, flat: torch.Tensor, cancelled: threading.Event | None = None) -> None:
        options = dist.BroadcastOptions()
        options.rootRank = 0
        options.timeout = self._timeout
        try:
            work = self._work = self._group.broadcast([flat], options)
            deadline = time.monotonic() + self._timeout.total_seconds()
            # NCCL's `wait` returns at once, so that nothing would bound the use of what came
            while not work.is_completed():
                if cancelled is None:
                    time.sleep(_POLL_S)
                elif cancelled.wait(_POLL_S):
                    raise RuntimeError("it was given up")
                if time.monotonic() > deadline:
                    raise RuntimeError(f"it took more than {self._timeout.total_seconds():g} s")
            work.wait()
        except RuntimeError as error:
            raise EngineFailed(
                f"a broadcast in weight group {self.name} failed: {error}"
            ) from error


class WeightBroadcaster(_GroupMember):
    """Rank 0 of a weight group.

    Args:
        host: address of this machine that the others reach; nothing else is listened on.
        timeout_s: for each broadcast, and at most for the meeting of the ranks.
    """

    def __init__(self, name: str, host: str, backend: Backend, timeout_s: float) -> None:
        super().__init__(name, backend, timeout_s)
        self._meeting_timeout = timedelta(seconds=min(timeout_s, MEETING_TIMEOUT_S))
        self._host = host
        self._backend = backend
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self._store = listening_store(host, self._meeting_timeout)

    def describe(self, world_size: int) -> WeightGroup:
        """What the others need to join."""
        return WeightGroup(self.name, self._host, self._store.port, world_size, self._backend)

    def meet(self, world_size: int) -> None:
        """Returns when all ranks are there.

        Raises: EngineFailed: they were not in time.
        """
        group = self.describe(world_size)
        self._group = _join(group, 0, self._store, self._meeting_timeout)

    def broadcast(self, bucket: Sequence[NamedTensor], cancelled: threading.Event) -> int:
        """Sends one bucket; returns its bytes when all ranks have them.

        Args:
            bucket: on whatever device; the backend's own copy of it is made here.
            cancelled: ends the wait, as a receiver has refused.
        Raises: EngineFailed: it was cancelled, a rank is gone, or it took too long. This rank has
            left the group then, so that nobody goes on to wait for it.
        """
        device = torch.device("cuda" if self._is_nccl else "cpu")
        parts = [t.detach().reshape(-1).view(torch.uint8) for _, t in in_byte_order(bucket)]
        size = sum(map(len, parts))
        if len(self._buffer) < size:
            self._buffer = torch.empty(0)  # the smaller one goes first
            self._buffer = torch.empty(size, dtype=torch.uint8, device=device)
        flat = self._buffer[:size]
        for target, part in zip(
            torch.split(flat, [len(part) for part in parts]), parts, strict=True
        ):
            target.copy_(part)
        try:
            self._broadcast(flat, cancelled)
        except EngineFailed:
            self.close()
            raise
        return flat.nbytes


class WeightReceiver(_GroupMember):
    """Another rank of a weight group, in this process.

    Args:
        device: where the received weights are wanted.
        timeout_s: for the meeting of the ranks, and for each broadcast.
    """

    def __init__(
        self, group: WeightGroup, rank: int, device: torch.device, timeout_s: float
    ) -> None:
        super().__init__(group.name, group.backend, timeout_s)
        self._device = device if self._is_nccl else torch.device("cpu")
        host, port = group.master_address, group.master_port
        try:
            store = TCPStore(host, port, wait_for_workers=False, timeout=self._timeout)
        except (dist.DistError, RuntimeError) as error:
            raise EngineFailed(
                f"weight group {group.name}: nobody at {host}:{port}: {error}"
            ) from error
        self._group = _join(group, rank, store, self._timeout)

    def receive(self, layout: BucketLayout) -> list[NamedTensor]:
        """One bucket, as views of one buffer.

        Raises: EngineFailed: rank 0 gave it up, a rank is gone, or it took too long.
        """
        flat = torch.empty(sum(_sizes(layout)), dtype=torch.uint8, device=self._device)
        self._broadcast(flat)
        return cut(flat, layout)


def listening_store(host: str, timeout: timedelta) -> TCPStore:
    """A meeting point of ranks that listens on this one address, on a port of the system's choice.

    torch's own would listen on every interface of the machine.
    """
    with socket.create_server((host, 0), family=family_of(host), backlog=_BACKLOG) as listener:
        port: int = listener.getsockname()[1]
        return TCPStore(
            host,
            port,
            is_master=True,
            wait_for_workers=False,
            timeout=timeout,
            master_listen_fd=listener.detach(),
        )


def _join(group: WeightGroup, rank: int, store: Any, timeout: timedelta) -> Any:
    # the names under which torch's own helper, which SGLang uses, stores a group's keys
    device = "cuda" if group.backend == NCCL else "cpu"
    for prefix in (group.name, f"{group.name}/", f"{device}/"):
        store = PrefixStore(prefix, store)
    try:
        if group.backend == NCCL:
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = timeout
            return dist.ProcessGroupNCCL(store, rank, group.world_size, options)
        return dist.ProcessGroupGloo(store, rank, group.world_size, timeout)
    except (RuntimeError, ValueError) as error:
        raise EngineFailed(
            f"the {group.world_size} ranks of weight group {group.name} did not meet: {error}"
        ) from error


def _leave(group: list[Any], work: Any, *, is_nccl: bool) -> None:
    """Drops a group once its last broadcast has ended: until then its end would block everything.

    gloo cannot break a broadcast off; it ends at its time limit.

    Args:
        group: holds the only reference to it.
    """
    if is_nccl:
        group[0].abort()

    def drop_later() -> None:
        while work is not None and not work.is_completed():
            time.sleep(_DROP_POLL_S)
        group.clear()

    threading.Thread(target=drop_later, name="weight group", daemon=True).start()
