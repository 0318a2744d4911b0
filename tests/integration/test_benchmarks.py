"""Every benchmark's `--quick` runs and writes finite numbers.

Benchmarks that need what the machine may lack end with a message and exit code 2.
"""

from __future__ import annotations

import json
import math
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
SGLANG = BENCHMARKS.parent / ".venv-sglang" / "bin" / "python"
TRL = BENCHMARKS.parent / ".venv-trl" / "bin" / "python"
SMOLLM2 = BENCHMARKS.parent / ".venv-models" / "SmolLM2-135M-Instruct"
LIMIT_S = 240

PROMISED = {
    "admission --part doubling": {"lengths_double_just_in_time_steps_to_adapt"},
    "episode_kills": {"one_turn_played_per_needed", "agents_median_recovery_s"},
    "agent_kills": {"inside_turns_trained", "outside_turns_trained", "outside_kills_in_a_call"},
    "agent_schedules": {"trained", "worker_deaths", "server_deaths"},
    "agent_sessions": {"thinking_call_cpu_ms", "at_once_late_most_ms", "resident_growth"},
    "algorithms": {"decoupled_ppo_0_accuracy_before", "decoupled_ppo_0_accuracy_after"},
    "against_checkout": {"cpu_s_ratio", "s_ratio_high"},
    "against_trl": {"cpu_s_per_step_ratio", "trl_first_s", "ours_to_step_4_accuracy"},
    "autoscale": {"one_less_over_best_per_worker", "three_more_over_best_per_worker"},
    "async_speedup": {"sync_over_async_s_per_step", "async_floor_s_per_step", "sync_wait_share"},
    "chaos": {"num_reattached", "num_gone_back", "controller_recovery_worst_s"},
    "chaos_models": {"num_kills", "store_growth_ref", "store_growth_sft"},
    "chat_drift": {"QWEN_THINKING_rows", "LLAMA_drifted_by_split"},
    "chat_turns": {"turns_s", "session_s", "anew_over_turns"},
    "distillation": {"sampled_token_0_first_kl_nats", "top_16_forward_0_bytes_per_row"},
    "first_hour": {"huge_over_plain_first_step", "trackers_calls_percent"},
    "generate_throughput": {"local_over_static", "mixed_over_static"},
    "group_rewards": {"right_0_accuracy_after", "majority_0_accuracy_before"},
    "interruption": {"local_interrupted_over_waiting_eta1_batch8"},
    "learning_watch": {"always_zero_0_complaints", "always_zero_0_told_at_step"},
    "learning_watch --part small": {"rate_1_0_is_right", "sound_runs_told"},
    "many_nodes": {"sent_by_trainers_vs_model", "heartbeats_cpu_percent"},
    "many_workers": {"loop_lag_p99_ms", "choose_us", "step_s"},
    "output_layer": {"trained_kl_float32_over_rounded", "random_top_logit"},
    "preferences": {"dpo_ordered_mean", "reward_model_ordered_mean"},
    "page_live": {"step_worst_s", "row_worst_s", "server_growth", "tab_growth"},
    "page_rows": {"read_s", "query_worst_ms", "search_fifty_s", "open_worst_ms"},
    "picture_memory": {"1_text_dry_run", "1_all_dry_run"},
    "planner": {"8_24_2_error_median", "8_24_2_regret"},
    "planes": {"tcp_vs_bare_pyzmq", "noop_rpc_vs_bare", "heartbeat_256_cpu_percent"},
    "several_sets": {"held_out_before", "words_eta0"},
    "rank_kills": {"num_kills", "copying_snapshot_until_step_s", "between_steps_until_step_s"},
    "session_kills": {"num_kills", "median_pause_s"},
    "serve_kills": {"server_num_kills", "all_worst_until_step_s"},
    "serve_tenants": {"together_speedup", "resting_wake_up_s", "flood_beside_over_round"},
    "safety_cost": {"journal_over_bare", "all_over_bare"},
    "sandbox": {"strongest_programs_per_s", "apart_over_bare"},
    "scale": {"just_in_time_eta8_sync_over", "train_x0.7_sync_over"},
    "shared_prefixes": {"two_answers_times_faster", "tools_3000_8_ranks_balanced"},
    "start_checks": {"model_taken", "starts_refused", "largest_distance"},
    "soak": {"store_growth", "resident_growth"},
    "step_counts": {"reads_of_a_layer_now"},
    "task_mix": {"0_larger_rise", "0_equal_rise", "0_share_of_larger"},
    "staleness": {"auc_decoupled_minus_naive_eta2", "over_bound_s_per_token"},
    "train_memory": {"data_2_dry_run", "data_2_loading_others"},
    "train_memory --engine megatron": {"megatron_data_2_dry_run", "megatron_data_2_loading_first"},
    "train_tensor_parallel": {"tensor2_step_vs_handwritten"},
    "train_tensor_parallel --engine megatron": {"megatron_tensor2_step_vs_handwritten"},
    "train_mfu": {"0.5b_step_s", "7b_layers_tokens_per_s"},
    "train_throughput": {"step_vs_handwritten", "letter_sort_dynamic_over_fixed"},
    "weight_changes": {"changed_5_bytes_vs_whole", "changed_100_s_vs_whole"},
    "with_signal": {"kept_0_trained_rows", "chosen_0_sampled_tokens", "quartile_4_ratio"},
    "weight_update --engine local": {"pull_publish_s", "disk_total_s"},
    "weight_update --engine sglang": {"pull_stall_s", "disk_stall_s", "collective_vs_copy"},
}
"""benchmark, with what else selects its part -> some metrics that it must write."""

