"""SFT and DPO: one update against float64 by hand, and whole runs on a tiny task."""

from __future__ import annotations

import json
import random
import re
import shutil
import string
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from integration.run_process import TINY_YAML
from torch.nn.functional import logsigmoid
from transformers import AutoModelForCausalLM

from areal_sc import (
    DPOTrainer,
    FSDPPPOActor,
    GRPOConfig,
    RewardModelTrainer,
    SFTTrainer,
    TrainController,
    load_config,
    make_scheduler,
    start,
)
from areal_sc.algorithms.named_loss import CROSS_ENTROPY, NamedLoss
from areal_sc.errors import WorkflowError
from areal_sc.records.learning_curve import plot_learning_curve
from areal_sc.records.metrics_log import History
from areal_sc.run.run_folder import RunFolder

TEMPLATE = (
    "{% for m in messages %}{{ m.role[0] }}={{ m.content }}"
    "{% if m.role == 'assistant' %}${% endif %}{% endfor %}"
    "{% if add_generation_prompt %}a={% endif %}"
)
BETA = 0.3
REPOSITORY = Path(__file__).resolve().parents[2]


def row(seed: int, length: int, reference: float) -> dict[str, Any]:
    rng = random.Random(seed)
    return {
        "input_ids": [rng.randrange(2, 30) for _ in range(length)],
        "loss_mask": [place >= 3 for place in range(length)],
        "reference_logprob": reference,
    }


PAIRS = [
    {"chosen": row(n, 5 + n, -9.0 - 4 * n), "rejected": row(50 + n, 9 - n, -25.0 + 3 * n)}
    for n in range(5)
]
ROWS = [pair[name] for pair in PAIRS for name in ("chosen", "rejected")]


