"""Weight updates of LocalEngine or of real SGLang or vLLM servers, each way, against a plain copy.

    python benchmarks/weight_update.py [--quick] [--json FILE] [--device cuda]
        [--engine local|sglang|vllm] [--sizes 1m 10m 50m] [--servers 1 2]
        [--methods disk pull collective]

Real controllers, a train worker and a rollout worker; one update is what a training step ends with.
Meanwhile each server, or the engine, generates some answers. Values are medians of the rounds.

- publish: how long training waits. pull: sealing a copy; disk: writing the folder; collective:
  sealing and broadcasting, which lasts as long as the servers take to load.
- total: until the new weights are used.
- open, load, stall: the engine's own counters. Weights are opened (mapped from the trainer's
  shared memory) while generation goes on. A server generates nothing during `stall`, which contains
  `load`.
- vs copy: rate of the load over that of a copy of as many bytes into memory that is there, by one
  thread, timed before each update while generation is paused.
- publish vs pinned copy: on a GPU, the rate of `publish` over that of a copy of as many bytes from
  it into pinned memory.
- trainer private, trainer shared: what the trainer's process takes at most over what it had before
  its first publication, in buckets of `weight_update.bucket_bytes`. Shared memory is that of its
  store, where `pull` and `collective` keep the last version; private memory is what comes on top.
- added device bytes: of the GPU, all processes together, at most above what was in use before.

All methods update the same servers, in turns; collective is left out where trainer and servers
share a GPU.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path

import qwen2_models
import report
import sglang_side
import torch
from cuda_device import device_memory
from processes import memory_growth, resident_bytes, worker_pids
from random_model_run import Controllers, GivenLengths, model_folder, started

from areal_sc.config.schema import (
    ActorConfig,
    Device,
    Dtype,
    RolloutEngine,
    WeightUpdateConfig,
    WeightUpdateMethod,
)
from areal_sc.config.server_settings import SGLangConfig, VLLMConfig

VLLM_PYTHON = Path(__file__).parents[1] / ".venv-vllm" / "bin" / "python"
ANSWER_TOKENS = 200
"""Few: on a CPU it takes seconds to compute the KV of long answers again after each update."""
COPIES = 3
SERVERS_HELP = (
    "numbers of servers; all but the first with the last size only (default 1 2, quick 1)"
)


def copy_seconds(source: torch.Tensor, target: torch.Tensor) -> float:
    """Median of some copies."""
    times = []
    for _ in range(COPIES):
        start = time.perf_counter()
        target.copy_(source)
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def update(run: Controllers, method: WeightUpdateMethod, memory: torch.Tensor) -> report.Metrics:
    """Publishes the next version, and waits until all servers use it; times are means over them.

    Args:
        memory: [2, bytes of the weights], for the plain copy.
    """
    run.actor.config.weight_update.method = method  # read at each publication
    run.rollout.pause()
    copy_s = copy_seconds(*memory)
    run.rollout.resume()
    before = run.rollout.worker_stats()
    start = time.perf_counter()
    run.actor.publish_weights(run.rollout)
    publish_s = time.perf_counter() - start
    run.rollout.wait_for_weights()
    total_s = time.perf_counter() - start
    after = run.rollout.worker_stats()
    assert run.rollout.num_restarts == 0, "a server was lost"

    def mean(name: str) -> float:
        return statistics.fmean(a[name] - b[name] for a, b in zip(after, before, strict=True))

    load_s = mean("update_load_s")
    return {
        "publish_s": publish_s,
        "total_s": total_s,
        "open_s": mean("update_open_s"),
        "load_s": load_s,
        "stall_s": mean("update_stall_s"),
        "vs_copy": copy_s / load_s,
    }


def measure(
    actor: ActorConfig, num_servers: int, arguments: argparse.Namespace
) -> dict[WeightUpdateMethod, report.Metrics]:
    """Medians of the updates by each method, in turns, into the same servers."""
    methods = [WeightUpdateMethod.disk, WeightUpdateMethod.pull]  # what takes least memory first
    has_own_gpus = torch.cuda.device_count() > num_servers
    if arguments.engine != RolloutEngine.local and (actor.device == Device.cpu or has_own_gpus):
        methods.append(WeightUpdateMethod.collective)
    methods = [method for method in methods if method in arguments.methods]
    num_streams = arguments.streams * num_servers
    num_bytes = sum(file.stat().st_size for file in Path(actor.path).glob("*.safetensors"))
    memory = torch.ones(2, num_bytes, dtype=torch.uint8)
    updates: dict[WeightUpdateMethod, list[report.Metrics]] = {method: [] for method in methods}
    measured: dict[WeightUpdateMethod, report.Metrics] = {}
    with started(
        actor,
        engine=RolloutEngine(arguments.engine),
        num_workers=num_servers,
        max_running_sequences=8,
        max_context_tokens=2048,
        train_batch_groups=1,
        max_staleness=1_000_000,
        max_concurrent_groups=max(1, num_streams),
        sglang=SGLangConfig(python=str(arguments.sglang_python)),
        vllm=VLLMConfig(python=str(arguments.vllm_python)),
    ) as run:
        if num_streams:  # from the first batch on, answers are generated without end
            prompts = [
                {"input_ids": [3, 5, 7, 11 + number], "num_new_tokens": ANSWER_TOKENS}
                for number in range(400)
            ]
            run.rollout.prepare_batch(prompts, GivenLengths())
        pid = worker_pids(run.actor)["train/0"]
        memory_before = resident_bytes(pid)
        for method in methods:
            with (
                memory_growth(pid, memory_before) as growth,
                device_memory(actor.device) as device_bytes,
            ):
                for _ in range(2):  # the second version is sealed while the first is still there
                    update(run, method, memory)
            measured[method] = {
                f"trainer_{kind}_buckets": grown / actor.weight_update.bucket_bytes
                for kind, grown in growth.items()
            }
            if actor.device == Device.cuda:
                measured[method]["added_device_bytes"] = max(device_bytes) - device_bytes[0]
        for number in range(arguments.rounds):
            turn = number % len(methods)
            for method in (*methods[turn:], *methods[:turn]):
                updates[method].append(update(run, method, memory))
    for method, found in updates.items():
        medians = {name: statistics.median(u[name] for u in found) for name in found[0]}
        measured[method] = medians | measured[method]
        if actor.device == Device.cuda:
            pinned = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
            pinned_s = copy_seconds(memory[0].cuda(), pinned)
            measured[method]["publish_vs_pinned_copy"] = pinned_s / medians["publish_s"]
    return measured


def main() -> None:
    parser = report.make_parser(__doc__, device=True)
    sglang_side.add_arguments(parser)
    parser.add_argument("--vllm-python", type=Path, default=VLLM_PYTHON, metavar="FILE")
    parser.add_argument("--engine", choices=list(RolloutEngine), default=RolloutEngine.sglang)
    parser.add_argument("--sizes", nargs="+", choices=tuple(qwen2_models.SHAPES))
    parser.add_argument("--servers", nargs="+", type=int, default=[1, 2], help=SERVERS_HELP)
    methods = list(WeightUpdateMethod)
    parser.add_argument("--methods", nargs="+", type=WeightUpdateMethod, default=methods)
    parser.add_argument("--rounds", type=int, default=7, help="timed updates a method")
    parser.add_argument("--streams", type=int, default=2, help="answers a server")
    parser.add_argument("--bucket-mib", type=int, default=256)
    arguments = report.parse(parser, rounds=1, servers=[1])
    engine = RolloutEngine(arguments.engine)
    if engine == RolloutEngine.sglang:
        sglang_side.check_python(parser, arguments.sglang_python)
    if engine == RolloutEngine.vllm and not arguments.vllm_python.is_file():
        python = arguments.vllm_python
        parser.error(f"no vLLM at {python}: tests/vllm_server/install.sh installs it")
    torch.set_num_threads(1)
    is_cpu = arguments.device == "cpu"
    dtype = Dtype.float32 if is_cpu else Dtype.bfloat16
    usual_sizes = ["1m", "10m", "50m"] if is_cpu else ["0.5b"]
    sizes = arguments.sizes or usual_sizes[: 1 if arguments.quick else None]
    servers = [1] if engine == RolloutEngine.local else arguments.servers
    records: dict[tuple[str, str, str], report.Metrics] = {}
    for size in sizes:
        with model_folder(qwen2_models.SHAPES[size], dtype) as model:
            weight_update = WeightUpdateConfig(
                folder=str(model.parent / "weights"), bucket_bytes=arguments.bucket_mib << 20
            )
            actor = ActorConfig(
                path=str(model),
                dtype=dtype,
                device=Device(arguments.device),
                seed=0,
                weight_update=weight_update,
            )
            for number in servers if size == sizes[-1] else servers[:1]:
                for method, measured in measure(actor, number, arguments).items():
                    records[size, f"{number}_servers", str(method)] = measured
    report.print_records(
        f"Weight updates: {engine}",
        {"dtype": dtype}
        | {
            name: getattr(arguments, name) for name in ("device", "rounds", "streams", "bucket_mib")
        },
        ("model", "servers", "method"),
        records,
    )
    # those of the largest model on the fewest servers have short names, too
    largest = (sizes[-1], f"{servers[0]}_servers")
    short = {key[2:]: record for key, record in records.items() if key[:2] == largest}
    report.write(report.flat(records) | report.flat(short), arguments.json)


if __name__ == "__main__":
    main()
