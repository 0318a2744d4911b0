"""The text work of a long conversation with tools, against rendering it anew at each turn.

Once with the conversation at hand, and once as an agent's calls, which send all of it each time.

    python benchmarks/chat_turns.py               128 turns, about 80,000 tokens
    python benchmarks/chat_turns.py --quick       16 turns

Answers are scripted, so that nothing but the work on texts and tokens is timed.
"""

from __future__ import annotations

import asyncio
import gc
import random
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import report

sys.path.append(str(Path(__file__).parents[1] / "tests"))

from msgspec import json
from scripted_engine import answer_to
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from areal_sc import Conversation
from areal_sc.agents.dialects.chat_completions import ChatCompletions
from areal_sc.agents.session import Session
from areal_sc.config.schema import GenerationConfig
from areal_sc.engines.base import Completion

TOOL = {
    "type": "function",
    "function": {
        "name": "search",
        "description": "Searches the web.",
        "parameters": {"type": "object", "properties": {"query": {"type": "string"}}},
    },
}
TEMPLATE = """\
{% if tools %}<|start|>system\n{% for it in tools %}{{ it | tojson }}\n{% endfor %}<|end|>\n\
{% endif %}\
{% for it in messages %}<|start|>{{ it.role }}\n{{ it.content or '' }}\
{% for call in it.tool_calls or [] %}\n<tool_call>\n{"name": "{{ call.function.name }}", \
"arguments": {{ call.function.arguments | tojson }}}\n</tool_call>{% endfor %}<|end|>\n{% endfor %}\
{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"""


class ScriptedEngine:
    """Answers with the given tokens; counts the time that it takes."""

    def __init__(self, tokenizer: Any, answers: Sequence[list[int]]) -> None:
        self.tokenizer = tokenizer
        self.max_context_tokens = 1 << 30
        self.end_token_ids = (tokenizer.eos_token_id,)
        self.own_s = 0.0
        self._answers = iter(answers)

    async def generate(
        self, input_ids: Sequence[int], sampling: GenerationConfig | None = None, **_: Any
    ) -> Completion:
        begun = time.process_time()
        tokens = next(self._answers)
        completion = Completion(tokens, [-1.0] * len(tokens), [0] * len(tokens), "stop", 1.0)
        self.own_s += time.process_time() - begun
        return completion


def make_tokenizer(text: str) -> Any:
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=4000,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|start|>", "<|end|>"],
        show_progress=False,
    )
    backend.train_from_iterator([text, TEMPLATE], trainer)
    backend.add_tokens([AddedToken(tag) for tag in ("<tool_call>", "</tool_call>")])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|end|>")
    tokenizer.chat_template = TEMPLATE
    return tokenizer


async def measure(num_turns: int) -> report.Metrics:
    rng = random.Random(0)
    words = ["".join(rng.choices("etaoinshrdlu", k=rng.randrange(2, 8))) for _ in range(2000)]

    def text(num_words: int) -> str:
        return " ".join(rng.choices(words, k=num_words))

    tokenizer = make_tokenizer(" ".join(words))
    answers = [
        f"{text(240)}\n<tool_call>\n"
        f'{{"name": "search", "arguments": {{"query": "{text(5)}"}}}}\n</tool_call><|end|>'
        for _ in range(num_turns)
    ]

    def engine_of() -> ScriptedEngine:
        tokens = [tokenizer.encode(it, add_special_tokens=False) for it in answers]
        return ScriptedEngine(tokenizer, tokens)

    engine = engine_of()
    conversation, sampling = Conversation(text(100)), GenerationConfig()
    begun = time.process_time()
    for number in range(num_turns):
        turn = await conversation.answer(engine, [TOOL], sampling)
        if number + 1 < num_turns:
            conversation.add(*[call.answer(text(335)) for call in turn.tool_calls])
    turns_s = time.process_time() - begun - engine.own_s
    [row] = conversation.trajectories(1.0)
    engine = engine_of()
    session_s = await session_time(engine, conversation) - engine.own_s
    begun = time.process_time()
    for number in range(num_turns):
        history = list(conversation.messages[: 1 + 2 * number])
        tokenizer.apply_chat_template(history, tools=[TOOL], add_generation_prompt=True)
    anew_s = time.process_time() - begun
    return {
        "conversation_tokens": len(row.input_ids),
        "turns_s": turns_s,
        "session_s": session_s,
        "anew_s": anew_s,
        "anew_over_turns": anew_s / turns_s,
    }


async def session_time(engine: ScriptedEngine, conversation: Conversation) -> float:
    """CPU seconds for the same conversation, when an agent sends all of it at each turn."""
    session, dialect = Session(engine, GenerationConfig()), ChatCompletions()
    messages = [
        {**it, "tool_calls": [as_text(call) for call in it["tool_calls"]]}
        if it.get("tool_calls")
        else it
        for it in conversation.messages
    ]
    places = [n for n, it in enumerate(messages) if it["role"] == "assistant"]
    gc.collect()
    gc.freeze()  # as the fork server of workers does it after its imports
    bodies = [json.encode({"messages": messages[:n], "tools": [TOOL]}) for n in places]
    begun = time.process_time()
    for body in bodies:
        call = dialect.read(json.decode(body))
        json.encode(dialect.write(call, await answer_to(session, call)))
    took_s = time.process_time() - begun
    assert len(session.trajectories(1.0)) == 1
    return took_s


def as_text(call: dict[str, Any]) -> dict[str, Any]:
    function = call["function"]
    arguments = json.encode(function["arguments"]).decode()
    return {**call, "function": {**function, "arguments": arguments}}


def main() -> None:
    parser = report.make_parser(__doc__)
    parser.add_argument("--turns", type=int, default=128)
    arguments = report.parse(parser, turns=16)
    metrics = asyncio.run(measure(arguments.turns))
    report.print_metrics("Text work of a conversation", {"turns": arguments.turns}, metrics)
    report.write(metrics, arguments.json)


if __name__ == "__main__":
    main()
