"""Rewards for answers that are words: exact match, F1 and multiple choice. No torch.

Each takes a row with `answer`, a text or a list of texts of which the best one counts.
"""

from __future__ import annotations

import re
import string
from abc import abstractmethod
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from areal_sc.rewards.answer_text import (
    ReferenceReward,
    given_answer,
    last_together,
    right_answer_of,
    without_reasoning,
)

_ARTICLES = re.compile(r"\b(?:a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)
_CLOSED = frozenset(("yes", "no", "noanswer"))
"""Answers of which half a match is none."""

_LETTER = r"(?:\\text\w*\s*\{|[*\s({\[])*([A-Z])(?![\w'])"
_CHOSEN = tuple(
    re.compile(pattern)
    for pattern in (
        rf"\\boxed\s*\{{{_LETTER}",
        rf"(?i:<answer>){_LETTER}",
        rf"(?i:\b(?:answer|option|choice)\b[\s*]*(?:is\b|:|=)[\s*:]*(?:option\b|choice\b)?){_LETTER}",
    )
)
"""Signs of a choice, the strongest one first."""

_SAID = tuple(
    re.compile(pattern)
    for pattern in (
        r"\\boxed\s*\{((?:[^{}]|\{(?:[^{}]|\{[^{}]*\})*\})*)\}",
        r"(?is:<answer>(.*?)</answer>)",
        r"(?i:\b(?:answer|option|choice)\b[\s*]*(?:is\b|:|=)[\s*:]*)([^\n]*)",
    )
)
"""The same signs before the text of a choice."""

_ANOTHER = re.compile(rf"[*\s)\]}}]*(?:[,/&;]|\b(?:or|and)\b)+[\s*]*(?:or\b|and\b)?{_LETTER}")
"""A letter that stands beside the one before it: `B or C`, `A, B`."""

_BEFORE_TEXT = re.compile(r"[\s*(\[]*([A-Z])[)\].:]+\s*(.+)")
"""A letter before the text of its choice: `(B) Rome`, `B. Rome`."""

_ALONE = re.compile(r"[\s*(\[]*([A-Z])[\s*)\].:,]*")

_WORDS_IN_FORMULAS = re.compile(r"\\text\w*\s*\{([^{}]*)\}")

_IN_FORMULAS = re.compile(r"[\d+\-/^<>=]")
"""What makes a text a number or a formula, which punctuation changes: `-5`, `1.5`, `x+1`."""


def normalized_words(text: str) -> str:
    """The text in lower case, without punctuation and articles, one space between two words.

    Source: the evaluation of SQuAD, arXiv:1606.05250.
    """
    plain = text.lower().translate(_PUNCTUATION)
    return " ".join(_ARTICLES.sub(" ", plain).split())


class _WordsReward(ReferenceReward):
    """The best score that the normalized answer of a completion has with a reference."""

    def __init__(self, *, tag: str = "") -> None:
        self.tag = tag

    def __call__(self, prompt: Mapping[str, Any], completion: str) -> float:
        references, words = self.reference(prompt), self.words(completion)
        return 0.0 if words is None else max(self.score(words, it) for it in references)

    def words(self, completion: str) -> str | None:
        """The normalized answer; None: there is none."""
        given = given_answer(completion, self.tag)
        return None if given is None else normalized_words(given)

    @abstractmethod
    def score(self, words: str, reference: str) -> float:
        """How right words are by one reference."""

    def reference(self, row: Mapping[str, Any]) -> list[str]:
        """The normalized texts, without those of which nothing is left."""
        texts = _texts(row)
        if not (known := [words for text in texts if (words := normalized_words(text))]):
            raise ValueError(
                f"answer {texts!r:.80}: without case, punctuation and articles nothing is left of "
                "it, which an empty answer would match; of letters of choices `MultipleChoice` is "
                "the reward"
            )
        return known


class ExactMatch(_WordsReward):
    """1.0 where the normalized answer of the completion equals a reference, else 0.0.

    Args:
        tag: the answer is what stands in the last `<tag>...</tag>`, and without one there is no
            answer; "": it is all that the completion says behind its reasoning.
        is_part: it is enough that a reference stands in the answer, as whole words.
    """

    def __init__(self, *, tag: str = "", is_part: bool = False) -> None:
        super().__init__(tag=tag)
        self.is_part = is_part

    def score(self, words: str, reference: str) -> float:
        is_there = f" {reference} " in f" {words} " if self.is_part else reference == words
        return float(is_there)

    def vote(self, completion: str) -> str | None:
        """The normalized answer; None: there is none."""
        return self.words(completion) or None


class WordF1(_WordsReward):
    """F1 of the words that the answer of the completion shares with a reference, 0.0 to 1.0.

    Each word counts as often as it stands there. `yes`, `no` and `noanswer` match whole or not.
    Source: the evaluations of SQuAD (arXiv:1606.05250) and HotpotQA (arXiv:1809.09600).

    Args:
        tag: as in `ExactMatch`.
    """

    def score(self, words: str, reference: str) -> float:
        if words == reference:
            return 1.0
        if words in _CLOSED or reference in _CLOSED:
            return 0.0
        given, right = words.split(), reference.split()
        shared = sum((Counter(given) & Counter(right)).values())
        return 2 * shared / (len(given) + len(right)) if shared else 0.0


class MultipleChoice(ReferenceReward):
    """1.0 where the completion chooses the letter `answer` of the row, else 0.0.

    The choice is what stands in a box, or else behind `<answer>`, or else behind `answer is`,
    `Answer:` and the like, or else the letter that is the whole last line. Of different letters
    behind the same sign the last one is chosen; `B or C`, and letters in several boxes with only
    "or" between them, are no choice, and neither is what stands in reasoning.

    Args:
        choices: number of choices; the letters are A, B, ... A letter beyond is no choice.
        texts: the row's column with the texts of the choices, a list in their order: an answer that
            names no letter chooses by the text that stands in its box, in `<answer>`, behind
            `answer is`, or as the last line. Words are compared as in `ExactMatch`, numbers and
            formulas as they are written. "": only letters choose.
    Raises: ValueError: in a call: the row's answer is none of the letters, or the row has no such
        column.
    """

    def __init__(self, choices: int = 4, *, texts: str = "") -> None:
        self.texts = texts
        if not 2 <= choices <= len(string.ascii_uppercase):
            raise ValueError(f"choices={choices}: expected 2 to {len(string.ascii_uppercase)}")
        self.letters = string.ascii_uppercase[:choices]

    def __call__(self, prompt: Mapping[str, Any], completion: str) -> float:
        references = self.reference(prompt)
        chosen = self.chosen(completion)
        if chosen is None and self.texts:
            chosen = self._chosen_by_text(prompt, without_reasoning(completion))
        return float(chosen in references)

    def reference(self, row: Mapping[str, Any]) -> list[str]:
        """The letters of which each is a right choice."""
        if self.texts and not isinstance(row.get(self.texts), list | tuple):
            raise ValueError(f"column {self.texts!r}: expected a list of the choices' texts")
        references = [text.strip().strip("()").upper() for text in _texts(row)]
        for text in references:
            if len(text) != 1 or text not in self.letters:
                raise ValueError(f"answer {text!r}: expected one letter of {self.letters}")
        return references

    def vote(self, completion: str) -> str | None:
        """The letter that a completion chooses."""
        return self.chosen(completion)

    def chosen(self, completion: str) -> str | None:
        """The letter that a completion chooses; None: it chooses none."""
        text = without_reasoning(completion)
        for sign in _CHOSEN:
            found = [(*it.span(), it[1]) for it in sign.finditer(text) if it[1] in self.letters]
            if found:
                letters = {*last_together(text, found), *self._beside(text, found[-1][1])}
                return letters.pop() if len(letters) == 1 else None
        lines = text.strip().splitlines()
        alone = _ALONE.fullmatch(lines[-1]) if lines else None
        return alone[1] if alone and alone[1] in self.letters else None

    def _chosen_by_text(self, row: Mapping[str, Any], text: str) -> str | None:
        """The letter whose text the answer is; None: it is that of none, or of several."""
        said = next((found[-1] for sign in _SAID if (found := sign.findall(text))), None)
        lines = text.strip().splitlines()
        given = (lines[-1] if lines else "") if said is None else said
        before = _BEFORE_TEXT.fullmatch(given)

        def is_named(letter: str, choice: str) -> bool:
            if before is None or choice.lstrip().startswith(before[1]):
                return _is_same(given, choice)
            return before[1] == letter and _is_same(before[2], choice)

        choices = zip(self.letters, map(str, row[self.texts]), strict=False)
        named = [letter for letter, choice in choices if is_named(letter, choice)]
        return named[0] if len(named) == 1 else None

    def _beside(self, text: str, end: int) -> list[str]:
        """Letters that are named together with the one that ends there."""
        letters = []
        while (other := _ANOTHER.match(text, end)) and other[1] in self.letters:
            letters.append(other[1])
            end = other.end()
        return letters


def _is_same(given: str, choice: str) -> bool:
    """Whether both are the same text; of numbers and formulas punctuation is a part."""
    given, choice = (_WORDS_IN_FORMULAS.sub(r"\1", it) for it in (given, choice))
    plain, other = (
        " ".join(it.casefold().split()).lstrip(" *$").rstrip(" .,*$") for it in (given, choice)
    )
    if plain == other or _IN_FORMULAS.search(plain + other):
        return plain == other != ""
    words = normalized_words(given)
    return words == normalized_words(choice) != ""


def _texts(row: Mapping[str, Any]) -> Sequence[str]:
    """The texts of which each is a right answer.

    Raises: ValueError: there is none, an empty list, or something else than texts.
    """
    answer = right_answer_of(row)
    texts = [answer] if isinstance(answer, str) else answer
    if (
        not isinstance(texts, list | tuple)
        or not texts
        or not all(isinstance(it, str) for it in texts)
    ):
        raise ValueError(f"answer: expected a text, or a list of texts, got {answer!r:.80}")
    return texts
