"""The main job on the device: FSDP and LocalEngine in bfloat16, by the shipped example.

It learns if the accuracy goes from about 0.2 to above 0.9. A job that takes too long is ended by
Ctrl-C, and the batches' own accuracies are given.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import report
from gpu_common import ROOT, Setting

END_S = 60.0
"""Kept of the section's limit for ending the job."""


def measure(setting: Setting) -> report.Metrics:
    with tempfile.TemporaryDirectory(prefix="areal-sc-benchmark-") as name:
        folder = Path(name)
        started = time.monotonic()
        status = _run_job(setting, folder)
        metrics = {
            "letter_sort_exit_code": (float(status), "code"),
            "letter_sort_total_s": (time.monotonic() - started, "s"),
        }
        run = folder / "run"
        if (run / "summary.json").is_file():
            metrics |= _summary(json.loads((run / "summary.json").read_text()))
        if (run / "metrics.jsonl").is_file():
            lines = (run / "metrics.jsonl").read_text().splitlines()
            metrics |= _steps([json.loads(line) for line in lines])
        if status:
            print((folder / "output.txt").read_text()[-4000:])
            for log in sorted((run / "logs").glob("*.log")):
                print(f"--- {log.name}\n{log.read_text()[-1500:]}")
    rows = [(key, value, unit) for key, (value, unit) in metrics.items()]
    report.print_table(
        "Letter sort: FSDP and LocalEngine in bfloat16",
        {"device": setting.device, "steps": _num_steps(setting)},
        ("number", "value", "unit"),
        rows,
    )
    return metrics


def _num_steps(setting: Setting) -> int:
    if not setting.is_cuda:
        return 3
    return 80 if setting.is_quick else 160


def _run_job(setting: Setting, folder: Path) -> int:
    overrides = {
        "run_dir": folder / "run",
        "actor.path": folder / "warm_start",
        "actor.device": setting.device,
        "rollout.device": setting.device,
        "total_steps": _num_steps(setting),
        "resume": "never",
    }
    if not setting.is_cuda:
        overrides |= {"task.warm_start.steps": 10, "evaluation.num_prompts": 8}
    command = [
        *(sys.executable, str(ROOT / "examples" / "letter_sort.py")),
        *("--config", str(ROOT / "configs" / "letter_sort_gpu.yaml")),
        *(f"{key}={value}" for key, value in overrides.items()),
    ]
    with (folder / "output.txt").open("w") as output:
        job = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
        try:
            return job.wait(setting.limit_s - END_S)
        except subprocess.TimeoutExpired:
            job.send_signal(signal.SIGINT)
        try:
            return job.wait(END_S / 2)
        except subprocess.TimeoutExpired:
            job.kill()
            return job.wait()


def _summary(summary: dict[str, Any]) -> dict[str, tuple[float, str]]:
    units = {
        "accuracy_before": "share",
        "accuracy_after": "share",
        "greedy_accuracy_after": "share",
        "wall_time_s": "s",
        "first_step_s": "s",
        "generated_tokens_per_s": "tokens/s",
        "trained_tokens_per_s": "tokens/s",
        "train_share": "share",
        "wait_share": "share",
        "sync_share": "share",
    }
    return {
        f"letter_sort_{name}": (summary[name], unit)
        for name, unit in units.items()
        if summary.get(name) is not None
    }


def _steps(records: list[dict[str, Any]]) -> dict[str, tuple[float, str]]:
    """Accuracy of the first and the last batches, and the time of a step between them."""
    steps = [record for record in records if record["kind"] == "step"]
    if not steps:
        return {}
    few = max(1, len(steps) // 10)
    times = sorted(step["step_time_s"] for step in steps)

    def mean_accuracy(chosen: list[dict[str, Any]]) -> float:
        return sum(step["accuracy"] for step in chosen) / len(chosen)

    return {
        "letter_sort_steps": (float(len(steps)), "steps"),
        "letter_sort_first_batches_accuracy": (mean_accuracy(steps[:few]), "share"),
        "letter_sort_last_batches_accuracy": (mean_accuracy(steps[-few:]), "share"),
        "letter_sort_median_step_s": (times[len(times) // 2], "s"),
    }
