"""Rewards for answers that are words: exact match, F1 and multiple choice. No torch.

Each takes a row with `answer`, a text or a list of texts of which the best one counts.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from areal_sc.sources.reference import Referable

_ARTICLES = re.compile(r"\b(?:a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)
_CLOSED = frozenset(("yes", "no", "noanswer"))
"""Answers of which half a match is none."""

_LETTER = r"[*\s({\[]*(?:\\text\w*\s*\{)?\s*([A-Z])(?![\w'])"
_CHOSEN = tuple(
    re.compile(pattern)
    for pattern in (
        rf"\\boxed\s*\{{{_LETTER}",
        rf"(?i:<answer>){_LETTER}",
        rf"(?i:\b(?:answer|option|choice)\b[\s*]*(?:is\b|:|=)[\s*:]*(?:option\b|choice\b)?){_LETTER}",
    )
)
"""Signs of a choice, the strongest one first."""

_ALONE = re.compile(r"[\s*(\[]*([A-Z])[\s*)\].:,]*")


def normalized_words(text: str) -> str:
    """The text in lower case, without punctuation and articles, one space between two words.

    Source: the evaluation of SQuAD, arXiv:1606.05250.
    """
    plain = text.lower().translate(_PUNCTUATION)
    return " ".join(_ARTICLES.sub(" ", plain).split())


class ExactMatch(Referable):
    """1.0 where the normalized answer of the completion equals a reference, else 0.0.

    Args:
        tag: the answer is what stands in the last `<tag>...</tag>`, and without one there is no
            answer; "": it is the whole completion.
        is_part: it is enough that a reference stands in the answer, as whole words.
    """

    def __init__(self, *, tag: str = "", is_part: bool = False) -> None:
        self.tag = tag
        self.is_part = is_part

    def __call__(self, prompt: Mapping[str, Any], completion: str) -> float:
        given = given_answer(completion, self.tag)
        if given is None:
            return 0.0
        words = normalized_words(given)
        references = [normalized_words(text) for text in references_of(prompt)]
        if self.is_part:
            return float(any(f" {it} " in f" {words} " for it in references if it))
        return float(words in references)

    def vote(self, completion: str) -> str | None:
        """The normalized answer; None: there is none."""
        given = given_answer(completion, self.tag)
        return None if given is None else normalized_words(given) or None


class WordF1(Referable):
    """F1 of the words that the answer of the completion shares with a reference, 0.0 to 1.0.

    Each word counts as often as it stands there. `yes`, `no` and `noanswer` match whole or not.
    Source: the evaluations of SQuAD (arXiv:1606.05250) and HotpotQA (arXiv:1809.09600).

    Args:
        tag: as in `ExactMatch`.
    """

    def __init__(self, *, tag: str = "") -> None:
        self.tag = tag

    def __call__(self, prompt: Mapping[str, Any], completion: str) -> float:
        given = given_answer(completion, self.tag)
        if given is None:
            return 0.0
        words = normalized_words(given)
        return max(_f1(words, normalized_words(text)) for text in references_of(prompt))


class MultipleChoice(Referable):
    """1.0 where the completion chooses the letter `answer` of the row, else 0.0.

    The choice is what stands in a box, or else behind `<answer>`, or else behind `answer is`,
    `Answer:` and the like, or else the letter that is the whole last line. A completion that
    shows different letters by the same sign chooses by the last one of them.

    Args:
        choices: number of choices; the letters are A, B, ... A letter beyond is no choice.
    Raises: ValueError: in a call: the row's answer is none of the letters.
    """

    def __init__(self, choices: int = 4) -> None:
        if not 2 <= choices <= len(string.ascii_uppercase):
            raise ValueError(f"choices={choices}: expected 2 to {len(string.ascii_uppercase)}")
        self.letters = string.ascii_uppercase[:choices]

    def __call__(self, prompt: Mapping[str, Any], completion: str) -> float:
        references = [text.strip().strip("()").upper() for text in references_of(prompt)]
        for text in references:
            if len(text) != 1 or text not in self.letters:
                raise ValueError(f"answer {text!r}: expected one letter of {self.letters}")
        return float(self.chosen(completion) in references)

    def vote(self, completion: str) -> str | None:
        """The letter that a completion chooses."""
        return self.chosen(completion)

    def chosen(self, completion: str) -> str | None:
        """The letter that a completion chooses; None: it chooses none."""
        for sign in _CHOSEN:
            if letters := [it for it in sign.findall(completion) if it in self.letters]:
                return str(letters[-1])
        lines = completion.strip().splitlines()
        alone = _ALONE.fullmatch(lines[-1]) if lines else None
        return alone[1] if alone and alone[1] in self.letters else None


def references_of(prompt: Mapping[str, Any]) -> Sequence[str]:
    """The texts of which each is a right answer.

    Raises: ValueError: the row has no `answer`, an empty list, or something else than texts.
    """
    answer = prompt.get("answer")
    texts = [answer] if isinstance(answer, str) else answer
    if (
        not isinstance(texts, list | tuple)
        or not texts
        or not all(isinstance(it, str) for it in texts)
    ):
        raise ValueError(f"answer: expected a text, or a list of texts, got {answer!r:.80}")
    return texts


def given_answer(completion: str, tag: str) -> str | None:
    """What the last `<tag>...</tag>` holds, None: there is none. Of tag "" it is the whole text."""
    if not tag:
        return completion
    found = re.findall(rf"<{re.escape(tag)}>(.*?)</{re.escape(tag)}>", completion, re.DOTALL)
    return found[-1] if found else None


def _f1(given: str, reference: str) -> float:
    if given == reference:
        return 1.0
    if given in _CLOSED or reference in _CLOSED:
        return 0.0
    given_words, reference_words = given.split(), reference.split()
    shared = sum((Counter(given_words) & Counter(reference_words)).values())
    return 2 * shared / (len(given_words) + len(reference_words)) if shared else 0.0
