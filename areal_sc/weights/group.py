"""A process group of one trainer rank and all generating ranks: rank 0 broadcasts, all receive.

The trainer's side (`WeightBroadcaster`) and the receivers' (`WeightReceiver` in a worker, SGLang's
weight-update group in its servers) cut the same buckets, and each bucket is one broadcast of
bytes. A broadcast waits for all ranks; every wait here has a limit and can be given up.

gloo connects the ranks when they meet. NCCL does it in their first broadcast: SGLang has no call
in which its ranks take part without loading something.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterable, Iterator, MutableMapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from datetime import timedelta
from math import prod
from typing import Any, Final, Literal

import torch
from torch import distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore

from areal_sc.errors import EngineFailed
from areal_sc.transport.sockets.interface import family_of
from areal_sc.weights.published import BucketLayout, WeightGroup

NamedTensor = tuple[str, torch.Tensor]

NCCL: Final = "nccl"
GLOO: Final = "gloo"
Backend = Literal["nccl", "gloo"]
NCCL_SETTINGS: Final = {"NCCL_CUMEM_ENABLE": "0", "NCCL_NVLS_ENABLE": "0"}
"""All ranks of a group must have the same. These are what SGLang gives its servers."""

MEETING_TIMEOUT_S = 120.0
_POLL_S = 0.001
_DROP_POLL_S = 1.0
_BACKLOG = 1024


def layout_of(bucket: Sequence[NamedTensor]) -> BucketLayout:
    """The layout of a bucket of tensors on whatever device, also `meta`."""
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


def tell_nccl(environment: MutableMapping[str, str] = os.environ) -> None:
    """`NCCL_SETTINGS` for this process, unless the user has others; before NCCL is first used."""
    for name, value in NCCL_SETTINGS.items():
        environment.setdefault(name, value)


class _GroupMember:
    """A rank of a weight group. Blocking: to be used from a thread."""

    def __init__(self, name: str, backend: Backend, timeout_s: float) -> None:
        self.name = name
        self._is_nccl = backend == NCCL
        self._timeout = timedelta(seconds=timeout_s)
        self._group: Any = None
        self._begun: Future[Any] | None = None  # the last broadcast

    def close(self) -> None:
        """Leaves, at once; a broadcast that goes on ends by itself, or at its time limit."""
        group, self._group = [self._group], None
        begun, self._begun = self._begun, None  # which keeps the connections, too
        if group[0] is not None:
            _leave(group, begun, is_nccl=self._is_nccl)

    def _broadcast(self, flat: torch.Tensor, cancelled: threading.Event | None = None) -> None:
        limit_s = self._timeout.total_seconds()
        deadline = time.monotonic() + limit_s
        try:
            begun = self._begun = self._begin(flat)
            # NCCL's `wait` returns at once, so that nothing would bound the use of what came
            while not _has_ended(begun):
                if cancelled is None:
                    time.sleep(_POLL_S)
                elif cancelled.wait(_POLL_S):
                    raise RuntimeError("it was given up")
                if time.monotonic() > deadline:
                    raise RuntimeError(f"it took more than {limit_s:g} s")
            begun.result().wait()
        except RuntimeError as error:
            own = (
                f" (NCCL {_nccl_version()} here; all ranks need the same)" if self._is_nccl else ""
            )
            raise EngineFailed(
                f"a broadcast in weight group {self.name} failed{own}: {error}"
            ) from error

    def _begin(self, flat: torch.Tensor) -> Future[Any]:
        """torch's handle of a broadcast, once it is begun.

        In a thread: NCCL's first one returns when all ranks are connected, maybe never.
        """
        options = dist.BroadcastOptions()
        options.rootRank = 0
        options.timeout = self._timeout
        group, begun = self._group, Future[Any]()
        if group is None:
            raise RuntimeError("this rank has left it")

        def begin() -> None:
            try:
                begun.set_result(group.broadcast([flat], options))
            except (RuntimeError, ValueError) as error:
                begun.set_exception(error)

        threading.Thread(target=begin, name="weight group", daemon=True).start()
        return begun


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
        """With gloo, returns when all ranks are there.

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
            return _nccl_group(store, rank, group.world_size, timeout)
        return dist.ProcessGroupGloo(store, rank, group.world_size, timeout)
    except (RuntimeError, ValueError) as error:
        raise EngineFailed(
            f"the {group.world_size} ranks of weight group {group.name} did not meet: {error}"
        ) from error


def _nccl_group(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    """A group of NCCL without torch's watchdog.

    That one would end this process, and so the training, when another rank dies or is late.
    """
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    with _environment("TORCH_NCCL_BLOCKING_WAIT", "1"):  # read when a group is made
        return dist.ProcessGroupNCCL(store, rank, size, options)


def _nccl_version() -> str:
    return ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]


@contextmanager
def _environment(name: str, value: str) -> Iterator[None]:
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        del os.environ[name]
        if before is not None:
            os.environ[name] = before


def _has_ended(begun: Future[Any]) -> bool:
    """Whether a broadcast is over, or could not be begun."""
    return begun.done() and (begun.exception() is not None or begun.result().is_completed())


def _leave(group: list[Any], begun: Future[Any] | None, *, is_nccl: bool) -> None:
    """Drops a group once its last broadcast has ended: until then its end would block everything.

    gloo cannot break a broadcast off; it ends at its time limit.

    Args:
        group: holds the only reference to it.
    """

    def drop_later() -> None:
        if is_nccl:
            group[0].abort()
        while begun is not None and not _has_ended(begun):
            time.sleep(_DROP_POLL_S)
        group.clear()

    threading.Thread(target=drop_later, name="weight group", daemon=True).start()
