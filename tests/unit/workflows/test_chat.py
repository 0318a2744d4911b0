"""Conversations over several turns: against whole renderings of the template, and bad input."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import chat_templates as templates
import pytest
from scripted_engine import check_trained, engine_for

from areal_sc.errors import NeverWorks, WorkflowError
from areal_sc.workflows.chat import ChatTurn, Conversation, PastTurns

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


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def call(**arguments: Any) -> dict[str, Any]:
    return {"name": "weather", "arguments": arguments}


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


async def play(
    template: str, said: Sequence[Said], **settings: Any
) -> tuple[list[bool], Conversation]:
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
        assert (turn.message.get("reasoning_content") or "") == answer.reasoning
        got = [{"name": it.name, "arguments": it.arguments} for it in turn.tool_calls]
        assert got == list(answer.calls)
        assert [it.id for it in turn.tool_calls] == ids
        assert (turn.finish_reason, turn.invalid_calls) == ("stop", ())
        begins.append(len(conversation.trajectories(0.5)) > sum(begins))
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
    check_trained(engine, conversation.trajectories(0.5))
    return begins, conversation


ONE_ROW = {3: [True, False, False], 5: [True, False, False, False, False], 2: [True, False]}


@pytest.mark.parametrize("name", ["QWEN", "LLAMA", "MISTRAL", "GEMMA", "GLM", "DEEPSEEK"])
async def test_a_plain_chat_is_one_row(name: str) -> None:
    said = CHAT
    if name == "DEEPSEEK":  # it opens a thought, which it then drops
        said = tuple(Said(it.content, reasoning="hm", then=it.then) for it in CHAT)
    begins, _ = await play(getattr(templates, name), said)
    assert begins == ([True] * 3 if name == "DEEPSEEK" else ONE_ROW[3])


@pytest.mark.parametrize("name", ["QWEN", "LLAMA", "GLM"])
async def test_calls_and_results_go_on_in_the_row(name: str) -> None:
    begins, _ = await play(getattr(templates, name), TOOLS)
    assert begins == ONE_ROW[5]


async def test_tools_that_stand_before_the_last_question_begin_a_row_with_each() -> None:
    begins, _ = await play(templates.MISTRAL, TOOLS)
    assert begins == [True, False, False, True, False]


@pytest.mark.parametrize("name", ["QWEN", "GLM"])
async def test_several_calls_in_an_answer(name: str) -> None:
    begins, _ = await play(getattr(templates, name), TWO_CALLS)
    assert begins == ONE_ROW[2]


async def test_dropped_reasoning_begins_a_row_with_each_question(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING):
        begins, conversation = await play(templates.QWEN_THINKING, THOUGHT)
    assert begins == [True, True, True]
    assert len(conversation.trajectories(1.0)) == 3
    told = [it.getMessage() for it in caplog.records]
    assert len(told) == 1
    assert "leaves out the reasoning of an answer" in told[0]
    begins, _ = await play(templates.QWEN_THINKING, THOUGHT_TOOLS)
    assert begins == [True, False, False, True]


async def test_an_empty_thought_that_is_not_written_again_begins_a_row() -> None:
    arguments = {"enable_thinking": False}
    begins, _ = await play(templates.QWEN_THINKING, CHAT, chat_template_arguments=arguments)
    assert begins == [True, True, True]


async def test_a_sampled_thought_that_is_kept_stays_in_the_row() -> None:
    engine = engine_for(templates.QWEN_THINKING)
    conversation = Conversation("hi there", history=PastTurns.keep)
    first, second = "<think>\nhm one\n</think>\n\nhello<|im_end|>", "again<|im_end|>"
    engine.will_say(first, second)
    await engine.episode.chat(conversation)
    conversation.add(user("more"))
    await engine.episode.chat(conversation)
    [row] = conversation.trajectories(1.0)
    assert engine.tokenizer.decode(row.input_ids) == (
        "<|im_start|>user\nhi there<|im_end|>\n<|im_start|>assistant\n"
        f"{first}\n<|im_start|>user\nmore<|im_end|>\n<|im_start|>assistant\n{second}"
    )
    check_trained(engine, conversation.trajectories(0.5))


async def test_text_that_depends_on_the_history_begins_a_row_with_each_turn() -> None:
    for history in PastTurns:
        engine = engine_for(templates.NUMBERED)
        conversation = Conversation("hi there", history=history)
        for _ in range(3):
            engine.will_say("hello</s>")
            await engine.episode.chat(conversation)
            conversation.add(user("more"))
        assert len(conversation.trajectories(1.0)) == 3
        expected = "1|user|hi there</s>2|assistant|hello</s>3|user|more</s>4|assistant|"
        assert engine.tokenizer.decode(engine.sent[1]) == expected
        check_trained(engine, conversation.trajectories(0.5))


async def test_other_tools_begin_a_row() -> None:
    engine = engine_for(templates.QWEN)
    conversation = Conversation("hi there")
    engine.will_say("hello<|im_end|>", "again<|im_end|>", "bye<|im_end|>")
    for tools in ([], [TOOL], [TOOL]):
        await engine.episode.chat(conversation, tools=tools)
        conversation.add(user("more"))
    assert len(conversation.trajectories(1.0)) == 2
    check_trained(engine, conversation.trajectories(0.5))


async def test_what_was_sampled_is_never_tokenized_again() -> None:
    """Answers are sampled a byte at a time, as no tokenizer would write them."""
    engine = engine_for(templates.QWEN)
    conversation = Conversation("hi there")
    end = engine.tokenizer.convert_tokens_to_ids("<|im_end|>")
    num_drifted, written = 0, list[dict[str, Any]]([user("hi there")])
    for turn in range(5):
        text = f"the weather of day {turn} is sunny"
        letters = [engine.tokenizer.encode(it, add_special_tokens=False) for it in text]
        engine.answers.append([*(token for it in letters for token in it), end])
        assert (await engine.episode.chat(conversation)).content == text
        conversation.add(user("more"))
        written += [{"role": "assistant", "content": text}, user("more")]
        anew = engine.tokenizer.apply_chat_template(written, add_generation_prompt=True)
        [row] = conversation.trajectories(1.0)
        num_drifted += anew["input_ids"][: len(row.input_ids)] != row.input_ids
    assert num_drifted == 5
    check_trained(engine, conversation.trajectories(0.5))
    assert sum(row.loss_mask) == sum(map(len, engine.sampled))


@pytest.mark.parametrize(
    ("end", "reason"),
    [("<|im_end|>", "stop"), ("</s>", "stop"), ("", "length")],
)
async def test_a_turn_is_ended_once_however_its_answer_ended(end: str, reason: str) -> None:
    engine = engine_for(templates.QWEN)
    conversation = Conversation("hi there")
    engine.will_say(f"hello{end}", "bye<|im_end|>")
    turn = await engine.episode.chat(conversation)
    assert (turn.content, turn.finish_reason) == ("hello", reason)
    conversation.add(user("more"))
    await engine.episode.chat(conversation)
    expected = f"hello{end or '<|im_end|>'}\n<|im_start|>user\nmore<|im_end|>\n"
    assert expected in engine.tokenizer.decode(engine.sent[1])
    check_trained(engine, conversation.trajectories(0.5))


async def test_the_mark_of_another_speaker_ends_an_answer_and_stays() -> None:
    engine = engine_for(templates.GLM)
    conversation = Conversation("hi there")
    engine.will_say("hello<|observation|>", "bye<|user|>")
    await engine.episode.chat(conversation)
    conversation.add(user("more"))
    await engine.episode.chat(conversation)
    sent = engine.tokenizer.decode(engine.sent[1])
    assert sent.endswith("hello<|observation|><|user|>\nmore<|assistant|>\n")
    check_trained(engine, conversation.trajectories(0.5))


@pytest.mark.parametrize("first", [3, 9, 11])
async def test_a_stop_string_ends_a_turn_across_tokens(first: int) -> None:
    """Wherever a token ends: the text ends before the string, and nothing is trained behind it."""
    engine = engine_for(templates.QWEN)
    conversation = Conversation("hi there")
    text = "so I call </call> and go on"
    parts = (text[:first], text[first : first + 4], text[first + 4 :])
    tokens = [engine.tokenizer.encode(it, add_special_tokens=False) for it in parts]
    engine.answers.append([token for part in tokens for token in part])
    turn = await engine.episode.chat(conversation, stop="</call>")
    assert (turn.content, turn.finish_reason) == ("so I call ", "stop")
    sampled = engine.tokenizer.decode(engine.sampled[0])
    assert sampled.startswith("so I call </call>")
    assert len(sampled) <= len("so I call </call>") + 3  # no token behind the one that completes it
    conversation.add(user("4"))
    engine.will_say("bye<|im_end|>")
    await engine.episode.chat(conversation)
    sent = engine.tokenizer.decode(engine.sent[1])
    assert sent.endswith(
        f"{sampled}<|im_end|>\n<|im_start|>user\n4<|im_end|>\n<|im_start|>assistant\n"
    )
    check_trained(engine, conversation.trajectories(0.5))


async def test_a_call_that_a_stop_string_ends_is_read() -> None:
    engine = engine_for(templates.QWEN)
    conversation = Conversation("hi there")
    engine.will_say('I look.\n<tool_call>\n{"name": "weather", "arguments": {}}\n</tool_call> and')
    turn = await engine.episode.chat(conversation, tools=[TOOL], stop=["</tool_call>"])
    assert (turn.content, [it.arguments for it in turn.tool_calls]) == ("I look.", [{}])


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('{"name": "weather", "arguments": {"city": }}', "tool call 1: no JSON: Expecting value"),
        ('{"name": "wether", "arguments": {}}', "there is no tool 'wether', only weather"),
        ('{"name": "weather", "arguments": "{}"}', "arguments of weather are a str, not an object"),
        ('{"name": "weather"}', "expected an object with name and arguments"),
        ('["weather"]', "expected an object with name and arguments"),
    ],
)
async def test_a_call_that_cannot_be_read_is_told_and_stays_in_the_text(
    text: str, problem: str
) -> None:
    engine = engine_for(templates.QWEN)
    conversation = Conversation("hi there")
    whole = f"I look.\n<tool_call>\n{text}\n</tool_call>"
    engine.will_say(f"{whole}<|im_end|>", "bye<|im_end|>")
    turn = await engine.episode.chat(conversation, tools=[TOOL])
    assert turn.tool_calls == ()
    assert len(turn.invalid_calls) == 1
    assert problem in turn.invalid_calls[0]
    assert turn.content == whole
    conversation.add(user(turn.invalid_calls[0]))
    await engine.episode.chat(conversation, tools=[TOOL])
    assert len(conversation.trajectories(1.0)) == 1
    check_trained(engine, conversation.trajectories(0.5))


async def test_each_call_has_an_id_of_its_own_that_the_template_takes() -> None:
    engine = engine_for(templates.MISTRAL)
    conversation = Conversation("hi there")
    found = []
    for ids in (['"1"', '"abcdefgh1"', "null"], ['"abcdefgh1"', '"call00003"', '"call00003"']):
        calls = ", ".join(f'{{"name": "weather", "arguments": {{}}, "id": {it}}}' for it in ids)
        engine.will_say(f"[TOOL_CALLS][{calls}]</s>")
        turn = await engine.episode.chat(conversation, tools=[TOOL])
        conversation.add(*[call.answer("20") for call in turn.tool_calls])
        found += [call.id for call in turn.tool_calls]
    assert found == ["call00000", "abcdefgh1", "call00002", "call00003", "call00004", "call00005"]


async def test_more_calls_than_the_template_takes_end_no_conversation() -> None:
    engine = engine_for(templates.LLAMA)
    conversation = Conversation("hi there")
    call = '{"name": "weather", "parameters": {"city": "Paris"}}'
    engine.will_say(f"{call}; {call}<|eot_id|>", "fine<|eot_id|>")
    turn = await engine.episode.chat(conversation, tools=[TOOL])
    assert (len(turn.tool_calls), len(turn.invalid_calls)) == (1, 1)
    conversation.add(turn.tool_calls[0].answer("sunny"))
    assert (await engine.episode.chat(conversation, tools=[TOOL])).content == "fine"
    check_trained(engine, conversation.trajectories(0.5))


async def test_a_conversation_that_has_no_room_left_says_so_and_keeps_its_rows() -> None:
    engine = engine_for(templates.QWEN, max_context_tokens=120)
    conversation = Conversation("hi there")
    turns = list[ChatTurn]()
    while not turns or turns[-1].finish_reason == "stop":
        engine.will_say("hello<|im_end|>")
        turns.append(await engine.episode.chat(conversation))
        conversation.add(user("more, and still more"))
    assert len(turns) > 2
    assert (turns[-1].finish_reason, turns[-1].content, turns[-1].num_tokens) == ("context", "", 0)
    [row] = conversation.trajectories(1.0)
    assert sum(row.loss_mask) == sum(turn.num_tokens for turn in turns)


@pytest.mark.parametrize(
    ("messages", "problem"),
    [
        ([{"role": "usr", "content": "c"}], "message 0: expected a role of system, .* got 'usr'"),
        ([user("c"), "d"], "message 1 is 'd': expected"),
        ([user("c"), {"role": "user"}], "content of message 1 .user. is None"),
        (
            [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}],
            "message 0: expected tool_calls .* JSON: JSONDecodeError",
        ),
        (
            [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": []}}]}],
            "message 0: expected tool_calls .* no object",
        ),
    ],
)
def test_messages_that_a_template_would_misread_are_refused(messages: Any, problem: str) -> None:
    with pytest.raises(WorkflowError, match=problem):
        Conversation(messages)


async def test_a_turn_that_cannot_be_is_refused() -> None:
    engine = engine_for(templates.QWEN)
    with pytest.raises(WorkflowError, match="expected template or keep, got 'drop'"):
        Conversation("hi there", history="drop")
    conversation = Conversation("hi there")
    engine.will_say("hello<|im_end|>")
    await engine.episode.chat(conversation)
    with pytest.raises(WorkflowError, match="last message is the assistant's"):
        await engine.episode.chat(conversation)
    with pytest.raises(WorkflowError, match="a tool is 'weather': expected"):
        await engine.episode.chat(Conversation("hi"), tools=cast("Any", ["weather"]))
    with pytest.raises(NeverWorks, match="does not tell a model of tools"):
        await engine_for(templates.GEMMA).episode.chat(Conversation("hi"), tools=[TOOL])
    waiting = Conversation("hi there")
    engine.will_say("hello<|im_end|>")
    with pytest.raises(WorkflowError, match="it has one turn at a time"):
        await asyncio.gather(engine.episode.chat(waiting), engine.episode.chat(waiting))
    with_system = Conversation([{"role": "system", "content": "be kind"}, user("hi")])
    with pytest.raises(WorkflowError, match="refuses the messages: TemplateError: no system"):
        await engine_for(templates.GEMMA).episode.chat(with_system)
    without = engine_for(templates.QWEN)
    without.tokenizer.chat_template = None
    with pytest.raises(NeverWorks, match="has no chat template, which chat turns need"):
        await without.episode.chat(Conversation("hi"))


async def test_a_turn_that_failed_can_be_tried_again() -> None:
    engine = engine_for(templates.QWEN)
    conversation = Conversation("hi there")
    engine.will_say("hello<|im_end|>")
    await engine.episode.chat(conversation)
    conversation.add(user("more"))
    with pytest.raises(IndexError):  # nothing is left to say
        await engine.episode.chat(conversation)
    engine.will_say("again<|im_end|>")
    await engine.episode.chat(conversation)
    check_trained(engine, conversation.trajectories(0.5))
