"""Weight groups when ranks are missing, and how groups of NCCL are made."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import distributed as dist

from areal_sc.errors import EngineFailed
from areal_sc.weights import group as weight_group
from areal_sc.weights.group import WeightBroadcaster

BUCKET = [("weight", torch.ones(3))]
LIMIT_S = 60.0


class Connecting:
    """Of NCCL, what gloo lacks: its first broadcast returns when all ranks are connected."""

    def __init__(self) -> None:
        self.is_ended = threading.Event()

    def broadcast(self, tensors: Any, options: Any) -> None:
        self.is_ended.wait(LIMIT_S)
        raise RuntimeError("no other rank came")


@pytest.fixture
def connecting() -> Iterator[Connecting]:
    group = Connecting()
    yield group
    group.is_ended.set()


def broadcaster(group: Any, timeout_s: float) -> WeightBroadcaster:
    made = WeightBroadcaster("group", "127.0.0.1", "gloo", timeout_s)
    made._group = group
    return made


def test_ranks_that_do_not_connect_are_waited_for_until_the_limit(connecting: Connecting) -> None:
    root = broadcaster(connecting, timeout_s=0.2)
    with pytest.raises(EngineFailed, match=r"group failed: it took more than 0\.2 s"):
        root.broadcast(BUCKET, threading.Event())
    with pytest.raises(EngineFailed, match="this rank has left it"):
        root.broadcast(BUCKET, threading.Event())


def test_ranks_that_do_not_connect_are_given_up_when_one_has_refused(
    connecting: Connecting,
) -> None:
    cancelled = threading.Event()
    threading.Timer(0.1, cancelled.set).start()
    began = time.monotonic()
    with pytest.raises(EngineFailed, match="it was given up"):
        broadcaster(connecting, timeout_s=LIMIT_S).broadcast(BUCKET, cancelled)
    assert time.monotonic() - began < LIMIT_S / 2


def test_a_broadcast_that_cannot_begin_is_an_error_at_once(connecting: Connecting) -> None:
    connecting.is_ended.set()
    with pytest.raises(EngineFailed, match="no other rank came"):
        broadcaster(connecting, timeout_s=LIMIT_S).broadcast(BUCKET, threading.Event())


@pytest.mark.parametrize("before", [None, "0"])
def test_nccl_gets_no_watchdog_that_would_end_the_trainer(
    before: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "TORCH_NCCL_BLOCKING_WAIT"
    if before is None:
        monkeypatch.delenv(name, raising=False)
    else:
        monkeypatch.setenv(name, before)
    seen: list[Any] = []

    def make(store: Any, rank: int, size: int, options: Any) -> str:
        seen.append((rank, size, options._timeout, os.environ[name]))
        return "group"

    vars(make)["Options"] = SimpleNamespace
    monkeypatch.setattr(dist, "ProcessGroupNCCL", make, raising=False)
    timeout = timedelta(seconds=5)
    assert weight_group._nccl_group(None, 1, 3, timeout) == "group"
    assert seen == [(1, 3, timeout, "1")]
    assert os.environ.get(name) == before
