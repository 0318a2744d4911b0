"""The texts of recorded rows, of many at once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from tokenizers import Tokenizer, decoders

from areal_sc.records.recorded_rows import RecordedGroup, RecordedTokens

Texts = tuple[bytes, bytes]
"""What stands before the first sampled token of a row, and all that follows, in UTF-8."""


class TextReader:
    """Reads tokens as bytes of text.

    Args:
        tokenizer: None: a prompt is the row of the dataset, and there are no answers.
    """

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self.tokenizer = tokenizer
        self._bytes_of = None if tokenizer is None else _bytes_of_tokens(tokenizer)

    def texts(
        self, new: Sequence[tuple[RecordedGroup, Sequence[RecordedTokens]]]
    ) -> Iterator[list[Texts]]:
        """The texts of each group's rows, then of its episodes that have none.

        Args:
            new: groups, and the tokens of their rows.
        """
        wanted: dict[bytes, np.ndarray] = {}  # each prompt of a group once
        parts = list[list[tuple[bytes, bytes]]]()
        for _, tokens in new:
            of_group = []
            for row in tokens if self.tokenizer is not None else ():
                trained = row.loss_mask.nonzero()[0]
                begin = int(trained[0]) if len(trained) else len(row.loss_mask)
                pair = row.input_ids[:begin], row.input_ids[begin:]
                of_group.append((pair[0].tobytes(), pair[1].tobytes()))
                wanted.update(zip(of_group[-1], pair, strict=True))
            parts.append(of_group)
        found = dict(zip(wanted, self._read([*wanted.values()]), strict=True))
        for (group, _), of_group in zip(new, parts, strict=True):
            prompt = group.prompt.encode()
            texts = [(found[first], found[second]) for first, second in of_group]
            texts += [(prompt, b"")] * (len(group.rows) - len(texts))
            texts += [(prompt, rejection.message.encode()) for rejection in group.rejected]
            yield texts + [(prompt, b"")] * group.has_only_begun

    def _read(self, rows: Sequence[np.ndarray]) -> list[bytes]:
        if self.tokenizer is None or not rows:
            return []
        if self._bytes_of is not None and max(ids.max(initial=0) for ids in rows) < len(
            self._bytes_of
        ):
            # a third of the time that the tokenizer takes
            return [b"".join(map(self._bytes_of.__getitem__, _numbers(ids))) for ids in rows]
        return [text.encode() for text in decoded(rows, self.tokenizer)]


def decoded(rows: Sequence[np.ndarray], tokenizer: Tokenizer) -> list[str]:
    """The text of each of some rows of tokens; what is the number of none is left out.

    Args:
        rows: of each [T] int32.
    """
    numbers = [_numbers(ids) for ids in rows]
    found: list[str] = tokenizer.decode_batch(numbers, skip_special_tokens=False)
    return found


def _numbers(ids: np.ndarray) -> list[int]:
    found: list[int] = ids[ids >= 0].tolist()
    return found


def _bytes_of_tokens(tokenizer: Tokenizer) -> list[bytes] | None:
    """What each token stands for, where that is bytes whatever stands beside it; else None."""
    if not isinstance(tokenizer.decoder, decoders.ByteLevel):
        return None
    # those that are seen stand for themselves, the others for characters from 256 on
    seen = [*range(33, 127), *range(161, 173), *range(174, 256)]
    unseen = [number for number in range(256) if number not in seen]
    number_of = {chr(number): number for number in seen}
    number_of |= {chr(256 + place): number for place, number in enumerate(unseen)}
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    found = [b""] * (max(vocabulary.values(), default=-1) + 1)
    for token, number in vocabulary.items():
        is_spelled = all(name in number_of for name in token)
        found[number] = bytes(number_of[name] for name in token) if is_spelled else token.encode()
    return found
