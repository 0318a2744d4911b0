"""Several ranks, and rows shared out unevenly, must train as one process in float64 would."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from builders import save_qwen2
from integration.ranks import EIGHT, check_user_losses, difference, load_program, run_ranks
from transformers import AutoModelForCausalLM

from areal_sc.transport.packed_rows import PackedRows

MINIBATCHES_EVEN = [
    {"lengths": EIGHT, "rows": [[0, 1, 2, 3], [4, 5, 6, 7]]},
    {"lengths": EIGHT[::-1], "rows": [[0, 2, 4, 6], [1, 3, 5, 7]]},
]
MINIBATCHES_UNEVEN = [
    {"lengths": EIGHT, "rows": [[0, 1, 2, 3, 4, 6, 7], [5]]},
    {"lengths": EIGHT[::-1], "rows": [[0], [1, 2, 3, 4, 5, 6, 7]]},
]
MINIBATCHES_EMPTY_RANK = [
    {"lengths": EIGHT, "rows": [[0, 1, 2, 3, 4, 5, 6, 7], []]},
    {"lengths": EIGHT[::-1], "rows": [[], [0, 1, 2, 3, 4, 5, 6, 7]]},
]
MINIBATCHES_ONE_PROCESS = [
    {"lengths": EIGHT, "rows": [[0, 1, 2, 3, 4, 5, 6, 7]]},
    {"lengths": EIGHT[::-1], "rows": [[0, 1, 2, 3, 4, 5, 6, 7]]},
]
# Of the first minibatch rank 1 has no row with an advantage; of the second, nobody has one.
UNREWARDED = [
    {"lengths": EIGHT, "rows": [[0, 1, 2, 3, 4], [5, 6, 7]], "unrewarded": [1, 5, 6, 7]},
    {"lengths": EIGHT[::-1], "rows": [[0, 1, 2], [3, 4, 5, 6, 7]], "unrewarded": list(range(8))},
]
UNREWARDED_ONE_PROCESS = [
    {**minibatch, "rows": [[0, 1, 2, 3, 4, 5, 6, 7]]} for minibatch in UNREWARDED
]
# Rows 0, 2 and 5 have three answers with advantages of their own, row 4 one alone.
ANSWERS = {
    "lengths": EIGHT,
    "answers": [[3, 1, 4], [], [2, 7, 1], [], [6], [2, 9, 3], [], []],
    "groups": list(range(8)),
    "episodes": [0] * 8,
}


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_qwen2(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def deep_model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_qwen2(tmp_path_factory.mktemp("deep_model"), num_hidden_layers=6)


@pytest.fixture(scope="module")
def results(
    model_folder: Path, deep_model_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, list[dict[str, Any]]]:
    """Scenario name -> what each rank left."""
    folder = tmp_path_factory.mktemp("ranks")
    broken = folder / "no_model"
    broken.mkdir()
    common = {"model": str(model_folder), "world_size": 2, "steps": [0, 1, 2]}
    alone = {**common, "world_size": 1, "minibatches": MINIBATCHES_ONE_PROCESS}
    scenarios = {
        "even": {**common, "minibatches": MINIBATCHES_EVEN, "chunk_tokens": 100},
        "uneven": {
            **common,
            "minibatches": MINIBATCHES_UNEVEN,
            "max_tokens": 21,
        },
        "empty_rank": {
            **common,
            "minibatches": MINIBATCHES_EMPTY_RANK,
            "logprob_lengths": [[5, 9], []],
            "user_losses": True,
        },
        "recomputed_activations": {
            **common,
            "minibatches": MINIBATCHES_UNEVEN,
            "activation_checkpointing": "layers",
        },
        "masked_versions": {**common, "minibatches": MINIBATCHES_UNEVEN, "min_token_version": 1},
        "answers": {
            **common,
            "minibatches": [{**ANSWERS, "rows": [[0, 1, 3, 4, 7], [2, 5, 6]]}],
            "max_tokens": 21,
        },
        "unrewarded": {**common, "minibatches": UNREWARDED},
        "unrewarded_one_process": {**alone, "minibatches": UNREWARDED_ONE_PROCESS},
        "gradients": {
            **common,
            "model": str(deep_model_folder),
            "steps": [0],
            "minibatches": MINIBATCHES_UNEVEN[:1],
            "max_tokens": 21,
            "weighed": True,
        },
        "one_process": alone,
        "one_row_at_a_time": {**alone, "max_tokens": 20},
        "no_model": {**common, "model": str(broken), "minibatches": []},
        "row_too_long": {**common, "minibatches": MINIBATCHES_UNEVEN, "max_tokens": 19},
        "disk_problem": {
            **common,
            "steps": [0],
            "minibatches": MINIBATCHES_EVEN,
            "save_hf": str(model_folder / "config.json" / "inside_a_file"),
        },
    }
    return run_ranks(folder, scenarios)


def whole_weights(ranks: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """The same on every rank."""
    first, *others = (rank["weights"] for rank in ranks)
    for other in others:
        assert other.keys() == first.keys()
        assert all(torch.equal(other[name], values) for name, values in first.items())
    return first


def train_by_hand(
    model_folder: Path,
    program: Any,
    min_token_version: int | None = None,
    minibatches: list[dict[str, Any]] = MINIBATCHES_ONE_PROCESS,
) -> tuple[dict[str, torch.Tensor], list[float]]:
    """Float64, one row at a time, full logits, torch's AdamW: shares nothing with the engine."""
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float64).eval()
    weights = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    others = [parameter for parameter in model.parameters() if parameter.dim() == 1]
    groups = [{"params": weights, "weight_decay": 0.01}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1.0, eps=1e-6)
    losses = []
    for step, lr in ((0, 0.5e-3), (1, 1e-3), (2, 1e-3)):
        for group in optimizer.param_groups:
            group["lr"] = lr
        step_losses = []
        for index, minibatch in enumerate(minibatches):
            rows = program.make_minibatch(step, index, minibatch)
            step_losses.append(minibatch_loss(model, rows, min_token_version))
            optimizer.zero_grad()
            step_losses[-1].backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            if any(rows.advantages or ()):  # else there is nothing to learn
                optimizer.step()
        losses.append(sum(loss.item() for loss in step_losses) / len(step_losses))
    return {name: p.detach() for name, p in model.named_parameters()}, losses


