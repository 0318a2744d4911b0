"""Between text and tokens, for episodes. No torch at import time."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final

from areal_sc.engines.base import Completion
from areal_sc.errors import NeverWorks, WorkflowError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

OWN_ARGUMENTS: Final = frozenset(
    ["messages", "add_generation_prompt", "continue_final_message", "tokenize", "return_dict"]
)
"""What `encode_chat` gives a chat template itself."""

ROLES: Final = ("system", "developer", "user", "assistant", "tool")
"""The roles in which messages of a conversation may be."""


def encode_text(tokenizer: PreTrainedTokenizerBase, text: str, *, begins: bool = True) -> list[int]:
    """Tokens of plain text, behind what the tokenizer itself puts before a text, such as BOS.

    What it puts behind one, such as EOS, is left out: the text goes on. A text that begins with it
    gets no second one.

    Args:
        begins: False: other tokens come before it, so that nothing is put there.
    """
    tokens = list(_tokens_of(tokenizer, text))
    if not begins:
        return tokens
    before = _begin_of(tokenizer)
    return tokens if tokens[: len(before)] == before else before + tokens


@lru_cache(maxsize=16)  # the episodes of a group begin with one text
def _tokens_of(tokenizer: PreTrainedTokenizerBase, text: str) -> tuple[int, ...]:
    return tuple(bare_tokens(tokenizer, text))


def bare_tokens(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Tokens of a text that stands among others: nothing is put around them."""
    backend: Any = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None or backend.truncation or backend.padding:  # which `encode` takes off
        return [int(token) for token in tokenizer.encode(text, add_special_tokens=False)]
    # places of the tokens in the text, which `encode` finds as well, are a third of its work
    return list(backend.encode_batch_fast([text], add_special_tokens=False)[0].ids)


