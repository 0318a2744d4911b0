"""Weight updates of real SGLang servers, each way, against a plain copy of the same bytes.

    python benchmarks/weight_update.py [--quick] [--json FILE] [--sizes 1m 10m 50m] [--servers 1 2]

One update is what a training step ends with, and the processes are those of a run: a trainer of one
rank (FSDPEngine, tensor store, WeightPublication; see weight_trainer.py), one for each method so
that each has memory of its own, and this process in place of the rollout worker (puller,
ServerEngine, its servers). What is left out is the controllers' few messages. All methods
update the same servers, in turns; each server streams some answers meanwhile.

- publish: the trainer's own time. pull: sealing a copy; disk: writing the folder; collective:
  sealing and broadcasting, which lasts as long as the servers take to load.
- open, pause, load, resume: of the engine's `stats()`. Servers generate while weights are opened
  (mapped from the trainer's shared memory); from pause to resume they stand still.
- stall: `update_stall_s` a server. `silence` is the same from outside: the longest gap between two
  tokens of a streamed answer around the update. It contains the stall, the answer's own prefill
  (its KV is computed again) and one decode step.
- plain copy: memcpy of as many bytes into memory that is there, by one thread, timed before each
  update while the servers are paused, as they are when they load. `..._vs_copy` is bytes over
  `load`, over the copy's rate: the median of the rounds, of the largest model on one server. The
  load itself copies twice (into shared memory, then into the server's parameters), overlapped.
- parts of a pull's load: SGLang begins an update session, loads each bucket, and ends the session;
  these are the requests' times. `fill` writes the buckets into shared memory; only the first one
  has nothing beside it.
- trainer memory: what the trainer's process takes at most over what it had before its first
  publication, in buckets and in models. Shared memory is that of its store, where `pull` and
  `collective` keep the last version; private memory is what comes on top.

A model larger than the bucket needs several. Small models are bound by the time of the requests.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import planes_ours
import qwen2_models
import report
import sglang_side
import torch
from msgspec import convert
from peak_memory import MemoryGrowth, memory_of, watched_memory
from planes_role import Role
from token_streams import TokenStreams, token_streams

from areal_sc.config.schema import Device, Dtype, RolloutConfig, SGLangConfig, WeightUpdateConfig
from areal_sc.engines.servers.engine import ServerEngine
from areal_sc.engines.weight_group import NamedTensor
from areal_sc.weights import BucketLayout, ShardReference, WeightGroup, WeightsReference

METHODS = ("pull", "disk", "collective")
PHASES = ("open", "pause", "load", "resume")
PULL_PARTS = ("begin", "fill", "buckets", "end")
GROUP = "weights-benchmark"
MAX_CONTEXT_TOKENS = 2048
ANSWER_TOKENS = 200
"""Few: on a CPU it takes seconds to compute the KV of long answers again after each update."""
COPIES = 3

Source = Callable[[], Awaitable[list[NamedTensor]]]


@dataclass(frozen=True)
class Settings:
    """Of one run of the benchmark."""

    rounds: int
    num_streams: int
    bucket_bytes: int
    device: Device
    dtype: Dtype
    sglang_python: Path


@dataclass
class Update:
    """One update, in seconds; `copy_s` is that of the plain copy before it."""

    copy_s: float
    publish_s: float
    phases: dict[str, float]
    stall_s: float
    silence_s: float
    parts: dict[str, float]


@dataclass
class Measured:
    """All updates of one method, into the servers of one model."""

    num_bytes: int
    num_servers: int
    memory: MemoryGrowth = field(default_factory=MemoryGrowth)
    updates: list[Update] = field(default_factory=list)

    def median(self, value: Callable[[Update], float]) -> float:
        return statistics.median(map(value, self.updates))

    @property
    def over_copy(self) -> float:
        """Rate of the load over that of the plain copy."""
        return self.median(lambda update: update.copy_s / update.phases["load"])


class PlainCopy:
    """Memory of a size, and a copy of it."""

    def __init__(self, num_bytes: int) -> None:
        self._source = torch.full((num_bytes,), 7, dtype=torch.uint8)
        self._target = torch.zeros(num_bytes, dtype=torch.uint8)

    def seconds(self) -> float:
        times = []
        for _ in range(COPIES):
            start = time.perf_counter()
            self._target.copy_(self._source)
            times.append(time.perf_counter() - start)
        return statistics.median(times)


class Trainers:
    """One trainer a method, each in a process of its own."""

    def __init__(self, roles: dict[str, Role]) -> None:
        self._roles = roles
        self.num_bytes = 0
        self.pids: dict[str, int] = {}
        self.memory_before: dict[str, dict[str, int]] = {}

    async def initialize(self) -> None:
        for method in METHODS:
            self.num_bytes = await self.call(method, "initialize")
            await self.call(method, "change")
            self.pids[method] = await self.call(method, "pid")
            self.memory_before[method] = memory_of(self.pids[method])

    async def call(self, method: str, name: str, /, **args: Any) -> Any:
        return await asyncio.to_thread(lambda: self._roles[method].call(name, **args))


class UpdateSide:
    """Publishes one version after the other, from the trainers into the servers."""

    def __init__(
        self,
        trainers: Trainers,
        engine: ServerEngine,
        node: planes_ours.Worker,
        streams: TokenStreams,
    ) -> None:
        self._trainers = trainers
        self._engine = engine
        self._node = node
        self._streams = streams
        self._copy = PlainCopy(trainers.num_bytes)
        self._num_servers = len(engine.replicas)
        self._layouts: list[BucketLayout] = []

    async def meet(self) -> None:
        """The servers join the weight group of the trainer that broadcasts."""
        world_size = 1 + self._engine.count_ranks()
        opened = await self._trainers.call(
            "collective", "open_group", name=GROUP, world_size=world_size
        )
        await asyncio.gather(
            self._trainers.call("collective", "meet_group", world_size=world_size),
            self._engine.join_group(convert(opened, WeightGroup), first_rank=1),
        )
        layouts = await self._trainers.call("collective", "layouts")
        self._layouts = convert(layouts, list[BucketLayout])

    async def leave(self) -> None:
        await self._engine.leave_group(GROUP)

    async def update(self, method: str) -> Update:
        """Changes the trainer's weights, and brings them into the servers."""
        await self._engine.pause()
        copy_s = self._copy.seconds()
        await self._engine.resume()
        await self._trainers.call(method, "change")
        await self._streams.until_flowing()
        before = dict(self._engine.stats())
        version = int(self._engine.version) + 1
        publish = {"pull": self._pull, "disk": self._disk, "collective": self._broadcast}[method]
        with timed_parts(self._engine) as parts:
            publish_s, started = await publish(version)
        ended = time.perf_counter()
        await self._streams.until_flowing()
        after = self._engine.stats()
        grown = {name: after[name] - before[name] for name in after}
        num_servers = self._num_servers
        assert self._engine.version == version
        assert grown["updated_servers"] == num_servers, "a server was lost"
        if method == "pull":
            assert grown["update_bytes"] == self._trainers.num_bytes
        return Update(
            copy_s,
            publish_s,
            {phase: grown[f"update_{phase}_s"] for phase in PHASES},
            grown["update_stall_s"] / num_servers,
            statistics.median(self._streams.silence_s(started, ended) or [math.nan]),
            parts,
        )

    async def _pull(self, version: int) -> Started:
        sealed = await self._trainers.call("pull", "seal")
        started = time.perf_counter()
        await self._engine.update_weights(version, self._source(version, sealed))
        return sealed["seconds"], started

    async def _disk(self, version: int) -> Started:
        saved = await self._trainers.call("disk", "save", version=version)
        started = time.perf_counter()
        await self._engine.update_weights_from_disk(version, Path(saved["folder"]))
        return saved["seconds"], started

    async def _broadcast(self, version: int) -> Started:
        sealed = await self._trainers.call("collective", "seal")
        started = time.perf_counter()
        sent, _ = await asyncio.gather(
            self._trainers.call("collective", "broadcast"),
            self._engine.update_weights_from_group(
                version,
                GROUP,
                self._layouts,
                again=self._source(version, sealed),
                give_up=_nobody_may_refuse,
            ),
        )
        assert not sent["failure"], sent["failure"]
        assert sent["bytes"] == self._trainers.num_bytes
        return sealed["seconds"] + sent["seconds"], started

    def _source(self, version: int, sealed: dict[str, Any]) -> Source:
        """As a rollout worker gets them: views of the trainer's shared memory."""
        reference = WeightsReference(version, (ShardReference(*sealed["shard"]),))

        async def pull() -> list[NamedTensor]:
            return [
                (name, parts[0])
                async for name, parts in self._node.plane.puller.pull_weights(reference)
            ]

        return pull