def by_hand(folder: Path, loss_of: Callable[[Callable[[Any], Any]], Any]) -> tuple[float, float]:
    """The loss and the norm of its gradient, in float64, row by row."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)

    def logprob(item: dict[str, Any]) -> Any:
        ids = torch.tensor(item["input_ids"])
        known = model(ids[None]).logits[0, :-1].log_softmax(-1)
        return known.gather(1, ids[1:, None])[torch.tensor(item["loss_mask"][1:]), 0].sum()

    loss = loss_of(logprob)
    loss.backward()
    norm = torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None]).norm()
    return loss.item(), norm.item()


def dpo_by_hand(logprob: Callable[[Any], Any]) -> Any:
    losses = [
        -logsigmoid(
            BETA
            * (
                (logprob(it["chosen"]) - it["chosen"]["reference_logprob"])
                - (logprob(it["rejected"]) - it["rejected"]["reference_logprob"])
            )
        )
        for it in PAIRS
    ]
    return torch.stack(losses).mean()


def sft_by_hand(logprob: Callable[[Any], Any]) -> Any:
    return -sum(map(logprob, ROWS)) / sum(sum(it["loss_mask"]) for it in ROWS)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_an_update_on_rows_against_float64(
    num_ranks: int, tiny_model_folder: Path, tmp_path: Path
) -> None:
    config = load_config(
        ["--config", str(TINY_YAML), f"run_dir={tmp_path}/run", f"actor.path={tiny_model_folder}"],
        GRPOConfig,
        "task.gate=unused",
        f"actor.parallel.data={num_ranks}",
        "actor.max_tokens_per_micro_batch=24",  # several micro-batches a rank
        "rollout.max_context_tokens=20",
        "actor.optimizer.lr=0",
    )
    scheduler = make_scheduler(config.scheduler)
    actor = TrainController(FSDPPPOActor(config.actor), scheduler)
    cases: dict[str, tuple[Any, NamedLoss, Any]] = {
        "dpo": (PAIRS, NamedLoss("dpo", {"beta": BETA}), dpo_by_hand),
        "sft": (ROWS, CROSS_ENTROPY, sft_by_hand),
    }
    try:
        with start(actor):
            for items, loss, hand in cases.values():
                stats = actor.update_rows(items, range(len(items)), loss)
                value, norm = by_hand(tiny_model_folder, hand)
                assert stats["loss"] == pytest.approx(value, rel=1e-5)
                assert stats["grad_norm"] == pytest.approx(norm, rel=1e-4)
            scored = actor.score_rows(PAIRS, [3, 0])
            assert [len(of_pair) for of_pair in scored] == [2, 2]
            sums = actor.score_rows(ROWS, [6, 7, 0, 1])
            flat = [total for of_pair in scored for total in of_pair]
            assert flat == pytest.approx([total for (total,) in sums], rel=1e-6)
    finally:
        scheduler.close()


@pytest.fixture
def chat_model(tiny_model_folder: Path, tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    shutil.copytree(tiny_model_folder, folder)
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": TEMPLATE}))
    return folder


def config_of(model: Path, run_dir: Path, *overrides: str) -> GRPOConfig:
    paths = (f"run_dir={run_dir}", f"actor.path={model}", "task.gate=unused")
    settings = ("actor.optimizer.lr=2e-3", "checkpoint.every_steps=5", "evaluation.every_steps=5")
    unused = ("generation.max_new_tokens=4096", "rollout.group_size=1")  # GRPO refuses both
    words = ["--config", str(TINY_YAML), *paths, *settings, *unused, *overrides]
    return load_config(words, GRPOConfig, generates=False)


def sorting_rows(count: int) -> list[dict[str, Any]]:
    rng = random.Random(0)
    words = ["".join(rng.sample(string.ascii_lowercase, 4)) for _ in range(count)]
    return [
        {
            "prompt": word,
            "completion": "".join(sorted(word)),
            "chosen": "".join(sorted(word)),
            "rejected": "".join(sorted(word, reverse=True)),
        }
        for word in words
    ]


def test_sft_lowers_the_loss_of_held_out_rows_and_goes_on(
    chat_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows, run_dir = sorting_rows(80), tmp_path / "run"
    for total in (10, 20):  # the second start goes on from the snapshot of step 10
        best = "checkpoint.keep_best=loss"
        config = config_of(chat_model, run_dir, f"total_steps={total}", best)
        SFTTrainer(config).fit(rows[:64], batch_size=16, held_out=rows[64:])
    history = History.read(RunFolder(run_dir).metrics_path)
    assert [it.step for it in history.steps] == list(range(1, 21))
    losses = {it.step: it.workflow["loss"] for it in history.evaluations}
    assert losses[0] == pytest.approx(3.7, abs=0.1)  # log 39: nothing is known
    assert losses[20] < losses[10] < losses[0]
    assert (run_dir / "model" / "model.safetensors").is_file()
    lowest = min((step for step in losses if step), key=lambda step: losses[step])
    assert (run_dir / "models" / "best").resolve().name == f"step-{lowest}"
    assert {it.name for it in (run_dir / "models").iterdir()} == {f"step-{lowest}", "best"}
    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary["num_steps"] == 20
    assert summary["metrics_before"] == {"loss": losses[0]}
    assert summary["metrics_after"] == {"loss": losses[20]}
    said = capsys.readouterr().out
    assert re.search(r"step=20/20 entropy=\S+ loss=\S+ grad_norm=\S+ trained_tokens_per_s=", said)
    assert not re.search("nan|reward|staleness|generated|rejected", said)
    plot_learning_curve(history, "sft", tmp_path / "curve.png")
    shown = (tmp_path / "curve.png").read_bytes()
    assert shown.startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("settings", "form"),
    [
        ([], {}),
        (["actor.lora.rank=8", "actor.optimizer.lr=2e-2"], {}),
        ([], {"of_margin": "square", "of_row": "mean", "beta": 0.5, "cross_entropy": 0.1}),
    ],
)
def test_dpo_orders_held_out_pairs(
    chat_model: Path, tmp_path: Path, settings: list[str], form: dict[str, Any]
) -> None:
    """In ten runs of `benchmarks/preferences.py` the share was 1.0; half of that is demanded."""
    rows, run_dir = sorting_rows(80), tmp_path / "run"
    config = config_of(chat_model, run_dir, "total_steps=20", *settings)
    DPOTrainer(config).fit(rows[:64], batch_size=16, held_out=rows[64:], **form)
    history = History.read(RunFolder(run_dir).metrics_path)
    before, after = (
        next(it for it in history.evaluations if it.name == name) for name in ("before", "after")
    )
    assert {step.num_rows for step in history.steps} == {2 * 16}, "both answers of each pair"
    of_rows = [step.train["num_tokens"] / step.num_rows for step in history.steps]
    assert [step.mean_sequence_length for step in history.steps] == pytest.approx(of_rows)
    assert before.workflow["margin"] == pytest.approx(0.0, abs=1e-4)  # it is its own reference
    assert after.workflow["margin"] > 0
    assert after.accuracy is not None
    assert after.accuracy > 0.5


def test_a_reward_model_orders_held_out_pairs_and_is_read_as_documented(
    chat_model: Path, tmp_path: Path
) -> None:
    """In ten runs of `benchmarks/preferences.py` it ordered all; half of that is demanded."""
    rows, run_dir = sorting_rows(80), tmp_path / "run"
    config = config_of(chat_model, run_dir, "total_steps=20")
    RewardModelTrainer(config).fit(
        rows[:64], batch_size=16, held_out=rows[64:], use_chat_template=False
    )
    after = History.read(RunFolder(run_dir).metrics_path).evaluations[-1]
    assert (after.name, after.num_prompts) == ("after", 16)
    assert after.accuracy is not None
    assert after.accuracy > 0.5
    learned_reward = documented_reward(run_dir / "model")
    margins = [
        learned_reward(row, row["chosen"]) - learned_reward(row, row["rejected"])
        for row in rows[64:]
    ]
    assert after.workflow["margin"] == pytest.approx(sum(margins) / 16, rel=1e-3, abs=1e-5)


def documented_reward(model: Path) -> Callable[[dict[str, Any], str], float]:
    """The function that docs/reward-model.md shows, reading this model."""
    page = (REPOSITORY / "docs" / "reward-model.md").read_text()
    (code,) = re.findall(r"```python\n(# learned_reward.py\n.*?)```", page, re.DOTALL)
    defined: dict[str, Any] = {}
    exec(code.replace("runs/reward_model/model", str(model)), defined)
    return defined["learned_reward"]


def test_a_bad_row_is_told_before_a_worker_starts(chat_model: Path, tmp_path: Path) -> None:
    rows, run_dir = sorting_rows(8), tmp_path / "run"
    rows[5]["rejected"] = rows[5]["chosen"]
    with pytest.raises(WorkflowError, match="row 5 of the dataset: chosen and rejected are equal"):
        DPOTrainer(config_of(chat_model, run_dir)).fit(rows, batch_size=4)
    assert not (run_dir / "logs" / "train").exists()
