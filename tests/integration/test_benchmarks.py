"""Every benchmark's `--quick` runs and writes finite numbers.

Benchmarks that need what the machine may lack end with a message and exit code 2.
"""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
SGLANG = BENCHMARKS.parent / ".venv-sglang" / "bin" / "python"
LIMIT_S = 240

PROMISED = {
    "async_speedup": {"async_over_sync", "async_floor_s_per_step", "sync_wait_share"},
    "chaos": {"rows_lost", "rows_trained_twice", "false_zero_rewards", "leftovers"},
    "first_hour": {"huge_over_plain_first_step", "trackers_calls_percent"},
    "generate_throughput": {"local_over_static", "mixed_over_static"},
    "generate_throughput --against sglang": {"local_over_sglang"},
    "interruption": {"local_interrupted_over_waiting_eta1_batch8"},
    "many_workers": {"loop_lag_p99_ms", "choose_us", "step_s"},
    "planes": {"tcp_vs_bare_pyzmq", "noop_rpc_vs_bare", "heartbeat_256_cpu_percent"},
    "soak": {"store_growth", "resident_growth"},
    "staleness": {"auc_decoupled_minus_naive_eta2", "over_bound_s_per_token"},
    "train_throughput": {"step_vs_handwritten", "letter_sort_dynamic_over_fixed"},
    "weight_update --engine local": {"pull_publish_s", "disk_total_s"},
    "weight_update --engine sglang": {"pull_stall_s", "disk_stall_s", "collective_vs_copy"},
}
"""benchmark, with what else selects its part -> some metrics that it must write."""


def run_benchmark(name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(BENCHMARKS / f"{name}.py"), *arguments],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )


def test_all_benchmarks_are_known() -> None:
    programs = {
        path.stem for path in BENCHMARKS.glob("*.py") if "report.make_parser(" in path.read_text()
    }
    assert programs == {command.split()[0] for command in PROMISED}


@pytest.mark.parametrize("command", sorted(PROMISED))
def test_a_quick_benchmark_runs_and_its_numbers_are_finite(command: str, tmp_path: Path) -> None:
    if "sglang" in command and not SGLANG.is_file():
        pytest.skip(f"no SGLang at {SGLANG}: tests/sglang_server/install.sh installs it")
    result = tmp_path / "result.json"
    done = run_benchmark(*command.split(), "--quick", "--json", str(result))
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    metrics = json.loads(result.read_text())
    assert PROMISED[command] <= set(metrics), sorted(metrics)
    assert not {key: entry for key, entry in metrics.items() if not math.isfinite(entry["value"])}


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_missing_gpu_is_named() -> None:
    done = run_benchmark("generate_throughput", "--quick", "--device", "cuda")
    assert done.returncode == 2
    assert "argument --device: torch finds no CUDA device here" in done.stderr


def test_what_is_measured_on_a_gpu_is_measured_by_benchmarks_with_a_device(tmp_path: Path) -> None:
    named = run_gpu_script(tmp_path / "named", python="echo")
    assert named.returncode == 0, named.stdout
    commands = re.findall(r"^benchmarks/(\w+)\.py --device cuda .*--quick", named.stdout, re.M)
    assert set(commands) == {
        path.stem
        for path in BENCHMARKS.glob("*.py")
        if "report.make_parser(__doc__, device=True)" in path.read_text()
    }
    assert "examples/letter_sort.py --config configs/letter_sort_gpu.yaml" in named.stdout
    failed = run_gpu_script(tmp_path / "failed", python="false")
    assert failed.returncode == 1 + len(commands)


def run_gpu_script(folder: Path, python: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(BENCHMARKS / "gpu.sh"), str(folder), "--quick"],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        env={**os.environ, "PYTHON": python, "SGLANG_PYTHON": "any"},
    )


def test_a_missing_sglang_is_named(tmp_path: Path) -> None:
    done = run_benchmark("weight_update", "--quick", "--sglang-python", str(tmp_path / "python"))
    assert done.returncode == 2
    assert f"no SGLang at {tmp_path / 'python'}" in done.stderr
