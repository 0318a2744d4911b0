"""Layers that torch compiles train as others do; for other rows nothing is compiled anew."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import transformers as hf
from integration.ranks import Results, difference, loaded_weights, run_ranks, save_model
from integration.test_meshes import SIZES, assert_same_training, scenario

LENGTHS = [[4, 17, 9], [11, 6, 14, 3, 9, 20, 5, 8]]
"""Of each update's rows: one micro-batch of 64 tokens at most, and two, in one of which rows share
their first tokens where layers are compiled."""
MESHES = ("one", "dp2", "sp2", "tp2")


def minibatches(num_shares: int) -> list[dict[str, Any]]:
    """One for each step. The first of two shares has one row of it, and so fewer micro-batches."""
    return [
        {
            "step": step,
            "lengths": lengths,
            "prompt": 4 * step,
            "rows": [[0], rows[1:]] if num_shares == 2 else [rows],
        }
        for step, lengths in enumerate(LENGTHS)
        for rows in [list(range(len(lengths)))]
    ]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("compiled")


@pytest.fixture(scope="module")
def results(folder: Path) -> Results:
    """Scenario name -> what each rank left.

    On several ranks the model has one layer: to compile one takes a rank six seconds.
    """
    sizes = {"long": SIZES, "short": SIZES | {"num_hidden_layers": 1}}
    long, short = (
        save_model(folder / name, hf.Qwen2Config(**its, tie_word_embeddings=True))
        for name, its in sizes.items()
    )
    alone = {"steps": [0, 1], "minibatches": minibatches(1)}
    compiled = {"compile_layers": True, "min_saved": 1}
    scenarios = {
        "long": scenario(long, "one", **alone),
        "short": scenario(short, "one", **alone),
        "one": scenario(long, "one", **alone, **compiled),
        "dp2": scenario(
            short,
            "dp2",
            steps=[0, 1],
            activation_checkpointing="layers",
            **compiled,
            **{"minibatches": minibatches(2), "save_hf": str(folder / "exported")},
        ),
        "sp2": scenario(short, "sp2", **alone, **compiled),
        "tp2": scenario(short, "tp2", **alone, **compiled),
    }
    return run_ranks(folder, scenarios)


@pytest.mark.parametrize("mesh", MESHES)
def test_training_is_that_of_layers_that_are_not_compiled(mesh: str, results: Results) -> None:
    """On dp2, activations are recomputed."""
    (uncompiled,) = results["long" if mesh == "one" else "short"]
    assert_same_training(results[mesh], uncompiled)
    shares = [stats["shared_token_share"] for stats in results[mesh][0]["stats"]]
    assert shares[0] == 0 < shares[1]


@pytest.mark.parametrize("mesh", MESHES)
def test_other_rows_compile_nothing_anew(mesh: str, results: Results) -> None:
    for rank in results[mesh]:
        first, *others = rank["num_graphs"]
        assert first > 0
        assert others == [first]


def test_an_export_has_the_names_and_weights_of_the_model(results: Results, folder: Path) -> None:
    weights = loaded_weights(folder / "exported")
    assert weights.keys() == loaded_weights(folder / "short").keys()
    assert difference(weights, results["dp2"][0]["weights"]) == 0
