"""Every mesh of ranks trains as one process does, and goes on from what any other has saved."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from integration.ranks import (
    ONE_SHARE,
    TWO_SHARES,
    Ranks,
    Results,
    difference,
    loaded_weights,
    run_ranks,
    save_model,
    snapshot_weights,
)

from areal_sc.metadata import BatchMetadata, RowMetadata

MESHES = {
    "one": {},
    "dp2": {"data": 2},
    "tp2": {"tensor": 2},
    "sp2": {"sequence": 2},
    "dp2_tp2": {"data": 2, "tensor": 2},
    "dp2_sp2": {"data": 2, "sequence": 2},
    "tp2_sp2": {"sequence": 2, "tensor": 2},
}
SIZES = {  # neither the vocabulary nor the layers' width comes out even
    "vocab_size": 31,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "intermediate_size": 51,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
}
PHI3_SIZES = {name: size for name, size in SIZES.items() if name != "head_dim"}
EXPERTS = {"num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 12}
SHARED_EXPERTS = {"moe_num_experts": 3, "moe_k": 2, "moe_intermediate_size": 12}
MESHES_OF = {
    "experts": ("one", "tp2"),
    "shared_experts": ("one", "dp2_tp2"),
    "untied": ("one", "tp2", "sp2"),
    "capped": ("one", "tp2", "sp2"),
    "fused": ("one", "tp2"),
}
REPLAYED = ("one", "dp2", "tp2", "sp2")
"""Meshes whose tokens go through given experts."""
ROUNDED = ("one", "tp2", "dp2")
"""Meshes that compute in bfloat16, without FSDP and with it."""
SHARING = ("one", "dp2", "sp2", "dp2_tp2")
"""Meshes on which rows share their first tokens."""
SCALED = ("one", "dp2", "tp2")
"""Meshes that compute in float16."""
RESUMED = {  # what others have saved before, in the order in which they run
    "one": (),
    "dp2_sp2": ("one",),
    "dp2_tp2": ("one", "dp2_sp2"),
    "tp2_sp2": ("dp2_sp2", "dp2_tp2"),
    "tp2": ("one", "dp2_tp2"),
    "dp2": ("tp2", "tp2_sp2"),
    "sp2": ("dp2", "dp2_sp2"),
}


def scenario(model: str, mesh: str, **settings: Any) -> dict[str, Any]:
    parallel = MESHES[mesh]
    num_ranks = 1
    for size in parallel.values():
        num_ranks *= size
    return {
        "model": model,
        "world_size": num_ranks,
        "parallel": parallel,
        "steps": [0, 1],
        "logprob_lengths": [[5, 9, 1], [5, 9, 1]],
        "minibatches": TWO_SHARES if "data" in parallel else ONE_SHARE,
        **settings,
    }


def balanced(minibatches: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Shares as a controller cuts them, that are to compute equally much: 3 first tokens once."""
    found = []
    for minibatch in minibatches:
        rows = tuple(
            RowMetadata(0, 0, length, 0.0, 0, (), row, prompt_length=min(3, length))
            for row, length in enumerate(minibatch["lengths"])
        )
        parts = BatchMetadata("b", 0, (), rows).partition(2, min_saved_tokens=1)
        assert all(parts)
        found.append({**minibatch, "rows": parts})
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("meshes")


