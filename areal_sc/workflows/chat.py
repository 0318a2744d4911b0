"""Conversations with the model over several turns, whose sampled tokens are what is trained.

    conversation = Conversation("How many letters has 'strawberry'?")
    turn = await engine.chat(conversation, tools=TOOLS)
    while turn.tool_calls:
        conversation.add(*[call.answer(run(call)) for call in turn.tool_calls])
        turn = await engine.chat(conversation, tools=TOOLS)
    return conversation.trajectories(reward)

What was sent and sampled is never made into text and tokens again. The next turn is what the chat
template puts behind the answer. No torch.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import chain, count
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeAlias

from areal_sc.engines.base import Completion, OnTokens
from areal_sc.errors import WorkflowError
from areal_sc.workflows.answer_text import TextStream, begins_thought, split_reasoning, text_of
from areal_sc.workflows.chat_format import ChatFormat, Message, MessageShape, TurnBridge, format_of
from areal_sc.workflows.text import ROLES, check_message
from areal_sc.workflows.tool_calls import ReadAnswer, ToolCall
from areal_sc.workflows.transcript import Transcript

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from areal_sc.config.schema import GenerationConfig
    from areal_sc.workflows.trajectory import Trajectory

logger = logging.getLogger(__name__)

OnText: TypeAlias = Callable[[str], None]
"""Takes the next piece of an answer's content."""

_CALL_ID: Final = re.compile("[A-Za-z0-9]{9}")
"""What every template takes; the strictest, Mistral's, take nothing else."""


class TokenEngine(Protocol):
    """An engine by its tokens.

    Attributes:
        end_token_ids: that end an answer, beside those of its `GenerationConfig`.
    """

    tokenizer: PreTrainedTokenizerBase
    max_context_tokens: int
    end_token_ids: tuple[int, ...]

    async def generate(
        self,
        input_ids: Sequence[int],
        sampling: GenerationConfig | None = None,
        *,
        on_tokens: OnTokens | None = None,
    ) -> Completion:
        """Samples one completion; None samples as the run's `generation` section says.

        During an evaluation the worker replaces the temperature by that of the evaluation.

        Args:
            on_tokens: gets the tokens while they are sampled, each once. What it raises ends the
                call, and is raised here.
        Raises: WorkflowError: the prompt leaves no room in the context.
        """
        ...


class PastTurns(StrEnum):
    """What becomes of earlier turns where the chat template writes them otherwise later on.

    template: a new row begins there, with the conversation as the template now writes it.
    keep: the row goes on with what was sampled.
    """

    template = "template"
    keep = "keep"


@dataclass(frozen=True)
class ChatTurn:
    """One answer of the model.

    Attributes:
        message: in OpenAI's form: `content`, `tool_calls` (with arguments as objects), and
            `reasoning_content` where the template knows reasoning.
        text: all that was sampled, up to the token or string that ends it.
        tool_calls: that can be run.
        invalid_calls: why other calls cannot be: broken JSON, an unknown tool, arguments that are
            no object. Their text is in the message's content. Or the template takes one call in an
            answer, and they are more.
        finish_reason: `stop`, `length`, `cancelled`, or `context`: no room was left to go on, or to
            begin an answer.
        num_tokens: that were sampled; 0: there was no room to begin.
    """

    message: Message
    text: str
    tool_calls: tuple[ToolCall, ...]
    invalid_calls: tuple[str, ...]
    finish_reason: str
    num_tokens: int

    @property
    def content(self) -> str:
        """The message's text, without reasoning and tool calls."""
        return str(self.message["content"] or "")