Started = tuple[float, float]
"""The trainer's seconds, and when the servers' side began."""


async def _nobody_may_refuse() -> None:
    raise AssertionError("a server has refused the broadcast")


@contextmanager
def timed_parts(engine: ServerEngine) -> Iterator[dict[str, float]]:
    """Seconds of the parts of a pull's load within the block; requests those of one server."""
    parts = dict.fromkeys(PULL_PARTS, 0.0)
    client = engine.replicas[0].client
    buckets = engine._buckets
    fill = buckets._fill

    def timed_fill(*args: Any) -> Any:
        start = time.perf_counter()
        try:
            return fill(*args)
        finally:
            parts["fill"] += time.perf_counter() - start

    def timed_request(part: str, request: Callable[..., Awaitable[None]]) -> Any:
        async def timed(*args: Any, **kwargs: Any) -> None:
            start = time.perf_counter()
            await request(*args, **kwargs)
            parts[part] += time.perf_counter() - start

        return timed

    buckets._fill = timed_fill  # type: ignore[method-assign]
    client.begin_update = timed_request("begin", client.begin_update)  # type: ignore[method-assign]
    client.load_tensors = timed_request("buckets", client.load_tensors)  # type: ignore[method-assign]
    client.end_update = timed_request("end", client.end_update)  # type: ignore[method-assign]
    try:
        yield parts
    finally:
        del buckets._fill, client.begin_update, client.load_tensors, client.end_update