@pytest.fixture(scope="module")
def results(folder: Path) -> Results:
    """Scenario name -> what each rank left."""
    tied = save_model(folder / "tied", hf.Qwen2Config(**SIZES, tie_word_embeddings=True))
    one_kv_head = {**SIZES, "num_key_value_heads": 1}
    models = {
        "experts": hf.Qwen3MoeConfig(**SIZES, **EXPERTS, mlp_only_layers=[0]),
        "shared_experts": hf.Ernie4_5_MoeConfig(
            **SIZES, **SHARED_EXPERTS, moe_layer_start_index=1, pad_token_id=0
        ),
        # more tokens than two ranks look up together, so that embeddings are not gathered
        "untied": hf.Qwen3Config(**one_kv_head | {"vocab_size": 151}, tie_word_embeddings=False),
        "capped": hf.Gemma2Config(**SIZES, sliding_window=4, pad_token_id=0),
        "fused": hf.Phi3Config(**PHI3_SIZES, pad_token_id=0),
    }

    def overflowing(mesh: str) -> dict[str, Any]:
        """Overflows at first, and goes on from its own snapshot and from that of one process."""
        saved = [f"overflow_by_{other}" for other in dict.fromkeys((mesh, "one"))]
        return scenario(
            tied,
            mesh,
            dtype="float16",
            loss_scale=2.0**22,
            steps=list(range(4)),
            snapshot_after=2,
            snapshot=str(folder / saved[0]),
            resumes=[str(folder / name) for name in saved],
            resumes_step=3,
        )

    def resumes(saved: Iterable[str]) -> dict[str, Any]:
        return {"resumes": [str(folder / f"by_{other}") for other in saved], "resumes_step": 1}

    prompts = {
        mesh: [{**minibatch, "prompt": 3} for minibatch in shares]
        for mesh, shares in (
            *(("one", ONE_SHARE), ("sp2", ONE_SHARE)),
            *(("dp2", balanced(ONE_SHARE)), ("dp2_tp2", TWO_SHARES)),
        )
    }
    recomputed = {"activation_checkpointing": "layers", "max_tokens": 21}
    scenarios = {
        f"tied_{mesh}": scenario(
            tied,
            mesh,
            snapshot_after=0,
            snapshot=str(folder / f"by_{mesh}"),
            save_hf=str(folder / f"exported_by_{mesh}"),
            **resumes(saved),
            **(recomputed if mesh == "tp2_sp2" else {}),
        )
        for mesh, saved in RESUMED.items()
    }
    for name, config in models.items():
        model = save_model(folder / name, config)
        scenarios |= {f"{name}_{mesh}": scenario(model, mesh) for mesh in MESHES_OF[name]}
    scenarios["experts_tp2"]["activation_checkpointing"] = "layers"
    scenarios |= {
        f"replay_{mesh}": scenario(
            str(folder / "experts"),
            mesh,
            routing_replay=True,
            steps=[0, 1, 2],
            minibatches=[
                {**it, "routes": [2, EXPERTS["num_experts"], EXPERTS["num_experts_per_tok"]]}
                for it in (TWO_SHARES if "data" in MESHES[mesh] else ONE_SHARE)
            ],
            max_tokens=21,
            activation_checkpointing="layers" if mesh in ("dp2", "tp2") else "none",
        )
        for mesh in REPLAYED
    }
    by_one = str(folder / "shared_experts_by_one")
    scenarios["shared_experts_one"] |= {"snapshot_after": 0, "snapshot": by_one}
    scenarios["shared_experts_dp2_tp2"]["save_hf"] = str(folder / "exported_experts")
    for mesh in MESHES_OF["shared_experts"]:
        scenarios[f"shared_experts_{mesh}"] |= {"resumes": [by_one], "resumes_step": 1}
    scenarios |= {
        "resumed_by_one": scenario(tied, "one", steps=[], **resumes(MESHES)),
        **{f"bfloat16_{mesh}": scenario(tied, mesh, dtype="bfloat16") for mesh in ROUNDED},
        **{f"float16_{mesh}": scenario(tied, mesh, dtype="float16") for mesh in SCALED},
        **{f"overflow_{mesh}": overflowing(mesh) for mesh in SCALED},
        "apart": scenario(tied, "one", minibatches=prompts["one"]),
        **{
            f"sharing_{mesh}": scenario(tied, mesh, minibatches=prompts[mesh], min_saved=1)
            for mesh in SHARING
        },
        "tied_once": scenario(tied, "dp2", meets_once=True, max_tokens=21),
        "untied_once": scenario(str(folder / "untied"), "dp2_sp2", meets_once=True, max_tokens=21),
        "spoilt_layer": scenario(tied, "tp2", spoilt="last layer"),
        "lost_files": scenario(tied, "tp2", spoilt="files"),
        "spoilt_exchange": scenario(tied, "sp2", spoilt="exchange"),
        "swapped_ranks": scenario(tied, "tp2", spoilt="order of ranks"),
        "swapped_in_bfloat16": scenario(tied, "tp2", spoilt="order of ranks", dtype="bfloat16"),
        "lost_bias": scenario(tied, "tp2", spoilt="bias"),
        "lost_sum": scenario(tied, "dp2_tp2", spoilt="sum"),
        "too_few_heads": scenario(tied, "tp2", world_size=3, parallel={"tensor": 3}),
        "no_mesh": scenario(tied, "dp2", world_size=2, parallel={"sequence": 3}),
    }
    return run_ranks(folder, scenarios)