class Conversation:
    """A conversation, and the rows to train on that come from it.

    Args:
        messages: that it begins with; a text is one of the user.
        history: see `PastTurns`.
        chat_template_arguments: what the model's template reads beside messages and tools, by name,
            such as `{"enable_thinking": False}`.
    Raises: WorkflowError: a message has no known role, no content, or a tool call without JSON.
    """

    def __init__(
        self,
        messages: str | Sequence[Mapping[str, Any]],
        *,
        history: PastTurns | str = PastTurns.template,
        chat_template_arguments: Mapping[str, Any] | None = None,
    ) -> None:
        if history not in list(PastTurns):
            raise WorkflowError(f"history: expected template or keep, got {history!r}")
        self._history = PastTurns(history)
        self._arguments = dict(chat_template_arguments or {})
        self._messages = list[Message]()
        self._rows = list[Transcript]()
        self._format: ChatFormat | None = None  # that the last row was begun with
        # of the last answer: its shape, and its last token
        self._last: tuple[MessageShape, int | None] | None = None
        self._num_answered = 0  # messages up to the last answer, with it
        self._beginning: tuple[MessageShape, ...] = ()  # before the first answer
        self._turns = dict[tuple[MessageShape, ...], None]()  # each answer with what follows it
        self._num_calls = 0
        self._is_answering = False
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        self.add(*messages)

    @property
    def messages(self) -> tuple[Message, ...]:
        """All of them, with the model's answers."""
        return tuple(self._messages)

    def add(self, *messages: Mapping[str, Any]) -> None:
        """Adds messages of the user, of tools, or of whoever else speaks.

        Raises: WorkflowError: as for the first ones.
        """
        self._messages += [
            _checked(message, number)
            for number, message in enumerate(messages, len(self._messages))
        ]

    def trajectories(
        self, reward: float, metrics: Mapping[str, float] | None = None
    ) -> list[Trajectory]:
        """The rows so far, each with this reward: one, and one more for each new beginning.

        Every sampled token is trained in one of them.
        """
        return [row.trajectory(reward, metrics) for row in self._rows]

    async def answer(
        self,
        engine: TokenEngine,
        tools: Sequence[Mapping[str, Any]],
        sampling: GenerationConfig,
        on_text: OnText | None = None,
    ) -> ChatTurn:
        """One turn; what `engine.chat` does."""
        if self._is_answering:
            raise WorkflowError("the conversation waits for an answer: it has one turn at a time")
        if len(self._messages) == self._num_answered or self._messages[-1]["role"] == "assistant":
            raise WorkflowError("the last message is the assistant's: add one that it answers to")
        self._is_answering = True
        try:
            return await self._answer(engine, tools, sampling, on_text)
        finally:
            self._is_answering = False

    async def _answer(
        self,
        engine: TokenEngine,
        tools: Sequence[Mapping[str, Any]],
        sampling: GenerationConfig,
        on_text: OnText | None,
    ) -> ChatTurn:
        ends = frozenset((*engine.end_token_ids, *sampling.stop_token_ids))
        chat = format_of(engine.tokenizer, _checked_tools(tools), self._arguments, ends)
        bridge = self._bridge(chat)
        if bridge is None:
            row, context = Transcript(), chat.begin(self._messages)
        else:
            row, context = self._rows[-1], bridge.token_ids
        prompt = [*row.input_ids, *context]
        if self._rows and len(prompt) >= engine.max_context_tokens:
            message = {"role": "assistant", "content": ""}
            return ChatTurn(message, "", (), (), "context", 0)
        is_thinking = chat.splits_reasoning and begins_thought(engine.tokenizer, prompt)
        on_tokens: OnTokens | None = None
        if on_text is not None:
            stream = TextStream(chat, sampling.stop, is_thinking=is_thinking)
            on_tokens = stream.to(on_text)
        completion = await engine.generate(prompt, sampling, on_tokens=on_tokens)
        if bridge is None:
            self._rows.append(row)
        row.add_context(context)
        row.add_completion(completion)
        self._format = chat
        return self._take(engine, completion, ends, tools, is_thinking=is_thinking)

    def _bridge(self, chat: ChatFormat) -> TurnBridge | None:
        """What goes on the row; None: a new one begins."""
        if self._last is None:
            return None
        _, last_token = self._last
        added = self._messages[self._num_answered :]
        history = [*self._beginning, *chain.from_iterable(self._turns)]
        bridge = None
        rewrites = "it got other tools or arguments"
        if self._format is not None and chat.key == self._format.key:
            bridge = chat.bridge(history, self._messages[self._num_answered - 1], added, last_token)
            rewrites = bridge.rewrites if bridge else "what it puts behind an answer is not clear"
        if not rewrites or (bridge and self._history is PastTurns.keep):
            return bridge
        if not chat.has_told_of_rewriting:
            chat.has_told_of_rewriting = True
            logger.warning(
                "a conversation begins a new row where the model's chat template writes its past "
                "otherwise: %s; Conversation(history='keep') goes on with what was sampled",
                rewrites,
            )
        return None

    def _take(
        self,
        engine: TokenEngine,
        completion: Completion,
        ends: frozenset[int],
        tools: Sequence[Mapping[str, Any]],
        *,
        is_thinking: bool,
    ) -> ChatTurn:
        chat = self._format
        assert chat is not None
        text = text_of(engine.tokenizer, completion, ends)
        message: Message = {"role": "assistant", "content": text}
        if chat.splits_reasoning:
            message |= split_reasoning(text, is_thinking=is_thinking)
        before, behind = chat.around
        message["content"] = message["content"].removeprefix(before).removesuffix(behind)
        read = ReadAnswer(message["content"])
        if chat.tool_format is not None:
            read = chat.tool_format.read(message["content"], tools)
        calls = tuple(
            ToolCall(call_id, name, arguments)
            for call_id, (name, arguments, _) in zip(
                self._call_ids([own for _, _, own in read.calls]), read.calls, strict=True
            )
        )
        self._num_calls += len(calls)
        message["content"] = read.content
        if calls:
            message["tool_calls"] = [call.as_message() for call in calls]
        tokens = completion.token_ids
        self._note_answer(message, tokens[-1] if tokens else None)
        return ChatTurn(message, text, calls, read.problems, completion.finish_reason, len(tokens))

    def _call_ids(self, own: Sequence[str]) -> list[str]:
        """Ids of new calls: the model's own where they can be used, each once in the conversation.

        Args:
            own: "": it gives none.
        """
        used = {call.get("id") for it in self._messages for call in it.get("tool_calls") or ()}
        found = list[str]()
        for number, call_id in enumerate(own, self._num_calls):
            if not _CALL_ID.fullmatch(call_id) or call_id in used:
                call_id = next(made for n in count(number) if (made := f"call{n:05d}") not in used)
            used.add(call_id)
            found.append(call_id)
        return found

    def _note_answer(self, message: Message, last_token: int | None) -> None:
        added = tuple(map(MessageShape.of, self._messages[self._num_answered :]))
        if self._last is None:
            self._beginning = added
        else:
            past = [shape.of_past for shape in (self._last[0], *added)]
            turn = tuple(dict.fromkeys(past))  # several results are as one
            self._turns.pop(turn, None)  # the newest ones stand last
            self._turns[turn] = None
        self._messages.append(message)
        self._num_answered = len(self._messages)
        self._last = MessageShape.of(message), last_token


