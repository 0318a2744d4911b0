"""Models of values on meshes of ranks: against transformers in float64, and what they write."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from integration.ranks import Results, difference, load_program, run_ranks, save_model
from integration.test_meshes import SIZES, scenario
from torch.nn.functional import logsigmoid

from areal_sc.transport.packed_rows import PackedRows

VALUE_MESHES = ("one", "dp2", "tp2", "sp2")
PAIR_MESHES = ("dp2", "sp2")
LENGTHS = [5, 9, 1]
CONTEXT = 32
"""Of a model with learned positions: two rows of it are as long."""
PAIRS = [{"lengths": [CONTEXT, 7, 3, CONTEXT], "groups": [0, 0, 1, 1], "episodes": [0, 1, 0, 1]}]
ROWS_OF_PAIRS = {"dp2": [[0, 1], [2, 3]], "sp2": [[0, 1, 2, 3]]}
LossOfRows = Callable[[Any, PackedRows], torch.Tensor]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("values")


@pytest.fixture(scope="module")
def program() -> Any:
    return load_program()


@pytest.fixture(scope="module")
def results(folder: Path) -> Results:
    """Scenario name -> what each rank left; `again`, the last, begins from what others wrote."""
    lm = save_model(folder / "lm", hf.Qwen3Config(**SIZES, tie_word_embeddings=True))
    gpt2 = hf.GPT2Config(
        **{"vocab_size": 31, "n_positions": CONTEXT, "n_embd": 16, "n_layer": 2, "n_head": 2},
        **{"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 0},
    )
    save_values(lm, folder / "model")
    save_values(save_model(folder / "gpt2", gpt2), folder / "learned_positions")
    model, learned = str(folder / "model"), str(folder / "learned_positions")
    return run_ranks(
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
        | {"rounded": scenario(model, "one", head="value", loss="values", dtype="bfloat16")}
        | {
            f"pairs_{mesh}": scenario(
                learned,
                mesh,
                head="value",
                loss="pairs",
                minibatches=[PAIRS[0] | {"rows": ROWS_OF_PAIRS[mesh]}],
                max_tokens=2 * CONTEXT,
                logprob_lengths=[[5, CONTEXT, 1]] * 2,
            )
            for mesh in PAIR_MESHES
        }
        | {
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


def save_values(lm: str, folder: Path) -> None:
    model: Any = hf.AutoModelForSequenceClassification.from_pretrained(lm, num_labels=1)
    torch.manual_seed(1)
    torch.nn.init.normal_(model.score.weight, std=0.1)
    model.save_pretrained(folder)


def values_behind(model: Any, rows: PackedRows) -> list[torch.Tensor]:
    """[length] of each row: what the model says having read the token."""
    each = [rows.take([row]).fields["input_ids"] for row in range(rows.num_rows)]
    return [model.score(model.base_model(ids[None])[0])[0, :, 0] for ids in each]


def squared_error(model: Any, rows: PackedRows) -> torch.Tensor:
    losses = torch.zeros((), dtype=torch.float64)
    for row, values in enumerate(values_behind(model, rows)):
        fields = rows.take([row]).fields
        mask, target = fields["loss_mask"][1:], fields["behavior_logprobs"][1:].double()
        losses = losses + ((values[:-1] - target).square() * mask).sum()  # of what comes next
    return losses / rows.fields["loss_mask"].sum()


def of_pairs(model: Any, rows: PackedRows) -> torch.Tensor:
    """The second row of each pair has the higher reward; all end with a trained token."""
    scores = torch.stack([values[-1] for values in values_behind(model, rows)])
    return -logsigmoid(scores[1::2] - scores[0::2]).mean()


def by_hand(
    folder: Path, program: Any, minibatches: list[dict[str, Any]], loss_of: LossOfRows
) -> dict[str, torch.Tensor]:
    """The weights after two steps of one process in float64, by torch's AdamW."""
    model: Any = hf.AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float64)
    model.eval()
    weights = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    others = [parameter for parameter in model.parameters() if parameter.dim() == 1]
    groups = [{"params": weights, "weight_decay": 0.01}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1.0, eps=1e-6)
    for step, lr in ((0, 0.5e-3), (1, 1e-3)):
        for index, minibatch in enumerate(minibatches):
            for group in optimizer.param_groups:
                group["lr"] = lr
            optimizer.zero_grad()
            loss_of(model, program.make_minibatch(step, index, minibatch)).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("mesh", VALUE_MESHES)
def test_values_are_trained_as_one_float64_process_does(
    mesh: str, results: Results, folder: Path, program: Any
) -> None:
    one = scenario("", "one")["minibatches"]
    expected = by_hand(folder / "model", program, one, squared_error)
    for rank in results[mesh]:
        assert "error" not in rank, rank["error"]
        assert difference(rank["weights"], expected) <= 1e-5


@pytest.mark.parametrize("mesh", PAIR_MESHES)
def test_rows_of_the_whole_context_are_scored_behind_their_last_token(
    mesh: str, results: Results, folder: Path, program: Any
) -> None:
    expected = by_hand(folder / "learned_positions", program, PAIRS, of_pairs)
    for rank in results[f"pairs_{mesh}"]:
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
    with torch.no_grad():
        each = values_behind(model, rows)
    mask = rows.fields["loss_mask"]
    values = torch.cat([torch.cat([row.new_zeros(1), row[:-1]]) for row in each]) * mask
    assert float(values.abs().max()) > 1e-3
    assert torch.allclose(first["values"], values, atol=1e-5)
    assert torch.allclose(first["scores"], torch.cat(each) * mask, atol=1e-5)
    resumed = first[str(folder / "by_sp2")]
    assert difference(resumed, results["one"][0]["weights"]) <= 1e-5
