"""The content of an answer while it is sampled, against the content that it has at its end."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import chat_templates as templates
import pytest
from scripted_engine import ScriptedEngine, engine_for
from unit.engines.test_stop_strings import TEXT, any_tokens, byte_fallback, byte_level
from unit.workflows.test_chat import TOOL

from areal_sc.config.schema import GenerationConfig
from areal_sc.workflows.answer_text import TextStream
from areal_sc.workflows.chat import ChatTurn, Conversation

CALLS = {
    "QWEN": '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>',
    "LLAMA": '{"name": "weather", "parameters": {"city": "Rome"}}',
    "MISTRAL": '[TOOL_CALLS][{"name": "weather", "arguments": {"city": "Rome"}, "id": "1"}]',
    "DEEPSEEK": "<|calls|><|call|>function<|sep|>weather\n```json\n"
    '{"city": "Rome"}\n```<|call_end|>',
    "GLM": "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Rome</arg_value>\n</tool_call>",
}
PIECES = (
    *("sunny", " in", " Paris", "\n\n", " ", "é", "🛑", "<", "{", '{"na', "</", "stop", "st"),
    *("<think>", "</think>", "<tool_call>", "[TOOL_CALLS]", "<|im_start|>", "<|calls|>", "<|x"),
)


async def asked(
    engine: ScriptedEngine, tokens: list[int], stop: list[str], tools: list[Any]
) -> tuple[ChatTurn, list[str]]:
    """The turn with this answer, and the pieces of text that were told."""
    told: list[str] = []
    engine.answers = [tokens]
    turn = await engine.episode.chat(
        Conversation("hi there"), tools=tools, stop=stop, on_text=told.append
    )
    return turn, told


@pytest.mark.parametrize("has_tools", [False, True])
@pytest.mark.parametrize("name", ["QWEN", "QWEN_THINKING", "LLAMA", "MISTRAL", "DEEPSEEK", "GLM"])
async def test_what_was_told_is_the_beginning_of_the_content_wherever_the_answer_ends(
    name: str, has_tools: bool
) -> None:
    engine, rng = engine_for(getattr(templates, name)), random.Random(0)
    call = CALLS[name.partition("_")[0]]
    num_told = num_whole = 0
    for number in range(12):
        pieces = [rng.choice((*PIECES, call)) for _ in range(rng.randrange(2, 9))]
        pieces[0] = rng.choice([pieces[0], "<think>", " hello", "hello", "</think>\n\nhello"])
        text = "".join(pieces)
        tokens = list[int]()
        while text:  # cut at random, not as the tokenizer would
            cut = rng.choice([1, 2, 3, 5, 20])
            tokens += engine.tokenizer.encode(text[:cut], add_special_tokens=False)
            text = text[cut:]
        tokens += rng.choice([[], [engine.end_token_ids[0]]])
        stop = ["stop", "</"] if number % 2 else []
        for length in range(1, len(tokens) + 1):
            turn, told = await asked(engine, tokens[:length], stop, [TOOL] if has_tools else [])
            assert turn.content.startswith("".join(told))
            num_whole += turn.content.rstrip() == "".join(told) != ""
            num_told += bool(told)
    assert num_told > 10
    assert num_whole > 3


async def test_text_is_told_as_soon_as_it_is_sure() -> None:
    engine = engine_for(templates.QWEN_THINKING)
    encode = engine.tokenizer.encode

    async def pieces(*texts: str, stop: str = "", tools: bool = False) -> list[str]:
        tokens = [token for text in texts for token in encode(text, add_special_tokens=False)]
        turn, told = await asked(engine, tokens, [stop] if stop else [], [TOOL] * tools)
        assert turn.content.startswith("".join(told))
        return told

    letters = list("sunny")
    assert await pieces(*letters) == letters
    assert await pieces(*letters, "<|im_end|>") == letters
    assert await pieces(*"a b", "\n", "\n", "c", "\n") == ["a", " b", "\n\nc"]
    assert await pieces("<think>", *"no", "</think>", *"\n\na b") == ["a", " b"]
    assert await pieces(*"a</ans b", stop="</answer>") == ["a", "</ans", " b"]
    assert await pieces(*"a</answer>", stop="</answer>") == ["a"]
    assert await pieces(*"a<tool", " b", tools=True) == ["a", "<tool b"]
    assert await pieces("a", CALLS["QWEN"], "b", tools=True) == ["a"]
    assert await pieces("é", "b") == ["é", "b"]
    assert await pieces("a", "<|im_start|>", "b") == ["a"]


@pytest.mark.parametrize("make_tokenizer", [byte_level, byte_fallback])
def test_characters_are_told_whole_and_never_taken_back(make_tokenizer: Any) -> None:
    """Bytes are text once no other one can follow, and what is no text ends the stream."""
    tokenizer, rng = make_tokenizer(), random.Random(1)
    vocabulary = tokenizer.get_vocab()
    chat: Any = SimpleNamespace(
        tokenizer=tokenizer, ends={}, splits_reasoning=False, tool_format=None, around=("", "")
    )
    num_whole = 0
    for _ in range(20):
        tokens = any_tokens(tokenizer, TEXT, rng)
        tokens = [token for token in tokens if token != vocabulary["<|x|>"]]
        if rng.random() < 0.5:
            place = rng.randrange(len(tokens))
            junk = rng.choices(list(vocabulary.values())[:256], k=rng.choice([1, 30]))
            tokens[place:place] = [token for token in junk if token != vocabulary["<|x|>"]]
        stream, told, place = TextStream(chat, [], is_thinking=False), "", 0
        while place < len(tokens):
            size = rng.choice([1, 1, 1, 4])
            told += stream.add(tokens[place : place + size])
            place += size
            whole = tokenizer.decode(tokens[:place], clean_up_tokenization_spaces=False)
            assert whole.startswith(told)
        num_whole += whole.rstrip() == told
    assert num_whole > 5


async def test_the_callback_s_error_is_the_call_s_and_the_turn_can_be_asked_again() -> None:
    engine = engine_for(templates.QWEN)
    conversation = Conversation("hi there")
    episode = engine.episode

    def refuse(text: str) -> None:
        raise LookupError(text)

    engine.will_say("hello<|im_end|>", "hello<|im_end|>")
    with pytest.raises(LookupError):
        await episode.chat(conversation, on_text=refuse)
    assert episode.failure is None
    assert conversation.messages == ({"role": "user", "content": "hi there"},)
    assert (await episode.chat(conversation)).content == "hello"
    assert len(conversation.trajectories(1.0)) == 1


async def test_tokens_of_an_episode_are_told() -> None:
    engine, told = engine_for(templates.QWEN), list[int]()
    engine.will_say("hello there")
    answer = await engine.episode.generate([5], GenerationConfig(), on_tokens=told.extend)
    assert told == answer.token_ids
