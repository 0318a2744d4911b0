"""One turn of a chat: what the model reads, and what its answer comes to. No torch.

    messages -- NextTurn --> prompt -- engine.generate --> completion -- NextTurn.node --> TurnNode

A node holds the tokens that its turn added to a row, and knows the node that the row comes from. So
several turns may go on from one, and each is exact.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import chain, count
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeAlias

from areal_sc.engines.base import Completion, OnTokens
from areal_sc.errors import WorkflowError
from areal_sc.records.recorded_calls import RecordedCall, RecordedMessage, recorded_text
from areal_sc.workflows.answer_text import TextStream, begins_thought, split_reasoning, text_of
from areal_sc.workflows.chat_format import ChatFormat, Message, MessageShape, TurnBridge, format_of
from areal_sc.workflows.tool_calls import ReadAnswer, ToolCall
from areal_sc.workflows.transcript import Transcript

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from areal_sc.config.schema import GenerationConfig

logger = logging.getLogger(__name__)

OnText: TypeAlias = Callable[[str], None]
"""Takes the next piece of an answer's content."""

_CALL_ID: Final = re.compile("[A-Za-z0-9]{9}")
"""What every template takes; the strictest, Mistral's, take nothing else."""

_NUMBERS: Final = count()
"""Gives each call of this process a number of its own."""

OTHER_TOOLS: Final = "it got other tools or arguments"
"""Why a row begins; every other reason is the template's."""


