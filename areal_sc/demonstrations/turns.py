"""Conversations as tokens, and which of them are the assistant's. No torch at import time.

What a model is trained on is what it writes when it answers: each turn from where the template lets
an answer begin to the token that ends it. Where the template marks the turns itself (`{% generation
%}`), its marks say which these are. Else the beginning of the conversation up to each turn is
rendered; a template whose beginnings do not fit the whole is refused, as the model would never see
those tokens when it answers. Either way one rule, `_ended`, finds the token that ends a turn.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import groupby, takewhile
from typing import TYPE_CHECKING, Any, Final

from areal_sc.errors import WorkflowError
from areal_sc.sources.pictures import PART, packed
from areal_sc.token_fields import PICTURES
from areal_sc.workflows.pictures import encode_text_with, in_parts
from areal_sc.workflows.text import ROLES, bare_tokens, check_messages, describe_lost, encode_text

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from areal_sc.engines.picture_processor import PictureProcessor

Render = Callable[..., Any]
"""Makes of messages and tools what `apply_chat_template` gives."""

Find = Callable[[Sequence[Mapping[str, Any]], Sequence[int], Any], tuple[list[int], list[range]]]
"""The tokens of messages, and where these turns are."""

_MARK: Final = re.compile(r"\{%-?\s*generation\b")

_WEIGHT: Final = "weight"
"""Field of a message of the assistant; with 0 it is not trained, as OpenAI's files have it."""


