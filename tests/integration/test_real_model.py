"""A user trains a model that people know, SmolLM2-135M-Instruct. Whether it learns is not tested.

What the workers compute is compared with plain passes of transformers, in float32: of a run with
the whole model, and of rows, pairs and an adapter with its first layers. The run takes up to 7 GB,
so two must not run at once: all tests are in this file, and one process of pytest-xdist takes all
tests of a file (`pytest_xdist_make_scheduler` in tests/conftest.py).
"""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
import torch
from integration.run_process import PATIENT, REPOSITORY, RunProcess, open_gate, tiny_run
from integration.scripts import agents
from integration.scripts.episodes import NotesRows, by_letters
from integration.scripts.tiny_run import letter_prompts
from integration.test_adapter_runs import assert_adapter_is_merged
from integration.test_killed_scripts import num_lives
from torch.nn.functional import logsigmoid
from transformers import AutoModelForCausalLM, AutoTokenizer

from areal_sc import (
    AgentWorkflow,
    DPOTrainer,
    GRPOConfig,
    SFTTrainer,
    SingleTurnWorkflow,
    load_config,
)
from areal_sc.__main__ import main
from areal_sc.controller.ledger.ledger_account import read_account
from areal_sc.records.metrics_log import History
from areal_sc.records.reading import Row, rows
from areal_sc.run.run_folder import RunFolder

NOISE: Final = 1e-3
"""Nats. Two float32 computations of this model differ by 3.4e-5 at most; a wrong mask makes 0.1."""

ROUNDING: Final = 2.0**-11
"""Of float16, relative: log-probabilities are recorded in it."""

CLEAR: Final = 1e-2
"""Nats between the two likeliest tokens, so that noise leaves the likeliest one as it is."""

NUM_TOKENS: Final = 6

NUM_LAYERS: Final = 5
"""Of 30: the others are alike, and would show no more of a gradient or of an adapter."""

END: Final = "<|im_end|>"

ON_DISK: Final = ("checkpoint.memory_snapshots=false", "checkpoint.keep=1")
"""Snapshots in memory would take 3 GB more."""

SETTINGS: Final = (
    *(f"generation.max_new_tokens={NUM_TOKENS}", "rollout.max_context_tokens=128"),
    *("rollout.train_batch_groups=2", "rollout.group_size=2", "rollout.max_running_sequences=8"),
    *("actor.ppo.num_minibatches=1", "actor.max_tokens_per_micro_batch=512"),
    *("evaluation.num_prompts=2", "evaluation.greedy=false", "generation.cut_answers=judged"),
    *("task.reward=by_letters", "task.use_chat_template=true", *PATIENT),
)
"""Of a tiny run: 2 groups of 2 answers a step, whose rewards differ."""


class Reference:
    """Plain forward passes of a model's folder, in float32."""

    def __init__(self, folder: Path) -> None:
        self.model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self.tokenizer: Any = AutoTokenizer.from_pretrained(folder)

    def logprobs(self, input_ids: Sequence[int]) -> torch.Tensor:
        """[T - 1] of each token but the first."""
        ids = torch.tensor(input_ids)
        known = self.model(ids[None]).logits[0, :-1].log_softmax(-1)
        result: torch.Tensor = known.gather(1, ids[1:, None])[:, 0]
        return result

    @torch.no_grad()
    def trained_logprobs(self, input_ids: Sequence[int], mask: Sequence[bool]) -> np.ndarray:
        found: np.ndarray = self.logprobs(input_ids)[torch.tensor(mask)[1:]].numpy()
        return found

    def conversation(self, *texts: str, add_generation_prompt: bool = False) -> list[int]:
        """Tokens of messages of the user and the assistant, in turn."""
        messages = [
            {"role": ("user", "assistant")[number % 2], "content": text}
            for number, text in enumerate(texts)
        ]
        encoded = self.tokenizer.apply_chat_template(
            messages, add_generation_prompt=add_generation_prompt, return_dict=True
        )
        return list(encoded["input_ids"])

    def text(self, input_ids: Sequence[int]) -> str:
        """With special tokens."""
        text: str = self.tokenizer.decode(input_ids)
        return text

    def greedy_answer(self, prompt: str) -> tuple[str, float]:
        """The answer, and how far its tokens are at least from the second likeliest ones."""
        ids = self.conversation(prompt, add_generation_prompt=True)
        made = self.model.generate(
            torch.tensor([ids]),
            do_sample=False,
            max_new_tokens=NUM_TOKENS,
            output_scores=True,
            return_dict_in_generate=True,
        )
        best = torch.cat(made.scores).log_softmax(-1).topk(2).values
        text = self.tokenizer.decode(made.sequences[0, len(ids) :], skip_special_tokens=True)
        return text, float((best[:, 0] - best[:, 1]).min())


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture
def run_dir(tmp_path: Path) -> Iterator[Path]:
    """Gigabytes, which pytest would keep."""
    yield tmp_path / "run"
    shutil.rmtree(tmp_path / "run", ignore_errors=True)


