"""Tokens that a history made of text again would change, by chat template.

    python benchmarks/chat_drift.py FOLDER        each *.jinja in it, a chat template of a model
    python benchmarks/chat_drift.py --quick       the formats in tests/chat_templates.py

An agent asks eight times: a question, a call of a tool, its answer, the next question. Here the
model writes what its template writes, but for one place in each answer: there it has sampled two
tokens that make the same text as one, as models do. Counted are the rows of a session, in which
every sampled token stands as it was sampled; and the calls in which the whole history, made into
tokens again from its messages, differs from what the model has read and sampled: because of those
tokens (`split`), and without them because of the template alone (`template`).
"""

from __future__ import annotations

import asyncio
import json
import logging
import random
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import report

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

import chat_templates
from scripted_engine import answer_to
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from areal_sc.agents.calls import ModelCall
from areal_sc.agents.session import Session
from areal_sc.config.schema import GenerationConfig
from areal_sc.engines.base import Completion
from areal_sc.workflows.chat_format import Message

NUM_QUESTIONS: Final = 4
TOOL: Final = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "Gives the weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
        },
    },
}
_SPECIAL: Final = re.compile(
    r"<[|\uff5c][^<>\s]{1,40}[|\uff5c]>|<[a-z_]+(?:_of_turn|_turn)>|\[/?[A-Z_]+\]|</?s>"
)
_ROLES: Final = ("<|system|>", "<|user|>", "<|assistant|>", "<|observation|>")
"""Marks that templates make of a role."""
_TAGS: Final = ("<tool_call>", "</tool_call>", "<think>", "</think>")
_MARK: Final = "zqanswerqz"
MEASURED: Final = (
    *("has_tools", "thinks", "calls", "rows", "drifted_by_template"),
    *("rows_with_split", "drifted_by_split"),
)


