"""One call of an agent, whatever its client speaks. No torch.

    client's body -- Dialect.read --> ModelCall -- session --> ModelAnswer -- Dialect.write --> body

A dialect is a pure translation between what a client sends and reads, and these types.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from areal_sc.workflows.chat import ChatTurn
from areal_sc.workflows.chat_format import Message


class CallRefused(Exception):
    """A call that gets no answer; each dialect tells it in its own form.

    Args:
        status: of HTTP, 400 or more.
        code: one word for programs, such as `unknown_key`.
        message: for people: what is wrong, and what to do.
        retry_after_s: when the same call may succeed; None: it never will.
        is_for_all: nor will any such call, whatever its messages say.
    """

    def __init__(
        self,
        status: int,
        code: str,
        message: str,
        *,
        retry_after_s: float | None = None,
        is_for_all: bool = False,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.message = message
        self.retry_after_s = retry_after_s
        self.is_for_all = is_for_all

    def told(self, of_overflow: str) -> str:
        """The message as a dialect has it, whose words for a `ContextOverflow` these are."""
        return self.message


class ContextOverflow(CallRefused):
    """The conversation leaves no room for an answer: whoever has sent it may send a shorter one.

    Agents that do so know the error by its words, which differ by dialect.

    Args:
        num_tokens: of the conversation.
        max_tokens: of the conversation and its answer.
    """

    def __init__(self, num_tokens: int, max_tokens: int) -> None:
        message = f"the messages are {num_tokens} tokens: expected fewer than {max_tokens}"
        super().__init__(400, "context_length_exceeded", message)
        self.num_tokens = num_tokens
        self.max_tokens = max_tokens

    def told(self, of_overflow: str) -> str:
        """Args: of_overflow: has the two numbers by name."""
        return of_overflow.format(num_tokens=self.num_tokens, max_tokens=self.max_tokens)


def anew(refused: CallRefused) -> CallRefused:
    """The same refusal; an exception that is raised again and again grows."""
    again_s = refused.retry_after_s
    return CallRefused(refused.status, refused.code, refused.message, retry_after_s=again_s)


@dataclass(frozen=True)
class ModelCall:
    """What a client asks for.

    Attributes:
        messages: in OpenAI's form, arguments of tool calls as their text or as objects.
        tools: `{"type": "function", "function": {...}}` each.
        stop: strings that end the answer.
        max_tokens: most tokens of the answer; None: as the run's sampling says.
        sampling: temperature, top_p and the like as the client asks, by their names in
            `GenerationConfig`. The run's own win; what differs is counted.
        model: that the client names: the role of the agent, by which rewards may be given. It is
            told back, and chooses no other model.
        wants_logprobs: of the sampled tokens.
        wants_reasoning: the client reads what the model has thought.
        wants_usage: a streamed answer tells its numbers of tokens, where that is the client's
            choice.
        is_streamed: the answer is sent in pieces.
        after: id of an answer whose conversation comes before the messages; "": they are all.
        num_instructions: of the messages, those at the beginning that are for this call alone.
        is_kept: a later call may go on from the answer by its id.
        metadata: of the client's own, that it is told back.
    """

    messages: tuple[Message, ...]
    tools: tuple[Mapping[str, Any], ...] = ()
    stop: tuple[str, ...] = ()
    max_tokens: int | None = None
    sampling: Mapping[str, float] = field(default_factory=dict)
    model: str = ""
    wants_logprobs: bool = False
    wants_reasoning: bool = True
    wants_usage: bool = False
    is_streamed: bool = False
    after: str = ""
    num_instructions: int = 0
    is_kept: bool = False
    metadata: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class SampledToken:
    """A token of an answer, as a client may ask for it. `logprob`: nats."""

    text: str
    logprob: float


@dataclass(frozen=True)
class ModelAnswer:
    """What the model answered.

    Attributes:
        answer_id: unique in the run.
        created_s: Unix time.
        num_prompt_tokens: that the model read, earlier answers among them.
        tokens: the sampled ones, if the client wants them.
        stop: the one of the call's strings that ended the answer; "": none of them.
    """

    answer_id: str
    created_s: int
    turn: ChatTurn
    num_prompt_tokens: int
    tokens: tuple[SampledToken, ...] = ()
    stop: str = ""


class AnswerStream(Protocol):
    """One streamed answer: pieces of `text/event-stream`, each ready to be sent."""

    def opening(self) -> Sequence[bytes]:
        """What comes before the first text."""

    def text(self, added: str) -> Sequence[bytes]:
        """More of the message's content: never a part of a tool call, and never of reasoning."""

    def rest(self, answer: ModelAnswer) -> Iterable[bytes]:
        """The rest of the answer: reasoning, content that was not sent yet, tool calls, usage."""

    def fail(self, refused: CallRefused) -> Sequence[bytes]:
        """The answer breaks off."""


class Dialect(Protocol):
    """How one kind of client speaks.

    Attributes:
        path: of its calls, such as `/v1/chat/completions`.
    """

    path: str

    def read(self, body: Mapping[str, Any]) -> ModelCall:
        """Raises: CallRefused: 400: the body is wrong, or asks for what cannot be done exactly."""

    def write(self, call: ModelCall, answer: ModelAnswer) -> dict[str, Any]:
        """The body of an answer that is not streamed.

        Args:
            call: with the sampling that the answer has, which may be another than was asked for.
        """

    def stream(self, call: ModelCall, answer_id: str, created_s: int) -> AnswerStream:
        """Begins a streamed answer; `call`: see `write`."""

    def refuse(self, refused: CallRefused) -> dict[str, Any]:
        """The body of an answer that says why there is none."""