@pytest.fixture(scope="module")
def reference(real_model: Path) -> Reference:
    return Reference(real_model)


@pytest.fixture(scope="module")
def short_model(real_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Its words, and the first of its layers alone, as an export of transformers."""
    folder = tmp_path_factory.mktemp("short") / real_model.name
    shutil.copytree(real_model, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    layers = {"num_hidden_layers": NUM_LAYERS, "dtype": torch.float32}
    AutoModelForCausalLM.from_pretrained(real_model, **layers).save_pretrained(folder)
    yield folder
    shutil.rmtree(folder)


@pytest.fixture(scope="module")
def short_reference(short_model: Path) -> Reference:
    return Reference(short_model)


@pytest.fixture(scope="module")
def killed_run(real_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunProcess]:
    """A run of 4 steps that has ended.

    A rollout worker was killed after step 1, a training rank after step 2, the script after step 3.
    """
    run_dir = tmp_path_factory.mktemp("killed") / "run"
    settings = (
        *(*SETTINGS, "total_steps=4", "actor.optimizer.lr=1e-4"),
        "task.num_free_episodes=4",  # of each worker: it is held after a step
        "rollout.max_staleness=0",  # a step's rows are of the version before it
        *(*ON_DISK, "checkpoint.every_steps=2", "checkpoint.export_every_steps=2"),
    )
    try:
        with tiny_run(run_dir, real_model, *settings) as first:
            first.wait_for_step(1)
            first.wait_until(lambda: len(list(rows(run_dir))) == 4, "the records of step 1")
            os.kill(first.worker_pid("rollout/0"), signal.SIGKILL)
            first.wait_for_step(2)
            for written in ("checkpoints/step-000002", "models/step-2"):
                first.wait_until((run_dir / written).exists, written)
            os.kill(first.worker_pid("train/0"), signal.SIGKILL)
            open_gate(run_dir)
            first.wait_for_step(3)
            first.send(signal.SIGKILL)
            first.wait()
            open_gate(run_dir)
            with tiny_run(run_dir, real_model, *settings) as second:
                second.finish()
                second.wait_until_gone()
        yield second
    finally:
        shutil.rmtree(run_dir, ignore_errors=True)


def test_a_run_goes_on_after_kills(killed_run: RunProcess) -> None:
    steps = killed_run.records("step")
    assert [step["step"] for step in steps] == [1, 2, 3, 4]
    for step in steps:
        assert (step["num_rows"], step["train"]["num_updates"]) == (4, 1)
        assert math.isfinite(step["train"]["loss"])
        assert step["train"]["grad_norm"] > 0
        assert step["train"]["mismatch_max"] <= NOISE
    run_dir = killed_run.run_dir
    account = read_account(run_dir / "ledger", lambda group: None)
    assert (account.rows_lost, account.trained_again, account.version) == (0, [], 4)
    lives = [num_lives(run_dir, name) for name in ("train-0", "rollout-0")]
    assert lives == [2, 2], killed_run.story()


def test_a_run_exports_what_it_samples_with(killed_run: RunProcess, reference: Reference) -> None:
    recorded = list(rows(killed_run.run_dir))
    assert max(gaps(row, reference).max() for row in of_version(recorded, 0)) <= NOISE
    trained = of_version(recorded, 2)
    exported = Reference(killed_run.run_dir / "models" / "step-2")
    assert max(gaps(row, exported).max() for row in trained) <= NOISE
    assert max(gaps(row, reference).max() for row in trained) > 10 * NOISE


def of_version(recorded: Sequence[Row], version: int) -> list[Row]:
    """The rows of a step that this version has sampled."""
    found = [it for it in recorded if (it.versions[it.loss_mask] == version).all()]
    assert len(found) == 4
    return found


def gaps(row: Row, reference: Reference) -> np.ndarray:
    """Nats between a row's recorded log-probabilities and plain ones, beyond their rounding."""
    expected = reference.trained_logprobs(row.input_ids.tolist(), row.loss_mask.tolist())
    gap: np.ndarray = np.abs(row.behavior_logprobs[row.loss_mask] - expected)
    return gap - ROUNDING * np.abs(expected)


def test_evaluate_answers_greedily_as_transformers(killed_run: RunProcess, tmp_path: Path) -> None:
    """With the model that a run has left."""
    folder = killed_run.run_dir / "model"
    trained, known = Reference(folder), []
    for row in letter_prompts(12, seed=2):
        answer, distance = trained.greedy_answer(row["prompt"])
        if distance >= CLEAR:
            known.append({"prompt": row["prompt"], "answer": answer})
    assert len(known) >= 8
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "out"
    prompts.write_text("".join(json.dumps(row) + "\n" for row in known[:8]))
    words = ["evaluate", str(folder), "--out", str(out), "actor.device=cpu", "rollout.device=cpu"]
    words += [f"generation.max_new_tokens={NUM_TOKENS}", "rollout.max_context_tokens=128"]
    words += ["generation.cut_answers=judged", "--set"]
    reward = "areal_sc.workflows.math_reward:exact_match"
    main([*words, f"name=letters,prompts={prompts},temperature=0,reward={reward}"])
    written = [json.loads(line) for line in (out / "answers.jsonl").read_text().splitlines()]
    found = {it["text"]["prompt"]: it["text"]["answer"] for it in written}
    assert len(found) == 8
    assert json.loads((out / "summary.json").read_text())["letters"]["accuracy"] == 1.0, found


def test_two_ranks_train_an_adapter(short_model: Path, run_dir: Path, tmp_path: Path) -> None:
    settings = (
        *(*SETTINGS, "total_steps=2", "rollout.max_staleness=0"),
        *("actor.parallel.data=2", "actor.lora.rank=8", "actor.optimizer.lr=1e-3"),
    )
    with tiny_run(run_dir, short_model, *settings) as run:
        run.finish()
        run.wait_until_gone()
    steps = [step["train"] for step in run.records("step")]
    assert [step["num_updates"] for step in steps] == [1, 1]
    # what is served is the adapter merged, and what is trained computes with it apart
    assert all(step["mismatch_max"] <= NOISE for step in steps)
    main(["export", str(run_dir), str(tmp_path / "adapter"), "--adapter"])
    assert_adapter_is_merged(short_model, tmp_path / "adapter", run_dir / "model", rank=8)


CONVERSATIONS: Final = [
    {"prompt": "What is the capital of France?", "completion": "The capital of France is Paris."},
    {"prompt": "Name a colour of the sky.", "completion": "Blue, on a day without clouds."},
]
PAIRS: Final = [
    {"prompt": row["prompt"], "chosen": row["completion"], "rejected": "I do not want to say it."}
    for row in CONVERSATIONS
]


def row_config(name: str, model: Path, run_dir: Path) -> GRPOConfig:
    """Of the shipped settings of `examples/<name>.py`, on CPUs, for one step."""
    return load_config(
        ["--config", str(REPOSITORY / "configs" / f"{name}.yaml")],
        GRPOConfig,
        *(f"actor.path={model}", f"run_dir={run_dir}", "total_steps=1"),
        *("actor.device=cpu", "actor.dtype=float32", "actor.max_tokens_per_micro_batch=512"),
        *("actor.optimizer.warmup_steps=0", "evaluation.every_steps=0", "checkpoint.every_steps=0"),
        *(*ON_DISK, *PATIENT),
        generates=False,
    )


def answer_logprob(reference: Reference, prompt: str, answer: str) -> tuple[torch.Tensor, int]:
    """The log-probability of an answer and the token that ends it, and their number of tokens."""
    before = reference.conversation(prompt, add_generation_prompt=True)
    whole = reference.conversation(prompt, answer)
    end = reference.tokenizer.eos_token_id
    whole = whole[: len(whole) - whole[::-1].index(end)]  # the template goes on with a new line
    assert whole[: len(before)] == before
    return reference.logprobs(whole)[len(before) - 1 :].sum(), len(whole) - len(before)


def sft_loss(reference: Reference) -> torch.Tensor:
    answers = [answer_logprob(reference, *row.values()) for row in CONVERSATIONS]
    total: torch.Tensor = sum(logprob for logprob, _ in answers)  # type: ignore[assignment]
    return -total / sum(count for _, count in answers)


def dpo_loss(reference: Reference) -> torch.Tensor:
    """Of a policy that is still its own reference."""
    losses = []
    for row in PAIRS:
        chosen, rejected = (
            answer_logprob(reference, row["prompt"], row[name])[0]
            for name in ("chosen", "rejected")
        )
        margin = (chosen - chosen.detach()) - (rejected - rejected.detach())
        losses.append(-logsigmoid(0.1 * margin))
    return torch.stack(losses).mean()


@pytest.mark.parametrize(
    ("name", "trainer", "dataset", "loss_of"),
    [
        ("sft", SFTTrainer, CONVERSATIONS, sft_loss),
        ("dpo", DPOTrainer, PAIRS, dpo_loss),
    ],
)
def test_a_step_on_rows_is_that_of_autograd(
    short_model: Path,
    short_reference: Reference,
    run_dir: Path,
    name: str,
    trainer: Any,
    dataset: Any,
    loss_of: Callable[[Reference], torch.Tensor],
) -> None:
    trainer(row_config(name, short_model, run_dir)).fit(dataset, batch_size=2)
    (step,) = History.read(RunFolder(run_dir).metrics_path).steps
    loss = loss_of(short_reference)
    gradients = torch.autograd.grad(loss, list(short_reference.model.parameters()))
    norm = torch.stack([gradient.norm() for gradient in gradients]).norm()
    assert step.train["loss"] == pytest.approx(loss.item(), rel=1e-4)
    assert step.train["grad_norm"] == pytest.approx(norm.item(), rel=1e-3)


def test_workers_and_agents_sample_what_a_plain_forward_gives(
    real_model: Path, reference: Reference, start_rollout: Callable[..., Any], tmp_path: Path
) -> None:
    """In answers to a question, and in an agent's conversations of two turns."""
    single, turns = tmp_path / "single.jsonl", tmp_path / "turns.jsonl"
    questions = [
        {"prompt": f"What is {number} + 14?", "then": "Are you sure?"} for number in range(4)
    ]
    settings = (f"actor.path={real_model}", *SETTINGS, "generation.max_new_tokens=12")
    with start_rollout(*settings) as rollout:
        workflow = SingleTurnWorkflow(by_letters, use_chat_template=True)
        rollout.rollout_batch(questions, NotesRows(workflow, str(single)))
        rollout.rollout_batch(questions, NotesRows(AgentWorkflow(agents.asks_twice), str(turns)))
    for path in (single, turns):
        noted = [json.loads(line) for line in path.read_text().splitlines()]
        assert len(noted) == 4 * 2
        for row in noted:
            ids, mask = row["input_ids"], row["loss_mask"]
            expected = reference.trained_logprobs(ids, mask)
            assert np.abs(np.array(row["behavior_logprobs"])[mask] - expected).max() <= NOISE
            texts = [row["prompt"]["prompt"]]
            *first, answer = answers_in(row, reference)
            if path == turns:
                texts += [*first, row["prompt"]["then"]]
                assert row["reward"] == len(answer), "the agent has read it"
            before = reference.conversation(*texts, add_generation_prompt=True)
            assert reference.text(ids).removesuffix(END) == reference.text(before) + answer


def answers_in(row: dict[str, Any], reference: Reference) -> list[str]:
    """The texts of a row's trained tokens, run by run."""
    runs = groupby(zip(row["input_ids"], row["loss_mask"], strict=True), key=itemgetter(1))
    tokens = [[token for token, _ in run] for is_trained, run in runs if is_trained]
    return [reference.text(ids).removesuffix(END) for ids in tokens]
