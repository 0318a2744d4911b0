"""A loss of whole rows is the same on one rank, and on ranks that share rows, tokens or layers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from builders import SMALL
from integration.ranks import EIGHT, load_program, run_ranks, save_model
from transformers import AutoModelForCausalLM, Qwen2Config

from areal_sc.transport.packed_rows import PackedRows

# groups and episodes of several rows, over shares and micro-batches
ORIGINS = {"groups": [7, 7, 7, 7, 3, 3, 9, 9], "episodes": [0, 0, 1, 1, 0, 1, 5, 5]}
ALL = list(range(8))
HALVES = [[0, 2, 4, 6, 7], [1, 3, 5]]
MESHES: dict[str, Any] = {
    "one rank": {"world_size": 1, "rows": [ALL]},
    "one row at a time": {"world_size": 1, "rows": [ALL], "max_tokens": 20},
    "data": {"rows": HALVES},
    "data, small micro-batches": {"rows": HALVES, "max_tokens": 21},
    "sequence": {"rows": [ALL], "parallel": {"sequence": 2}},
    "sequence, small micro-batches": {
        "rows": [ALL],
        "parallel": {"sequence": 2},
        "max_tokens": 21,
    },
    "tensor": {"rows": [ALL], "parallel": {"tensor": 2}},
}


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = Qwen2Config(**SMALL, tie_word_embeddings=True)
    return Path(save_model(tmp_path_factory.mktemp("model"), config))


@pytest.fixture(scope="module")
def results(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    scenarios = {}
    for name, mesh in MESHES.items():
        minibatches = [{"lengths": EIGHT, "rows": mesh["rows"], "unrewarded": [2], **ORIGINS}]
        others = {key: value for key, value in mesh.items() if key != "rows"}
        common = {"model": str(model_folder), "world_size": 2, "steps": [0], "loss": "rows"}
        lengths = [[5, 9]] * len(mesh["rows"])
        scenarios[name] = common | others | {"minibatches": minibatches, "logprob_lengths": lengths}
    return run_ranks(tmp_path_factory.mktemp("ranks"), scenarios)


@pytest.fixture(scope="module")
def by_hand(model_folder: Path) -> tuple[float, dict[str, torch.Tensor], float]:
    """The loss in float64, what one step of AdamW makes of its gradient, and the mean ratio."""
    rows = load_program().make_minibatch(0, 0, {"lengths": EIGHT, "unrewarded": [2], **ORIGINS})
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float64).eval()
    loss, ratio = loss_by_hand(model, rows)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    moved = {}
    for name, parameter in model.named_parameters():
        decay = 0.01 if parameter.dim() > 1 else 0.0
        gradient = parameter.grad
        direction = gradient / (gradient.abs() + 1e-6)  # AdamW's first step
        moved[name] = (parameter - 0.5e-3 * (direction + decay * parameter)).detach()
    return loss.item(), moved, ratio


def loss_by_hand(model: Any, rows: PackedRows) -> tuple[torch.Tensor, float]:
    """In float64, row by row, and each mean by its own loop."""
    gains, rewards, late, entropies, ratios = [], [], [], [], []
    for index in range(rows.num_rows):
        row = rows.take([index])
        fields = {name: values[1:] for name, values in row.fields.items()}
        logits = model(row.fields["input_ids"][None]).logits[0, :-1] / 0.9
        known = logits.log_softmax(-1)
        mask = fields["loss_mask"]
        logprobs = known.gather(1, fields["input_ids"][:, None])[mask, 0]
        entropies.append(-(known.exp() * known).sum(-1)[mask])
        ratio = (logprobs - fields["proximal_logprobs"][mask].double()).mean().exp()
        ratios += [ratio.item()] * len(logprobs)
        advantage = row.advantages[0]
        # the gradient of a sequence's ratio, spread over its tokens: each token has the mean's
        gains.append(
            torch.minimum(ratio * advantage, ratio.clamp(0.9, 1.2) * advantage).expand(
                len(logprobs)
            )
        )
        rewards.append((0.5 * index - 1) * logprobs)
        positions = torch.arange(1, row.num_tokens)[mask]
        late.append(logprobs * positions / row.num_tokens)

    def mean_over(values: list[torch.Tensor], origins: list[Any]) -> torch.Tensor:
        means = []
        for origin in dict.fromkeys(origins):
            its = [v for v, found in zip(values, origins, strict=True) if found == origin]
            means.append(torch.cat(its).mean())
        return torch.stack(means).mean()

    groups, episodes = ORIGINS["groups"], ORIGINS["episodes"]
    loss = (
        -mean_over(gains, ALL)
        - 0.3 * mean_over(rewards, list(zip(groups, episodes, strict=True)))
        - 0.2 * mean_over(late, groups)
        - 0.1 * mean_over(entropies, [0] * 8)
    )
    return loss, sum(ratios) / len(ratios)


@pytest.mark.parametrize("mesh", MESHES)
def test_rows_are_whole_on_every_mesh(mesh: str, results: Any, by_hand: Any) -> None:
    loss, moved, ratio = by_hand
    for rank in results[mesh]:
        assert "error" not in rank, rank.get("error")
        (stats,) = rank["stats"]
        assert stats["loss"] == pytest.approx(loss, rel=1e-5)
        assert stats["counts"] == 8 * 10000 + 5 * 100 + 3
        assert stats["sequence_ratio"] == pytest.approx(ratio, rel=1e-5)
        weights = rank["weights"]
        assert weights.keys() == moved.keys()
        most = max(float((weights[name] - values).abs().max()) for name, values in moved.items())
        assert most < 2e-5