@asynccontextmanager
async def started_trainers(
    run_folder: Path, model_folder: Path, settings: Settings
) -> AsyncIterator[Trainers]:
    with ExitStack() as stack:
        roles = {}
        for number, method in enumerate(METHODS):
            trainer = {
                "path": str(model_folder),
                "dtype": str(settings.dtype),
                "device": str(settings.device),
                "method": method,
                "folder": str(model_folder.parent / "published"),
                "bucket_bytes": settings.bucket_bytes,
            }
            arguments = (str(run_folder), f"train/{number}", json.dumps(trainer))
            script = Path(__file__).parent / "weight_trainer.py"
            roles[method] = stack.enter_context(Role(method, script, arguments))
        trainers = Trainers(roles)
        await trainers.initialize()
        yield trainers


async def measure_size(
    run_folder: Path, size: str, servers: Sequence[int], settings: Settings
) -> dict[tuple[int, str], Measured]:
    """By (number of servers, method)."""
    measured = {}
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="areal-sc-model-")))
        model_folder = folder / "model"
        dtype = getattr(torch, settings.dtype)
        qwen2_models.write_folder(model_folder, qwen2_models.SHAPES[size], dtype)
        trainers = await stack.enter_async_context(
            started_trainers(run_folder, model_folder, settings)
        )
        node = await stack.enter_async_context(
            planes_ours.worker("rollout/0", run_folder, encrypt=False, shares_memory=True)
        )
        for num_servers in servers:
            found = await measure_servers(trainers, node, model_folder, num_servers, settings)
            measured |= {(num_servers, method): value for method, value in found.items()}
    return measured


async def measure_servers(
    trainers: Trainers,
    node: planes_ours.Worker,
    model_folder: Path,
    num_servers: int,
    settings: Settings,
) -> dict[str, Measured]:
    """By method: the first update of each, with the trainer's memory watched, is not timed."""
    config = RolloutConfig(
        path=str(model_folder),
        dtype=settings.dtype,
        device=settings.device,
        max_running_sequences=8 * num_servers,
        max_context_tokens=MAX_CONTEXT_TOKENS,
        seed=0,
        sglang=SGLangConfig(python=str(settings.sglang_python), num_servers=num_servers),
        weight_update=WeightUpdateConfig(bucket_bytes=settings.bucket_bytes),
    )
    measured = {method: Measured(trainers.num_bytes, num_servers) for method in METHODS}
    async with AsyncExitStack() as stack:
        engine = await stack.enter_async_context(sglang_side.serving(config))
        streams = await stack.enter_async_context(
            token_streams(engine.replicas, settings.num_streams, ANSWER_TOKENS)
        )
        side = UpdateSide(trainers, engine, node, streams)
        await side.meet()
        for method in METHODS:
            base = trainers.memory_before[method]
            for _ in range(2):  # the second version is sealed while the first one is still there
                with watched_memory(trainers.pids[method], base) as growth:
                    await side.update(method)
                measured[method].memory.include(growth)
        for number in range(settings.rounds):
            turn = number % len(METHODS)
            for method in (*METHODS[turn:], *METHODS[:turn]):
                measured[method].updates.append(await side.update(method))
        await side.leave()
    return measured


