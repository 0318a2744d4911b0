"""The dry run's estimate against numbers worked out by hand."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path

import pytest

from areal_sc.config.machine import Machine
from areal_sc.config.plan import PROCESS_BYTES, format_bytes, plan
from areal_sc.config.schema import GRPOConfig
from areal_sc.errors import ConfigError

Load = Callable[..., GRPOConfig]
NUM_PARAMETERS = 1000
KV_VALUES = 2 * 2 * 1 * 8  # key and value, 2 layers, 1 head of 8
SIZES = [
    "rollout.train_batch_groups=2",
    "rollout.group_size=4",
    "rollout.max_context_tokens=100",
    "rollout.max_running_sequences=5",
    "rollout.max_staleness=1",
    "generation.max_new_tokens=50",
]
ROW_BYTES = (1 + 2) * 2 * 4 * 100 * 13  # eta + 1 batches admitted, one in training


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    config = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    config["num_key_value_heads"] = 1
    (folder / "config.json").write_text(json.dumps(config))
    entry = {"dtype": "F32", "shape": [NUM_PARAMETERS], "data_offsets": [0, 0]}  # without values
    header = json.dumps({"w": entry}).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)
    return folder


def test_memory_on_one_cpu(load: Load, model: Path) -> None:
    config = load(f"actor.path={model}", *SIZES)
    result = plan(config, lambda: Machine(host_memory_bytes=1 << 40))
    train, rollout = result.workers
    assert (train.role, train.index, train.device) == ("train", 0, "cpu")
    assert train.parameter_bytes == (4 + 4) * NUM_PARAMETERS  # and gradients
    assert train.optimizer_bytes == 8 * NUM_PARAMETERS
    assert train.store_bytes == 2 * 4 * NUM_PARAMETERS
    assert (rollout.role, rollout.index, rollout.device) == ("rollout", 0, "cpu")
    assert rollout.parameter_bytes == 4 * NUM_PARAMETERS
    assert rollout.kv_bytes == 5 * 100 * KV_VALUES * 4
    assert rollout.store_bytes == ROW_BYTES
    total = 16 + 8 + 4
    assert result.needed_bytes == {
        "host": total * NUM_PARAMETERS + 64000 + ROW_BYTES + 2 * PROCESS_BYTES
    }
    assert result.fits


def test_ranks_share_parameters_and_devices_in_turn(load: Load, model: Path) -> None:
    config = load(
        f"actor.path={model}",
        *SIZES,
        "actor.num_workers=2",
        "rollout.num_workers=2",
        "actor.dtype=bfloat16",
        num_devices=3,
    )
    result = plan(config, lambda: Machine(1 << 40, (1 << 30,) * 3))
    assert [(f"{w.role}/{w.index}", w.device) for w in result.workers] == [
        ("train/0", "cuda:0"),
        ("train/1", "cuda:1"),
        ("rollout/0", "cuda:2"),
        ("rollout/1", "cuda:0"),
    ]
    train = result.workers[0]
    assert train.parameter_bytes + train.optimizer_bytes == 16 * NUM_PARAMETERS // 2
    kv_bytes = 5 * 100 * KV_VALUES * 2
    needed = result.needed_bytes
    assert needed["cuda:0"] == 16 * NUM_PARAMETERS // 2 + 2 * NUM_PARAMETERS + kv_bytes
    assert needed["cuda:1"] == 16 * NUM_PARAMETERS // 2
    assert needed["cuda:2"] == 2 * NUM_PARAMETERS + kv_bytes
    # weights for publication, rows and processes stay in host memory
    assert needed["host"] == 2 * 2 * NUM_PARAMETERS + ROW_BYTES + 4 * PROCESS_BYTES


def test_store_limit_bounds_the_rows(load: Load, model: Path) -> None:
    config = load(f"actor.path={model}", *SIZES, f"rollout.store_bytes={2 * 4 * 100 * 13}")
    assert plan(config, Machine).workers[1].store_bytes == 2 * 4 * 100 * 13


def test_too_little_memory(load: Load, model: Path) -> None:
    config = load(f"actor.path={model}", *SIZES)
    needed = plan(config, Machine).needed_bytes["host"]  # unknown memory fits
    plan(config, lambda: Machine(host_memory_bytes=needed))
    with pytest.raises(ConfigError, match="does not fit into memory") as caught:
        plan(config, lambda: Machine(host_memory_bytes=needed - 1))
    assert "TOO LITTLE" in str(caught.value)
    assert "rollout/0" in str(caught.value)


def test_lines_say_what_is_not_counted(load: Load) -> None:
    lines = plan(load(*SIZES), lambda: Machine(host_memory_bytes=1 << 40)).lines()
    assert lines[0].split()[:2] == ["worker", "device"]
    assert lines[1].split()[:2] == ["train/0", "cpu"]
    assert lines[2].split()[:2] == ["rollout/0", "cpu"]
    assert lines[3].endswith("of 1.0 TiB")
    assert lines[-1] == "not counted: the model, which is not there yet"


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1536, "1.5 KiB"),
        (3 << 30, "3.0 GiB"),
        (1 << 51, "2048.0 TiB"),
    ],
)
def test_format_bytes(count: int, text: str) -> None:
    assert format_bytes(count) == text