OF_THE_WAY = {"num_micro_batches", "num_computed_tokens", "shared_token_share"}
"""What is reported of how rows are computed."""


def assert_same_training(ranks: Ranks, alone: dict[str, Any]) -> None:
    """Weights, and what is reported, are those of one process, on every rank."""
    for rank in ranks:
        assert "error" not in rank, rank["error"]
        assert difference(rank["weights"], alone["weights"]) <= 1e-5
        assert (rank["logprobs"] - alone["logprobs"]).abs().max() <= 1e-5
        for found, expected in zip(rank["stats"], alone["stats"], strict=True):
            assert found.keys() == expected.keys()
            for name in found.keys() - OF_THE_WAY:
                assert found[name] == pytest.approx(expected[name], abs=1e-5), name


@pytest.mark.parametrize("mesh", [mesh for mesh in MESHES if mesh != "one"])
def test_training_is_that_of_one_process(mesh: str, results: Results, folder: Path) -> None:
    """Also where activations are recomputed, on tp2_sp2."""
    (alone,) = results["tied_one"]
    assert_same_training(results[f"tied_{mesh}"], alone)
    before = loaded_weights(folder / "tied")
    assert difference(alone["weights"], before) > 1e-3  # there was something to get wrong


@pytest.mark.parametrize("mesh", SHARING)
def test_rows_that_share_their_first_tokens_train_the_same(mesh: str, results: Results) -> None:
    (apart,) = results["apart"]
    assert_same_training(results[f"sharing_{mesh}"], apart)
    for rank in results[f"sharing_{mesh}"]:
        for found, expected in zip(rank["stats"], apart["stats"], strict=True):
            assert found["num_computed_tokens"] < expected["num_computed_tokens"]
            share = 1 - found["num_computed_tokens"] / expected["num_computed_tokens"]
            assert found["shared_token_share"] == pytest.approx(share)
            assert expected["shared_token_share"] == 0


@pytest.mark.parametrize("mesh", ["tp2", "sp2"])
def test_key_value_heads_may_be_fewer_than_ranks(mesh: str, results: Results) -> None:
    """And norms of queries and keys are shared by heads of different ranks."""
    assert_same_training(results[f"untied_{mesh}"], results["untied_one"][0])


@pytest.mark.parametrize("model", ["tied", "untied"])
def test_ranks_that_meet_once_an_update_train_the_same(model: str, results: Results) -> None:
    """Also where one of them has fewer micro-batches than another, or no rows."""
    assert_same_training(results[f"{model}_once"], results[f"{model}_one"][0])


def test_copies_of_a_parameter_stay_the_same_to_the_bit(results: Results) -> None:
    """Norms, and key and value heads that are fewer than ranks."""
    first, second = (rank["parts"] for rank in results["untied_tp2"])
    whole = results["untied_tp2"][0]["weights"]
    copies = [name for name in whole if first[name].shape == whole[name].shape]
    assert {"model.norm.weight", "model.layers.1.self_attn.k_proj.weight"} <= set(copies)
    assert [name for name in copies if not torch.equal(first[name], second[name])] == []


