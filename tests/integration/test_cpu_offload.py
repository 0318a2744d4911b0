"""Parameters, gradients and moments in host memory, and a device that computes with them.

The device is pretended: see `pretended_device`.
"""

from __future__ import annotations

from typing import Any

import pytest
import transformers as hf
from integration.ranks import EIGHT, difference, run_ranks, save_model

SIZES = {
    "vocab_size": 30,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
ON_HOST, ON_DEVICE = {"cpu"}, {"pretended"}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """Scenario name -> what each rank left."""
    folder = tmp_path_factory.mktemp("offload")
    model = save_model(folder / "model", hf.Qwen2Config(**SIZES, tie_word_embeddings=True))

    def scenario(rows: list[list[int]], **settings: Any) -> dict[str, Any]:
        return {
            "model": model,
            "world_size": 1,
            "steps": [0, 1],
            "logprob_lengths": [[5, 9, 1], [5, 9, 1]],
            "minibatches": [{"lengths": EIGHT, "rows": rows}],
            "max_tokens": 32,  # gradients of several micro-batches add up
            "snapshot_after": 0,
            "resumes_step": 1,
            **settings,
        }

    rows = list(range(len(EIGHT)))
    offloaded = {"cpu_offload": True, "pretends_device": True}
    four = {"world_size": 4, "parallel": {"data": 2, "tensor": 2}, **offloaded}
    four |= {"activation_checkpointing": "layers", "activation_offload": True}
    scenarios = {
        "plain": scenario([rows]),
        "one_rank": scenario([rows], **offloaded),
        "four_ranks": scenario([rows[::2], rows[1::2]], **four),
    }
    for name, settings in scenarios.items():
        snapshot = str(folder / f"snapshot_of_{name}")
        settings |= {"snapshot": snapshot, "resumes": [snapshot]}
    return run_ranks(folder, scenarios)


@pytest.mark.parametrize("name", ["one_rank", "four_ranks"])
def test_training_is_that_of_one_process(
    name: str, results: dict[str, list[dict[str, Any]]]
) -> None:
    """Nothing is computed with tensors of both places, which would be an error. On four ranks the
    inputs of layers lie in host memory, too."""
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
