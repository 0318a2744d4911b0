"""Models of values on meshes of ranks: against transformers in float64, and what they write."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from integration.ranks import PROGRAM, Results, difference, run_ranks, save_model
from integration.test_meshes import SIZES, scenario

VALUE_MESHES = ("one", "dp2", "tp2", "sp2")
LENGTHS = [5, 9, 1]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("values")


@pytest.fixture(scope="module")
def program() -> Any:
    spec = importlib.util.spec_from_file_location("ranks_program", PROGRAM)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def results(folder: Path) -> Results:
    """Scenario name -> what each rank left; `again` begins from what `dp2` has written."""
    lm = save_model(folder / "lm", hf.Qwen3Config(**SIZES, tie_word_embeddings=True))
    of_values: Any = hf.AutoModelForSequenceClassification.from_pretrained(lm, num_labels=1)
    torch.manual_seed(1)
    torch.nn.init.normal_(of_values.score.weight, std=0.1)
    of_values.save_pretrained(folder / "model")
    model = str(folder / "model")
    found = run_ranks(
        folder,
        {
            mesh: scenario(
                model,
                mesh,
                head="value",
                loss="values",
                snapshot_after=0,
                snapshot=str(folder / f"by_{mesh}"),
                save_hf=str(folder / f"exported_by_{mesh}"),
            )
            for mesh in VALUE_MESHES
        }
        | {
            f"new_{mesh}": scenario(lm, mesh, head="value", loss="values", steps=[0])
            for mesh in ("one", "dp2")
        }
        | {"rounded": scenario(model, "one", head="value", loss="values", dtype="bfloat16")},
    )
    return found | run_ranks(
        folder,
        {
            "again": scenario(
                str(folder / "exported_by_dp2"),
                "tp2",
                head="value",
                loss="values",
                steps=[],
                resumes=[str(folder / "by_sp2")],
                resumes_step=1,
            ),
        },
    )


def by_hand(folder: Path, program: Any) -> dict[str, torch.Tensor]:
    """The weights after two steps of one process in float64, by torch's AdamW."""
    model: Any = hf.AutoModelForSequenceClassification.from_pretrained(
        folder / "model", dtype=torch.float64
    )
    one = scenario("", "one")
    weights = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    others = [parameter for parameter in model.parameters() if parameter.dim() == 1]
    groups = [{"params": weights, "weight_decay": 0.01}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1.0, eps=1e-6)
    for step, lr in ((0, 0.5e-3), (1, 1e-3)):
        for index, minibatch in enumerate(one["minibatches"]):
            rows = program.make_minibatch(step, index, minibatch)
            start, losses = 0, torch.zeros((), dtype=torch.float64)
            for length in rows.lengths:
                part = slice(start, start + length)
                ids, mask = rows.fields["input_ids"][part], rows.fields["loss_mask"][part]
                target = rows.fields["behavior_logprobs"][part].double()
                hidden = model.model(input_ids=ids[None]).last_hidden_state
                values = model.score(hidden)[0, :-1, 0]  # of what comes after each token
                losses = losses + ((values - target[1:]).square() * mask[1:]).sum()
                start += length
            for group in optimizer.param_groups:
                group["lr"] = lr
            optimizer.zero_grad()
            (losses / rows.fields["loss_mask"].sum()).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("mesh", VALUE_MESHES)
def test_values_are_trained_as_one_float64_process_does(
    mesh: str, results: Results, folder: Path, program: Any
) -> None:
    expected = by_hand(folder, program)
    for rank in results[mesh]:
        assert "error" not in rank, rank["error"]
        assert difference(rank["weights"], expected) <= 1e-5


def test_values_in_bfloat16_stay_near_float32(results: Results) -> None:
    (rank,), (exact,) = results["rounded"], results["one"]
    assert "error" not in rank, rank["error"]
    assert difference(rank["weights"], exact["weights"]) < 0.02


@pytest.mark.parametrize("mesh", ["one", "dp2"])
def test_values_of_a_new_head_begin_at_zero(mesh: str, results: Results) -> None:
    for rank in results[f"new_{mesh}"]:
        assert "error" not in rank, rank["error"]
        assert float(rank["values"].abs().max()) == 0.0
        assert float(rank["weights"]["score.weight"].abs().max()) > 1e-4


@pytest.mark.parametrize("mesh", VALUE_MESHES)
def test_an_export_is_a_model_of_transformers(mesh: str, results: Results, folder: Path) -> None:
    model = hf.AutoModelForSequenceClassification.from_pretrained(folder / f"exported_by_{mesh}")
    assert model.config.num_labels == 1
    found = {name: parameter.detach() for name, parameter in model.named_parameters()}
    assert difference(found, results[mesh][0]["weights"]) == 0.0


def test_a_mesh_begins_from_an_export_and_goes_on_from_a_snapshot(
    results: Results, folder: Path, program: Any
) -> None:
    first = results["again"][0]
    assert "error" not in first, first["error"]
    assert difference(first["weights"], results["dp2"][0]["weights"]) == 0.0
    rows = program.make_rows(99, LENGTHS, 30)
    model: Any = hf.AutoModelForSequenceClassification.from_pretrained(folder / "exported_by_dp2")
    expected, start = torch.zeros(sum(LENGTHS)), 0
    for length in LENGTHS:
        ids = rows.fields["input_ids"][start : start + length]
        hidden = model.model(input_ids=ids[None]).last_hidden_state
        expected[start + 1 : start + length] = model.score(hidden)[0, :-1, 0].detach()
        start += length
    expected *= rows.fields["loss_mask"]
    assert float(expected.abs().max()) > 1e-3
    assert torch.allclose(first["values"], expected, atol=1e-5)
    resumed = first[str(folder / "by_sp2")]
    assert difference(resumed, results["one"][0]["weights"]) <= 1e-5
