"""Host memory of each rank of training, on several meshes, against what `--dry-run` counts.

    python benchmarks/train_memory.py [--quick] [--json FILE] [--engine megatron]

Processes of one thread each, connected by gloo; a model with random weights, in bfloat16 in its
files, trained in float32. A rank's private memory is sampled while it loads the model, and in its
second training step, whose tokens are so few that activations hardly count. Ratios, of the rank
that needs most:

- dry_run: what the step has at most, over parameters, gradients and optimizer as `--dry-run`
  counts them.
- loading_first, loading_others: what loading takes at most, over what the rank then keeps and the
  two largest tensors; of rank 0, and of the others. FSDP's loading keeps a rank's share of the
  parameters; that of Megatron-core also their gradients and optimizer state.

Of FSDP alone:

- step: what the step takes beyond what is there before it, over the rank's share of the gradients
  and of one decoder layer's parameters.
- gradients: the same without the two layers' parameters that FSDP has gathered at that time.

With `--engine megatron` the names of metrics begin with `megatron_`, and the tests' shim takes
CUDA's place.
"""

from __future__ import annotations

import gc
import os
import socket
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import report
from processes import memory_growth, resident_bytes
from qwen2_models import Shape, build
from random_model_run import model_folder
from torch import device, multiprocessing, set_num_threads
from train_throughput import actor_config
from train_workload import Workload, make_rows
from transformers.utils import logging as hf_logging

from areal_sc.algorithms.named_loss import loss_of
from areal_sc.config.parallel_settings import TrainEngineKind
from areal_sc.config.schema import ActorConfig, Dtype, ParallelConfig
from areal_sc.engines.fsdp.model import load_sharded_model
from areal_sc.engines.handle_base import FLOAT32_BYTES
from areal_sc.engines.handles import make_actor
from areal_sc.engines.megatron.machine import ON_CPU
from areal_sc.engines.training.causal_lm import read_causal_lm
from areal_sc.engines.training.process_group import ProcessGroups
from areal_sc.sizing.machine import Machine
from areal_sc.sizing.model_folder import read_model_shape

FSDP_MESHES = {
    "one": ParallelConfig(),
    "data_2": ParallelConfig(data=2),
    "tensor_2": ParallelConfig(tensor=2),
    "data_4": ParallelConfig(data=4),
    "data_2_tensor_2": ParallelConfig(data=2, tensor=2),
}
MEGATRON_MESHES = {
    "tensor_2": ParallelConfig(tensor=2),
    "data_2": ParallelConfig(data=2),
    "pipeline_2": ParallelConfig(pipeline=2),
    "virtual_pipeline_2": ParallelConfig(pipeline=2, virtual_pipeline=2),
    "tensor_2_pipeline_2": ParallelConfig(tensor=2, pipeline=2),
}
SMALL, LARGE = Shape(64, 128, 2, 4, 2, 256), Shape(1024, 2816, 20, 16, 8, 32768)
LIMIT_S = 60.0


@dataclass(frozen=True, order=True)
class Found:
    """Bytes of a rank, over what it had when it began.

    Attributes:
        loading: at most while it loaded the model.
        held: between two steps.
        step: at most in a step, over `held`.
    """

    rank: int
    loading: int
    held: int
    step: int


def run_rank(
    rank: int,
    config: ActorConfig,
    workload: Workload,
    small: Path,
    address: str,
    found: Any,
) -> None:
    set_num_threads(1)
    hf_logging.disable_progress_bar()
    read_causal_lm(replace(config, path=str(small)))  # imports whatever loading imports
    rows, loss, pid = make_rows(workload), loss_of(config.ppo), os.getpid()
    engine = make_actor(config).build()
    begun = resident_bytes(pid)
    is_fsdp = config.engine == TrainEngineKind.fsdp
    loading = load(rank, config, address) if is_fsdp else 0
    with memory_growth(pid, resident_bytes(pid)) as start:
        engine.initialize(rank, config.parallel.num_ranks, address)
    loading = loading or start["private"]
    rows = replace(
        rows, fields={**rows.fields, "proximal_logprobs": rows.fields["behavior_logprobs"]}
    )
    engine.update([rows], loss, step=0)  # makes the optimizer's state
    held = resident_bytes(pid)
    with memory_growth(pid, held) as step:
        engine.update([rows], loss, step=1)
    found.put(Found(rank, loading, held["private"] - begun["private"], step["private"]))


