"""Megatron-core's meshes train as one process of the FSDP engine does, and share its files."""

from __future__ import annotations

import re
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
    check_user_losses,
    difference,
    loaded_weights,
    run_ranks,
    save_model,
    snapshot_weights,
)

SIZES = {  # the vocabulary does not come out even
    "vocab_size": 31,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
}
LLAMA_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 100.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
YARN_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 100.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
}
WINDOW = {"sliding_window": 6}  # most rows are longer
EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "norm_topk_prob": True,
}
MODELS = {
    "qwen2": hf.Qwen2Config(**SIZES, tie_word_embeddings=True),
    "qwen3": hf.Qwen3Config(
        **{**SIZES, **WINDOW, "num_hidden_layers": 4},
        use_sliding_window=True,
        layer_types=["sliding_attention", "full_attention"] * 2,
    ),
    "llama": hf.LlamaConfig(**{**SIZES, "num_key_value_heads": 1}, rope_parameters=LLAMA_ROPE),
    "mistral": hf.MistralConfig(**SIZES, **WINDOW, rope_parameters=YARN_ROPE),
    "moe": hf.Qwen3MoeConfig(**SIZES, **EXPERTS, mlp_only_layers=[0]),
    "moe_plain": hf.Qwen3MoeConfig(**{**SIZES, **EXPERTS, "norm_topk_prob": False}),
    "mixtral": hf.MixtralConfig(**SIZES, num_local_experts=4, tie_word_embeddings=True),
}
MESHES = {
    "tp2": {"tensor": 2},
    "dp2": {"data": 2},
    "pp2": {"pipeline": 2},
    "vpp": {"pipeline": 2, "virtual_pipeline": 2},
    "tp2_pp2": {"tensor": 2, "pipeline": 2},
    "dp2_pp2": {"data": 2, "pipeline": 2},
    "ep2": {"data": 2, "expert": 2},
    "tp2_ep2": {"tensor": 2, "expert": 2},
    "ep2_pp2": {"data": 2, "expert": 2, "pipeline": 2},
}
MESHES_OF = {
    "qwen2": ("tp2_pp2", "dp2", "dp2_pp2"),
    "qwen3": ("vpp",),
    "llama": ("tp2",),  # its key-value head is on both ranks
    "mistral": ("pp2",),
    "moe": ("tp2_ep2", "ep2_pp2"),  # with experts in the second stage alone
    "moe_plain": ("ep2",),
    "mixtral": ("ep2_pp2",),
}
RESUMED = {  # what others have saved before
    "qwen2_tp2_pp2": ("fsdp",),
    "qwen2_dp2": ("fsdp", "dp2", "tp2_pp2"),
    "qwen2_resumed_by_fsdp": MESHES_OF["qwen2"],
    "qwen3_vpp": ("fsdp",),
    "moe_resumed_by_fsdp": ("tp2_ep2",),
    "moe_plain_ep2": ("fsdp",),
}
REPLAYED = {"dp2": "layers", "tp2_ep2": "none", "ep2_pp2": "layers"}
"""Meshes whose ranks replay routes, and what they compute again."""
TRAINED = [(model, mesh) for model, meshes in MESHES_OF.items() for mesh in meshes]
TOLERANCE = 2e-5


def model_of(name: str) -> str:
    """Of the scenario of this name."""
    return max((model for model in MODELS if name.startswith(f"{model}_")), key=len)