class TemplateModel:
    """Writes what the template would, and is an engine of a session."""

    def __init__(self, template: str, tools: Sequence[Mapping[str, Any]], *, splits: bool) -> None:
        self.tools = tools
        self.tokenizer = tokenizer_for(template)
        self.max_context_tokens = 1 << 20
        self.read: list[list[int]] = []
        self.wrote: list[list[int]] = []
        self._splits = splits
        self._rng = random.Random(0)
        asked: Message = {"role": "user", "content": "hello"}
        answer: Message = {"role": "assistant", "content": _MARK}
        behind = self._text([asked, answer, asked]).partition(_MARK)[2]
        if not (ends := _SPECIAL.findall(behind)):
            raise SystemExit("what ends an answer is not known here")
        self._end = self.tokenizer.convert_tokens_to_ids(ends[0])
        self.end_token_ids = (self._end,)
        self.next_message: Message = {}
        self.history: list[Message] = []

    async def generate(
        self, input_ids: Sequence[int], sampling: GenerationConfig | None = None, **_: Any
    ) -> Completion:
        tokens = self._encode(self._answer())
        if self._end in tokens:
            tokens = tokens[: tokens.index(self._end)]
        tokens = [*(self._split(tokens) if self._splits else tokens), self._end]
        self.read.append(list(input_ids))
        self.wrote.append(tokens)
        return Completion(tokens, [-1.0] * len(tokens), [0] * len(tokens), "stop", 1.0)

    def again(self, messages: Sequence[Message]) -> list[int]:
        """The whole history, tokenized again."""
        return self._encode(self._text(messages, add_generation_prompt=True))

    def _answer(self) -> str:
        """What a model would write, for the template to write it so later on."""
        asked = self._text(self.history, add_generation_prompt=True)
        whole = self._text([*self.history, self.next_message])
        if whole.startswith(asked):
            return whole[len(asked) :]
        common = next(
            n for n, pair in enumerate(zip(asked, whole, strict=False)) if pair[0] != pair[1]
        )
        if "<think>" in asked[common:]:  # the prompt begins to think, and the history has none
            return f"{self.next_message['reasoning_content']}\n</think>\n\n{whole[common:]}"
        return whole[common:]

    def _text(self, messages: Sequence[Message], **how: Any) -> str:
        how |= {"tools": self.tools or None, "tokenize": False}
        try:
            return str(self.tokenizer.apply_chat_template(messages, **how))
        except TypeError:  # it wants the arguments as text
            texts = [with_text(it) for it in messages]
            return str(self.tokenizer.apply_chat_template(texts, **how))

    def _encode(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    def _split(self, tokens: list[int]) -> list[int]:
        """One token in two, which make the same text."""
        places = list(range(len(tokens)))
        self._rng.shuffle(places)
        pieces = self.tokenizer.convert_ids_to_tokens(tokens)
        known = self.tokenizer.get_vocab()
        for place in places:
            piece = pieces[place]
            for cut in range(1, len(piece) if piece.isalpha() and piece.isascii() else 1):
                if piece[:cut] in known and piece[cut:] in known:
                    two = [known[piece[:cut]], known[piece[cut:]]]
                    return [*tokens[:place], *two, *tokens[place + 1 :]]
        return tokens


def with_text(message: Message) -> Message:
    """The arguments of a message's calls as text."""
    calls = [
        {**it, "function": {**it["function"], "arguments": json.dumps(it["function"]["arguments"])}}
        for it in message.get("tool_calls") or ()
    ]
    return {**message, "tool_calls": calls} if calls else message


def tokenizer_for(template: str) -> Any:
    """Byte-level pairs, with the marks of the template as special tokens."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    specials = sorted({"<s>", "</s>", *_ROLES, *_SPECIAL.findall(template)})
    trainer = trainers.BpeTrainer(
        vocab_size=1500,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=specials,
        show_progress=False,
    )
    texts = [template, *(it["content"] or "" for it in conversation() for _ in range(20))]
    backend.train_from_iterator(texts, trainer)
    backend.add_tokens([AddedToken(tag, special=False) for tag in _TAGS])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")
    tokenizer.chat_template = template
    return tokenizer


def conversation(*, has_tools: bool = True, thinks: bool = True) -> Iterator[Message]:
    """Messages of the user, the model and a tool."""
    for number in range(NUM_QUESTIONS):
        city = ("Paris", "Rome", "Oslo", "Lima")[number]
        thought = {"reasoning_content": f"I want to know about {city}."} if thinks else {}
        yield {"role": "user", "content": f"How is the weather in {city} tomorrow?"}
        if has_tools:
            arguments = {"city": city, "days": number + 1}
            function = {"name": "look_up", "arguments": arguments}
            call = {"id": f"call{number:05d}", "type": "function", "function": function}
            yield {"role": "assistant", "content": "", "tool_calls": [call], **thought}
            yield {"role": "tool", "tool_call_id": f"call{number:05d}", "content": "sunny, 21"}
        yield {"role": "assistant", "content": f"It is sunny in {city}, and 21 degrees.", **thought}


async def play(model: TemplateModel, told: Sequence[Message]) -> report.Metrics:
    """What the session, and a history that is tokenized again, make of a conversation."""
    session = Session(model, GenerationConfig())
    messages = list[Message]()
    num_drifted = 0
    for message in told:
        if message["role"] != "assistant":
            messages.append(message)
            continue
        model.history, model.next_message = messages, message
        if model.wrote:
            before = [*model.read[-1], *model.wrote[-1][:-1]]  # GLM ends with who speaks next
            again = model.again(messages)
            num_drifted += again[: len(before)] != before
        answer = await answer_to(session, ModelCall(tuple(messages), tuple(model.tools)))
        messages = [*messages, answer.turn.message]
    rows = session.trajectories(1.0)
    sampled = [
        token
        for row in rows
        for token, is_sampled in zip(row.input_ids, row.loss_mask, strict=True)
        if is_sampled
    ]
    assert sorted(sampled) == sorted(it for wrote in model.wrote for it in wrote)
    return {"calls": len(model.wrote), "rows": len(rows), "drifted": num_drifted}


def measure(template: str) -> report.Metrics:
    """As much of the conversation as the template takes."""
    refused: Exception | None = None
    for has_tools, thinks in ((True, True), (True, False), (False, True), (False, False)):
        tools = [TOOL] if has_tools else []
        told = list(conversation(has_tools=has_tools, thinks=thinks))
        try:
            alone, split = (
                asyncio.run(play(TemplateModel(template, tools, splits=it), told))
                for it in (False, True)
            )
        except Exception as error:  # a template raises what it likes
            refused = error
            continue
        return {
            "has_tools": has_tools,
            "thinks": thinks,
            "calls": alone["calls"],
            "rows": alone["rows"],
            "drifted_by_template": alone["drifted"],
            "drifted_by_split": split["drifted"],
            "rows_with_split": split["rows"],
        }
    raise SystemExit(f"the template takes no conversation: {refused!r}")


def templates_of(folder: Path | None) -> Mapping[str, str]:
    if folder is None:
        found = vars(chat_templates).items()
        return {
            name: it
            for name, it in found
            if name.isupper() and name[0] != "_" and isinstance(it, str)
        }
    return {path.stem: path.read_text() for path in sorted(folder.glob("*.jinja"))}


def main() -> None:
    parser = report.make_parser(__doc__)
    parser.add_argument("folder", type=Path, nargs="?", help="of chat templates")
    arguments = report.parse(parser)
    logging.disable(logging.CRITICAL)
    metrics: report.Metrics = {}
    rows = list[list[object]]()
    for name, template in templates_of(arguments.folder).items():
        try:
            found = measure(template)
        except SystemExit as refused:
            report.say(f"{name}: {refused}")
            continue
        rows.append([name, *(found[it] for it in MEASURED)])
        metrics |= {f"{name}_{what}": float(value) for what, value in found.items()}
    report.print_table("Drift", {}, ["template", *MEASURED], rows)
    report.write(metrics, arguments.json)


if __name__ == "__main__":
    main()