class TokenEngine(Protocol):
    """An engine by its tokens.

    Attributes:
        end_token_ids: they end an answer, beside those of its `GenerationConfig`.
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
        pictures: Sequence[bytes] | None = None,
    ) -> Completion:
        """Samples one completion; None samples as the run's `generation` section says.

        During an evaluation the worker replaces the temperature by that of the evaluation.

        Args:
            on_tokens: gets the tokens while they are sampled, each once. What it raises ends the
                call, and is raised here.
            pictures: of the prompt, of a workflow with `pictures_of_rows`; None: those of the row
                of data, if it has any.
        Raises: WorkflowError: the prompt leaves no room in the context.
        """


class PictureReader(Protocol):
    """Knows the pictures of messages."""

    def of(self, messages: Sequence[Message]) -> list[bytes]:
        """Their pictures, in the order of their parts."""

    def expanded(self, text: str, messages: Sequence[Message]) -> str:
        """What a template makes of them, with the tokens of their pictures in it."""


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
        tool_calls: those that can be run.
        invalid_calls: why other calls cannot be: broken JSON, an unknown tool, arguments that are
            no object. Their text is in the message's content. Or the template takes one call in an
            answer, and they are more.
        finish_reason: `stop`, `length`, or `context`: no room was left to go on, or to begin an
            answer.
        num_tokens: sampled ones; 0: there was no room to begin.
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


@dataclass(frozen=True, eq=False)
class TurnNode:
    """A point behind an answer of the model, from which conversations go on.

    Attributes:
        row: the node whose row this one goes on; None: it begins one.
        context: tokens that the model was given behind that node.
        completion: what it sampled behind those.
        pictures: of the context, compressed.
        num_messages: of the conversation, with the answer.
        chat: the template that both were read with.
        beginning: shapes of the messages before the conversation's first answer.
        turns: shapes of each answer with what follows it, up to this one; each sequence once.
        call: what is recorded of it.
    """

    row: TurnNode | None
    context: list[int]
    completion: Completion
    pictures: Sequence[bytes]
    turn: ChatTurn
    num_messages: int
    chat: ChatFormat
    beginning: tuple[MessageShape, ...]
    turns: tuple[tuple[MessageShape, ...], ...]
    call: RecordedCall

    @property
    def path(self) -> list[TurnNode]:
        """The nodes of its row, from the first one to this one."""
        found, node = list[TurnNode](), self
        while True:
            found.append(node)
            if node.row is None:
                return found[::-1]
            node = node.row

    @property
    def input_ids(self) -> list[int]:
        """All tokens of its row, with those that were sampled last."""
        found = list[int]()
        for node in self.path:
            found += node.context
            found += node.completion.token_ids
        return found

    @property
    def last_token(self) -> int | None:
        """The last one of the answer; None: it has none."""
        tokens = self.completion.token_ids
        return tokens[-1] if tokens else None


def paths_of(nodes: Sequence[TurnNode]) -> list[list[TurnNode]]:
    """The rows of nodes: each from where it begins to a node that none of these goes on from."""
    inner = {id(node.row) for node in nodes}
    return [node.path for node in nodes if id(node) not in inner]


def transcript_of(path: Sequence[TurnNode], trained: Collection[TurnNode]) -> Transcript:
    """The tokens of a row.

    Args:
        trained: nodes whose answers are trained in it; those of others are context.
    """
    row = Transcript()
    for node in path:
        row.calls.append(node.call)
        row.add_context(node.context)
        row.pictures += node.pictures
        if node in trained:
            row.add_completion(node.completion)
        else:
            row.add_context(node.completion.token_ids)
    return row


class NextTurn:
    """A turn that the model is to take.

    Args:
        after: the last of its answers that the conversation goes on from; None: it has none yet.
        messages: the whole conversation.
        tools: in OpenAI's form.
        arguments: what the template reads beside messages and tools.
        model: the name by which it is called.
        reader: of the pictures of the messages; None: their parts are texts.

    Attributes:
        prompt: tokens that the model reads.
        pictures: of the prompt.
        new_row: why it begins a row, though it goes on from an answer; "": it does not.
    Raises: WorkflowError: the template refuses the messages, or there is none.
    """

    def __init__(
        self,
        engine: TokenEngine,
        after: TurnNode | None,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]],
        sampling: GenerationConfig,
        *,
        history: PastTurns,
        arguments: Mapping[str, Any],
        model: str = "",
        reader: PictureReader | None = None,
    ) -> None:
        self._model = model
        self._expand = reader.expanded if reader else _as_it_is
        self._began, self._began_s = time.time(), time.monotonic()
        self._tokenizer = engine.tokenizer
        self._ends = frozenset((*engine.end_token_ids, *sampling.stop_token_ids))
        self._tools = tools
        self._chat = format_of(engine.tokenizer, tools, arguments, self._ends)
        self._messages = messages
        self._after = after
        self.new_row = ""
        bridge = None
        if after is not None:
            bridge = self._bridge(after, messages[after.num_messages :], history)
        self._row = after if bridge else None
        self._context = bridge.token_ids if bridge else self._chat.begin(messages, self._expand)
        added = messages[after.num_messages :] if after and bridge else messages
        self._pictures = reader.of(added) if reader else []
        past = self._row.path if self._row else []
        self.pictures = [*(it for node in past for it in node.pictures), *self._pictures]
        self.prompt = self._row.input_ids if self._row else []
        self.prompt += self._context
        self._stop = sampling.stop
        self._is_thinking = self._chat.splits_reasoning and begins_thought(
            engine.tokenizer, self.prompt
        )

    def text_stream(self, on_text: OnText) -> OnTokens:
        """A function that takes the answer's tokens while they are sampled.

        Args:
            on_text: gets the content that they add, as far as it is sure.
        """
        return TextStream(self._chat, self._stop, is_thinking=self._is_thinking).to(on_text)

    def node(self, completion: Completion, first_call: int) -> TurnNode:
        """What the answer comes to.

        Args:
            first_call: number in the id of its first tool call, if the model gives it none.
        """
        text = text_of(self._tokenizer, completion, self._ends)
        message: Message = {"role": "assistant", "content": text}
        if self._chat.splits_reasoning:
            message |= split_reasoning(text, is_thinking=self._is_thinking)
        before, behind = self._chat.around
        message["content"] = message["content"].removeprefix(before).removesuffix(behind)
        read = ReadAnswer(message["content"])
        if self._chat.tool_format is not None:
            read = self._chat.tool_format.read(message["content"], self._tools)
        calls = tuple(
            ToolCall(call_id, name, arguments)
            for call_id, (name, arguments, _) in zip(
                self._call_ids([own for _, _, own in read.calls], first_call),
                read.calls,
                strict=True,
            )
        )
        message["content"] = read.content
        if calls:
            message["tool_calls"] = [call.as_message() for call in calls]
        num_tokens, reason = len(completion.token_ids), completion.finish_reason
        turn = ChatTurn(message, text, calls, read.problems, reason, num_tokens)
        beginning, turns = self._shapes()
        return TurnNode(
            row=self._row,
            context=self._context,
            completion=completion,
            pictures=self._pictures,
            turn=turn,
            num_messages=len(self._messages) + 1,
            chat=self._chat,
            beginning=beginning,
            turns=turns,
            call=self._record(message, num_tokens),
        )

    def _record(self, answer: Message, num_tokens: int) -> RecordedCall:
        after = self._after
        given = self._messages[after.num_messages if after else 0 :]
        return RecordedCall(
            number=next(_NUMBERS),
            after=after.call.number if after else -1,
            new_row=self.new_row,
            model=recorded_text(self._model),
            began=self._began,
            took_s=time.monotonic() - self._began_s,
            num_given=len(self._context),
            num_sampled=num_tokens,
            given=tuple(map(RecordedMessage.of, given)),
            answer=RecordedMessage.of(answer),
        )

    def _bridge(
        self, after: TurnNode, added: Sequence[Message], history: PastTurns
    ) -> TurnBridge | None:
        """What goes on the row; None: a new one begins."""
        bridge, self.new_row = None, OTHER_TOOLS
        if self._chat.key == after.chat.key:
            past = [*after.beginning, *chain.from_iterable(after.turns)]
            bridge = self._chat.bridge(
                past, after.turn.message, added, after.last_token, self._expand
            )
            self.new_row = bridge.rewrites if bridge else "what it puts behind an answer is unclear"
        if not self.new_row or (bridge and history is PastTurns.keep):
            self.new_row = ""
            return bridge
        if not self._chat.has_told_of_rewriting:
            self._chat.has_told_of_rewriting = True
            logger.warning(
                "a conversation begins a new row where the model's chat template writes its past "
                "otherwise: %s; history=keep goes on with what was sampled",
                self.new_row,
            )
        return None

    def _shapes(self) -> tuple[tuple[MessageShape, ...], tuple[tuple[MessageShape, ...], ...]]:
        """The shapes of the beginning, and of the turns before the answer."""
        after = self._after
        if after is None:
            return tuple(map(MessageShape.of, self._messages)), ()
        added = map(MessageShape.of, self._messages[after.num_messages :])
        past = (shape.of_past for shape in (MessageShape.of(after.turn.message), *added))
        turn = tuple(dict.fromkeys(past))  # several results are as one
        # the newest ones stand last
        return after.beginning, (*(it for it in after.turns if it != turn), turn)

    def _call_ids(self, own: Sequence[str], first: int) -> list[str]:
        """Ids of new calls: the model's own where they can be used, each once in the conversation.

        Args:
            own: "": it gives none.
        """
        used = {call.get("id") for it in self._messages for call in it.get("tool_calls") or ()}
        found = list[str]()
        for number, call_id in enumerate(own, first):
            if not _CALL_ID.fullmatch(call_id) or call_id in used:
                call_id = next(made for n in count(number) if (made := f"call{n:05d}") not in used)
            used.add(call_id)
            found.append(call_id)
        return found


def _as_it_is(text: str, messages: Sequence[Message]) -> str:
    return text


def check_tools(tools: Any) -> None:
    """Raises: WorkflowError: a template would tell the model something else."""
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
