"""Teachers behind URLs: a model that is served as SGLang and vLLM do, and servers that fail.

What rows get is compared with a frozen teacher beside the policy, and with the model in float64.
A real server is asked in `integration/sglang/test_sglang_generation.py`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from aiohttp import web
from builders import engines_on, packed_rows
from teacher_server import listening, serving
from transformers import AutoModelForCausalLM, AutoTokenizer

from areal_sc.config.schema import GRPOConfig
from areal_sc.errors import ConfigError, NeverWorks, WorkflowError
from areal_sc.preflight.load import load_config
from areal_sc.schedulers.base import Scheduler
from areal_sc.sources.reference import reference_of, resolve
from areal_sc.trainer.models_beside import ModelsBeside
from areal_sc.workflows.base import EpisodeEngine, Trajectory, Workflow
from areal_sc.workflows.task_mix import Task, TaskMix
from areal_sc.workflows.teachers import TaughtWorkflow, Teacher

TOP_K = 5
IDS = [7, 8, 9, 3, 4, 5, 6, 1, 20]
IS_TRAINED = [False, False, True, True, False, False, True, True, False]


class Played(Workflow):
    """Two turns of an answer, and what comes behind the last one."""

    def __init__(self, temperature: float = 1.0) -> None:
        self.temperature = temperature
        self.num_played = 0

    async def run_episode(self, prompt: dict[str, Any], engine: EpisodeEngine) -> Trajectory:
        self.num_played += 1
        size = len(IDS)
        temperatures = [self.temperature if it else 1.0 for it in IS_TRAINED]
        return Trajectory(IDS, IS_TRAINED, [0.0] * size, [0] * size, temperatures, 1.0)


@pytest.fixture(scope="module")
def model(tiny_model_folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(tiny_model_folder).double().eval()


@pytest.fixture
async def served(model: Any, tokenizer: Any) -> AsyncIterator[str]:
    """The address of a server of the tiny model."""
    async with serving(model, tokenizer) as url:
        yield url


@pytest.fixture(scope="module")
def tokenizer(tiny_model_folder: Path) -> Any:
    return AutoTokenizer.from_pretrained(tiny_model_folder)


@pytest.fixture
def episode(tokenizer: Any) -> EpisodeEngine:
    return cast("EpisodeEngine", SimpleNamespace(tokenizer=tokenizer, is_evaluation=False))


async def one_row(workflow: Workflow, episode: EpisodeEngine, **row: Any) -> Trajectory:
    played = await workflow.run_episode({"prompt": "p", **row}, episode)
    (only,) = cast("list[Trajectory]", played)
    return only


@pytest.mark.parametrize("server", ["sglang", "vllm"])
async def test_rows_have_what_a_frozen_teacher_says(
    server: str, served: str, episode: EpisodeEngine, tiny_model_folder: Path, model: Any
) -> None:
    teacher = Teacher(served, server=server)
    row = await one_row(TaughtWorkflow(Played(), teacher, TOP_K), episode)
    sampled = await one_row(TaughtWorkflow(Played(), teacher, 0), episode)
    is_trained = torch.tensor(IS_TRAINED)
    with torch.no_grad():
        whole = model(torch.tensor([IDS])).logits[0].log_softmax(-1).roll(1, 0)
    expected = whole.topk(TOP_K)
    tokens = torch.tensor(row.fields["teacher_top_tokens"])
    logprobs = torch.tensor(row.fields["teacher_top_logprobs"])
    own = torch.tensor(sampled.fields["teacher_logprobs"])
    assert (tokens.dtype, logprobs.dtype, own.dtype) == (torch.int32, torch.float32, torch.float32)
    assert torch.equal(tokens[is_trained].long(), expected.indices[is_trained])
    assert (logprobs[is_trained] - expected.values[is_trained]).abs().max() < 1e-6
    places = torch.arange(len(IDS))
    assert (own - whole[places, torch.tensor(IDS)])[is_trained].abs().max() < 1e-6
    assert not any(it[~is_trained].any() for it in (tokens, logprobs, own))
    rows = packed_rows((len(IDS),))
    rows = replace(
        rows,
        fields={**rows.fields, "input_ids": torch.tensor(IDS).int(), "loss_mask": is_trained},
    )
    with engines_on(tiny_model_folder) as build:
        beside = build(is_frozen=True)
        frozen_logprobs, frozen_tokens = beside.top_logprobs(rows, TOP_K)
        frozen_own = beside.forward(rows, "logprobs")
    assert torch.equal(tokens, frozen_tokens)
    assert (logprobs - frozen_logprobs).abs().max() < 1e-5
    assert (own - frozen_own).abs().max() < 1e-5


async def test_another_vocabulary_ends_the_run_before_anything_is_played(
    served: str, tokenizer: Any
) -> None:
    class Shifted:
        vocab_size, added_tokens_decoder = tokenizer.vocab_size, dict[int, Any]()

        def decode(self, ids: list[int]) -> str:
            return str(tokenizer.decode([ids[0] - 1]))

    other = cast("EpisodeEngine", SimpleNamespace(tokenizer=Shifted(), is_evaluation=False))
    played = Played()
    for server in ("sglang", "vllm"):
        with pytest.raises(NeverWorks, match=r"token 1 is '\$' there, and '<pad>' of the policy"):
            await one_row(TaughtWorkflow(played, Teacher(served, server=server)), other)
    assert not played.num_played


@asynccontextmanager
async def answering(answer: Callable[[dict[str, Any]], Any]) -> Any:
    """The address of a server whose answers, or statuses, are those of a function of the body."""

    async def handle(request: web.Request) -> web.Response:
        given = answer(await request.json())
        if isinstance(given, int):
            return web.Response(status=given, text="not now")
        return web.json_response(given)

    app = web.Application()
    app.router.add_post("/generate", handle)
    async with listening(app) as url:
        yield url


def whole_answer(tokenizer: Any, body: dict[str, Any], value: float | None = -2.0) -> Any:
    """As SGLang gives it: each place has the tokens 2, 3, .. with falling log-probabilities."""
    asked = body["input_ids"][body["logprob_start_len"] :]
    num = body["top_logprobs_num"]
    top = [[None if value is None else value - it, 2 + it, None] for it in range(num)]
    own = [[value, it, tokenizer.decode([it])] for it in asked]
    return {"meta_info": {"input_token_logprobs": own, "input_top_logprobs": [top] * len(asked)}}


@pytest.fixture
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("areal_sc.rewards.asked_model._FIRST_PAUSE_S", 0.0)


@pytest.mark.usefixtures("no_pauses")
async def test_a_teacher_that_fails_is_asked_again(tokenizer: Any, episode: EpisodeEngine) -> None:
    statuses = [503, 200, 429, {"meta_info": {}}, [], 200]

    def answer(body: dict[str, Any]) -> Any:
        given = statuses.pop(0)
        return whole_answer(tokenizer, body) if given == 200 else given

    async with answering(answer) as url:
        row = await one_row(TaughtWorkflow(Played(), Teacher(url), 2), episode)
    assert not statuses
    expected = np.where(np.array(IS_TRAINED)[:, None], [-2, -3], 0)
    assert np.array_equal(row.fields["teacher_top_logprobs"], expected)


@pytest.mark.usefixtures("no_pauses")
@pytest.mark.parametrize(
    ("fault", "match"),
    [
        (lambda its: its["input_top_logprobs"][-2].pop(), "expected 2 tokens at a place, got 1"),
        (lambda its: its["input_top_logprobs"].pop(), "cannot be read"),
        (lambda its: its["input_token_logprobs"].reverse(), "that were asked about"),
        (lambda its: its["input_top_logprobs"].__setitem__(-1, [[None, 2, ""]] * 2), "be read"),
        (lambda its: its["input_top_logprobs"].__setitem__(-1, [[0, 2, ""]] * 2), "expected log-p"),
        (lambda its: its["input_top_logprobs"].__setitem__(-1, [[-1e4, 2, ""]] * 2), "expected lo"),
    ],
)
async def test_a_row_is_rejected_for_which_the_teacher_has_no_numbers(
    tokenizer: Any, episode: EpisodeEngine, fault: Callable[[Any], Any], match: str
) -> None:
    num_asked = 0

    def answer(body: dict[str, Any]) -> Any:
        nonlocal num_asked
        num_asked += 1
        its = whole_answer(tokenizer, body)
        if num_asked > 1:  # behind the probe
            its["meta_info"] = {name: list(it) for name, it in its["meta_info"].items()}
            its["meta_info"]["input_top_logprobs"] = [
                list(it) for it in its["meta_info"]["input_top_logprobs"]
            ]
            fault(its["meta_info"])
        return its

    async with answering(answer) as url:
        with pytest.raises(WorkflowError, match=rf"no answer in 2 tries: .*{match}") as raised:
            await one_row(TaughtWorkflow(Played(), Teacher(url, tries=2), 2), episode)
    assert not isinstance(raised.value, NeverWorks)
    assert num_asked == 3


@pytest.mark.usefixtures("no_pauses")
async def test_a_probe_that_is_refused_ends_the_run_and_one_that_is_not_answered_does_not(
    tokenizer: Any, episode: EpisodeEngine
) -> None:
    statuses = [400, 503, 503, 200, 200, 400]

    def answer(body: dict[str, Any]) -> Any:
        given = statuses.pop(0)
        return whole_answer(tokenizer, body) if given == 200 else given

    async with answering(answer) as url:
        taught, played = TaughtWorkflow(Played(), Teacher(url, tries=2), 2), Played()
        with pytest.raises(NeverWorks, match="status 400: not now"):
            await one_row(taught, episode)
        with pytest.raises(WorkflowError, match="no answer in 2 tries: status 503"):
            await one_row(taught, episode)
        await one_row(taught, episode)
        with pytest.raises(WorkflowError, match="status 400") as raised:  # of one row
            await one_row(taught, episode)
        assert not isinstance(raised.value, NeverWorks)
    with pytest.raises(NeverWorks, match="does not tell the texts"):
        async with answering(lambda body: _without_texts(whole_answer(tokenizer, body))) as url:
            await one_row(TaughtWorkflow(played, Teacher(url), 2), episode)
    assert not played.num_played


def _without_texts(answer: Any) -> Any:
    for entry in answer["meta_info"]["input_token_logprobs"]:
        entry[2] = None
    return answer


async def test_nobody_is_asked_for_rows_of_evaluations(tokenizer: Any) -> None:
    evaluated = cast("EpisodeEngine", SimpleNamespace(tokenizer=tokenizer, is_evaluation=True))
    row = await one_row(TaughtWorkflow(Played(0.0), Teacher("http://127.0.0.1:9")), evaluated)
    assert {name: it.shape for name, it in row.fields.items()} == {
        "teacher_top_logprobs": (len(IDS), 16),
        "teacher_top_tokens": (len(IDS), 16),
    }
    assert not any(it.any() for it in row.fields.values())


async def test_what_a_teacher_cannot_say_is_refused_by_name(
    served: str, episode: EpisodeEngine
) -> None:
    with pytest.raises(NeverWorks, match=r"at temperature 1, .* at \[0.5\]: set generation"):
        await one_row(TaughtWorkflow(Played(0.5), Teacher(served)), episode)
    with pytest.raises(WorkflowError, match="the row has pictures"):
        TaughtWorkflow(Played(), Teacher(served)).check_row({"images": [b"?"]})
    with pytest.raises(WorkflowError, match=r"has the fields \['teacher_logprobs'\] already"):
        TaughtWorkflow(TaughtWorkflow(Played(), Teacher(served), 0), Teacher(served), 0)
    with pytest.raises(ValueError, match="expected sglang or vllm, got 'tgi'"):
        Teacher(served, server="tgi")


async def test_each_task_has_its_teacher(tokenizer: Any, episode: EpisodeEngine) -> None:
    """By the row's task; or as workflows of a mix, where a task without one is refused."""

    def says(value: float) -> Any:
        return answering(lambda body: whole_answer(tokenizer, body, value))

    async with says(-1.5) as words, says(-2.5) as sums:
        teachers = {"words": Teacher(words), "sums": Teacher(sums)}
        by_task = TaughtWorkflow(Played(), teachers, 2)
        mixed = TaskMix(
            {
                name: Task([{"prompt": "p"}], TaughtWorkflow(Played(), teacher, 2))
                for name, teacher in teachers.items()
            }
        ).workflow
        again = resolve(reference_of(by_task))  # as a worker has it
        for workflow in (by_task, mixed, again):
            for name, value in (("words", -1.5), ("sums", -2.5)):
                row = await one_row(workflow, episode, task=name)
                assert row.fields["teacher_top_logprobs"][2].tolist() == [value, value - 1]
        with pytest.raises(WorkflowError, match=r"expected one of words, sums, .* got 'other'"):
            by_task.check_row({"task": "other"})
        with pytest.raises(WorkflowError, match="task sums: it has no teacher, and others have"):
            TaskMix({"words": Task([1], by_task), "sums": Task([1], Played())})


