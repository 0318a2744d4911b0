"""Whether a tokenizer keeps the texts of a task, and whether answers to them can end.

The dry run and rollout workers judge by the same functions. No torch at import time.
"""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final

from areal_sc.errors import ConfigError
from areal_sc.workflows.text import bare_tokens, changed_texts, describe_unknown, written

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MAX_JUDGED: Final = 16
"""Prompts of a dataset that are judged. It is refused if more than half of them are lost: so a few
strange rows end no run. Of sets of which 30 % are lost fewer than one in a hundred are refused."""

_UNSEEN: Final = ("Mn", "Cc", "Cf")
"""Unicode's categories of accents, and of what has no shape."""

_BETWEEN_WORDS: Final = re.compile(r"(?<=[^\W_\u2e80-\u9fff])\s+(?=[^\W_\u2e80-\u9fff])")
"""White space without which two words, or numbers, are another one. Han characters stand alone."""

_MAX_NAMED: Final = 10
_OPENING_TOKENS: Final = 256
"""At the end of a prompt, where a template opens the answer."""
_TAG: Final = re.compile(r"<[^<>\s]+>|\[[^\[\]\s]+\]")
_USER, _ANSWER, _NEXT = "zq1uqz", "zq2aqz", "zq3uqz"


def texts_in(value: Any) -> Iterator[str]:
    """All texts in a row, or in a part of one; half of a pair of surrogates becomes `?`."""
    if isinstance(value, str):
        yield value.encode(errors="replace").decode()
    elif isinstance(value, Mapping | list | tuple):
        for part in value.values() if isinstance(value, Mapping) else value:
            yield from texts_in(part)


def lost_from(tokenizer: PreTrainedTokenizerBase, text: str) -> str:
    """What the tokens of a text have lost, in words; "" where they have all that matters.

    A tokenizer may lower the case, drop accents and invisible characters, write one character for
    another that means the same (NFKC), and change how much white space there is.
    """
    text = text.encode(errors="replace").decode()
    tokens = bare_tokens(tokenizer, text)
    given, kept = _letters(text), _letters(written(tokenizer, tokens))
    if given != kept:
        lost, new = Counter(given) - Counter(kept), Counter(kept) - Counter(given)
        return f"it has {'lost' if lost else 'got'} {' '.join(list(lost or new)[:_MAX_NAMED])}"
    joined = _BETWEEN_WORDS.sub("", text)
    if joined != text and bare_tokens(tokenizer, joined) == tokens:
        return "it has lost the white space between words"
    return ""


class PromptTexts:
    """Counts the prompts of a dataset whose text their tokens have lost.

    Attributes:
        lost: what of each such prompt.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self.num_judged = 0
        self.lost: list[str] = []

    def judge(self, row: Any, input_ids: Sequence[int]) -> None:
        """Args: input_ids: the prompt that was made of the row."""
        self.num_judged += 1
        if lost := self._lost(row, input_ids):
            self.lost.append(lost)

    def check(self, num_left: int = 0) -> None:
        """Raises: ConfigError: more than half are lost, even if the ones left to judge are kept."""
        if 2 * len(self.lost) <= self.num_judged + num_left:
            return
        raise ConfigError(
            f"{self.describe()}; use a model whose tokenizer knows such text, write prompts with "
            "what it knows, or mend normalizer, pre-tokenizer or decoder in its tokenizer.json: "
            f"transformers has read it as a {type(self._tokenizer).__name__}, and classes of "
            "families put their own in place"
        )

    def describe(self) -> str:
        """For people; there are some."""
        return (
            f"the model's tokenizer loses the text of {len(self.lost)} of {self.num_judged} "
            f"prompts: {self.lost[0]}"
        )

    def _lost(self, row: Any, input_ids: Sequence[int]) -> str:
        for text, kept in changed_texts(self._tokenizer, texts_in(row), input_ids):
            if lost := lost_from(self._tokenizer, text):
                tokens = bare_tokens(self._tokenizer, text)[:20]
                shown = " ".join(map(str, self._tokenizer.convert_ids_to_tokens(tokens)))
                return f"{text!r:.200} comes back as {kept!r:.200}: {lost} (its tokens: {shown})"
        return describe_unknown(self._tokenizer, input_ids)


def why_endless(
    tokenizer: PreTrainedTokenizerBase, input_ids: Sequence[int], ends: Iterable[int]
) -> str:
    """Why no answer to this prompt ends where the model's chat template ends one; "": it does, or
    the prompt is not the template's, or the template does not tell.

    Args: ends: tokens that end an answer, which no stop string does.
    """
    if not getattr(tokenizer, "chat_template", None):
        return ""
    opening, why = _of_template(tokenizer, frozenset(ends))
    if not why or _bare(opening) not in _bare(written(tokenizer, input_ids[-_OPENING_TOKENS:])):
        return ""
    return why


@lru_cache(maxsize=16)  # the episodes of a run have few different ones
def _of_template(tokenizer: PreTrainedTokenizerBase, ends: frozenset[int]) -> tuple[str, str]:
    """What the template puts before an answer, and why such an answer does not end."""
    user, answer = {"role": "user", "content": _USER}, {"role": "assistant", "content": _ANSWER}

    def behind(mark: str, *messages: dict[str, str]) -> str:
        is_open = messages[-1] is user
        text: Any = tokenizer.apply_chat_template(
            list(messages), tokenize=False, add_generation_prompt=is_open
        )
        return str(text).partition(mark)[2]

    try:
        opening = behind(_USER, user)
        closing = behind(_ANSWER, user, answer).lstrip()
        following = behind(_ANSWER, user, answer, {"role": "user", "content": _NEXT})
    except Exception:  # the model's own code, which jinja runs, and it may refuse these
        return "", ""
    between = following.partition(_NEXT)[0]
    if not opening.strip() or not closing or closing.strip() == opening.strip():
        return "", ""
    written_ends = (written(tokenizer, [token]) for token in sorted(ends))
    known = tuple(filter(None, (text.strip() for text in written_ends)))
    if closing.startswith(known) or any(text in between for text in known):
        return opening, ""
    token = next(iter(bare_tokens(tokenizer, closing)), -1)
    is_added = token in tokenizer.added_tokens_decoder
    tag = _TAG.match(closing)
    if not is_added and (tag is None or any(text in closing for text in known)):
        return opening, ""
    mark = written(tokenizer, [token]) if is_added else tag[0] if tag else ""
    shown = " or ".join(map(repr, known)) or "nothing"
    set_it = f"stop_token_ids=[{token}]" if is_added else f'stop=["{mark}"]'
    return opening, (
        f"no answer ends where the model's chat template ends one: that writes {mark!r} behind "
        f"it, and what ends an answer here is {shown}; set generation.{set_it}, or mend "
        "eos_token in tokenizer_config.json, eos_token_id in generation_config.json, or the "
        "template"
    )


def _letters(text: str) -> str:
    """A text without what tokenizers may change."""
    folded = unicodedata.normalize("NFKD", unicodedata.normalize("NFKD", text).casefold())
    return "".join(it for it in _bare(folded) if unicodedata.category(it) not in _UNSEEN)


def _bare(text: str) -> str:
    """A text without white space."""
    return "".join(text.split())
