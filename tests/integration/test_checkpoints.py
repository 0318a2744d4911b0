"""Snapshots go on with other numbers of ranks, and outlive a rank that is killed while it writes.

Everything is compared with one process that never stopped.
"""

from __future__ import annotations

import json
import signal
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from builders import save_qwen2
from integration.ranks import loaded_weights, run_program, snapshot_weights
from integration.run_process import tiny_run
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from areal_sc import __main__ as program
from areal_sc.trainer.failure import run_script

PROGRAM = Path(__file__).with_name("checkpoint_program.py")
KILLED = -signal.SIGKILL
WORLD_SIZES = [(2, 1), (1, 2), (3, 2), (2, 3)]
SAME_STEP = 1e-6
Results = dict[str, list[dict[str, Any]]]


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """On 3 ranks, most shards are uneven, and the last of each [4, 32] is empty."""
    return save_qwen2(tmp_path_factory.mktemp("model"), intermediate_size=4)


@pytest.fixture(scope="module")
def experts_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Loading fuses its experts into one parameter a layer."""
    folder = tmp_path_factory.mktemp("experts")
    torch.manual_seed(1)
    config = Qwen3MoeConfig(
        vocab_size=30,
        hidden_size=16,
        moe_intermediate_size=12,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        num_experts=5,
        num_experts_per_tok=2,
        max_position_embeddings=64,
    )
    Qwen3MoeForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="module")
def results(model_folder: Path, experts_folder: Path, folder: Path) -> Results:
    """Scenario name -> what each rank recorded; {} of a rank that was killed."""
    common = {"model": str(model_folder), "max_tokens": 128}
    snapshot, export, weights = "begin_snapshot", "begin_save_hf", "weights"
    scenarios: dict[str, dict[str, Any]] = {
        "never_stopped": {
            "world_size": 1,
            "actions": [
                *train(0, 1),
                [weights, "two_steps"],
                *train(2),
                [weights, "three_steps"],
                *train(3, 4),
                [weights, "five_steps"],
            ],
        }
    }
    for world_size in (1, 2, 3):
        path = str(folder / f"by_{world_size}")
        scenarios[f"saved_by_{world_size}"] = {
            "world_size": world_size,
            "actions": [
                *train(0, 1),
                ["seed", 7],
                ["record_size", "size"],
                [weights, "two_steps"],
                ["hold_pwrite", world_size - 1],
                [snapshot, path],
                ["await_holding", world_size - 1],
                *train(2),  # with the ranks' gradients summed while their snapshot is not written
                ["release", None],
                ["wait", "written"],
                [weights, "three_steps"],
                [export, str(folder / f"exported_by_{world_size}")],
                *train(3, 4),
                ["wait", "exported"],
                ["seed", 7],
                ["random", "random"],
                [weights, "five_steps"],
            ],
        }
    for saved, loaded in [*WORLD_SIZES, (2, 2)]:
        scenarios[f"{saved}_to_{loaded}"] = {
            "world_size": loaded,
            "actions": [
                *train(7),  # other weights and moments, that loading must replace
                ["load", str(folder / f"by_{saved}")],
                [weights, "two_steps"],
                ["random", "random"],
                *train(2),
                [weights, "three_steps"],
                *train(3, 4),
                [weights, "five_steps"],
            ],
        }
    for name, model in (("dense", model_folder), ("experts", experts_folder)):
        scenarios[f"split_{name}"] = {
            "world_size": 3,
            "model": str(model),
            "actions": [["begin_split_export", str(folder / f"split_{name}_model")], ["wait", ""]],
        }
    path = str(folder / "bfloat16")
    next_step = [*train(2), [weights, "three_steps"]]
    for name, world_size, before in (
        ("bfloat16", 2, [*train(0, 1), [snapshot, path]]),
        ("bfloat16_to_2", 2, [["load", path]]),
        ("bfloat16_to_1", 1, [["load", path]]),
    ):
        scenarios[name] = {
            "world_size": world_size,
            "dtype": "bfloat16",
            "actions": [*before, [export, f"{path}_by_{name}"], *next_step],
        }
    path = str(folder / "outlives" / "snapshot")
    held: dict[str, list[list[Any]]] = {
        "values": [["hold_pwrite", 1], [snapshot, path], ["await_holding", 1]],
        "renames": [["hold_rename", ".snapshot.partial"], [snapshot, path], ["await_holding", 0]],
    }
    for moment, hold in held.items():
        scenarios[f"killed_in_{moment}"] = {
            "world_size": 2,
            "actions": [
                *train(0, 1),
                [snapshot, path],
                ["wait", "written"],
                *train(2),
                *hold,
                ["kill", None],
            ],
            "exit_codes": [KILLED, KILLED],
        }
        scenarios[f"after_kill_in_{moment}"] = {
            "world_size": 1,
            "actions": [
                ["load", path],
                *train(2),
                [weights, "three_steps"],
                [snapshot, path],  # what is left of the killed one is not in its way
                ["wait", "written"],
            ],
        }
    scenarios["a_rank_dies"] = {
        "world_size": 2,
        "actions": [
            ["hold_pwrite", 1],
            [snapshot, str(folder / "by_less")],
            ["await_holding", 1],
            ["kill", 1],
            ["wait", "written"],
        ],
        "exit_codes": [0, KILLED],
        "loses_ranks": True,
    }
    for name, shares_files in (
        ("apart", [False] * 3),
        ("apart_in_part", [False, True, True]),
        ("apart_by_mistake", [True] * 3),
    ):
        path = str(folder / f"{name}-*")
        bring = [["bring", [f"{path}/snapshot", f"{folder}/brought"]]]
        scenarios[name] = {
            "world_size": 3,
            "shares_files": shares_files,
            "actions": [
                *train(0, 1),
                *([weights, "two_steps"], [snapshot, f"{path}/snapshot"], ["wait", "written"]),
                *(bring if name == "apart" else []),
                *([export, f"{path}/model"], ["wait", "exported"]),
            ],
        }
    scenarios["apart_to_2"] = {
        "world_size": 2,
        "actions": [["load", f"{folder}/brought"], *train(2), [weights, "three_steps"]],
    }
    # memory where a rank sees the folders of others, and is told that it may not
    path = str(folder / "together")
    scenarios["together"] = {
        "world_size": 2,
        "shares_files": [False] * 2,
        "actions": [[snapshot, path], ["wait", "written"], ["load", path]],
    }
    # rank 0 on a node of its own; norms are copies of tensor parallelism, which both nodes need
    path = str(folder / "node-*")
    nodes = {"world_size": 4, "parallel": {"data": 2, "tensor": 2}, "nodes": ["0", "1", "1", "1"]}
    scenarios["on_nodes"] = nodes | {
        "actions": [
            *train(0, 1),
            *(["seed", 7], [weights, "two_steps"], ["keep", [path, "of_2", ""]]),
            *(*train(2), ["keep", [path, "of_3", "of_2"]]),
        ],
    }
    lost = str(folder / "lost-*")
    scenarios["on_nodes_again"] = nodes | {
        "actions": [
            *(["load_kept", [path, "of_2"]], [weights, "two_steps"], ["random", "random"]),
            *(*train(2), [weights, "three_steps"], ["copy", [[0], path, lost]]),
            *(["refuse_kept", [lost, "of_2"]], [weights, "still_three_steps"]),
            *(*train(3), ["keep", [path, "of_4", "of_3"]], ["refuse_kept", [path, "of_2"]]),
            *(["load_kept", [path, "of_3"]], [weights, "kept_three_steps"]),
        ],
    }
    scenarios["on_fewer_ranks"] = {
        "world_size": 2,
        "nodes": ["0", "1"],
        "actions": [["refuse_kept", [path, "of_3"]]],
    }
    given = {name: {**common, **scenario} for name, scenario in scenarios.items()}
    run_program(PROGRAM, folder, given)
    return {
        name: [read(folder / f"{name}-{rank}.pt") for rank in range(scenario["world_size"])]
        for name, scenario in scenarios.items()
    }


def train(*steps: int) -> list[list[Any]]:
    return [["train", step] for step in steps]


def read(path: Path) -> dict[str, Any]:
    recorded: dict[str, Any] = torch.load(path) if path.exists() else {}
    assert "error" not in recorded, recorded["error"]
    return recorded


def whole(ranks: list[dict[str, Any]], label: str) -> dict[str, torch.Tensor]:
    """Gathered by the first rank."""
    found: dict[str, torch.Tensor] = ranks[0][label]
    return found


def difference(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    assert found.keys() == expected.keys()
    return max(float((found[n].double() - expected[n].double()).abs().max()) for n in found)


@pytest.mark.parametrize(("saved", "loaded"), [*WORLD_SIZES, (2, 2)])
def test_the_next_step_is_that_of_a_run_that_never_stopped(
    saved: int, loaded: int, results: Results
) -> None:
    resumed, reference = results[f"{saved}_to_{loaded}"], results["never_stopped"]
    for label in ("two_steps", "three_steps", "five_steps"):
        expected = whole(reference, label)
        assert difference(whole(resumed, label), expected) <= SAME_STEP, label
        assert difference(whole(reference, "two_steps"), expected) > 1e-4 or label == "two_steps"


def test_a_snapshot_written_while_training_goes_on_is_not_torn(results: Results) -> None:
    """Its values were written after the third step, and are those of the second, to the bit."""
    for saved, loaded in [*WORLD_SIZES, (2, 2)]:
        assert results[f"saved_by_{saved}"][0]["written"] == ""
        taken = whole(results[f"{saved}_to_{loaded}"], "two_steps")
        assert difference(taken, whole(results[f"saved_by_{saved}"], "two_steps")) == 0


def test_random_state_of_every_rank_comes_back(results: Results) -> None:
    expected = [rank["random"] for rank in results["saved_by_2"]]
    assert not torch.equal(expected[0], expected[1])
    for rank, values in zip(results["2_to_2"], expected, strict=True):
        assert torch.equal(rank["random"], values)
    assert not torch.equal(results["2_to_1"][0]["random"], expected[0])


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_an_export_while_training_goes_on_holds_the_weights_of_its_step(
    world_size: int, results: Results, folder: Path
) -> None:
    ranks = results[f"saved_by_{world_size}"]
    assert [rank["exported"] for rank in ranks] == [""] * world_size
    model = AutoModelForCausalLM.from_pretrained(folder / f"exported_by_{world_size}")
    loaded = {name: parameter.detach() for name, parameter in model.named_parameters()}
    assert difference(loaded, whole(ranks, "three_steps")) == 0
    assert difference(whole(ranks, "five_steps"), whole(ranks, "three_steps")) > 1e-4


@pytest.mark.parametrize("world_size", [2, 3])
def test_one_process_writes_the_model_of_a_snapshot_of_several_ranks(
    world_size: int, results: Results, folder: Path, model_folder: Path
) -> None:
    expected = whole(results[f"saved_by_{world_size}"], "two_steps")
    found = snapshot_weights(model_folder, folder / f"by_{world_size}")
    assert difference(found, expected) == 0


@pytest.mark.parametrize("name", ["dense", "experts"])
def test_three_ranks_fill_the_files_of_a_split_model(
    name: str, results: Results, folder: Path, model_folder: Path, experts_folder: Path
) -> None:
    assert results[f"split_{name}"][0][""] == ""
    exported = folder / f"split_{name}_model"
    assert len(list(exported.glob("model-*-of-*.safetensors"))) > 2
    index = json.loads((exported / "model.safetensors.index.json").read_text())
    source = {"dense": model_folder, "experts": experts_folder}[name]
    found, expected = (
        {key: values for path in f.glob("*.safetensors") for key, values in load_file(path).items()}
        for f in (exported, source)
    )
    assert difference(found, expected) == 0
    assert index["weight_map"].keys() == expected.keys()
    _, loading = AutoModelForCausalLM.from_pretrained(exported, output_loading_info=True)
    assert not loading["missing_keys"]
    assert not loading["unexpected_keys"]


def test_machines_that_share_no_folder_have_parts_of_a_snapshot_and_rank_0_an_export(
    results: Results, folder: Path
) -> None:
    for name in ("apart", "apart_in_part"):
        for rank in results[name]:
            assert rank["written"] == rank["exported"] == ""
        found = {
            place: sorted(it.name for it in (folder / f"{name}-{place}" / "snapshot").iterdir())
            for place in ("first", "others")
        }
        assert found == {
            "first": ["rank-0.safetensors", "snapshot.json"],
            "others": ["rank-1.safetensors", "rank-2.safetensors"],
        }
    expected = whole(results["never_stopped"], "three_steps")
    assert difference(whole(results["apart_to_2"], "three_steps"), expected) <= SAME_STEP
    model = AutoModelForCausalLM.from_pretrained(folder / "apart-first" / "model")
    loaded = {name: parameter.detach() for name, parameter in model.named_parameters()}
    assert difference(loaded, whole(results["apart"], "two_steps")) == 0
    assert list((folder / "apart-others" / "model").iterdir()) == []
    names = {it.name for it in (folder / "together").iterdir()}
    assert names == {"rank-0.safetensors", "rank-1.safetensors", "snapshot.json"}


def test_ranks_that_do_not_see_a_folder_that_they_are_to_share_write_nothing(
    results: Results, folder: Path
) -> None:
    for rank in results["apart_by_mistake"]:
        for what in ("written", "exported"):
            assert "(train rank 1): FileNotFoundError" in rank[what]
            assert "is not seen here; it must be on a shared file system" in rank[what]
    assert [*folder.glob("apart_by_mistake-*/*")] == []


def test_nodes_keep_what_their_own_ranks_need(results: Results, folder: Path) -> None:
    written, again = results["on_nodes"], results["on_nodes_again"]
    for node, ranks in {"first": [0], "others": [1, 2, 3]}.items():
        for buffer, name in (("0", "of_4"), ("1", "of_3")):
            found = {it.name for it in (folder / f"node-{node}" / buffer).iterdir()}
            of_ranks = [(f"rank-{n}.safetensors", f"rank-{n}-of-4.{name}.json") for n in ranks]
            assert found == {*chain(*of_ranks)}
    norm = "parameter.model.norm.weight"
    stored = {rank: stored_names(folder, rank) for rank in range(4)}
    assert [rank for rank in range(4) if norm in stored[rank]] == [0, 1, 2]  # 3 has what 2 has
    assert difference(whole(again, "two_steps"), whole(written, "two_steps")) == 0
    expected = whole(results["never_stopped"], "three_steps")
    assert difference(whole(again, "three_steps"), expected) <= SAME_STEP
    assert len({tuple(rank["random"].tolist()) for rank in again}) == 4


def test_of_two_states_on_nodes_one_stays_while_the_other_is_replaced(results: Results) -> None:
    again = results["on_nodes_again"]
    assert difference(whole(again, "kept_three_steps"), whole(results["on_nodes"], "two_steps")) > 0
    expected = whole(results["never_stopped"], "three_steps")
    assert difference(whole(again, "kept_three_steps"), expected) <= SAME_STEP
    for rank in again:
        assert "has nothing of that name there" in rank["node-*"]


def test_a_state_of_which_a_node_lacks_its_part_is_refused_by_all(results: Results) -> None:
    again = results["on_nodes_again"]
    for rank in again:
        assert "rank 1 has nothing of that name there" in rank["lost-*"]
    assert difference(whole(again, "still_three_steps"), whole(again, "three_steps")) == 0
    for rank in results["on_fewer_ranks"]:
        assert "rank 0 has nothing of that name there" in rank["node-*"]


def stored_names(folder: Path, rank: int) -> set[str]:
    place = folder / ("node-others" if rank else "node-first")
    return set(load_file(place / "1" / f"rank-{rank}.safetensors"))


def test_bfloat16_training_keeps_its_float32_weights(results: Results, folder: Path) -> None:
    """A step can be too small for bfloat16; and one rank in bfloat16 is sharded, too."""
    before, after = results["bfloat16"], results["bfloat16_to_2"]
    assert difference(whole(after, "three_steps"), whole(before, "three_steps")) == 0
    stored = load_file(folder / "bfloat16" / "rank-0.safetensors")
    exact = stored["parameter.model.norm.weight"]
    assert exact.dtype == torch.float32
    assert not torch.equal(exact, exact.bfloat16().float())
    exports = [
        load_file(folder / f"bfloat16_by_{name}" / "model.safetensors")
        for name in ("bfloat16", "bfloat16_to_1")
    ]
    assert {values.dtype for values in exports[0].values()} == {torch.bfloat16}
    assert difference(*exports) == 0


def test_no_rank_stores_what_another_does(results: Results, folder: Path) -> None:
    """Weights and two moments, four bytes each, and a few kilobytes of names and random state."""
    for world_size in (1, 2, 3):
        for rank, recorded in enumerate(results[f"saved_by_{world_size}"]):
            stored = (folder / f"by_{world_size}" / f"rank-{rank}.safetensors").stat().st_size
            assert 0 <= stored - 12 * recorded["size"] < 24_000


@pytest.mark.parametrize("moment", ["values", "renames"])
def test_killed_while_writing_the_earlier_snapshot_stays(
    moment: str, results: Results, folder: Path
) -> None:
    resumed = results[f"after_kill_in_{moment}"]
    expected = whole(results["never_stopped"], "three_steps")
    assert difference(whole(resumed, "three_steps"), expected) <= SAME_STEP
    assert resumed[0]["written"] == ""
    assert [path.name for path in (folder / "outlives").iterdir()] == ["snapshot"]


def test_the_others_are_told_when_a_rank_dies(results: Results, folder: Path) -> None:
    survivor = results["a_rank_dies"][0]
    assert survivor["written"].startswith("CheckpointError: cannot write")
    assert "another rank ended" in survivor["written"]
    assert not (folder / "by_less").exists()
    assert not (folder / ".by_less.partial").exists()


def test_a_killed_run_of_two_ranks_goes_on_with_one(
    tmp_path: Path, tiny_model_folder: Path
) -> None:
    """At the step of its newest snapshot, with every row trained once.

    Meanwhile that gives a model: the one that the ranks have written, file for file.
    """
    total_steps = 6
    run_dir, exported = tmp_path / "run", tmp_path / "exported"
    arguments = (f"total_steps={total_steps}", "checkpoint.every_steps=1")
    num_free = "task.num_free_episodes=32"
    two_ranks = (num_free, "actor.parallel.data=2", "checkpoint.export_every_steps=3")
    with tiny_run(run_dir, tiny_model_folder, *arguments, *two_ranks) as killed:
        written = run_dir / "models" / "step-3"  # after the snapshot
        killed.wait_until(written.is_dir, "snapshot and model of step 3")
        killed.send(signal.SIGKILL)
        killed.wait()
        killed.wait_until_gone()
    assert run_script(program.main, ["export", str(run_dir), str(exported), "--step", "3"]) == 0
    found, expected = (
        {path.name: path.read_bytes() for path in of.iterdir()} for of in (exported, written)
    )
    assert found == expected
    weights = loaded_weights(exported)
    assert difference(weights, loaded_weights(tiny_model_folder)) > 0
    assert "tokenizer.json" in found
    with tiny_run(
        tmp_path / "run", tiny_model_folder, *arguments, "resume=must", "actor.parallel.data=1"
    ) as resumed:
        resumed.finish()
        (event,) = resumed.events("resumed")
        assert event["step"] >= 3
        assert "actor.parallel.data: 2 -> 1" in resumed.output
        summary = resumed.summary()
    assert summary["num_steps"] == total_steps
    assert summary["num_rows_trained"] == total_steps * 4 * 2
    assert summary["num_rows_trained_twice"] == 0
    assert not list((tmp_path / "run" / "checkpoints").glob("*.part*"))
