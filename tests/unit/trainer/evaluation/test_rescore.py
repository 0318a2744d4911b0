"""Kept answers are played again: as in a worker, but for the engine."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from areal_sc.config.schema import RolloutConfig
from areal_sc.controller.rollout.evaluation import EvaluationSet
from areal_sc.engines.tokenizer import load_tokenizer, read_end_token_ids
from areal_sc.errors import CommandError, PromptTooLong
from areal_sc.rejection import Rejection, RejectionKind
from areal_sc.trainer.evaluation.kept_answers import KeptAnswer
from areal_sc.trainer.evaluation.model_evaluation import rescored
from areal_sc.workers.calls import EvaluatedText, EvaluationReply, KeptCompletion
from areal_sc.workflows.base import EpisodeEngine, Trajectory, Workflow
from areal_sc.workflows.transcript import Transcript


class CountsEnds(Workflow):
    """Its reward is the number of tokens that end an answer; it never ends for the prompt "b"."""

    async def run_episode(self, prompt: dict[str, Any], engine: EpisodeEngine) -> Trajectory:
        if prompt["prompt"] == "b":
            await asyncio.Event().wait()
        transcript = Transcript()
        transcript.add_context([2, 3])
        transcript.add_completion(await engine.generate(transcript.input_ids))
        return transcript.trajectory(float(len(engine.end_token_ids)))


def answer_to(prompt: int) -> KeptAnswer:
    text = EvaluatedText("a", "b", (KeptCompletion([5, 1], "stop", 0.5, ()),))
    return KeptAnswer.of("a", prompt, 0, EvaluationReply(0.0, {}, (3, 3), text=text))


def test_answers_are_judged_as_a_worker_does(tiny_model_folder: Path, tmp_path: Path) -> None:
    model = str(tiny_model_folder)
    config = RolloutConfig(path=model, group_timeout_s=0.5, max_context_tokens=9)
    sets = {"a": EvaluationSet([{"prompt": "a"}, {"prompt": "b"}], CountsEnds())}
    done: list[None] = []
    (tmp_path / "run" / "logs").mkdir(parents=True)
    log = tmp_path / "run" / "logs" / "rewards.log"
    right, late = rescored(
        [answer_to(0), answer_to(1)], sets, config, log, lambda: done.append(None)
    )
    ends = read_end_token_ids(tiny_model_folder, load_tokenizer(tiny_model_folder))
    assert ends
    assert (right.reward, right.rejected) == (len(ends), "")
    assert right.text == answer_to(0).text
    assert late.why is not None
    assert late.why.kind is RejectionKind.timeout
    assert "the episode took longer than group_timeout_s=0.5 s" in late.why.message
    assert len(done) == 2


def test_a_set_that_has_lost_prompts_is_told(tmp_path: Path) -> None:
    sets = {"a": EvaluationSet([{"prompt": "a"}], CountsEnds())}
    with pytest.raises(CommandError, match="set a has no prompt 1 any more"):
        rescored([answer_to(1)], sets, RolloutConfig(), tmp_path / "x.log", lambda: None)


class LongPrompts(CountsEnds):
    """Its prompts fill the context."""

    async def run_episode(self, prompt: dict[str, Any], engine: EpisodeEngine) -> Trajectory:
        transcript = Transcript()
        transcript.add_context([2] * engine.max_context_tokens)
        transcript.add_completion(await engine.generate(transcript.input_ids))
        return transcript.trajectory(1.0)


def test_a_prompt_that_is_too_long_is_so_again(tiny_model_folder: Path, tmp_path: Path) -> None:
    config = RolloutConfig(path=str(tiny_model_folder), max_context_tokens=9)
    (tmp_path / "run" / "logs").mkdir(parents=True)
    log = tmp_path / "run" / "logs" / "rewards.log"
    before = Rejection.of(PromptTooLong("the prompt has 9 tokens"))
    text = EvaluatedText("a", "", ())
    answer = KeptAnswer.of("a", 0, 0, EvaluationReply(None, rejection=before, text=text))
    sets = {"a": EvaluationSet([{"prompt": "a"}], LongPrompts())}
    (again,) = rescored([answer], sets, config, log, lambda: None)
    assert again.rejected == answer.rejected == "prompt_too_long"