@lru_cache(maxsize=8)  # every prompt begins so
def _begin_of(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """What the tokenizer puts before a text."""
    bare, whole = bare_tokens(tokenizer, "a"), [int(token) for token in tokenizer.encode("a")]
    offsets = range(len(whole) - len(bare) + 1)
    return whole[: next((n for n in offsets if whole[n : n + len(bare)] == bare), 0)]


def encode_chat(
    tokenizer: PreTrainedTokenizerBase, messages: Any, arguments: Mapping[str, Any] | None = None
) -> list[int]:
    """Tokens of a conversation in the model's chat format; see `chat_text`."""
    return bare_tokens(tokenizer, chat_text(tokenizer, messages, arguments))


def chat_text(
    tokenizer: PreTrainedTokenizerBase, messages: Any, arguments: Mapping[str, Any] | None = None
) -> str:
    """A conversation in the model's chat format, up to where its answer begins.

    A last message of the assistant is the beginning of that answer.

    Args:
        messages: a list of those, or the text of one of the user.
        arguments: what the template reads beside them, by name.
    Raises: NeverWorks: the tokenizer has no chat template, or the template does not read one of the
        arguments. WorkflowError: it cannot be filled with the messages, or they are none.
    """
    if not tokenizer.chat_template:
        raise NeverWorks(
            "use_chat_template is set, but the model's tokenizer has no chat template: "
            "use a chat model, or plain prompts"
        )
    if isinstance(messages, str):
        messages = [{"role": "user", "content": messages}]
    check_messages(messages)
    arguments = dict(arguments or {})
    template = tokenizer.get_chat_template(tools=arguments.get("tools"))
    for name in arguments:
        if not re.search(rf"\b{re.escape(name)}\b", template):
            raise NeverWorks(
                f"chat_template_arguments: the model's chat template does not read {name!r}, which "
                "would have no effect"
            )
    is_begun = messages[-1]["role"] == "assistant"
    # a table has null for the fields that a message does not have, and templates would write it
    given = [
        {key: value for key, value in message.items() if value is not None or key == "content"}
        for message in messages
    ]
    parts = [str(it["content"]) for it in given if isinstance(it.get("content"), list)]
    try:
        text: Any = tokenizer.apply_chat_template(
            given,
            tokenize=False,
            add_generation_prompt=not is_begun,
            continue_final_message=is_begun,
            **arguments,
        )
    except Exception as error:  # the model's own code, which jinja runs
        raise WorkflowError(
            f"the model's chat template refuses the messages: {type(error).__name__}: {error}"
        ) from error
    if any(written in text for written in parts):
        raise WorkflowError(
            "the model's chat template does not read lists of parts: it writes "
            f"{parts[0]:.80} into the prompt; give the text as the content of a message"
        )
    return str(text)


def check_messages(messages: Any) -> None:
    """Raises: WorkflowError: templates would write something else than was meant."""
    if not isinstance(messages, list | tuple) or not messages:
        raise WorkflowError(f"the prompt is {messages!r:.80}: {_MESSAGES}")
    for number, message in enumerate(messages):
        check_message(message, f"message {number} of the prompt")


def check_message(message: Any, where: str) -> None:
    """Raises: WorkflowError: a template would write something else than was meant."""
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise WorkflowError(f"{where} is {message!r:.80}: {_MESSAGES}")
    content = message.get("content")
    is_call = content is None and message.get("tool_calls")
    if not (is_call or isinstance(content, str | list)):
        raise WorkflowError(
            f"the content of {where} ({message['role']}) is {content!r:.80}: expected a text, "
            "or a list of parts"
        )


_MESSAGES: Final = (
    'expected a text, or a list of messages such as {"role": "user", "content": "..."}'
)


def describe_unknown(tokenizer: PreTrainedTokenizerBase, input_ids: Sequence[int]) -> str:
    """What most of a prompt is, if the tokenizer does not know it; "" if it knows half or more."""
    backend: Any = getattr(tokenizer, "backend_tokenizer", None)
    # what text becomes; `unk_token` alone may be a default that is never used
    token = getattr(getattr(backend, "model", None), "unk_token", None) or tokenizer.unk_token
    if token is None:
        return ""
    unknown: Any = tokenizer.convert_tokens_to_ids(str(token))
    num_unknown = list(input_ids).count(unknown)
    if 2 * num_unknown <= len(input_ids):
        return ""
    shown = " ".join(map(str, tokenizer.convert_ids_to_tokens(list(input_ids[:20]))))
    return f"{num_unknown} of its {len(input_ids)} tokens are {token}: {shown}"


def describe_lost(
    tokenizer: PreTrainedTokenizerBase, texts: Iterable[str], input_ids: Sequence[int]
) -> str:
    """The first of these texts that is another one in the tokens made of it, "" if none is.

    Args: input_ids: the tokens that the texts are in; a text that they do not have is passed over.
    """
    for text, given in changed_texts(tokenizer, texts, input_ids):
        return f"{text!r:.200} differs from what the model gets, {given!r:.200}"
    return ""


def changed_texts(
    tokenizer: PreTrainedTokenizerBase, texts: Iterable[str], input_ids: Sequence[int]
) -> Iterator[tuple[str, str]]:
    """Those of the texts that are others in these tokens, with what they are there."""
    whole = written(tokenizer, input_ids)
    longest = 10 * len(whole) + 100  # one that is far longer is not in it
    for text in texts:
        if len(text) <= longest and text.strip() not in whole:
            given = written(tokenizer, bare_tokens(tokenizer, text)).strip()
            if given in whole and (given or not whole.strip()):
                yield text, given


def written(tokenizer: PreTrainedTokenizerBase, token_ids: Sequence[int]) -> str:
    """The text of these tokens, with that of special ones."""
    return str(tokenizer.decode(list(token_ids), clean_up_tokenization_spaces=False))


def decode_completion(tokenizer: PreTrainedTokenizerBase, completion: Completion) -> str:
    """The answer's text, up to the stop string or token, without special tokens."""
    token_ids = completion.token_ids
    if completion.stop:
        text = _decode(tokenizer, token_ids)
        starts = [start for stop in completion.stop if (start := text.find(stop)) >= 0]
        if starts:
            return text[: min(starts)]
    ends_with_token = completion.finish_reason == "stop"
    return _decode(tokenizer, token_ids[:-1] if ends_with_token else token_ids)


def _decode(tokenizer: PreTrainedTokenizerBase, token_ids: list[int]) -> str:
    return str(
        tokenizer.decode(token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    )