def minibatch_loss(
    model: torch.nn.Module, rows: PackedRows, min_token_version: int | None
) -> torch.Tensor:
    gains = []
    num_tokens = 0
    for index in range(rows.num_rows):
        row = rows.take([index])
        fields = {name: values[1:] for name, values in row.fields.items()}
        logits = model(row.fields["input_ids"][None]).logits[0, :-1] / 0.9
        logprobs = logits.log_softmax(-1).gather(1, fields["input_ids"][:, None])[:, 0]
        ratio = (logprobs - fields["proximal_logprobs"]).exp()
        weight = (fields["proximal_logprobs"].double() - fields["behavior_logprobs"]).exp()
        mask = fields["loss_mask"]
        if min_token_version is not None:
            mask = mask & (fields["versions"] >= min_token_version)
        num_tokens += int(mask.sum())
        advantage = advantages_by_hand(row)[1:]
        gain = weight * torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
        gains.append(gain[mask & (weight <= 1.2)].sum())
    return -sum(gains) / num_tokens


def advantages_by_hand(row: PackedRows) -> torch.Tensor:
    """[T] float64 of one row; of its answers, token by token."""
    (given,) = row.advantages or ()
    if not isinstance(given, tuple):
        return torch.full((row.num_tokens,), given, dtype=torch.float64)
    assert row.metadata is not None
    left = [a for a, (_, n) in zip(given, row.metadata[0].returns, strict=True) for _ in range(n)]
    return torch.tensor([left.pop(0) if it else 0.0 for it in row.fields["loss_mask"]]).double()


@pytest.fixture(scope="module")
def program() -> Any:
    return load_program()


@pytest.fixture(scope="module")
def by_hand(model_folder: Path, program: Any) -> tuple[dict[str, torch.Tensor], list[float]]:
    return train_by_hand(model_folder, program)


@pytest.mark.parametrize(
    "scenario",
    [
        "even",
        "uneven",
        "empty_rank",
        "recomputed_activations",
        "one_process",
        "one_row_at_a_time",
    ],
)
def test_three_steps_give_the_weights_of_one_float64_process(
    scenario: str, results: Any, by_hand: Any, model_folder: Path
) -> None:
    trained = whole_weights(results[scenario])
    expected, losses = by_hand
    assert difference(trained, expected) <= 1e-5
    before = dict(AutoModelForCausalLM.from_pretrained(model_folder).named_parameters())
    assert difference(trained, before) > 1e-3  # there was something to get wrong
    reported = [stats["loss"] for stats in results[scenario][0]["stats"]]
    assert reported == pytest.approx(losses, abs=1e-6)


def test_masked_token_versions_leave_numerator_and_denominator(
    results: Any, model_folder: Path, program: Any
) -> None:
    expected, losses = train_by_hand(model_folder, program, min_token_version=1)
    assert difference(whole_weights(results["masked_versions"]), expected) <= 1e-5
    stats = results["masked_versions"][0]["stats"]
    assert [entry["loss"] for entry in stats] == pytest.approx(losses, abs=1e-6)


