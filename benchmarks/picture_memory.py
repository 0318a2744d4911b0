"""Host memory of ranks that train a model which reads pictures, against what `--dry-run` counts.

    python benchmarks/picture_memory.py [--quick] [--json FILE]

A random Idefics3 whose vision tower has two fifths of the parameters, in float32, on one rank and
on two (`data: 2`), with its tower frozen and trained. Of each rank the private memory is sampled in
its second and third training step, whose rows have few tokens and pictures of their own.

dry_run: the most that a rank has, over what is counted of it; of the rank that needs most. Without
what a rank keeps of pictures that it has seen, which is counted as the most that it may be.
"""

from __future__ import annotations

import gc
import json
import os
import socket
import tempfile
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import report
import torch
from processes import memory_growth, resident_bytes
from torch import multiprocessing, set_num_threads

from areal_sc.algorithms.named_loss import CROSS_ENTROPY
from areal_sc.config.schema import ActorConfig, Device, OptimizerConfig, ParallelConfig
from areal_sc.engines.handles import make_actor
from areal_sc.engines.picture_processor import picture_processor
from areal_sc.engines.tokenizer import load_tokenizer
from areal_sc.sizing.machine import Machine
from areal_sc.sizing.model_folder import read_model_shape
from areal_sc.sources.pictures import compressed, packed
from areal_sc.token_fields import PICTURES
from areal_sc.transport.packed_rows import PackedRows, RowValues

SIDE, PATCH, SCALE = 256, 16, 4
SPECIAL = ("$", "<fake_token_around_image>", "<image>", "<end_of_utterance>", "<global-img>")
SMALL, LARGE = (64, 2), (768, 8)
"""Width and layers, of text and of the tower."""
LIMIT_S = 600.0


def make_model(folder: Path, hidden: int, layers: int) -> None:
    """A model with random weights, and its tokenizer and image processor."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import (
        Idefics3Config,
        Idefics3ForConditionalGeneration,
        PreTrainedTokenizerFast,
    )

    characters = [*map(chr, range(97, 123)), " "]
    tokens = {token: number for number, token in enumerate([*SPECIAL, *characters])}
    tokenizer = Tokenizer(models.WordLevel(tokens, unk_token="a"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.add_special_tokens([*SPECIAL])
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="$").save_pretrained(folder)
    side = {"longest_edge": SIDE}
    kind = {"image_processor_type": "Idefics3ImageProcessor", "do_image_splitting": False}
    content = json.dumps({**kind, "size": side, "max_image_size": side})
    (folder / "preprocessor_config.json").write_text(content)
    sizes = {
        "hidden_size": hidden,
        "intermediate_size": 4 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": hidden // 32,
    }
    config = Idefics3Config(
        text_config={
            **sizes,
            "model_type": "llama",
            "vocab_size": len(tokens),
            "max_position_embeddings": 512,
            "bos_token_id": None,
            "eos_token_id": 0,
        },
        vision_config={**sizes, "image_size": SIDE, "patch_size": PATCH},
        scale_factor=SCALE,
        image_token_id=tokens["<image>"],
    )
    Idefics3ForConditionalGeneration(config).save_pretrained(folder)


def rows_with_pictures(folder: Path, num_rows: int, seed: int) -> PackedRows:
    from PIL import Image

    chance, tokenizer = np.random.default_rng(seed), load_tokenizer(folder)
    processor = picture_processor(folder, tokenizer)
    assert processor is not None
    ids, blobs = list[list[int]](), list[bytes]()
    for _ in range(num_rows):
        drawn = chance.integers(0, 255, (SIDE // 8, SIDE // 8, 3), dtype=np.uint8)
        picture = compressed(Image.fromarray(drawn).resize((SIDE, SIDE)))
        ids.append(tokenizer(processor.expand("see <image> b", [picture]))["input_ids"])
        blobs.append(packed([picture]).tobytes())
    masks = [[False] * (len(row) - 1) + [True] for row in ids]
    fields = {
        "input_ids": torch.tensor([*chain(*ids)]).int(),
        "loss_mask": torch.tensor([*chain(*masks)]),
    }
    values = {PICTURES: RowValues.of_bytes(blobs)}
    return PackedRows(fields, tuple(map(len, ids)), row_fields=values)


def run_rank(rank: int, config: ActorConfig, small: Path, address: str, found: Any) -> None:
    set_num_threads(1)
    tiny = make_actor(replace(config, path=str(small), parallel=ParallelConfig())).build()
    tiny.initialize(0, 1, "")  # imports, and the first use of each kernel
    tiny.update([rows_with_pictures(small, 2, 0)], CROSS_ENTROPY, step=0)
    tiny.close()
    del tiny
    gc.collect()
    pid = os.getpid()
    begun = resident_bytes(pid)
    engine = make_actor(config).build()
    engine.initialize(rank, config.parallel.num_ranks, address)
    steps = [rows_with_pictures(Path(config.path), 4, 10 * rank + it) for it in range(3)]
    engine.update([steps[0]], CROSS_ENTROPY, step=0)
    with memory_growth(pid, begun) as growth:
        for step in (1, 2):
            engine.update([steps[step]], CROSS_ENTROPY, step=step)
    found.put((growth["private"], rank))
    engine.close()


def measure(config: ActorConfig, small: Path) -> float:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{free.getsockname()[1]}"
    found = multiprocessing.get_context("spawn").Queue()
    words = config, small, address, found
    ranks = multiprocessing.spawn(run_rank, words, config.parallel.num_ranks, join=False)
    while not ranks.join():
        pass
    most, rank = max(found.get(timeout=LIMIT_S) for _ in range(config.parallel.num_ranks))
    shape = read_model_shape(Path(config.path))
    assert shape is not None
    plan = make_actor(config).plan_worker(rank, shape, ["cpu"], Machine())[0]
    counted = plan.held_bytes + plan.gathered_bytes + plan.activation_bytes
    print(
        f"{most >> 20} MiB, counted {counted >> 20} MiB, activations {plan.activation_bytes >> 20}"
    )
    return most / counted


def main() -> None:
    arguments = report.make_parser(__doc__).parse_args()
    # Freed memory goes back to the system at once, so that what is sampled is what is in use.
    os.environ["MALLOC_MMAP_THRESHOLD_"] = "65536"
    records: dict[tuple[str | int, ...], report.Metrics] = {}
    with tempfile.TemporaryDirectory() as folder:
        small, model = Path(folder) / "small", Path(folder) / "model"
        make_model(small, *SMALL)
        make_model(model, *(SMALL if arguments.quick else LARGE))
        for num_ranks in (1,) if arguments.quick else (1, 2):
            for trains_tower in (False, True):
                config = ActorConfig(
                    path=str(model),
                    device=Device.cpu,
                    train_vision_tower=trains_tower,
                    max_tokens_per_micro_batch=64,
                    memory_snapshots=False,
                    parallel=ParallelConfig(data=num_ranks),
                    optimizer=OptimizerConfig(total_steps=10),
                )
                key = num_ranks, "all" if trains_tower else "text"
                records[key] = {"dry_run": measure(config, small)}
        shape = read_model_shape(model)
    assert shape is not None
    settings = {"parameters": shape.num_parameters}
    report.print_records("Memory of a rank", settings, ["ranks", "trained"], records)
    report.write(report.flat(records), arguments.json)


if __name__ == "__main__":
    main()