IN_ALLOCATION = {"slurm_start"}
"""Benchmarks that need SLURM: tests/integration/slurm/test_slurm_start.py plays them."""

ZERO = {
    "agent_kills": {
        f"{agents}_{what}"
        for agents in ("inside", "outside")
        for what in (
            *("turns_trained_twice", "episodes_trained_twice", "turns_not_delivered", "left"),
            *("turns_left_out", "rows_lost", "rows_of_other_content", "rewards_not_of_the_agent"),
            *("false_rewards", "sessions_left_open", "ledger_rows_lost", "ledger_trained_again"),
        )
    },
    "autoscale": {"rows_lost", "rows_trained_twice", "groups_missing", "staleness_over_bound"},
    "chaos_models": {"rows_lost", "rows_trained_twice", "steps_missing"},
    "chaos": {
        *("rows_lost", "rows_trained_twice", "rows_of_other_content", "false_zero_rewards"),
        *("groups_begun_again", "workers_restarted_by_script", "leftovers"),
    },
    "rank_kills": {
        *("steps_of_other_weights", "groups_in_two_batches", "groups_not_trained"),
        *("rows_lost", "rows_trained_again"),
    },
    "start_checks": {"model_taken", "starts_refused"},
}
"""benchmark -> metrics that must be 0, however loaded the machine is."""


def run_benchmark(name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(BENCHMARKS / f"{name}.py"), *arguments],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )


@pytest.fixture
def refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Iterator[Callable[..., str]]:
    """What a benchmark says that ends at its arguments; here, where torch is imported already."""

    def said(name: str, *arguments: str) -> str:
        monkeypatch.setattr(sys, "argv", [name, *arguments])
        with pytest.raises(SystemExit) as ended:
            import_module(name).main()
        assert ended.value.code == 2
        return capsys.readouterr().err

    monkeypatch.syspath_prepend(str(BENCHMARKS))
    before = signal.getsignal(signal.SIGTERM)
    yield said
    signal.signal(signal.SIGTERM, before)


def test_all_benchmarks_are_known() -> None:
    programs = {
        path.stem for path in BENCHMARKS.glob("*.py") if "report.make_parser(" in path.read_text()
    }
    assert programs == {command.split()[0] for command in PROMISED} | IN_ALLOCATION


@pytest.mark.long
@pytest.mark.parametrize("command", sorted(PROMISED))
def test_a_quick_benchmark_runs_and_its_numbers_are_finite(command: str, tmp_path: Path) -> None:
    if "sglang" in command and not SGLANG.is_file():
        pytest.skip(f"no SGLang at {SGLANG}: tests/sglang_server/install.sh installs it")
    if command == "against_trl" and not TRL.is_file():
        pytest.skip(f"no TRL at {TRL}: benchmarks/peers/install_trl.sh installs it")
    if command == "serve_tenants" and not SMOLLM2.is_dir():
        pytest.skip(f"no model at {SMOLLM2}: make real-model writes it")
    result = tmp_path / "result.json"
    done = run_benchmark(*command.split(), "--quick", "--json", str(result))
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    metrics = json.loads(result.read_text())
    assert PROMISED[command] <= set(metrics), sorted(metrics)
    assert not {key: entry for key, entry in metrics.items() if not math.isfinite(entry["value"])}
    nothing = {key: metrics[key]["value"] for key in ZERO.get(command, ())}
    assert not any(nothing.values()), nothing


