"""Parameters, gradients and moments in host memory, and a device that computes with them.

The device is pretended: see `pretended_device`.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf

PROGRAM = Path(__file__).with_name("ranks_program.py")
SIZES = {
    "vocab_size": 30,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
LENGTHS = [11, 6, 14, 3, 9, 20, 5, 8]
ON_HOST, ON_DEVICE = {"cpu"}, {"pretended"}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """Scenario name -> what each rank left."""
    folder = tmp_path_factory.mktemp("offload")
    torch.manual_seed(0)
    hf.Qwen2ForCausalLM(hf.Qwen2Config(**SIZES, tie_word_embeddings=True)).save_pretrained(
        folder / "model"
    )
    (folder / "model" / "tokenizer_config.json").write_text("{}")

    def scenario(rows: list[list[int]], **settings: Any) -> dict[str, Any]:
        return {
            "model": str(folder / "model"),
            "world_size": 1,
            "steps": [0, 1],
            "logprob_lengths": [[5, 9, 1], [5, 9, 1]],
            "minibatches": [{"lengths": LENGTHS, "rows": rows}],
            "max_tokens": 32,  # gradients of several micro-batches add up
            "snapshot_after": 0,
            "resumes_step": 1,
            **settings,
        }

    rows = list(range(len(LENGTHS)))
    offloaded = {"cpu_offload": True, "pretends_device": True}
    four = {"world_size": 4, "parallel": {"data": 2, "tensor": 2}, **offloaded}
    scenarios = {
        "plain": scenario([rows]),
        "one_rank": scenario([rows], **offloaded),
        "four_ranks": scenario([rows[::2], rows[1::2]], **four),
    }
    for name, settings in scenarios.items():
        snapshot = str(folder / f"snapshot_of_{name}")
        settings |= {"snapshot": snapshot, "resumes": [snapshot]}
    (folder / "scenarios.json").write_text(json.dumps(scenarios))
    finished = subprocess.run(
        [sys.executable, str(PROGRAM), str(folder)],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr[-4000:]
    return {
        name: [torch.load(folder / f"{name}-{rank}.pt") for rank in range(it["world_size"])]
        for name, it in scenarios.items()
    }


def difference(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    assert found.keys() == expected.keys()
    return max(float((found[n].double() - expected[n].double()).abs().max()) for n in found)


@pytest.mark.parametrize("name", ["one_rank", "four_ranks"])
def test_training_is_that_of_one_process(
    name: str, results: dict[str, list[dict[str, Any]]]
) -> None:
    """Nothing is computed with tensors of both places, which would be an error."""
    (plain,) = results["plain"]
    for rank in results[name]:
        assert "error" not in rank, rank["error"]
        places = {"parameters": ON_HOST, "moments": ON_HOST}
        assert rank["devices"] == {**places, "buffers": ON_DEVICE, "published": ON_DEVICE}
        assert (rank["logprobs"] - plain["logprobs"]).abs().max() <= 1e-5
        assert difference(rank["weights"], plain["weights"]) <= 1e-5
        for found, expected in zip(rank["stats"], plain["stats"], strict=True):
            assert found["grad_norm"] == pytest.approx(expected["grad_norm"], abs=1e-5)
        (resumed,) = (values for path, values in rank.items() if "snapshot_of" in path)
        assert difference(resumed, rank["weights"]) <= 1e-6