def test_a_loss_reads_the_fields_of_the_workflow(tmp_path: Path, tiny_model_folder: Path) -> None:
    def load_settings(*overrides: str) -> GRPOConfig:
        own = (f"run_dir={tmp_path}", "total_steps=1", f"actor.path={tiny_model_folder}")
        return load_config([*own, *overrides], GRPOConfig)

    def beside(config: GRPOConfig, workflow: Workflow) -> None:
        ModelsBeside(config, cast("Scheduler", None), workflow.fields)

    top = load_settings("actor.algorithm=distillation_top_k")
    one = load_settings("actor.algorithm=distillation")
    teacher = Teacher("http://127.0.0.1:9")
    beside(top, TaughtWorkflow(Played(), teacher))
    beside(one, TaughtWorkflow(Played(), teacher, 0))
    with pytest.raises(ConfigError, match=r"teacher\.path: no value, but actor\.ppo needs teacher"):
        beside(top, TaughtWorkflow(Played(), teacher, 0))
    with pytest.raises(ConfigError, match=r"top_k: expected at most 8, .* got 16"):
        beside(top, TaughtWorkflow(Played(), teacher, 8))
    twice = load_settings("actor.algorithm=distillation_top_k", f"teacher.path={tiny_model_folder}")
    with pytest.raises(ConfigError, match="rows their teacher_top_logprobs already"):
        beside(twice, TaughtWorkflow(Played(), teacher))