@pytest.mark.parametrize("case", ["experts_tp2", "shared_experts_dp2_tp2"])
def test_ranks_have_some_of_the_experts_each(case: str, results: Results) -> None:
    """One of 3, and two. Also where activations are recomputed, on tp2."""
    model = case.partition("_dp2")[0].partition("_tp2")[0]
    ranks, (alone,) = results[case], results[f"{model}_one"]
    assert_same_training(ranks, alone)
    name = "model.layers.1.mlp.experts.down_proj"
    assert sum(len(rank["parts"][name]) for rank in ranks) == len(alone["weights"][name])


@pytest.mark.parametrize("mesh", [mesh for mesh in REPLAYED if mesh != "one"])
def test_ranks_replay_the_experts_of_their_tokens(mesh: str, results: Results) -> None:
    """Also where activations are recomputed, and where a rank has a part of each row."""
    (alone,) = results["replay_one"]
    assert_same_training(results[f"replay_{mesh}"], alone)
    assert all(0.2 < stats["routing_mismatch"] < 0.5 for stats in alone["stats"])
    (own_choice,) = results["experts_one"]
    for name in ("loss", "grad_norm"):  # the same rows
        assert abs(alone["stats"][0][name] - own_choice["stats"][0][name]) > 1e-4


def test_snapshots_and_exports_have_whole_experts(results: Results, folder: Path) -> None:
    """And no moments of what is not trained (a bias that picks experts), on any rank."""
    saved = str(folder / "shared_experts_by_one")
    (alone,), ranks = results["shared_experts_one"], results["shared_experts_dp2_tp2"]
    for rank in ranks:
        assert difference(rank[saved], alone[saved]) <= 1e-6
        assert difference(rank[saved], alone["weights"]) <= 1e-5
    assert difference(loaded_weights(folder / "exported_experts"), ranks[0]["weights"]) == 0
    found = snapshot_weights(folder / "shared_experts", folder / "shared_experts_by_one")
    assert found.keys() == alone["weights"].keys()


@pytest.mark.parametrize("mesh", ["tp2", "sp2"])
def test_a_model_that_computes_its_own_logits(mesh: str, results: Results) -> None:
    assert_same_training(results[f"capped_{mesh}"], results["capped_one"][0])


def test_layers_whose_features_all_ranks_gather(results: Results) -> None:
    assert_same_training(results["fused_tp2"], results["fused_one"][0])


@pytest.mark.parametrize("mesh", ROUNDED)
def test_bfloat16_on_a_mesh_stays_near_float32(mesh: str, results: Results) -> None:
    for rank in results[f"bfloat16_{mesh}"]:
        assert "error" not in rank, rank["error"]
        assert {values.dtype for values in rank["weights"].values()} == {torch.bfloat16}
        assert difference(rank["weights"], results["tied_one"][0]["weights"]) < 0.02


@pytest.mark.parametrize("mesh", SCALED)
def test_float16_on_a_mesh_stays_nearer_to_float32(mesh: str, results: Results) -> None:
    (exact,) = results["tied_one"]
    for rank in results[f"float16_{mesh}"]:
        assert "error" not in rank, rank["error"]
        assert {values.dtype for values in rank["weights"].values()} == {torch.float16}
        assert difference(rank["weights"], exact["weights"]) < 0.002
        for found, expected in zip(rank["stats"], exact["stats"], strict=True):
            assert found["num_skipped_updates"] == 0
            assert found["loss_scale"] == 2.0**16
            assert found["grad_norm"] == pytest.approx(expected["grad_norm"], rel=2e-3)