def test_answers_of_a_row_are_trained_by_advantages_of_their_own(
    results: Any, by_hand: Any, model_folder: Path, program: Any
) -> None:
    trained = whole_weights(results["answers"])
    expected, losses = train_by_hand(model_folder, program, minibatches=[ANSWERS])
    assert difference(trained, expected) <= 1e-5
    stats = results["answers"][0]["stats"]
    assert [entry["loss"] for entry in stats] == pytest.approx(losses, abs=1e-6)


@pytest.mark.parametrize("scenario", ["unrewarded", "unrewarded_one_process"])
def test_rows_of_advantage_zero_count_and_are_left_out(
    scenario: str, results: Any, model_folder: Path, program: Any
) -> None:
    """A minibatch of nothing else is no update: AdamW's momentum moves nothing."""
    expected, losses = train_by_hand(model_folder, program, minibatches=UNREWARDED)
    stats = results[scenario][0]["stats"]
    assert difference(whole_weights(results[scenario]), expected) <= 1e-5
    assert [entry["loss"] for entry in stats] == pytest.approx(losses, abs=1e-6)
    for entry in stats:
        assert entry["num_updates"] == 1
        assert entry["num_loss_tokens"] == 2 * sum(n - max(1, n // 3) for n in EIGHT)
        # rows 0, 2, 3 and 4 of the first minibatch
        assert entry["num_effective_tokens"] == (11 - 3) + (14 - 4) + (3 - 1) + (9 - 3)


def test_ranks_hold_their_own_part_of_the_gradients_alone(
    results: Any, deep_model_folder: Path
) -> None:
    model = AutoModelForCausalLM.from_pretrained(deep_model_folder)
    own_bytes = 4 * sum(parameter.numel() for parameter in model.parameters()) / 2
    layer_bytes = 4 * sum(parameter.numel() for parameter in model.model.layers[0].parameters())
    for rank in results["gradients"]:
        between = rank["held_bytes"][-2:]  # the first micro-batch finds no gradients yet
        assert len(rank["held_bytes"]) > 3
        assert max(between) > 0.9 * own_bytes, "gradients are not seen"
        assert max(between) <= own_bytes + layer_bytes


def test_every_rank_reports_the_same(results: Any) -> None:
    for name in ("even", "uneven", "empty_rank", "masked_versions", "unrewarded"):
        first, second = (rank["stats"] for rank in results[name])
        assert first == second
        assert all(math.isfinite(value) for entry in first for value in entry.values())


def test_token_counts_are_global(results: Any, program: Any) -> None:
    rows = [program.make_rows(index, EIGHT, 30) for index in range(2)]
    stats = results["empty_rank"][0]["stats"][0]
    assert stats["num_tokens"] == sum(batch.num_tokens for batch in rows)
    assert stats["num_loss_tokens"] == sum(int(batch.fields["loss_mask"].sum()) for batch in rows)


def test_logprobs_of_ranks_agree_with_a_plain_forward(
    results: Any, model_folder: Path, program: Any
) -> None:
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float64).eval()
    for name, shares in (("even", [[5, 9], [4]]), ("empty_rank", [[5, 9], []])):
        for rank, lengths in enumerate(shares):
            rows = program.make_rows(99, lengths, 30)
            expected = []
            for index in range(rows.num_rows):
                row = rows.take([index]).fields
                tokens, mask = row["input_ids"], row["loss_mask"][1:]
                logprobs = (model(tokens[None]).logits[0, :-1] / 0.9).log_softmax(-1)
                found = logprobs.gather(1, tokens[1:, None])[:, 0]
                expected += [0.0, *found.masked_fill(~mask, 0).tolist()]
            assert results[name][rank]["logprobs"].tolist() == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize(
    ("scenario", "message"),
    [
        ("no_model", "ModelError: .*no config.json"),
        ("row_too_long", "ValueError: train rank [01]: row . has 20 tokens.*at most 19"),
        ("disk_problem", "CheckpointError: cannot write .*inside_a_file.*NotADirectoryError"),
    ],
)
def test_a_failure_of_one_rank_is_raised_by_all(scenario: str, message: str, results: Any) -> None:
    import re

    for rank in results[scenario]:
        assert re.search(message, rank["error"]), rank["error"]


def test_no_loss_of_a_user_breaks_what_ranks_do_together(results: Any) -> None:
    """On one of the ranks some micro-batches are empty; see `UserLoss`."""
    check_user_losses([rank["user_losses"] for rank in results["empty_rank"]])
