"""Conversations as tokens, and which of them are the assistant's. No torch at import time.

What a model is trained on is what it writes when it answers: each turn from where the template lets
an answer begin to the token that ends it. Where the template marks the turns itself (`{% generation
%}`), its marks say which these are. Else the beginning of the conversation up to each turn is
rendered; a template whose beginnings do not fit the whole is refused, as the model would never see
those tokens when it answers.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any, Final

from areal_sc.errors import WorkflowError
from areal_sc.workflows.text import ROLES, check_messages, encode_text

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_MARK: Final = re.compile(r"\{%-?\s*generation\b")


class TurnEncoder:
    """Encodes demonstrations for one model.

    Args:
        ends: tokens that end an answer of the model.
        use_chat_template: False: rows are plain texts, and an end token follows each completion.
    Raises: WorkflowError: the model has no chat template, or nothing ends an answer.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        ends: Sequence[int],
        *,
        use_chat_template: bool = True,
    ) -> None:
        if use_chat_template and not tokenizer.chat_template:
            raise WorkflowError(
                "the model's tokenizer has no chat template: use a chat model, or rows of plain "
                "texts and use_chat_template=False"
            )
        if not use_chat_template and not ends:
            raise WorkflowError(
                "no token ends an answer of this model: its tokenizer has no eos_token, and "
                "generation_config.json no eos_token_id"
            )
        self._tokenizer = tokenizer
        self._ends = list(ends)
        self._last = frozenset([*ends, *tokenizer.all_special_ids])
        self.use_chat_template = use_chat_template

    def texts(self, prompt: str, completion: str) -> dict[str, list[Any]]:
        """A plain prompt, and the completion that follows it, with an end token."""
        before = encode_text(self._tokenizer, prompt)
        after = encode_text(self._tokenizer, completion, begins=False) + self._ends[:1]
        return _row([*before, *after], range(len(before), len(before) + len(after)))

    def conversation(
        self, messages: Sequence[Mapping[str, Any]], first: int = 0, tools: Any = None
    ) -> dict[str, list[Any]]:
        """A conversation, whose turns of the assistant are trained.

        Args:
            first: number of the message from which on they are.
            tools: that the template tells the model of.
        Raises: WorkflowError: the messages are no such conversation, or the template does not tell
            where the assistant's turns are.
        """
        check_conversation(messages, first)
        # a table has null for the fields that a message does not have, and templates would write it
        given = [
            {key: value for key, value in message.items() if value is not None or key == "content"}
            for message in messages
        ]
        turns = [n for n, it in enumerate(given) if it["role"] == "assistant"]
        template = self._tokenizer.get_chat_template(tools=tools)
        if _MARK.search(template):
            ids, spans = self._by_marks(given, len(turns), tools)
        else:
            ids, spans = self._by_beginnings(given, [n for n in turns if n >= first], tools)
        num_trained = sum(n >= first for n in turns)
        return _row(ids, *spans[len(spans) - num_trained :])

    def _by_marks(
        self, messages: Sequence[Mapping[str, Any]], num_turns: int, tools: Any
    ) -> tuple[list[int], list[range]]:
        """Tokens, and where the template says that the turns are, with the token that ends each."""
        encoded = self._render(messages, tools, return_assistant_tokens_mask=True)
        ids, spans, place = [int(token) for token in encoded["input_ids"]], [], 0
        for is_turn, run in groupby(encoded["assistant_masks"]):
            end = place + len(list(run))
            if is_turn:
                is_ended = ids[end - 1] in self._last or ids[end : end + 1] == []
                takes_end = not is_ended and ids[end] in self._last
                spans.append(range(place, end + takes_end))
            place = end
        if len(spans) != num_turns:
            raise WorkflowError(
                f"the chat template marks {len(spans)} turns by {{% generation %}}, but "
                f"{num_turns} are the assistant's"
            )
        return ids, spans

    def _by_beginnings(
        self, messages: Sequence[Mapping[str, Any]], turns: Sequence[int], tools: Any
    ) -> tuple[list[int], list[range]]:
        """Tokens, and where these turns are, each up to its last special token."""
        ids, spans = self._ids(messages, tools), []
        for turn in turns:
            before = self._ids(messages[:turn], tools, add_generation_prompt=True)
            is_last = turn == len(messages) - 1
            after = ids if is_last else self._ids(messages[: turn + 1], tools)
            if ids[: len(before)] != before or ids[: len(after)] != after:
                raise WorkflowError(
                    f"message {turn}: the chat template writes a conversation otherwise once it "
                    "goes on, so the tokens of this turn are not those that the model writes; "
                    "train on the last turn alone (last_turn_only), or give the template "
                    "{% generation %} marks"
                )
            specials = [n for n in range(len(before), len(after)) if ids[n] in self._last]
            if not specials:
                raise WorkflowError(
                    f"message {turn}: the chat template ends the turn with no special token, so "
                    "the model would not learn to end its answers"
                )
            spans.append(range(len(before), specials[-1] + 1))
        return ids, spans

    def _ids(self, messages: Sequence[Any], tools: Any, **options: Any) -> list[int]:
        return [int(token) for token in self._render(messages, tools, **options)["input_ids"]]

    def _render(self, messages: Sequence[Any], tools: Any, **options: Any) -> Any:
        try:
            return self._tokenizer.apply_chat_template(
                list(messages), tools=tools, tokenize=True, return_dict=True, **options
            )
        except Exception as error:  # the model's own code, which jinja runs
            raise WorkflowError(
                f"the model's chat template refuses the messages: {type(error).__name__}: {error}"
            ) from error


def check_conversation(messages: Any, first: int = 0) -> None:
    """Checks what a template would not.

    Args:
        first: number of the message from which on turns of the assistant are trained.
    Raises: WorkflowError: they are no messages, a role is unknown, an answer is empty or answers
        nothing, or the last message is not the assistant's.
    """
    check_messages(messages)
    for number, message in enumerate(messages):
        if message["role"] not in ROLES:
            raise WorkflowError(
                f"message {number}: expected a role of {', '.join(ROLES)}, got {message['role']!r}"
            )
        if message["role"] != "assistant" or number < first:
            continue
        if number == 0:
            raise WorkflowError("message 0 is the assistant's: expected one that it answers before")
        content = message.get("content")
        is_empty = not (content.strip() if isinstance(content, str) else content)
        if is_empty and not message.get("tool_calls"):
            raise WorkflowError(f"message {number}: the assistant's answer is empty")
    if messages[-1]["role"] != "assistant" or len(messages) <= first:
        raise WorkflowError(
            f"the last message is of the role {messages[-1]['role']!r}: expected an answer of the "
            "assistant, which is trained"
        )


def _row(ids: list[int], *spans: range) -> dict[str, list[Any]]:
    """Tokens, of which those in the spans are trained."""
    mask = [False] * len(ids)
    for span in spans:
        mask[span.start : span.stop] = [True] * len(span)
    return {"input_ids": ids, "loss_mask": mask}