@pytest.mark.parametrize("mesh", SCALED)
def test_all_ranks_skip_an_update_that_overflows_and_go_on_alike(
    mesh: str, results: Results, folder: Path
) -> None:
    first = results[f"overflow_{mesh}"][0]
    for rank in results[f"overflow_{mesh}"]:
        assert "error" not in rank, rank["error"]
        assert repr(rank["stats"]) == repr(first["stats"])  # NaN: the mean norm of no update
        num_skipped = [stats["num_skipped_updates"] for stats in rank["stats"]]
        assert num_skipped[0] > 0
        assert num_skipped[-1] == 0
        assert rank["stats"][-1]["loss_scale"] == 2.0 ** (22 - sum(num_skipped))
        own = str(folder / f"overflow_by_{mesh}")
        assert rank[f"{own} stats"] == rank["stats"][-1]
        assert difference(rank[f"{own} parts"], rank["parts"]) == 0, "to the bit"
        by_one = rank[f"{folder / 'overflow_by_one'} stats"]
        scale_of_one = results["overflow_one"][0]["stats"][2]["loss_scale"]
        assert by_one["loss_scale"] == scale_of_one / 2 ** by_one["num_skipped_updates"]


@pytest.mark.parametrize("loaded", [*RESUMED, "alone"])
def test_a_mesh_goes_on_from_the_snapshot_of_another(
    loaded: str, results: Results, folder: Path
) -> None:
    (trained,), (resumed,) = results["tied_one"], results["resumed_by_one"]
    ranks = results["resumed_by_one" if loaded == "alone" else f"tied_{loaded}"]
    for rank in ranks:
        for saved in MESHES if loaded == "alone" else RESUMED[loaded]:
            path = str(folder / f"by_{saved}")
            assert difference(rank[path], resumed[path]) <= 1e-6, saved
            assert difference(rank[path], trained["weights"]) <= 1e-5, saved


def test_the_snapshot_of_any_mesh_gives_the_model(results: Results, folder: Path) -> None:
    assert results
    model = folder / "tied"
    expected = snapshot_weights(model, folder / "by_one")
    assert difference(expected, loaded_weights(model)) > 1e-3
    for mesh in ("dp2_tp2", "tp2_sp2"):
        assert difference(snapshot_weights(model, folder / f"by_{mesh}"), expected) <= 1e-5, mesh


@pytest.mark.parametrize("mesh", list(MESHES))
def test_an_export_holds_the_weights_of_the_mesh(mesh: str, results: Results, folder: Path) -> None:
    weights = results[f"tied_{mesh}"][0]["weights"]
    assert difference(loaded_weights(folder / f"exported_by_{mesh}"), weights) == 0


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("too_few_heads", r"ConfigError: actor.parallel.tensor: expected a divisor .* 4 .*, got 3"),
        ("lost_files", r"ModelError: model\.layers\.1\.mlp\.up_proj\.weight is gone"),
        ("spoilt_layer", r"ModelError: Qwen2ForCausalLM does not compute on tensor=2, .* on one"),
        ("spoilt_exchange", r"ModelError: Qwen2ForCausalLM .* tensor=1, sequence=2 ranks in"),
        ("swapped_ranks", r"ModelError: .* tensor=2, .* times what rounding moves it by, .* 30"),
        ("swapped_in_bfloat16", r"ModelError: .* in torch.bfloat16 .* expected at most 4"),
        ("lost_bias", r"ModelError: .* tensor=2, .* times what rounding moves it by, .* 30"),
        ("lost_sum", r"ModelError: .* tensor=2, .* times what rounding moves it by, .* 30"),
        ("no_mesh", r"WorkerStartError: 2 ranks cannot be .*sequence=3 x .* a multiple of 3"),
    ],
)
def test_a_mesh_that_does_not_fit_is_refused_by_every_rank(
    name: str, message: str, results: Results
) -> None:
    """As is one that computes something else, be it in the last layer; weights may be lost, too."""
    for rank in results[name]:
        assert re.match(message, rank["error"]), rank["error"]
