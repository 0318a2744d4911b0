"""How a chat template goes on behind an answer, without rendering what came before. No torch.

The tokens of an answer are those that were sampled, so they are never made from text again. What
the template puts behind them is found in a *trial*: a short conversation that has the shape of the
real one (roles, reasoning, tools that were called), marks in place of its texts, and each sequence
of shapes once. The real new messages follow in it.

    before     <|user|>MARK1<|end|><|assistant|>
    whole      <|user|>MARK1<|end|><|assistant|>MARK2<|end|><|user|>How many?<|end|><|assistant|>
                                                     ^ from here on: the bridge

The same trial shows whether the template keeps what was: `whole` begins with `before`, which the
model has read, and with the answer as the template wrote it while it was the last message.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import groupby, product, takewhile
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from areal_sc.errors import NeverWorks, WorkflowError
from areal_sc.workflows.text import bare_tokens, chat_text
from areal_sc.workflows.tool_calls import (
    TOOLS,
    TRIED_ARGUMENTS,
    ToolFormat,
    call_entry,
    find_format,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Message = dict[str, Any]

Expand: TypeAlias = Callable[[str, Sequence[Message]], str]
"""Puts the tokens of pictures into what a template has made of messages."""

_ID: Final = "zq{:05d}{:02d}"
"""The id of a call in a trial, by its message and its place; some templates want nine letters."""
_MAX_TRIALS: Final = 256
"""Shapes that are remembered; conversations of one kind have about ten."""

_PLAIN = frozenset(["role", "content", "reasoning_content", "tool_calls", "tool_call_id"])


@dataclass(frozen=True)
class MessageShape:
    """What a template may look at in a message, beside its texts.

    Attributes:
        parts: the types of its content's parts, equal neighbours once; (): it is no list.
    """

    role: str
    has_content: bool
    parts: tuple[str, ...]
    has_reasoning: bool
    calls: tuple[str, ...]
    others: tuple[str, ...]

    @classmethod
    def of(cls, message: Mapping[str, Any]) -> MessageShape:
        content = message.get("content")
        return cls(
            role=message["role"],
            has_content=bool(content),
            parts=tuple(key for key, _ in groupby(map(_type_of, content)))
            if isinstance(content, list)
            else (),
            has_reasoning=bool(message.get("reasoning_content")),
            calls=tuple(call["function"]["name"] for call in message.get("tool_calls") or ()),
            others=tuple(
                sorted(
                    name for name, it in message.items() if it is not None and name not in _PLAIN
                )
            ),
        )

    @property
    def of_past(self) -> MessageShape:
        """The shape without what matters only while it is the newest: which tools, how many."""
        return replace(self, calls=self.calls and ("tool",))

    def sample(self, number: int) -> tuple[Message, list[str]]:
        """A message of this shape, and the marks that stand for its texts."""
        marks = list[str]()

        def mark(name: str) -> str:
            marks.append(f"zq{number}{name}qz")
            return marks[-1]

        message: Message = {
            "role": self.role,
            "content": None,
            "tool_call_id": _ID.format(number, 0),
        }
        message |= {name: f"zq{name}" for name in self.others}
        if self.role != "tool":
            del message["tool_call_id"]
        if self.has_reasoning:
            message["reasoning_content"] = mark("r")
        if self.has_content or not self.calls:
            message["content"] = [
                {"type": kind} if kind == "image" else {"type": "text", "text": mark(f"c{n}")}
                for n, kind in enumerate(self.parts)
            ] or mark("c")
        if self.calls:
            message["tool_calls"] = [
                call_entry(_ID.format(number, n), name, {"a": mark(f"a{n}")})
                for n, name in enumerate(self.calls)
            ]
        return message, marks


@dataclass(frozen=True)
class _TriedAnswer:
    """What is known of a shape of a conversation up to an answer.

    Attributes:
        messages: the answer included.
        before: what the template makes of them up to the answer.
        through: what it makes of all of them, up to the token that ends the answer.
        marks: of the answer.
        closing: what it puts behind the last of them, up to the token that ends the answer.
        end: this token; None: the template puts none.
    """

    messages: list[Message]
    before: str
    through: str
    marks: list[str]
    closing: str
    end: int | None


@dataclass(frozen=True)
class TurnBridge:
    """What comes behind an answer, up to where the next one begins.

    Attributes:
        token_ids: behind the sampled ones.
        rewrites: what the template now writes otherwise than it did before; "": nothing.
    """

    token_ids: list[int]
    rewrites: str


class ChatFormat:
    """A model's chat template, with the tools and arguments that it is given.

    Args:
        ends: tokens that end an answer.

    Attributes:
        key: two formats with equal ones are the same.
        ends: the text of each of these tokens.
        around: what the template itself puts before and behind the content of an answer.
        splits_reasoning: the template knows that an answer may begin with reasoning.
        tool_format: how it writes calls; None: there are no tools.
    Raises: NeverWorks: there is no template, it tells nothing of tools, or calls have a form that
        cannot be read. WorkflowError: it refuses a plain conversation, or these tools.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        tools: Sequence[dict[str, Any]],
        arguments: Mapping[str, Any],
        ends: frozenset[int],
    ) -> None:
        if not tokenizer.chat_template:
            raise NeverWorks(
                "the model's tokenizer has no chat template, which chat turns need: use a chat "
                "model, or engine.generate"
            )
        self.key = (json.dumps(tools), json.dumps(arguments), ends)
        self.has_told_of_rewriting = False
        self.tokenizer = tokenizer
        self._arguments = {"tools": list(tools), **arguments} if tools else dict(arguments)
        self.ends = {token: _text(tokenizer, token) for token in sorted(ends)}
        template = tokenizer.get_chat_template(tools=list(tools) or None)
        if tools and not re.search(r"\btools\b", template):
            raise NeverWorks(
                "the model's chat template does not tell a model of tools: use a model whose "
                "template does, or give it none, and say in a message what there is"
            )
        reads_reasoning = "reasoning_content" in template
        self.splits_reasoning = reads_reasoning or "</think>" in template
        self._thoughts_in_content = self.splits_reasoning and not reads_reasoning
        self._empty: str | None = None
        self._has_text_arguments = False
        self._trials: dict[tuple[MessageShape, ...], _TriedAnswer | None] = {}
        self._proved: dict[tuple[MessageShape, ...], bool] = {}
        if self._thoughts_in_content:
            self._thoughts_in_content = self._keeps_thoughts()
        self.around = self._find_around()
        self.tool_format = self._find_tool_format() if tools else None

    def begin(self, messages: Sequence[Message], expand: Expand) -> list[int]:
        """Tokens of a whole conversation, up to where the next answer begins."""
        read = [self._as_read(it) for it in messages]
        text = chat_text(self.tokenizer, read, self._arguments)
        return bare_tokens(self.tokenizer, expand(text, messages))

    def bridge(
        self,
        history: Sequence[MessageShape],
        answer: Message,
        added: Sequence[Message],
        last_token: int | None,
        expand: Expand,
    ) -> TurnBridge | None:
        """What comes behind an answer.

        Args:
            history: shapes of the messages before the answer; of past turns that are alike, one
                is enough.
            added: messages behind it.
            last_token: of the answer.
            expand: see `Expand`.
        Returns: None: the template does not show it.
        Raises: WorkflowError: the template refuses the messages.
        """
        shape = MessageShape.of(answer)
        trial = self._trial((*history, shape))
        if trial is None:
            return None
        whole = self._go_on(trial.messages, answer, added)
        text = _behind(whole, trial.marks)
        if text is None or not text.startswith(trial.closing):
            return None
        text = _with_ids(text.removeprefix(trial.closing), len(history), answer)
        proof = (*history, shape, *map(MessageShape.of, added), shape)
        is_same = self._proved.get(proof)
        if is_same is None:
            is_same = self._proved[proof] = self._is_same(text, proof, answer, added)
        if not is_same:
            return None
        rewrites = ""
        if lost := [mark for mark in trial.marks if mark not in whole]:
            part = "reasoning" if lost[0].endswith("rqz") else "text"
            rewrites = f"it leaves out the {part} of an answer"
        elif not (whole.startswith(trial.before) and whole.startswith(trial.through)):
            rewrites = "it writes an answer, or what came before it, otherwise"
        return TurnBridge(self._encode(expand(text, added), trial.end, last_token), rewrites)

    def _encode(self, text: str, end: int | None, last_token: int | None) -> list[int]:
        """Tokens of the text behind an answer, and of the token that ends it, if it has none yet.

        The text is encoded together with a token before it, as some tokenizers write the begin of
        a text in another way.
        """
        is_ended = last_token in self.ends
        ended = self.ends.get(last_token, "") if last_token is not None else ""
        if end is None and ended and text.lstrip().startswith(ended):
            text, end = text.lstrip().removeprefix(ended), last_token
        if end is None:
            return bare_tokens(self.tokenizer, text)
        tokens = bare_tokens(self.tokenizer, self.ends[end] + text)
        if tokens[0] != end:
            tokens = [end, *bare_tokens(self.tokenizer, text)]
        return tokens[1:] if is_ended else tokens

    def _trial(self, shapes: tuple[MessageShape, ...]) -> _TriedAnswer | None:
        if shapes in (known := self._trials):
            return known[shapes]
        if len(known) >= _MAX_TRIALS:
            # new ones: another thread may read the old ones
            self._trials, self._proved = {}, {}
        trial = self._trials[shapes] = self._try(shapes)
        return trial

    def _go_on(self, messages: Sequence[Message], answer: Message, added: Sequence[Message]) -> str:
        """What the template makes of a trial and of the real messages behind it."""
        ids = _ids(len(messages) - 1, answer)
        read = [self._as_read(it) for it in added]
        for message in read:
            if (call_id := message.get("tool_call_id")) in ids:
                message["tool_call_id"] = ids[call_id]
        return self._render([*messages, *read], is_open=True)

    def _is_same(
        self, text: str, shapes: tuple[MessageShape, ...], answer: Message, added: Sequence[Message]
    ) -> bool:
        """Whether the same stands behind an answer after a longer conversation."""
        trial = self._trial(shapes)
        if trial is None:
            return False
        try:
            behind = _behind(self._go_on(trial.messages, answer, added), trial.marks)
        except WorkflowError:
            return False
        expected = trial.closing + text
        return behind is not None and _with_ids(behind, len(shapes) - 1, answer) == _with_ids(
            expected, len(shapes) - 1, answer
        )

    def _sampled(self, shapes: Sequence[MessageShape]) -> tuple[list[Message], list[str]]:
        """A conversation of these shapes, and the marks of its last message."""
        sampled = [shape.sample(number) for number, shape in enumerate(shapes)]
        return [self._as_read(message) for message, _ in sampled], sampled[-1][1]

    def _try(self, shapes: Sequence[MessageShape]) -> _TriedAnswer | None:
        messages, marks = self._sampled(shapes)
        try:
            before = self._render(messages[:-1], is_open=True)
            after = self._render(messages)
        except WorkflowError:  # it may refuse a conversation that ends with an answer
            return None
        behind = _behind(after, marks)
        if behind is None:
            return None
        stops = {
            behind.rfind(text) + len(text): end
            for end, text in self.ends.items()
            if text and text in behind
        }
        if stops:
            stop = max(stops)
            closing, end = behind[:stop], stops[stop]
        else:
            closing, end = behind.rstrip(), None
        through = after.removesuffix(behind) + closing
        return _TriedAnswer(messages, before, through, marks, closing, end)

    def _keeps_thoughts(self) -> bool:
        """Whether the template writes a thought that stands in the content of an answer."""
        answer = {"role": "assistant", "content": "c", "reasoning_content": "zq1rqz"}
        return "zq1rqz" in self._render([{"role": "user", "content": "c"}, self._as_read(answer)])

    def _find_around(self) -> tuple[str, str]:
        """What the template puts before and behind the content of an answer."""
        shapes = [
            MessageShape("user", True, (), False, (), ()),
            MessageShape("assistant", True, (), False, (), ()),
        ]
        trial = self._trial(tuple(shapes))
        if trial is None:
            return "", ""
        after = self._render(trial.messages)
        if not after.startswith(trial.before):
            return "", ""
        before = after[len(trial.before) : after.index(trial.marks[0])]
        end = "" if trial.end is None else self.ends[trial.end]
        return before, trial.closing.removesuffix(end)

    def _find_tool_format(self) -> ToolFormat:
        """Sets also how the template wants a message without content, and arguments."""
        begun: Message = {"role": "user", "content": "zq0qz"}
        error, kind = "", WorkflowError
        for num_calls, empty, has_text in product((2, 1), (None, ""), (False, True)):
            self._empty, self._has_text_arguments = empty, has_text
            tried = zip(TOOLS[:num_calls], TRIED_ARGUMENTS[:num_calls], strict=True)
            calls = [
                call_entry(_ID.format(1, n), name, arguments)
                for n, (name, arguments) in enumerate(tried)
            ]
            answer = {"role": "assistant", "content": None, "tool_calls": calls}
            try:
                before = self._render([begun], is_open=True)
                after = self._render([begun, self._as_read(answer)])
            except WorkflowError as raised:
                error, kind = f": {raised}", WorkflowError
                continue
            text = after[after.find("zq0qz") + len("zq0qz") :]
            opening = before[before.find("zq0qz") + len("zq0qz") :]
            pairs = zip(text, opening, strict=False)
            shared = len(list(takewhile(lambda pair: pair[0] == pair[1], pairs)))
            if shared < len(opening):  # it begins otherwise, such as without a thought
                shared = text.rfind(">", 0, shared) + 1
            text = text[shared:]
            for end in self.ends.values():
                text = text.rpartition(end)[0] or text
            if "None" not in text and (found := find_format(text)):
                return replace(found, max_calls=1) if num_calls == 1 else found
            error, kind = f", but so: {text:.400}", NeverWorks
        raise kind(
            "the model's chat template writes tool calls in no form that is known here"
            f"{error}; use engine.chat without tools, and read the calls in turn.text"
        )

    def _as_read(self, message: Mapping[str, Any]) -> Message:
        """The message as this template reads it."""
        read = dict(message)
        reasoning = read.get("reasoning_content")
        if reasoning and self._thoughts_in_content:
            read["content"] = f"<think>\n{reasoning}\n</think>\n\n{read.get('content') or ''}"
        if calls := read.get("tool_calls"):
            read["content"] = read.get("content") or self._empty
            read["tool_calls"] = [self._call_as_read(call) for call in calls]
        return read

    def _call_as_read(self, call: Mapping[str, Any]) -> dict[str, Any]:
        function = dict(call["function"])
        if self._has_text_arguments:
            function["arguments"] = json.dumps(function["arguments"], ensure_ascii=False)
        return {**call, "function": function}

    def _render(self, messages: Sequence[Message], *, is_open: bool = False) -> str:
        try:
            text: Any = self.tokenizer.apply_chat_template(
                list(messages), tokenize=False, add_generation_prompt=is_open, **self._arguments
            )
        except Exception as error:  # the model's own code, which jinja runs
            raise WorkflowError(
                f"the model's chat template refuses the messages: {type(error).__name__}: {error}"
            ) from error
        return str(text)


