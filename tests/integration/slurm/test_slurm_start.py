"""The benchmark of the start on SLURM nodes, within an allocation."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from integration.slurm.conftest import NODES, Cluster

PROGRAM = Path(__file__).parents[3] / "benchmarks" / "slurm_start.py"


@pytest.mark.long
def test_the_quick_benchmark_starts_workers_within_an_allocation(
    cluster: Cluster, tmp_path: Path
) -> None:
    result = tmp_path / "result.json"
    words = [sys.executable, str(PROGRAM), "--quick", "--json", str(result)]
    done = subprocess.run(
        ["salloc", "-N", str(len(NODES)), "--exclusive", *words, "--folder", str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    metrics = json.loads(result.read_text())
    assert 0 < metrics["agents_joined_s"]["value"] < metrics["workers_started_s"]["value"]
    assert metrics["start_over_plain_srun"]["value"] > 0
    assert cluster.left_overs() == []