def test_the_account_of_killed_processes_tells_what_went_wrong(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    from chaos_books import Books, Kill, begun_again, recovery_times, vanished

    def trained(version: int, lineage: int, groups: list[int], time: float) -> list[dict[str, Any]]:
        told = {"version": version, "lineage": lineage, "time": time, "began": time - 1.0}
        rows = {"attempt": 0, "episode": 0, "pid": 1, "rank": 0, "update": 0}
        return [{**rows, **told, "group": group} for group in groups]

    steps = [(0, 0, [0], 10.0), (1, 0, [1], 20.0), (1, 1, [2], 31.0), (1, 1, [2], 40.0)]
    begun = [(0, 7, 1.0), (1, 7, 2.0), (2, 8, 21.0), (1, 8, 22.0), (0, 9, 30.0), (9, 7, 25.0)]
    books = Books(
        trained=[record for step in steps for record in trained(*step)],
        begun=[{"group": group, "pid": pid, "time": time} for group, pid, time in begun],
    )
    survivors = books.survivors()
    assert {v: [r["group"] for r in rows] for v, rows in survivors.items()} == {0: [0], 1: [2]}
    # process 7 lived when its group 1 was begun again, and not when group 0 was
    assert [record["group"] for record in begun_again(books, [])] == [1]
    names = {7: "areal:rollout/0", 8: "areal:rollout/1", 1: "areal:train/0", 3: "python"}
    kills = [
        Kill("controller", 19.5, names, False, 3),
        Kill("controller", 35.0, {8: names[8], 1: names[1]}, False, 4),
        Kill("train", 50.0, {8: names[8], 1: names[1]}, False, 1),
    ]
    assert [(kill.time_s, pids) for kill, pids in vanished(kills, books)] == [(19.5, [7])]
    # the step that ended 0.5 s after the first kill had begun before it
    assert recovery_times("controller", kills, books) == {
        "controller_recovery_worst_s": 11.5,
        "controller_recovery_alone_median_s": 8.25,
        "controller_recovery_alone_worst_s": 11.5,
    }


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_missing_gpu_is_named(refused: Callable[..., str]) -> None:
    said = refused("generate_throughput", "--quick", "--device", "cuda")
    assert "argument --device: torch finds no CUDA device here" in said


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
    assert "-m pytest -q tests/gpu" in named.stdout
    assert "examples/sums.py --config configs/sums.yaml" in named.stdout
    num_parts = 3 + len(commands)
    failed = run_gpu_script(tmp_path / "failed", python="false")
    assert failed.returncode == num_parts
    late = run_gpu_script(tmp_path / "late", python="echo", limit_s=0)
    assert late.returncode == late.stdout.count("left for the next call") == num_parts


def test_a_part_that_was_run_on_a_gpu_is_not_run_again(tmp_path: Path) -> None:
    """Calls may be short, and come one after the other."""
    first = run_gpu_script(tmp_path, python="echo", limit_s=239)
    assert first.returncode == first.stdout.count("left for the next call") > 0
    (tmp_path / "tests.status").write_text("5\n")
    second = run_gpu_script(tmp_path, python="echo")
    assert "== tests: done before, exit code 5" in second.stdout
    assert second.returncode == 1, "it failed, and nothing is left"
    statuses = {path.stem for path in tmp_path.glob("*.status")}
    assert {"letter_sort", "mfu_0.5b", "mfu_7b_layers", "publication"} <= statuses


def test_what_was_measured_on_a_gpu_is_collected(tmp_path: Path) -> None:
    (tmp_path / "letter_sort").mkdir()
    (tmp_path / "letter_sort" / "summary.json").write_text('{"reward": 0.93}')
    for name, code in (("mfu_0.5b", 0), ("tests", 1)):
        (tmp_path / f"{name}.status").write_text(f"{code}\n")
    (tmp_path / "mfu_0.5b.json").write_text('{"share_of_peak": {"value": 0.21, "unit": "share"}}')
    done = run_benchmark("gpu_summary", str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "summary.json").read_text()) == {
        "exit_codes": {"mfu_0.5b": 0, "tests": 1},
        "metrics": {"mfu_0.5b": {"share_of_peak": 0.21}},
        "letter_sort": {"reward": 0.93},
    }


def run_gpu_script(
    folder: Path, python: str, limit_s: int = 1200
) -> subprocess.CompletedProcess[str]:
    model = folder.with_name("model")
    model.mkdir(exist_ok=True)
    (model / "config.json").touch()
    return subprocess.run(
        [str(BENCHMARKS / "gpu.sh"), str(folder), "--quick"],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        env={
            **os.environ,
            "PYTHON": python,
            "SGLANG_PYTHON": "any",
            "REAL_MODEL": str(model),
            "LIMIT_S": str(limit_s),
        },
    )


def test_kept_runs_are_those_of_the_same_settings(
    refused: Callable[..., str], tmp_path: Path
) -> None:
    from algorithms import is_of

    folder, steps = tmp_path / "runs", {"steps": 80, "settings": "actor.ppo.clip_low=0.1"}
    assert is_of(folder, steps)
    assert is_of(folder, steps)
    said = refused("algorithms", "--folder", str(folder), "--steps", "40", "actor.ppo.clip_low=0.1")
    assert f"--folder {folder}: its runs have other settings" in said
    (tmp_path / "old" / "grpo-0").mkdir(parents=True)
    assert not is_of(tmp_path / "old", steps), "nobody knows of which settings they are"


def test_a_missing_sglang_is_named(refused: Callable[..., str], tmp_path: Path) -> None:
    said = refused("weight_update", "--quick", "--sglang-python", str(tmp_path / "python"))
    assert f"no SGLang at {tmp_path / 'python'}" in said


def test_a_missing_trl_is_named(refused: Callable[..., str], tmp_path: Path) -> None:
    said = refused("against_trl", "--quick", "--trl-python", str(tmp_path / "python"))
    assert f"no TRL at {tmp_path / 'python'}" in said


def test_the_last_number_of_an_answer_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    from trl_tasks import last_number

    answers = {"-4": 1.0, "5 - 9 = -4.": 1.0, "14": 0.0, "-4 or 4": 0.0, "none": 0.0}
    assert {text: last_number({"answer": "-4"}, text) for text in answers} == answers
