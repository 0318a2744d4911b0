"""Conversations over several turns: against whole renderings of the template, and bad input."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import chat_templates as templates
import pytest

from areal_sc.config.schema import GenerationConfig
from areal_sc.engines.base import Completion, GenerationEngine
from areal_sc.engines.stop_strings import StopStrings
from areal_sc.errors import WorkflowError
from areal_sc.rewards.pool import RewardPool
from areal_sc.workers.episodes import WorkerEpisodeEngine
from areal_sc.workflows.chat import ChatTurn, Conversation, History

TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Tells the weather.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
        },
    },
}


@dataclass
class ScriptedEngine:
    """Answers with the texts that it is given, up to a stop string, and keeps what it was sent."""

    tokenizer: Any
    max_context_tokens: int = 10_000
    answers: list[list[int]] = field(default_factory=list)
    sent: list[list[int]] = field(default_factory=list)
    sampled: list[list[int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.end_token_ids = templates.end_token_ids(self.tokenizer)

    def will_say(self, *texts: str) -> None:
        self.answers += [self.tokenizer.encode(text, add_special_tokens=False) for text in texts]

    async def generate(
        self,
        input_ids: Sequence[int],
        sampling: GenerationConfig,
        *,
        prefix_group: str | None = None,
    ) -> Completion:
        self.sent.append(list(input_ids))
        tokens, reason = self.answers.pop(0), "length"
        if tokens and tokens[-1] in self.end_token_ids:
            reason = "stop"
        if sampling.stop:
            stops = StopStrings(self.tokenizer, sampling.stop)
            found = next((n for n, it in enumerate(tokens, 1) if stops.completes(it)), 0)
            tokens, reason = (tokens[:found], "stop") if found else (tokens, reason)
        self.sampled.append(tokens)
        number = len(self.sent)
        logprobs = [-number - n / 1000 for n in range(len(tokens))]
        versions = [number // 2] * len(tokens)
        return Completion(tokens, logprobs, versions, reason, 1.0, tuple(sampling.stop))

    @property
    def episode(self) -> WorkerEpisodeEngine:
        engine, pool = cast("GenerationEngine", self), cast("RewardPool", None)
        return WorkerEpisodeEngine(engine, pool, "g", GenerationConfig(), None)


def engine_for(template: str, **settings: Any) -> ScriptedEngine:
    return ScriptedEngine(templates.tokenizer_for(template), **settings)


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def call(**arguments: Any) -> dict[str, Any]:
    return {"name": "weather", "arguments": arguments}


def check_trained(engine: ScriptedEngine, conversation: Conversation) -> None:
    """Each sampled token is trained once, in a row with the very tokens that were sent before it."""
    rows = conversation.trajectories(0.5)
    trained = [
        (list(row.input_ids[:place]), row.input_ids[place], *columns)
        for row in rows
        for place, (mask, *columns) in enumerate(
            zip(row.loss_mask, row.behavior_logprobs, row.versions, strict=True)
        )
        if mask
    ]
    expected = [
        (sent + sampled[:n], token, -number - n / 1000, number // 2)
        for number, (sent, sampled) in enumerate(zip(engine.sent, engine.sampled, strict=True), 1)
        for n, token in enumerate(sampled)
    ]
    assert trained == expected


@dataclass(frozen=True)
class Said:
    """An answer of the model as a template would write it, and what comes after it."""

    content: str = ""
    calls: tuple[dict[str, Any], ...] = ()
    reasoning: str = ""
    then: tuple[Any, ...] = ()


CHAT = (Said("hello", then=("more",)), Said("again", then=("and",)), Said("bye"))
THOUGHT = (
    Said("hello", reasoning="hm one", then=("more",)),
    Said("again", reasoning="hm two", then=("and",)),
    Said("bye", reasoning="hm three"),
)
TOOLS = (
    Said(calls=(call(city="Paris"),), then=("sunny",)),
    Said(calls=(call(city="Rome", days=3),), then=("rain",)),
    Said("fine", then=("and Oslo?",)),
    Said(calls=(call(city="Oslo"),), then=("snow",)),
    Said("cold"),
)
TWO_CALLS = (
    Said("look", (call(city="Paris"), call(city="Rome", days=2)), then=("sunny", "rain")),
    Said("fine"),
)
THOUGHT_TOOLS = (
    Said(calls=(call(city="Paris"),), reasoning="look it up", then=("sunny",)),
    Said(calls=(call(city="Rome"),), reasoning="more", then=("rain",)),
    Said("fine", reasoning="done", then=("and Oslo?",)),
    Said("cold", reasoning="easy"),
)
EMPTY = {"<think>\n\n</think>\n\n"}


async def play(
    template: str, said: Sequence[Said], *, has_text_arguments: bool = False, **settings: Any
) -> tuple[list[bool], ScriptedEngine, Conversation]:
    """Plays a conversation whose answers are those that the template itself would write.

    What is sent must be what the whole conversation renders to, token for token, and a row must go
    on exactly where that begins with what was sent and sampled before.

    Returns: which turns began a new row.
    """
    engine = engine_for(template)
    tokenizer: Any = engine.tokenizer
    conversation = Conversation("hi there", **settings)
    tools = [TOOL] if any(it.calls for it in said) else []
    history: list[dict[str, Any]] = [user("hi there")]
    begins, before = list[bool](), ""

    def rendered(messages: Sequence[Mapping[str, Any]], *, is_open: bool = False) -> str:
        arguments = settings.get("chat_template_arguments", {})
        options = {"tokenize": False, "add_generation_prompt": is_open, **arguments}
        return str(tokenizer.apply_chat_template(messages, tools=tools or None, **options))

    for answer in said:
        prompt = rendered(history, is_open=True)
        message: dict[str, Any] = {"role": "assistant", "content": answer.content}
        if answer.reasoning:
            message["reasoning_content"] = answer.reasoning
        ids = [f"call{conversation._num_calls + n:05d}" for n in range(len(answer.calls))]
        if answer.calls:
            message["tool_calls"] = [
                {"id": call_id, "type": "function", "function": dict(it)}
                for call_id, it in zip(ids, answer.calls, strict=True)
            ]
            if has_text_arguments:
                for it in message["tool_calls"]:
                    it["function"]["arguments"] = '{"city": "%s"}' % it["function"]["arguments"]["city"]
        whole = rendered([*history, message])
        if answer.reasoning and answer.reasoning not in whole:  # a template that always drops it
            whole = f"{prompt}{answer.reasoning}\n</think>\n\n{answer.content}</s>"
        assert whole.startswith(prompt)
        text = whole[len(prompt) :].rstrip()
        if not text.endswith(templates.ENDS):
            text += "<|observation|>" if answer.calls else "<|user|>"
        engine.will_say(text)
        turn = await engine.episode.chat(conversation, tools=tools)
        assert engine.sent[-1] == tokenizer.encode(prompt, add_special_tokens=False)
        assert turn.content == answer.content
        assert turn.message.get("reasoning_content") or "" == answer.reasoning or not answer.reasoning
        got = [{"name": it.name, "arguments": it.arguments} for it in turn.tool_calls]
        assert got == list(answer.calls)
        assert [it.id for it in turn.tool_calls] == ids
        assert (turn.finish_reason, turn.invalid_calls) == ("stop", ())
        begins.append(len(conversation._rows) > sum(begins))
        if before:
            assert begins[-1] is not prompt.startswith(before)
        before = prompt + text
        history.append(message)
        if answer.calls:
            results = zip(turn.tool_calls, answer.then, strict=True)
            added = [it.answer(result) for it, result in results]
        else:
            added = [user(text) for text in answer.then]
        if added:
            conversation.add(*added)
        history += added
    check_trained(engine, conversation)
    return begins, engine, conversation


ONE_ROW = {3: [True, False, False], 5: [True, False, False, False, False], 2: [True, False]}


@pytest.mark.parametrize("name", ["QWEN", "LLAMA", "MISTRAL", "GEMMA", "GLM", "DEEPSEEK"])
async def test_a_plain_chat_is_one_row(name: str) -> None:
    said = CHAT
    if name == "DEEPSEEK":  # it opens a thought, which it then drops
        said = tuple(Said(it.content, reasoning="hm", then=it.then) for it in CHAT)
    begins, engine, _ = await play(getattr(templates, name), said)
    assert begins == ([True] * 3 if name == "DEEPSEEK" else ONE_ROW[3])


@pytest.mark.parametrize("name", ["QWEN", "LLAMA", "GLM"])
async def test_calls_and_results_go_on_in_the_row(name: str) -> None:
    begins, _, _ = await play(getattr(templates, name), TOOLS)
    assert begins == ONE_ROW[5]


async def test_tools_that_stand_before_the_last_question_begin_a_row_with_each() -> None:
    begins, _, _ = await play(templates.MISTRAL, TOOLS)
    assert begins == [True, False, False, True, False]


@pytest.mark.parametrize("name", ["QWEN", "GLM"])
async def test_several_calls_in_an_answer(name: str) -> None:
    begins, _, _ = await play(getattr(templates, name), TWO_CALLS)
    assert begins == ONE_ROW[2]


async def test_dropped_reasoning_begins_a_row_with_each_question(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING):
        begins, _, conversation = await play(templates.QWEN_THINKING, THOUGHT)
    assert begins == [True, True, True]
    assert len(conversation.trajectories(1.0)) == 3
    told = [it.getMessage() for it in caplog.records]
    assert len(told) == 1
    assert "leaves out the reasoning of an answer" in told[0]
    begins, _, _ = await play(templates.QWEN_THINKING, THOUGHT_TOOLS)
    assert begins == [True, False, False, True]


async def test_an_empty_thought_that_is_not_written_again_begins_a_row() -> None:
    arguments = {"enable_thinking": False}
    begins, _, _ = await play(templates.QWEN_THINKING, CHAT, chat_template_arguments=arguments)
    assert begins == [True, True, True]
