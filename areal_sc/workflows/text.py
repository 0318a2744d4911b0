"""Between text and tokens, for episodes. No torch at import time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from areal_sc.engines.base import Completion
from areal_sc.errors import WorkflowError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def encode_text(tokenizer: PreTrainedTokenizerBase, text: str, *, begins: bool = True) -> list[int]:
    """Tokens of plain text, behind what the tokenizer itself puts before a text, such as BOS.

    What it puts behind one, such as EOS, is left out: the text goes on. A text that begins with it
    gets no second one.

    Args:
        begins: False: other tokens come before it, so that nothing is put there.
    """
    tokens = [int(token) for token in tokenizer.encode(text, add_special_tokens=False)]
    if not begins:
        return tokens
    whole = [int(token) for token in tokenizer.encode(text, add_special_tokens=True)]
    offsets = range(len(whole) - len(tokens) + 1)
    num_before = next((n for n in offsets if whole[n : n + len(tokens)] == tokens), 0)
    before = whole[:num_before]
    return tokens if tokens[:num_before] == before else before + tokens


def encode_chat(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Mapping[str, Any]]
) -> list[int]:
    """Tokens of a conversation in the model's chat format, up to where its answer begins.

    Raises: WorkflowError: the tokenizer has no chat template.
    """
    if not tokenizer.chat_template:
        raise WorkflowError(
            "use_chat_template is set, but the model's tokenizer has no chat template: "
            "use a chat model, or plain prompts"
        )
    encoded: Any = tokenizer.apply_chat_template(
        [dict(message) for message in messages],
        add_generation_prompt=True,
        tokenize=True,
        return_dict=True,
    )
    return [int(token) for token in encoded["input_ids"]]


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


def decode_completion(tokenizer: PreTrainedTokenizerBase, completion: Completion) -> str:
    """The answer's text without the stop token and other special tokens."""
    token_ids = completion.token_ids
    if completion.finish_reason == "stop":
        token_ids = token_ids[:-1]
    return str(
        tokenizer.decode(token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    )