@lru_cache(maxsize=64)  # the episodes of a run have few different ones
def _format_of(
    tokenizer: PreTrainedTokenizerBase, tools: str, arguments: str, ends: frozenset[int]
) -> ChatFormat:
    return ChatFormat(tokenizer, json.loads(tools), json.loads(arguments), ends)


def format_of(
    tokenizer: PreTrainedTokenizerBase,
    tools: Sequence[Mapping[str, Any]],
    arguments: Mapping[str, Any],
    ends: frozenset[int],
) -> ChatFormat:
    """The format of these arguments, which is made once."""
    try:
        texts = json.dumps(list(tools)), json.dumps(dict(arguments))
    except (TypeError, ValueError) as error:
        raise WorkflowError(f"tools and chat_template_arguments must be JSON: {error}") from error
    return _format_of(tokenizer, *texts, ends)


def _ids(number: int, answer: Message) -> dict[str, str]:
    """The ids of an answer's calls -> those in a trial, whose message of this number it is."""
    calls = answer.get("tool_calls") or ()
    return {call["id"]: _ID.format(number, n) for n, call in enumerate(calls)}


def _with_ids(text: str, number: int, answer: Message) -> str:
    """The text with the ids of the answer's own calls, in place of those of the trial."""
    for real, tried in _ids(number, answer).items():
        text = text.replace(tried, real)
    return text


def _behind(text: str, marks: Sequence[str]) -> str | None:
    """What stands behind the last of these; None: none is there."""
    places = {text.find(mark) + len(mark) for mark in marks if mark in text}
    return text[max(places) :] if places else None


def _type_of(part: Any) -> str:
    """`image`; and `text` of all else."""
    return "image" if isinstance(part, Mapping) and part.get("type") == "image" else "text"


def _text(tokenizer: PreTrainedTokenizerBase, token: int) -> str:
    return str(tokenizer.decode([token], skip_special_tokens=False))