def load(rank: int, config: ActorConfig, address: str) -> int:
    """Bytes that FSDP's loading takes at most, without the optimizer state that an engine adds."""
    groups = ProcessGroups.join(
        rank,
        config.parallel.num_ranks,
        address,
        device("cpu"),
        config.parallel,
        hosted=None,
        is_needed=config.parallel.num_ranks > 1,
    )
    with memory_growth(os.getpid(), resident_bytes(os.getpid())) as growth:
        load_sharded_model(config, groups)
    gc.collect()  # modules refer to each other
    return growth["private"]


def measure(config: ActorConfig, workload: Workload, small: Path) -> list[Found]:
    """What each rank took."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{free.getsockname()[1]}"
    found = multiprocessing.get_context("spawn").Queue()
    words = config, workload, small, address, found
    ranks = multiprocessing.spawn(run_rank, words, config.parallel.num_ranks, join=False)
    while not ranks.join():
        pass
    return sorted(found.get(timeout=LIMIT_S) for _ in range(config.parallel.num_ranks))


def compared(config: ActorConfig, shape: Shape, found: list[Found]) -> report.Metrics:
    parallel, known = config.parallel, read_model_shape(Path(config.path))
    handle = make_actor(config)
    plans = [handle.plan_worker(n, known, ["cpu"], Machine())[0] for n in range(len(found))]
    parameters = build(shape, device="meta").named_parameters()
    sizes = {name: FLOAT32_BYTES * p.numel() for name, p in parameters}
    share = sum(sizes.values()) / parallel.num_ranks
    is_fsdp = config.engine == TrainEngineKind.fsdp
    kept = [share if is_fsdp else plan.held_bytes for plan in plans]
    largest = sum(sorted(sizes.values())[-2:])
    loading = [rank.loading / (kept[rank.rank] + largest) for rank in found]
    most = max(found, key=lambda rank: rank.held + rank.step)
    plan = plans[most.rank]
    metrics = {
        "dry_run": (most.held + most.step) / (plan.held_bytes + plan.gathered_bytes),
        "loading_first": loading[0],
    }
    if loading[1:]:
        metrics["loading_others"] = max(loading[1:])
    if is_fsdp:
        layer = sum(size for name, size in sizes.items() if ".layers.0." in name) / parallel.tensor
        gathered = 2 * layer if parallel.num_ranks > parallel.tensor else 0
        step = max(rank.step for rank in found)
        metrics |= {
            "step": step / (share + layer),
            "gradients": (step - gathered) / (share + layer),
        }
    return metrics


def main() -> None:
    parser = report.make_parser(__doc__)
    parser.add_argument("--engine", type=TrainEngineKind, default=TrainEngineKind.fsdp)
    arguments = parser.parse_args()
    # Freed memory goes back to the system at once, so that what is sampled is what is in use.
    os.environ["MALLOC_MMAP_THRESHOLD_"] = "65536"
    is_fsdp = arguments.engine == TrainEngineKind.fsdp
    if not is_fsdp:
        os.environ[ON_CPU] = "1"
    meshes = FSDP_MESHES if is_fsdp else MEGATRON_MESHES
    shape = SMALL if arguments.quick else LARGE
    workload = Workload("few tokens", shape, 64, (8, 8, 8, 8))
    records: dict[tuple[str | int, ...], report.Metrics] = {}
    with model_folder(shape, Dtype.bfloat16) as model, model_folder(SMALL, Dtype.bfloat16) as small:
        for name in list(meshes)[1:2] if arguments.quick else meshes:
            config = replace(
                actor_config(workload, model, "cpu"), engine=arguments.engine, parallel=meshes[name]
            )
            key = name if is_fsdp else f"{arguments.engine}_{name}"
            records[key,] = compared(config, shape, measure(config, workload, small))
    settings = {"parameters": sum(p.numel() for p in build(shape, device="meta").parameters())}
    report.print_records("Memory of a rank", settings, ["mesh"], records)
    report.write(report.flat(records), arguments.json)


if __name__ == "__main__":
    main()