def _checked(message: Mapping[str, Any], number: int) -> Message:
    """A copy, with the arguments of tool calls as objects."""
    check_message(message, f"message {number}")
    if message["role"] not in ROLES:
        raise WorkflowError(
            f"message {number}: expected a role of {', '.join(ROLES)}, got {message['role']!r}"
        )
    # a table has null for the fields that a message does not have
    given = {name: it for name, it in message.items() if it is not None or name == "content"}
    calls = given.get("tool_calls")
    if not calls:
        return given
    try:
        return {**given, "tool_calls": [_with_objects(call) for call in calls]}
    except (KeyError, TypeError, ValueError) as error:
        raise WorkflowError(
            f"message {number}: expected tool_calls with a function of a name, and arguments in "
            f"JSON: {error!r}"
        ) from error


def _with_objects(call: Mapping[str, Any]) -> dict[str, Any]:
    function = {"name": call["function"]["name"], "arguments": call["function"]["arguments"]}
    if isinstance(function["arguments"], str):
        function["arguments"] = json.loads(function["arguments"])
    if not isinstance(function["arguments"], dict):
        raise TypeError("the arguments are no object")
    return {**call, "function": function}


def _checked_tools(tools: Any) -> list[Mapping[str, Any]]:
    for tool in tools:
        try:
            is_named = isinstance(tool["function"]["name"], str)
        except (KeyError, TypeError):
            is_named = False
        if not is_named:
            raise WorkflowError(
                f"a tool is {tool!r:.200}: expected "
                '{"type": "function", "function": {"name": ..., "parameters": {...}}}'
            )
    return list(tools)
