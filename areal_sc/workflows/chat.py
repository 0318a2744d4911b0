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
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from areal_sc.errors import WorkflowError
from areal_sc.workflows.chat_format import Message
from areal_sc.workflows.chat_turn import ChatTurn as ChatTurn
from areal_sc.workflows.chat_turn import (
    NextTurn,
    TokenEngine,
    TurnNode,
    check_tools,
    paths_of,
    transcript_of,
)
from areal_sc.workflows.chat_turn import OnText as OnText
from areal_sc.workflows.chat_turn import PastTurns as PastTurns
from areal_sc.workflows.text import ROLES, check_message

if TYPE_CHECKING:
    from areal_sc.config.schema import GenerationConfig
    from areal_sc.workflows.trajectory import Trajectory


class Conversation:
    """A conversation, and the rows to train on that come from it.

    Args:
        messages: those that it begins with; a text is one of the user.
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
        self._nodes = list[TurnNode]()
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

        Raises: WorkflowError: see `Conversation`.
        """
        self._messages += [
            checked_message(message, number)
            for number, message in enumerate(messages, len(self._messages))
        ]

    def trajectories(
        self, reward: float, metrics: Mapping[str, float] | None = None
    ) -> list[Trajectory]:
        """The rows so far, each with this reward: one, and one more for each new beginning.

        Every sampled token is trained in one of them.
        """
        return [
            transcript_of(path, path).trajectory(reward, metrics) for path in paths_of(self._nodes)
        ]

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
        last = self._nodes[-1] if self._nodes else None
        num_answered = last.num_messages if last else 0
        if len(self._messages) == num_answered or self._messages[-1]["role"] == "assistant":
            raise WorkflowError("the last message is the assistant's: add one that it answers to")
        self._is_answering = True
        try:
            check_tools(tools)
            planned = NextTurn(
                engine,
                last,
                self.messages,
                tools,
                sampling,
                history=self._history,
                arguments=self._arguments,
            )
            if last is not None and len(planned.prompt) >= engine.max_context_tokens:
                message = {"role": "assistant", "content": ""}
                return ChatTurn(message, "", (), (), "context", 0)
            on_tokens = None if on_text is None else planned.text_stream(on_text)
            completion = await engine.generate(planned.prompt, sampling, on_tokens=on_tokens)
            node = planned.node(completion, self._num_calls)
            self._nodes.append(node)
            self._num_calls += len(node.turn.tool_calls)
            # others may have been added behind it meanwhile
            self._messages.insert(node.num_messages - 1, node.turn.message)
            return node.turn
        finally:
            self._is_answering = False


def checked_message(message: Mapping[str, Any], number: int) -> Message:
    """A copy, with the arguments of tool calls as objects.

    Args:
        number: of the message, for what is told.
    Raises: WorkflowError: it has no known role, no content, or a tool call without JSON.
    """
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
