"""Prompts with pictures, as tokens. No torch at import time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from areal_sc.sources.pictures import PART
from areal_sc.workflows.text import bare_tokens, chat_text, check_messages, encode_text

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from areal_sc.engines.picture_processor import PictureProcessor


def encode_chat_with(
    pictures: Sequence[bytes],
    processor: PictureProcessor,
    tokenizer: PreTrainedTokenizerBase,
    messages: Any,
    arguments: Mapping[str, Any] | None = None,
) -> list[int]:
    """Tokens of a conversation with pictures; see `encode_chat`.

    Raises: WorkflowError: it has not as many parts for pictures as there are pictures; or one is
        damaged.
    """
    if isinstance(messages, str):
        messages = [{"role": "user", "content": messages}]
    check_messages(messages)
    text = chat_text(tokenizer, in_parts(messages, len(pictures)), arguments)
    return bare_tokens(tokenizer, processor.expand(text, pictures))


def encode_text_with(
    pictures: Sequence[bytes],
    processor: PictureProcessor,
    tokenizer: PreTrainedTokenizerBase,
    text: str,
) -> list[int]:
    """Tokens of a plain text with a marker for each picture; see `encode_text`.

    Raises: as `encode_chat_with`.
    """
    return encode_text(tokenizer, processor.expand(text, pictures))


def in_parts(messages: Sequence[Mapping[str, Any]], num_pictures: int) -> list[Mapping[str, Any]]:
    """The messages with lists of parts, as templates of such models read them.

    Where no part is for a picture, all pictures stand before the first text of the user.
    """
    found = list[Mapping[str, Any]]()
    are_named = any(
        part.get("type") == PART["type"]
        for message in messages
        if isinstance(message["content"], list)
        for part in message["content"]
        if isinstance(part, Mapping)
    )
    num_left = 0 if are_named else num_pictures
    for message in messages:
        content = message["content"]
        if isinstance(content, str):
            content = [{"type": "text", "text": content}]
        if num_left and message["role"] == "user":
            content, num_left = [*([dict(PART)] * num_left), *content], 0
        found.append({**message, "content": content})
    return found
