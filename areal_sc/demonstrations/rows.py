"""Rows of the user's data set as demonstrations, or as pairs of answers. No torch at import time.

{"messages": [...]}                                    a conversation
{"prompt": ..., "completion": ...}                     texts, or lists of messages
{"prompt": ..., "chosen": ..., "rejected": ...}        as well; without `prompt` both lists of
                                                       messages begin alike

Each may have pictures, see `sources.pictures`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from areal_sc.demonstrations.turns import TurnEncoder
from areal_sc.errors import WorkflowError
from areal_sc.sources.pictures import IMAGES, with_pictures

Item = dict[str, Any]
"""A demonstration, `{"input_ids", "loss_mask"}`, or a pair of them, `{"chosen", "rejected"}`."""

Messages = list[Mapping[str, Any]]


@dataclass(frozen=True)
class EncodedRows:
    """Rows that can be trained on.

    Attributes:
        num_too_long: rows that were left out, as they have more tokens than a micro-batch takes.
    """

    items: list[Item]
    num_too_long: int


def encode_demonstrations(
    rows: Iterable[Mapping[str, Any]],
    encoder: TurnEncoder,
    max_tokens: int,
    *,
    last_turn_only: bool = False,
) -> EncodedRows:
    """The tokens of rows that are demonstrations.

    Args:
        max_tokens: of a row.
        last_turn_only: of a conversation in `messages`, only the last turn is trained.
    Raises: WorkflowError: a row is none of these; names it by its number.
    """

    def encode(row: Mapping[str, Any]) -> tuple[Item, int]:
        if row.get("messages") is not None:
            messages = row["messages"]
            _require_template(encoder)
            first = len(messages) - 1 if last_turn_only and isinstance(messages, list) else 0
            item = encoder.conversation(messages, first, row.get("tools"), row.get(IMAGES, ()))
        else:
            _require(row, "prompt", "completion", also="messages")
            item = _answer(encoder, row, row["prompt"], "completion")
        return item, len(item["input_ids"])

    return _encode(rows, encode, max_tokens)


def encode_pairs(
    rows: Iterable[Mapping[str, Any]], encoder: TurnEncoder, max_tokens: int
) -> EncodedRows:
    """The tokens of rows that are pairs.

    Args:
        max_tokens: of both rows of a pair, which go through the model together.
    Raises: WorkflowError: a row is no pair, or its answers are equal; names it by its number.
    """

    def encode(row: Mapping[str, Any]) -> tuple[Item, int]:
        _require(row, "chosen", "rejected")
        prompt = row.get("prompt")
        if prompt is None:
            prompt = _shared_beginning(row)
        item = {name: _answer(encoder, row, prompt, name) for name in ("chosen", "rejected")}
        if item["chosen"] == item["rejected"]:
            raise WorkflowError("chosen and rejected are equal: nothing can be preferred")
        return item, sum(len(it["input_ids"]) for it in item.values())

    return _encode(rows, encode, max_tokens)


def _encode(
    rows: Iterable[Mapping[str, Any]],
    encode: Callable[[Mapping[str, Any]], tuple[Item, int]],
    max_tokens: int,
) -> EncodedRows:
    items, num_rows = list[Item](), 0
    for number, row in enumerate(rows):
        try:
            item, num_tokens = encode(with_pictures(row))
        except WorkflowError as error:
            raise WorkflowError(f"row {number} of the dataset: {error}") from error
        num_rows += 1
        if num_tokens <= max_tokens:
            items.append(item)
    if not items:
        raise WorkflowError(
            f"the dataset has no row to train on: {num_rows} rows, all of them longer than "
            f"actor.max_tokens_per_micro_batch={max_tokens}"
            if num_rows
            else "the dataset is empty: expected at least 1 row"
        )
    return EncodedRows(items, num_rows - len(items))


def _answer(encoder: TurnEncoder, row: Mapping[str, Any], prompt: Any, name: str) -> Item:
    """The tokens of a prompt and of the answer in a column; the answer's are trained."""
    answer = row[name]
    if not answer or (isinstance(answer, str) and not answer.strip()):
        raise WorkflowError(f"{name} is empty")
    if not encoder.use_chat_template:
        if not isinstance(prompt, str) or not isinstance(answer, str):
            _require_template(encoder)
        return encoder.texts(prompt, answer, row.get(IMAGES, ()))
    before, after = _messages(prompt, "user", "prompt"), _messages(answer, "assistant", name)
    if after[: len(before)] == before and len(after) > len(before):  # the whole conversation
        after = after[len(before) :]
    messages = [*before, *after]
    return encoder.conversation(messages, len(before), row.get("tools"), row.get(IMAGES, ()))


def _messages(value: Any, role: str, name: str) -> Messages:
    if isinstance(value, str):
        return [{"role": role, "content": value}]
    if isinstance(value, list) and all(isinstance(it, Mapping) for it in value):
        return list(value)
    raise WorkflowError(f"{name} is {value!r:.80}: expected a text, or a list of messages")


def _shared_beginning(row: Mapping[str, Any]) -> Messages:
    """Messages with which the chosen and the rejected conversation begin."""
    chosen, rejected = row["chosen"], row["rejected"]
    if not isinstance(chosen, list) or not isinstance(rejected, list):
        raise WorkflowError(
            "without a column 'prompt', chosen and rejected are expected to be lists of messages "
            "that begin alike"
        )
    if chosen == rejected:
        raise WorkflowError("chosen and rejected are equal: nothing can be preferred")
    alike = takewhile(lambda pair: pair[0] == pair[1], zip(chosen, rejected, strict=False))
    shared = [message for message, _ in alike]
    if not shared:
        raise WorkflowError("chosen and rejected do not begin alike, so there is no prompt")
    return shared


def _require(row: Mapping[str, Any], *names: str, also: str = "") -> None:
    missing = [name for name in names if row.get(name) is None]
    if missing:
        expected = f"{also!r}, or {' and '.join(map(repr, names))}" if also else repr(missing[0])
        raise WorkflowError(f"expected a column {expected}, got {', '.join(sorted(row))}")


def _require_template(encoder: TurnEncoder) -> None:
    if not encoder.use_chat_template:
        raise WorkflowError("messages need the chat template: use_chat_template=True")