class TurnEncoder:
    """Encodes demonstrations for one model.

    Args:
        ends: tokens that end an answer of the model.
        use_chat_template: False: rows are plain texts, and an end token follows each completion.
        processor: of a model that reads pictures.

    Attributes:
        complaints: what is wrong with the rows so far, by its kind, and does not keep them from
            being trained on.
    Raises: WorkflowError: the model has no chat template, or nothing ends an answer.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        ends: Sequence[int],
        *,
        use_chat_template: bool = True,
        processor: PictureProcessor | None = None,
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
        self._processor = processor
        self._ends = list(ends)
        added = tokenizer.added_tokens_decoder.items()
        special = {*tokenizer.all_special_ids, *(token for token, it in added if it.special)}
        self._special = (special - {tokenizer.unk_token_id}).union(ends)
        self.use_chat_template = use_chat_template
        self.complaints: dict[str, str] = {}

    def texts(self, prompt: str, completion: str, pictures: Sequence[bytes] = ()) -> dict[str, Any]:
        """A plain prompt, and the completion that follows it, with an end token."""
        if pictures:
            processor = self._reading_pictures()
            before = encode_text_with(pictures, processor, self._tokenizer, prompt)
        else:
            before = encode_text(self._tokenizer, prompt)
        after = encode_text(self._tokenizer, completion, begins=False)
        if after[-1:] == [] or after[-1] not in self._ends:
            after += self._ends[:1]
        ids = [*before, *after]
        self._look_for(ids, *([] if pictures else [prompt]), completion)
        return _row(ids, [range(len(before), len(ids))], pictures)

    def conversation(
        self,
        messages: Sequence[Mapping[str, Any]],
        first: int = 0,
        tools: Any = None,
        pictures: Sequence[bytes] = (),
    ) -> dict[str, Any]:
        """A conversation, whose turns of the assistant are trained, but for those of weight 0.

        Args:
            first: number of the message from which on they are.
            tools: that the template tells the model of.
            pictures: of the messages.
        Raises: WorkflowError: the messages are no such conversation, or the template does not tell
            where the assistant's turns are; or there are other pictures than the messages have.
        """
        check_conversation(messages, first)
        # a table has null for the fields that a message does not have, and templates would write it
        given: list[Mapping[str, Any]] = [
            {key: value for key, value in message.items() if value is not None or key == "content"}
            for message in messages
        ]
        trained = [n for n in _turns(given) if n >= first and given[n].get(_WEIGHT, 1)]
        if not trained:
            raise WorkflowError("each turn of the assistant has the weight 0: nothing is trained")
        template = self._tokenizer.get_chat_template(tools=tools)
        if tools and not _reads(template, "tools"):
            raise WorkflowError(
                "the row has tools, of which the model's chat template does not tell a model"
            )
        if pictures:  # a template's marks are of the text before it is expanded
            find: Find = partial(self._by_beginnings, render=self._rendering(pictures))
            given = in_parts(given, len(pictures))
        else:
            find = self._by_marks if _MARK.search(template) else self._by_beginnings
        ids, spans = find(given, trained, tools)
        ends = self._ends_in(ids)
        ended = [self._ended(ids, *turn, ends) for turn in zip(trained, spans, strict=True)]
        fields = {key for message in given for key in message} - {_WEIGHT, "tool_call_id"}
        if unread := sorted(field for field in fields if not _reads(template, field)):
            self.complaints["fields"] = (
                "messages have fields that the model's chat template does not read, so that they "
                f"have no effect: {', '.join(unread)}"
            )
        self._check_calls(given, ids)
        contents = (message.get("content") for message in given)
        self._look_for(ids, *(text for text in contents if isinstance(text, str)))
        return _row(ids, ended, pictures)

    def _reading_pictures(self) -> PictureProcessor:
        """Raises: WorkflowError: the model reads no pictures."""
        if self._processor is None:
            raise WorkflowError("the row has pictures, and the model reads none")
        return self._processor

    def _rendering(self, pictures: Sequence[bytes]) -> Render:
        """Renders the beginnings of a conversation that has these pictures in all."""
        processor = self._reading_pictures()

        def render(messages: Sequence[Any], tools: Any, **options: Any) -> Any:
            text = self._render(messages, tools, tokenize=False, **options)
            num_pictures = sum(part == PART for message in messages for part in message["content"])
            expanded = processor.expand(text, pictures[:num_pictures])
            return {"input_ids": bare_tokens(self._tokenizer, expanded)}

        return render

    def _check_calls(self, messages: Sequence[Mapping[str, Any]], ids: list[int]) -> None:
        """Raises: WorkflowError: arguments of a call are text, which the template quotes again."""
        calls = [call for message in messages for call in message.get("tool_calls") or ()]
        whole = str(self._tokenizer.decode(ids)) if calls else ""
        for call in calls:
            given = (call.get("function") or call).get("arguments")
            if isinstance(given, str) and json.dumps(given, ensure_ascii=False) in whole:
                raise WorkflowError(
                    f"the arguments of a call are text, {given:.80}, which the chat template "
                    "quotes once more: give them as an object (json.loads)"
                )

    def _look_for(self, ids: Sequence[int], *texts: str) -> None:
        """Notes a text that is another one in these tokens; the first one is enough."""
        if "lost" not in self.complaints and (lost := describe_lost(self._tokenizer, texts, ids)):
            self.complaints["lost"] = f"the model's tokenizer changes the text of rows: {lost}"

    def _by_marks(
        self, messages: Sequence[Mapping[str, Any]], turns: Sequence[int], tools: Any
    ) -> tuple[list[int], list[range]]:
        """Tokens, and where the template says that these turns are."""
        encoded = self._render(messages, tools, return_assistant_tokens_mask=True)
        ids = [int(token) for token in encoded["input_ids"]]
        spans, place = list[range](), 0
        for is_marked, run in groupby(encoded["assistant_masks"]):
            stop = place + len(list(run))
            if is_marked:
                spans.append(range(place, stop))
            place = stop
        if len(spans) != len(_turns(messages)):
            raise WorkflowError(
                f"the chat template marks {len(spans)} turns by {{% generation %}}, but "
                f"{len(_turns(messages))} are the assistant's"
            )
        marked, found = dict(zip(_turns(messages), spans, strict=True)), []
        for turn in turns:
            before = self._ids(messages[:turn], tools, add_generation_prompt=True)
            start = max(marked[turn].start, _num_shared(ids, before))
            found.append(range(start, marked[turn].stop))
            if not found[-1]:
                raise WorkflowError(
                    f"message {turn}: the chat template marks by {{% generation %}} what stands "
                    "before the assistant's answer"
                )
        return ids, found

    def _by_beginnings(
        self,
        messages: Sequence[Mapping[str, Any]],
        turns: Sequence[int],
        tools: Any,
        render: Render | None = None,
    ) -> tuple[list[int], list[range]]:
        """Tokens, and where these turns are."""
        tokens = partial(self._ids, render=render)
        ids, spans = tokens(messages, tools), []
        for turn in turns:
            before = tokens(messages[:turn], tools, add_generation_prompt=True)
            is_last = turn == len(messages) - 1
            after = ids if is_last else tokens(messages[: turn + 1], tools)
            if ids[: len(before)] != before or ids[: len(after)] != after:
                raise WorkflowError(
                    f"message {turn}: the chat template writes a conversation otherwise once it "
                    "goes on, so the tokens of this turn are not those that the model writes; "
                    "train on the last turn alone (last_turn_only), or give the template "
                    "{% generation %} marks"
                )
            spans.append(range(len(before), len(after)))
        return ids, spans

    def _ends_in(self, ids: Sequence[int]) -> frozenset[int]:
        """Tokens that end a turn: those that end an answer, and what closes the conversation."""
        closing = takewhile(
            lambda token: token in self._special or self._is_space(token), ids[::-1]
        )
        return frozenset([*self._ends, *(token for token in closing if token in self._special)])

    def _ended(self, ids: Sequence[int], number: int, turn: range, ends: frozenset[int]) -> range:
        """A turn, up to the first of the tokens that end it, of which each may follow white space.

        Args:
            number: of the message.
            turn: what is known to be of it; the tokens that end it may stand behind.
        Raises: WorkflowError: nothing ends it.
        """
        behind = takewhile(lambda token: token in ends or self._is_space(token), ids[turn.stop :])
        written = range(turn.start, turn.stop + len(list(behind)))
        places = [n for n in written if ids[n] in ends]
        if not places:
            raise WorkflowError(
                f"message {number}: the chat template ends the turn with no special token, so "
                "the model would not learn to end its answers"
            )
        while (
            len(places) > 1
            and ids[places[-2]] in self._ends
            and self._is_space(*ids[places[-2] + 1 : places[-1]])
        ):
            places.pop()
        if ids[places[-1]] not in self._ends:
            shown = [ids[places[-1]], *self._ends]
            end, *known = map(str, self._tokenizer.convert_ids_to_tokens(shown))
            self.complaints["end"] = (
                f"the chat template ends turns with {end}, and an answer of the model ends with "
                f"{' or '.join(known) or 'nothing'}: trained like this, it will write {end} and go "
                "on; name it as eos_token_id in generation_config.json, or its number in "
                "generation.stop_token_ids of runs that generate"
            )
        return range(turn.start, places[-1] + 1)

    def _is_space(self, *token_ids: int) -> bool:
        return not str(self._tokenizer.decode(list(token_ids))).strip()

    def _ids(
        self, messages: Sequence[Any], tools: Any, render: Render | None = None, **options: Any
    ) -> list[int]:
        rendered = (render or self._render)(messages, tools, **options)
        return [int(token) for token in rendered["input_ids"]]

    def _render(
        self, messages: Sequence[Any], tools: Any, *, tokenize: bool = True, **options: Any
    ) -> Any:
        try:
            return self._tokenizer.apply_chat_template(
                list(messages), tools=tools, tokenize=tokenize, return_dict=tokenize, **options
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
        if message.get(_WEIGHT) not in (None, 0, 1):
            raise WorkflowError(
                f"message {number}: expected a weight of 0 (not trained) or 1, got "
                f"{message[_WEIGHT]!r}"
            )
        content = message.get("content")
        is_empty = not (content.strip() if isinstance(content, str) else content)
        if is_empty and not message.get("tool_calls"):
            raise WorkflowError(f"message {number}: the assistant's answer is empty")
    if messages[-1]["role"] != "assistant" or len(messages) <= first:
        raise WorkflowError(
            f"the last message is of the role {messages[-1]['role']!r}: expected an answer of the "
            "assistant, which is trained"
        )


def _turns(messages: Sequence[Mapping[str, Any]]) -> list[int]:
    """The numbers of the assistant's messages."""
    return [number for number, it in enumerate(messages) if it["role"] == "assistant"]


def _reads(template: str, name: str) -> bool:
    """Whether a template has this name in it."""
    return re.search(rf"\b{re.escape(name)}\b", template) is not None


def _num_shared(ids: Sequence[int], others: Sequence[int]) -> int:
    """How many tokens both begin with."""
    pairs = zip(ids, others, strict=False)
    return len(list(takewhile(lambda pair: pair[0] == pair[1], pairs)))


def _row(ids: list[int], spans: Sequence[range], pictures: Sequence[bytes] = ()) -> dict[str, Any]:
    """Tokens, of which those in the spans are trained; and the row's pictures, if there are any."""
    mask = [False] * len(ids)
    for span in spans:
        mask[span.start : span.stop] = [True] * len(span)
    row: dict[str, Any] = {"input_ids": ids, "loss_mask": mask}
    return {**row, PICTURES: packed(pictures).tobytes()} if pictures else row