def print_tables(results: dict[tuple[str, int, str], Measured], settings: Settings) -> None:
    shared = {
        "rounds": settings.rounds,
        "bucket": f"{settings.bucket_bytes / 2**20:g} MiB",
        "dtype": str(settings.dtype),
        "device": str(settings.device),
        "streams a server": settings.num_streams,
    }
    times, parts, memory = [], [], []
    for (size, num_servers, method), found in results.items():
        key = (size, num_servers, method)
        load_s = found.median(lambda u: u.phases["load"])
        times.append(
            (
                *key,
                found.num_bytes / 1e6,
                _ms(found, lambda u: u.publish_s),
                *(_ms(found, lambda u, p=phase: u.phases[p]) for phase in PHASES),  # type: ignore[misc]
                _ms(found, lambda u: u.stall_s),
                _ms(found, lambda u: u.silence_s),
                found.num_bytes / load_s / 1e9,
                found.num_bytes / found.median(lambda u: u.copy_s) / 1e9,
                found.over_copy,
            )
        )
        if method == "pull":
            parts.append(
                (
                    *key[:2],
                    load_s * 1000,
                    *(_ms(found, lambda u, p=part: u.parts[p]) for part in PULL_PARTS),  # type: ignore[misc]
                    found.median(lambda u: u.copy_s) * 1000,
                )
            )
        grown = found.memory
        memory.append(
            (
                *key,
                found.num_bytes / settings.bucket_bytes,
                grown.private / settings.bucket_bytes,
                grown.shared / settings.bucket_bytes,
                grown.both / settings.bucket_bytes,
                grown.both / found.num_bytes,
            )
        )
    cell = ("model", "servers", "method")
    report.print_table(
        "Weight updates: milliseconds, medians",
        shared,
        (*cell, "MB", "publish", *PHASES, "stall", "silence", "GB/s", "copy GB/s", "vs copy"),
        times,
    )
    report.print_table(
        "Parts of a pull's load: milliseconds",
        shared,
        (*cell[:2], "load", *PULL_PARTS, "plain copy"),
        parts,
    )
    report.print_table(
        "Trainer's memory: growth at most, in buckets",
        shared,
        (*cell, "model", "private", "shared", "both", "both, in models"),
        memory,
    )


def metrics_of(results: dict[tuple[str, int, str], Measured], bucket_bytes: int) -> report.Metrics:
    """Those of the largest model on the fewest servers have the short names."""
    largest = max(results, key=lambda key: (results[key].num_bytes, -key[1]))
    metrics: dict[str, tuple[float, str]] = {}
    for (size, num_servers, method), found in results.items():
        prefixes = [f"{size}_{num_servers}_servers_"]
        if (size, num_servers) == largest[:2]:
            prefixes.append("")
        for prefix in prefixes:
            metrics[f"{prefix}{method}_vs_copy"] = (found.over_copy, "ratio")
            metrics[f"{prefix}{method}_stall_s"] = (found.median(lambda u: u.stall_s), "s")
            metrics[f"{prefix}{method}_silence_s"] = (found.median(lambda u: u.silence_s), "s")
            metrics[f"{prefix}{method}_publish_s"] = (found.median(lambda u: u.publish_s), "s")
            metrics[f"{prefix}{method}_trainer_private_buckets"] = (
                found.memory.private / bucket_bytes,
                "buckets",
            )
            metrics[f"{prefix}{method}_trainer_shared_buckets"] = (
                found.memory.shared / bucket_bytes,
                "buckets",
            )
    return metrics


def _ms(found: Measured, value: Callable[[Update], float]) -> float:
    return found.median(value) * 1000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    report.add_arguments(parser)
    sglang_side.add_arguments(parser)
    parser.add_argument("--sizes", nargs="+", choices=tuple(qwen2_models.SHAPES))
    parser.add_argument(
        "--servers",
        nargs="+",
        type=int,
        help="numbers of servers; all but the first with the last size only (default 1 2, quick 1)",
    )
    parser.add_argument("--rounds", type=int, help="timed updates a method (default 7, quick 1)")
    parser.add_argument("--streams", type=int, default=2, help="answers a server (default 2)")
    parser.add_argument("--bucket-mib", type=int, default=256, help="default 256")
    report.add_device(parser)
    arguments = parser.parse_args()
    sglang_side.check_python(parser, arguments.sglang_python)
    torch.set_num_threads(1)
    load = os.getloadavg()[0]
    settings = Settings(
        rounds=arguments.rounds or (1 if arguments.quick else 7),
        num_streams=arguments.streams,
        bucket_bytes=arguments.bucket_mib << 20,
        device=Device(arguments.device),
        dtype=Dtype.float32 if arguments.device == "cpu" else Dtype.bfloat16,
        sglang_python=arguments.sglang_python,
    )
    sizes = arguments.sizes or (["1m"] if arguments.quick else ["1m", "10m", "50m"])
    servers = arguments.servers or ([1] if arguments.quick else [1, 2])
    results: dict[tuple[str, int, str], Measured] = {}
    with planes_ours.run() as run_folder:
        for size in sizes:
            counts = servers if size == sizes[-1] else servers[:1]
            found = asyncio.run(measure_size(run_folder, size, counts, settings))
            of_size = {(size, *key): value for key, value in found.items()}
            print_tables(of_size, settings)
            results |= of_size
    metrics = metrics_of(results, settings.bucket_bytes)
    settings_shown = {
        "ratios": "medians over the rounds",
        "load of the machine beforehand": f"{load:.1f}",
    }
    report.print_metrics("Metrics", settings_shown, metrics)
    report.write(metrics, arguments.json)


if __name__ == "__main__":
    main()