def scenario(model: str, parallel: dict[str, int], **settings: Any) -> dict[str, Any]:
    num_ranks = 1
    for name in ("data", "tensor", "pipeline"):
        num_ranks *= parallel.get(name, 1)
    return {
        "engine": "megatron",
        "model": model,
        "world_size": num_ranks,
        "parallel": parallel,
        "steps": [0, 1],
        "logprob_lengths": [[5, 9, 1], [5, 9, 1]],
        "minibatches": TWO_SHARES if "data" in parallel else ONE_SHARE,
        "max_tokens": 32,
        **settings,
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("megatron")


@pytest.fixture(scope="module")
def results(folder: Path) -> Results:
    """Scenario name -> what each rank left."""
    paths = {name: save_model(folder / name, config) for name, config in MODELS.items()}

    def resumes(name: str) -> dict[str, Any]:
        saved = [str(folder / f"{model_of(name)}_at_{other}") for other in RESUMED.get(name, ())]
        return {"resumes": saved, "resumes_step": 1}

    scenarios = {}
    for model, path in paths.items():
        scenarios[f"{model}_fsdp"] = scenario(
            path, {}, engine="fsdp", snapshot_after=0, snapshot=str(folder / f"{model}_at_fsdp")
        )
    for model, mesh in TRAINED:
        name = f"{model}_{mesh}"
        scenarios[name] = scenario(
            paths[model],
            MESHES[mesh],
            save_first=str(folder / f"{name}_untrained"),
            save_hf=str(folder / f"{model}_by_{mesh}"),
            snapshot_after=0,
            snapshot=str(folder / f"{model}_at_{mesh}"),
            user_losses=name == "qwen2_dp2_pp2",
            **resumes(name),
        )
    for name in ("qwen2_resumed_by_fsdp", "moe_resumed_by_fsdp"):
        path = paths[model_of(name)]
        scenarios[name] = scenario(path, {}, engine="fsdp", steps=[], **resumes(name))
    for mesh, kept in {"one": "none", **REPLAYED}.items():
        is_alone = mesh == "one"
        parallel = {} if is_alone else MESHES[mesh]
        shares = TWO_SHARES if "data" in parallel else ONE_SHARE
        routes = [2, EXPERTS["num_experts"], EXPERTS["num_experts_per_tok"]]
        scenarios[f"replay_{mesh}"] = scenario(
            paths["moe"],
            parallel,
            engine="fsdp" if is_alone else "megatron",
            routing_replay=True,
            steps=[0, 1, 2],
            minibatches=[{**it, "routes": routes} for it in shares],
            max_tokens=21,
            activation_checkpointing=kept,
        )
    qwen2 = paths["qwen2"]
    scenarios |= {
        "recomputed": scenario(qwen2, MESHES["pp2"], activation_checkpointing="layers"),
        "bfloat16": scenario(qwen2, MESHES["dp2"], dtype="bfloat16", without_memory=0),
        "swapped": scenario(qwen2, MESHES["pp2"], swaps_gate_and_up=True),
        "unread": scenario(qwen2, MESHES["tp2"], fails_to_read=True),
        "lost": scenario(qwen2, MESHES["tp2"], spoilt="files"),
        "too_many_stages": scenario(qwen2, {"pipeline": 2, "virtual_pipeline": 2}),
    }
    return run_ranks(folder, scenarios, {"MEGATRON_ON_CPU": "1"})


def heads_of(mesh: str, ranks: Ranks) -> Ranks:
    """Ranks that know log-probabilities: of the last stage."""
    return ranks[-len(ranks) // MESHES[mesh].get("pipeline", 1) :]


def assert_same_training(ranks: Ranks, alone: dict[str, Any]) -> None:
    """Weights, and what is reported, are those of one process, on every rank."""
    for rank in ranks:
        assert "error" not in rank, rank["error"]
        assert difference(rank["weights"], alone["weights"]) <= TOLERANCE
        for found, expected in zip(rank["stats"], alone["stats"], strict=True):
            assert found.keys() == expected.keys()
            for name in found.keys() - {"num_micro_batches"}:
                assert found[name] == pytest.approx(expected[name], abs=TOLERANCE), name


@pytest.mark.parametrize(("model", "mesh"), TRAINED)
def test_training_is_that_of_one_fsdp_process(
    model: str, mesh: str, results: Results, folder: Path
) -> None:
    (alone,) = results[f"{model}_fsdp"]
    ranks = results[f"{model}_{mesh}"]
    assert_same_training(ranks, alone)
    for rank in heads_of(mesh, ranks):
        assert (rank["logprobs"] - alone["logprobs"]).abs().max() <= TOLERANCE
    assert difference(alone["weights"], loaded_weights(folder / model)) > 1e-3


@pytest.mark.parametrize("mesh", list(REPLAYED))
def test_ranks_replay_the_experts_of_their_tokens(mesh: str, results: Results) -> None:
    """Over three updates, also where layers are computed again behind other micro-batches."""
    (alone,) = results["replay_one"]
    assert_same_training(results[f"replay_{mesh}"], alone)
    assert all(stats["routing_mismatch"] > 0.2 for stats in alone["stats"])
    assert difference(alone["weights"], results["moe_fsdp"][0]["weights"]) > 1e-3


def test_no_loss_of_a_user_breaks_what_ranks_do_together(results: Results) -> None:
    """The last stage alone sees losses; the others hear of their faults."""
    check_user_losses([rank["user_losses"] for rank in results["qwen2_dp2_pp2"]])


@pytest.mark.parametrize(("model", "mesh"), TRAINED)
def test_an_export_holds_the_weights_of_the_mesh(
    model: str, mesh: str, results: Results, folder: Path
) -> None:
    weights = results[f"{model}_{mesh}"][0]["weights"]
    assert difference(loaded_weights(folder / f"{model}_by_{mesh}"), weights) == 0


@pytest.mark.parametrize(("model", "mesh"), TRAINED)
def test_weights_come_back_to_the_bit(
    model: str, mesh: str, results: Results, folder: Path
) -> None:
    """And their files have the names that the family's files have."""
    exported, source = folder / f"{model}_{mesh}_untrained", folder / model
    assert results[f"{model}_{mesh}"]
    assert difference(loaded_weights(exported), loaded_weights(source)) == 0
    names = [
        set(hf.modeling_utils.load_state_dict(path / "model.safetensors"))
        for path in (exported, source)
    ]
    assert names[0] == names[1]


@pytest.mark.parametrize(("model", "mesh"), [("qwen2", "tp2_pp2"), ("moe", "tp2_ep2")])
def test_a_snapshot_gives_the_model_without_the_engine(
    model: str, mesh: str, results: Results, folder: Path
) -> None:
    assert results
    expected = snapshot_weights(folder / model, folder / f"{model}_at_fsdp")
    found = snapshot_weights(folder / model, folder / f"{model}_at_{mesh}")
    assert difference(found, expected) <= TOLERANCE
    assert difference(found, loaded_weights(folder / model)) > 1e-3


@pytest.mark.parametrize("resumed", list(RESUMED))
def test_a_snapshot_goes_on_with_any_mesh_of_either_engine(
    resumed: str, results: Results, folder: Path
) -> None:
    model = model_of(resumed)
    (alone,) = results[f"{model}_fsdp"]
    for rank in results[resumed]:
        assert "error" not in rank, rank["error"]
        for saved in RESUMED[resumed]:
            path = str(folder / f"{model}_at_{saved}")
            assert difference(rank[path], alone["weights"]) <= TOLERANCE, saved


def test_activations_are_recomputed(results: Results) -> None:
    assert_same_training(results["recomputed"], results["qwen2_fsdp"][0])


def test_bfloat16_stays_near_float32(results: Results) -> None:
    for rank in results["bfloat16"]:
        assert "error" not in rank, rank["error"]
        assert {values.dtype for values in rank["weights"].values()} == {torch.bfloat16}
        assert difference(rank["weights"], results["qwen2_fsdp"][0]["weights"]) < 0.02


def test_a_rank_that_lacks_memory_for_a_snapshot_keeps_no_other_waiting(results: Results) -> None:
    for rank in results["bfloat16"]:
        assert re.search(r"\(train rank 0\): MemoryError: no memory for", rank["failure"])


def test_layers_that_compute_something_else_are_noticed_by_every_rank(results: Results) -> None:
    message = (
        "ModelError: Megatron-core's layers do not compute .* pipeline=2.* times what rounding"
    )
    for rank in results["swapped"]:
        assert re.match(message, rank["error"]), rank["error"]


def test_every_rank_says_what_kept_the_first_one_from_loading(
    results: Results, folder: Path
) -> None:
    for rank in results["unread"]:
        assert rank["error"] == (
            f"ModelError: cannot load the model in {folder / 'qwen2'}: MemoryError"
        )


def test_weights_are_read_one_after_the_other_and_every_rank_hears_of_a_lost_one(
    results: Results,
) -> None:
    for rank in results["lost"]:
        assert rank["error"] == "ModelError: model.layers.1.mlp.up_proj.weight is gone"


def test_a_mesh_that_does_not_fit_is_refused_by_every_rank(results: Results) -> None:
    message = (
        r"ConfigError: actor.parallel.pipeline times .*: expected a divisor of .* 2 layers, got 4"
    )
    for rank in results["too_many_stages"]:
        assert re.match(message, rank["error"]), rank["error"]
