"""Counts what a training step asks of a device, and prints it as JSON: one object a scenario.

A program of its own, because a pretended device stays for the rest of a process.
"""

from __future__ import annotations

import gc
import json
import tempfile
from pathlib import Path
from typing import Any

import pretended_device
import torch
import torch.distributed as dist
from device_counter import DeviceCounter
from integration.ranks import save_model
from integration.ranks_program import actor_config, make_rows
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import Qwen2Config

from areal_sc.algorithms.logprobs import chunked_logprobs
from areal_sc.algorithms.named_loss import loss_of
from areal_sc.engines.fsdp.spread_vocabulary import SpreadRows, spread_embedding
from areal_sc.engines.handles import make_actor
from areal_sc.engines.training.process_group import ProcessGroup
from areal_sc.sizing.machine import Machine
from areal_sc.sizing.model_folder import read_model_shape
from areal_sc.sizing.output_layer import piece_bytes

NUM_RANKS, NUM_CHUNKS, WIDTH, ROWS_OF_PIECE = 8, 16, 8, 4
SHAPES = {"0.5B": (151_936, 896), "7B": (152_064, 3_584)}
EIGHT = [11, 6, 14, 3, 9, 20, 5, 8]


def counted(counter: DeviceCounter) -> dict[str, Any]:
    return vars(counter.counts) | {"num_kernels": counter.counts.num_kernels}


def vocabulary(num_pieces: int) -> dict[str, Any]:
    """Embeddings and output layer on several ranks and on one, forward and backward."""
    share = ROWS_OF_PIECE * num_pieces
    total = share * NUM_RANKS
    device = torch.device(pretended_device.DEVICE_TYPE, 0)
    group = ProcessGroup(0, NUM_RANKS, device)
    rows = SpreadRows(total, group, torch.float32, 4 * WIDTH * ROWS_OF_PIECE * NUM_RANKS)
    tokens = torch.arange(NUM_CHUNKS).to(device)

    def weight(num_rows: int) -> torch.Tensor:
        return torch.ones(num_rows, WIDTH, device=device, requires_grad=True)

    own, whole = weight(share), weight(total)
    with DeviceCounter() as of_embedding:
        spread_embedding(own, tokens, rows).sum().backward()
        rows.finish()
    with DeviceCounter() as of_ranks:
        logprobs, entropy = chunked_logprobs(
            weight(NUM_CHUNKS), own, tokens, chunk_tokens=1, rows=rows
        )
        (logprobs + entropy).sum().backward()
        rows.finish()
    with DeviceCounter() as alone:
        logprobs, entropy = chunked_logprobs(
            weight(NUM_CHUNKS), whole, tokens, chunk_tokens=1, adds_gradient=True
        )
        (logprobs + entropy).sum().backward()
    return {
        "embedding": counted(of_embedding),
        "ranks": counted(of_ranks),
        "one rank": counted(alone),
    }


def step(model: str, max_tokens: int, dtype: str, **settings: Any) -> dict[str, Any]:
    """An update and a forward of an engine of one rank."""
    config = actor_config({"model": model, "max_tokens": max_tokens, "dtype": dtype, **settings})
    engine = make_actor(config).build()
    engine.initialize(0, 1, "")
    rows, loss = make_rows(1, EIGHT, 30), loss_of(config.ppo)
    engine.update([rows], loss, step=0)
    before = len(pretended_device.pinned_sizes())
    engine.begin_snapshot(Path(model).with_name("snapshot")).result()
    pinned = pretended_device.pinned_sizes()[before:]
    shape = read_model_shape(model)
    assert shape is not None
    (plan,) = make_actor(config).plan_worker(0, shape, ["cuda:0"], Machine(None, (None,)))
    with DeviceCounter() as of_update:
        metrics = engine.update([rows], loss, step=1)
    with DeviceCounter() as of_forward:
        engine.forward(rows, "logprobs")
    engine.close()
    return {
        "num_micro_batches": metrics["num_micro_batches"],
        "grad_norm": metrics["grad_norm"],
        "update": counted(of_update),
        "forward": counted(of_forward),
        "pinned_bytes": sum(pinned),
        "planned_bytes": plan.copy_bytes,
    }


def main() -> None:
    gc.freeze()  # each engine collects garbage while it loads: not in all that is imported
    pretended_device.install()
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        sizes = {"hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 48}
        heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
        model = save_model(Path(folder) / "model", Qwen2Config(vocab_size=30, **sizes, **heads))
        for dtype in ("float32", "bfloat16", "float16"):
            found[f"few {dtype}"] = step(model, 64, dtype)
            found[f"many {dtype}"] = step(model, 20, dtype)
        for name in ("checkpointing", "offload"):
            kept = {"activation_checkpointing": "layers", "activation_offload": name == "offload"}
            found[f"kept {name}"] = step(model, 20, "float16", **kept)
    dist.init_process_group("fake", rank=0, world_size=NUM_RANKS, store=FakeStore())
    for name, (num_tokens, width) in SHAPES.items():
        step_rows = piece_bytes("cuda", 80 << 30) // (4 * width * NUM_RANKS)
        found[name] = vocabulary(-(-(num_tokens // NUM_RANKS) // step_rows))
    print(json.dumps(found))


if __name__ == "__main__":
    main()
