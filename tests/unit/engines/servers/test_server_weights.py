"""Weights in buckets, through shared memory, and what they are compared with beforehand."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Awaitable, Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from areal_sc.engines.servers.model import as_served, check_weights_folder
from areal_sc.engines.servers.sglang.client import _pickle
from areal_sc.engines.servers.weights import (
    CollectiveWeights,
    SharedBuckets,
    TensorWeights,
    UpdateTimes,
    VersionWeights,
)
from areal_sc.errors import EngineFailed, ModelError, PeerLost
from areal_sc.sizing.model_folder import read_stored_shapes
from areal_sc.weights.group import (
    NamedTensor,
    in_byte_order,
    layout_of,
    split_into_buckets,
)
from areal_sc.weights.published import BucketLayout

READER = """
import base64, json, pickle, sys, torch
for line in sys.stdin:
    bucket = pickle.loads(base64.b64decode(line))
    flat = bucket["flattened_tensor"]
    found = {
        part.name: flat[part.start_idx : part.end_idx].view(part.dtype).reshape(part.shape)
        for part in bucket["metadata"]
    }
    print(json.dumps({name: tensor.double().tolist() for name, tensor in found.items()}))
    sys.stdout.flush()
"""


def named(*sizes: int) -> list[tuple[str, torch.Tensor]]:
    return [(f"p{i}", torch.full((size,), float(i))) for i, size in enumerate(sizes)]


def test_buckets_keep_the_order_and_the_bound() -> None:
    cut = list(split_into_buckets(named(2, 2, 5, 1, 1), bucket_bytes=16))
    assert [[name for name, _ in bucket] for bucket in cut] == [["p0", "p1"], ["p2"], ["p3", "p4"]]
    assert list(split_into_buckets([], 16)) == []


class Client:
    """Notes what it is given to load; `on_load` does more with it."""

    def __init__(self) -> None:
        self.loads: list[tuple[int, bool]] = []
        self.on_load: Callable[[torch.Tensor, BucketLayout], Awaitable[None]] | None = None

    async def begin_update(self) -> None: ...

    async def end_update(self) -> None: ...

    async def load_tensors(
        self, flat: torch.Tensor, layout: BucketLayout, *, drops_cache: bool
    ) -> None:
        self.loads.append((flat.nbytes, drops_cache))
        if self.on_load is not None:
            await self.on_load(flat, layout)


async def load(
    buckets: SharedBuckets, tensors: list[NamedTensor], bucket_bytes: int, client: Client
) -> int:
    """Bytes that were written."""

    async def source() -> list[NamedTensor]:
        return tensors

    weights, times = TensorWeights(1, source, buckets, bucket_bytes), UpdateTimes()
    server: Any = client
    async with weights.opened():
        await weights.load(server, times)
    return int(times.update_bytes)


async def test_another_process_reads_what_was_written() -> None:
    tensors = [
        ("odd", torch.arange(3, dtype=torch.bfloat16)),
        ("wide", torch.randn(4, 5, dtype=torch.float64)),
        ("view", torch.randn(6, 4).T),
        ("byte", torch.arange(7, dtype=torch.uint8)),
        ("large", torch.randn(50)),
    ]
    found: dict[str, list[float]] = {}
    reader = await asyncio.create_subprocess_exec(
        sys.executable, "-c", READER, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )

    async def read(flat: torch.Tensor, layout: BucketLayout) -> None:
        nonlocal found
        assert reader.stdin
        assert reader.stdout
        reader.stdin.write(_pickle(flat, layout).encode() + b"\n")
        await reader.stdin.drain()
        found |= json.loads(await reader.stdout.readline())

    buckets, client = SharedBuckets(), Client()
    client.on_load = read
    num_bytes = await load(buckets, tensors, 300, client)
    assert reader.stdin
    reader.stdin.close()
    assert await reader.wait() == 0
    buckets.close()
    assert num_bytes == sum(tensor.nbytes for _, tensor in tensors)
    assert found == {name: tensor.double().tolist() for name, tensor in tensors}


async def test_two_buffers_serve_any_number_of_buckets() -> None:
    buckets, client = SharedBuckets(), Client()
    await load(buckets, named(*[4] * 9), 16, client)
    assert client.loads == [(16, False)] * 8 + [(16, True)]
    assert sum(buffer.nbytes for buffer in buckets._buffers) == 2 * 16
    buckets.close()


async def test_a_load_that_breaks_off_leaves_the_buffers_to_the_next() -> None:
    async def break_off(flat: torch.Tensor, layout: BucketLayout) -> None:
        raise RuntimeError("a defect")

    buckets, client = SharedBuckets(), Client()
    client.on_load = break_off
    with pytest.raises(RuntimeError, match="a defect"):
        await load(buckets, named(4, 4, 4, 4), 16, client)
    client.on_load = None
    await load(buckets, named(4), 16, client)
    assert client.loads == [(16, False), (16, True)]
    buckets.close()


class Member:
    """A server that may be in the weight group; `fails` says in what, and how."""

    def __init__(self, group: str, fails: tuple[str, Exception] | None = None) -> None:
        self.groups = {group}
        self.done: list[str] = []
        self._fails = fails

    async def begin_update(self) -> None:
        await self._do("begin")

    async def end_update(self) -> None:
        await self._do("end")

    async def receive_broadcast(self, *_: object, drops_cache: bool) -> None:
        await self._do("receive")

    async def _do(self, step: str) -> None:
        self.done.append(step)
        if self._fails is not None and self._fails[0] == step:
            raise self._fails[1]


STEPS = ["begin", "receive", "receive", "end"]


@pytest.mark.parametrize(
    ("group", "fails", "done"),
    [
        ("group", None, STEPS),
        ("group", ("begin", EngineFailed("no")), ["begin", "end", "other way"]),
        ("group", ("receive", EngineFailed("no")), ["begin", "receive", "end", "other way"]),
        ("group", ("receive", PeerLost("gone")), ["begin", "receive"]),
        ("group", ("end", EngineFailed("no")), [*STEPS, "end", "other way"]),
        ("group", ("end", PeerLost("gone")), STEPS),
        ("another", None, ["other way"]),
    ],
    ids=str,
)
async def test_a_server_that_does_not_get_a_broadcast_whole_is_given_it_otherwise(
    group: str, fails: tuple[str, Exception] | None, done: list[str]
) -> None:
    """And whoever broadcasts is told; a server that is lost is asked nothing more."""
    num_given_up = 0
    server: Any = Member(group, fails)

    class OtherWay(VersionWeights):
        async def load(self, server: Any, times: UpdateTimes) -> None:
            server.done.append("other way")

    async def give_up() -> None:
        nonlocal num_given_up
        num_given_up += 1

    layouts = [layout_of(named(2)), layout_of(named(3))]
    weights = CollectiveWeights(1, "group", layouts, OtherWay(), give_up)
    is_lost = fails is not None and isinstance(fails[1], PeerLost)
    with pytest.raises(PeerLost) if is_lost else nullcontext():
        await weights.load(server, UpdateTimes())
    assert server.done == done
    has_received = fails is None and group == "group"
    assert num_given_up == (not has_received)
    assert ("group" in server.groups) is has_received


def test_the_layout_of_a_broadcast_is_that_of_its_bytes() -> None:
    bucket = [
        ("a", torch.zeros(3, dtype=torch.bfloat16)),
        ("b", torch.zeros(2, 2)),
        ("c", torch.zeros(1, dtype=torch.bfloat16)),
    ]
    layout = layout_of(bucket)
    assert layout.names == ("b", "a", "c") == tuple(name for name, _ in in_byte_order(bucket))
    assert layout.dtypes == ("float32", "bfloat16", "bfloat16")
    assert layout.shapes == ((2, 2), (3,), (1,))


def test_flat_tensors_get_the_model_s_shapes() -> None:
    shapes = {"a": (2, 3), "b": (4,)}
    given = [("a", torch.arange(6.0)), ("b", torch.zeros(4))]
    shaped = dict(as_served(given, shapes, None))
    assert shaped["a"].shape == (2, 3)
    assert as_served([("x", torch.zeros(3, 1))], {}, None)[0][1].shape == (3, 1)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"a": 6}, r"1 parameters are missing \(b\), 0 unknown"),
        ({"a": 6, "b": 4, "c": 1}, r"0 parameters are missing \(\), 1 unknown \(c\)"),
        ({"a": 6, "b": 5}, r"b has shape \(5,\), expected \(4,\)"),
    ],
)
def test_tensors_of_another_model(given: dict[str, int], message: str) -> None:
    tensors = [(name, torch.zeros(size)) for name, size in given.items()]
    with pytest.raises(ModelError, match=message):
        as_served(tensors, {"a": (2, 3), "b": (4,)}, None)


def test_a_folder_is_compared_with_the_model(tiny_model_folder: Path, tmp_path: Path) -> None:
    shapes = read_stored_shapes(tiny_model_folder)
    assert shapes["model.norm.weight"] == (32,)
    check_weights_folder(str(tiny_model_folder), shapes)
    with pytest.raises(ModelError, match="no such folder"):
        check_weights_folder(str(tmp_path / "none"), shapes)
    with pytest.raises(ModelError, match="1 parameters are missing"):
        check_weights_folder(str(tiny_model_folder), {**shapes, "more": (1,)})
    with pytest.raises(ModelError, match=r"norm\.weight has shape \(32,\), expected \(48,\)"):
        check_weights_folder(str(tiny_model_folder), {**shapes, "model.norm.weight": (48,)})
