"""What a training step asks of a GPU, counted on a pretended one: a GPU would wait for each."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

PROGRAM = Path(__file__).with_name("counted_steps.py")
LIMIT_S = 560.0
DTYPES = ("float32", "bfloat16", "float16")


@pytest.fixture(scope="module")
def counts() -> dict[str, Any]:
    finished = subprocess.run(
        [sys.executable, str(PROGRAM)],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
        env=os.environ | {"PYTHONPATH": ":".join(sys.path)},
    )
    assert finished.returncode == 0, finished.stderr[-4000:]
    found: dict[str, Any] = json.loads(finished.stdout)
    return found


@pytest.mark.parametrize("shape", ["0.5B", "7B"])
def test_a_vocabulary_over_ranks_needs_few_kernels(counts: dict[str, Any], shape: str) -> None:
    """Not thousands, as with pieces that are small enough for a CPU."""
    found = counts[shape]
    num_kernels = found["embedding"]["num_kernels"] + found["ranks"]["num_kernels"]
    assert num_kernels <= 3 * found["one rank"]["num_kernels"]


@pytest.mark.parametrize("shape", ["0.5B", "7B"])
def test_the_host_never_waits_for_a_vocabulary_over_ranks(
    counts: dict[str, Any], shape: str
) -> None:
    for part in ("embedding", "ranks"):
        assert counts[shape][part]["syncs"] == {}
        assert counts[shape][part]["blocking_copies"] == {}


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_host_waits_at_the_end_of_an_update_alone(counts: dict[str, Any], dtype: str) -> None:
    """For the norm of the gradients, and for the metrics: however many micro-batches there are."""
    few, many = counts[f"few {dtype}"], counts[f"many {dtype}"]
    assert many["num_micro_batches"] > few["num_micro_batches"] > 1
    for found in (few, many):
        assert found["update"]["syncs"] == {"_local_scalar_dense": 1}
        assert found["update"]["blocking_copies"] == {"pretended to cpu": 1}


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_host_waits_for_a_forward_once(counts: dict[str, Any], dtype: str) -> None:
    for found in (counts[f"few {dtype}"], counts[f"many {dtype}"]):
        assert found["forward"]["syncs"] == {}
        assert found["forward"]["blocking_copies"] == {"pretended to cpu": 1}


def test_the_host_waits_for_no_input_of_a_layer_that_it_keeps(counts: dict[str, Any]) -> None:
    """Each input goes to pinned memory and comes back, and nothing else does."""
    kept, offloaded = counts["kept checkpointing"], counts["kept offload"]
    assert offloaded["grad_norm"] == kept["grad_norm"] > 0
    on_device, on_host = kept["update"], offloaded["update"]
    for name in ("syncs", "blocking_copies", "kernels"):
        assert on_host[name] == on_device[name]
    moved = on_host["copied_bytes"] - on_device["copied_bytes"]
    num_tokens, num_layers, width = 76, 2, 32
    assert moved == 2 * num_layers * num_tokens * width * 2  # both ways, of two bytes each


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_snapshot_pins_as_much_memory_as_is_planned(counts: dict[str, Any], dtype: str) -> None:
    """That torch rounds it up no more is tested where its allocator is told so."""
    found = counts[f"few {dtype}"]
    assert found["pinned_bytes"] == pytest.approx(found["planned_bytes"], rel=0.03)
