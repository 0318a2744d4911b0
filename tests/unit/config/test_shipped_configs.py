"""Every YAML that comes with the project loads, passes its checks, and says what it promises."""

from __future__ import annotations

from pathlib import Path

import pytest

from areal_sc.config.schema import Device, Dtype, GRPOConfig, LrSchedule
from areal_sc.errors import ConfigError
from areal_sc.preflight.load import load_config

CONFIGS = Path(__file__).parents[3] / "configs"
SHIPPED = sorted(CONFIGS.glob("*.yaml"))
ONE_GPU = ("letter_sort_gpu.yaml", "one_gpu.yaml", "gsm8k.yaml", "gsm8k_arc.yaml")
DEVICES = {**dict.fromkeys(ONE_GPU, 1), "deepscaler.yaml": 8, "deepcoder.yaml": 8}
"""File -> CUDA devices of the machine that it is for."""


def load_shipped(name: str, *overrides: str) -> GRPOConfig:
    argv = ["--config", str(CONFIGS / name), *overrides]
    return load_config(argv, GRPOConfig, count_devices=lambda: DEVICES.get(name, 0))


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.name)
def test_loads_without_warning(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    load_shipped(path.name, "actor.path=some_model")
    assert caplog.records == []


def test_run_folders_are_distinct() -> None:
    folders = [load_shipped(path.name, "actor.path=some_model").run_dir for path in SHIPPED]
    assert len(set(folders)) == len(folders) > 12


def test_letter_sort() -> None:
    config = load_shipped("letter_sort.yaml")
    assert (config.total_steps, config.rollout.train_batch_groups) == (160, 32)
    assert (config.rollout.group_size, config.rollout.max_staleness) == (8, 4)
    assert config.actor.optimizer.lr == 4e-4
    assert config.actor.optimizer.schedule is LrSchedule.linear
    assert config.actor.optimizer.total_steps == config.rollout.total_steps == 160
    assert config.task["warm_start"]["lr"] == 4e-3
    assert config.task["max_letters"] + 1 <= config.generation.max_new_tokens
    # 26 letters and `=`, and as many and `$`
    assert 2 * (config.task["max_letters"] + 1) <= config.rollout.max_context_tokens


def test_variants_change_only_what_they_are_for() -> None:
    two_ranks = load_shipped("letter_sort_two_ranks.yaml")
    assert (two_ranks.actor.parallel.data, two_ranks.rollout.num_workers) == (2, 2)
    sync = load_shipped("letter_sort_sync.yaml")
    assert sync.rollout.max_staleness == 0
    gpu = load_shipped("letter_sort_gpu.yaml")
    assert (gpu.actor.device, gpu.rollout.device) == (Device.cuda, Device.cuda)
    assert (gpu.actor.dtype, gpu.rollout.dtype) == (Dtype.bfloat16, Dtype.bfloat16)
    base = load_shipped("letter_sort.yaml")
    for variant in (two_ranks, sync, gpu):
        assert variant.task == base.task
        assert variant.actor.optimizer == base.actor.optimizer
        assert variant.actor.path == base.actor.path


def test_jsonl_math_asks_for_a_model() -> None:
    with pytest.raises(ConfigError, match=r"no value for actor\.path"):
        load_shipped("jsonl_math.yaml")


def test_gpu_config_without_a_gpu() -> None:
    argv = ["--config", str(CONFIGS / "letter_sort_gpu.yaml")]
    with pytest.raises(ConfigError, match=r"actor\.device: cuda, but .* has no CUDA device"):
        load_config(argv, GRPOConfig, count_devices=lambda: 0)
