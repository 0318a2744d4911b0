"""The texts of recorded rows, of many at once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tokenizers import Tokenizer

from areal_sc.records.recorded_rows import RecordedGroup, RecordedTokens

Texts = tuple[bytes, bytes]
"""What stands before the first sampled token of a row, and all that follows, in UTF-8."""


def texts_of_groups(
    new: Sequence[tuple[RecordedGroup, list[RecordedTokens] | None]], tokenizer: Tokenizer | None
) -> Iterator[list[Texts]]:
    """The texts of each group's rows, then of its episodes that have none.

    Args:
        new: groups, and the tokens of their rows; None: these are damaged.
        tokenizer: None: a prompt is the row of the dataset, and there are no answers.
    """
    wanted: dict[bytes, list[int]] = {}  # each prompt of a group once
    parts = list[list[tuple[bytes, bytes]]]()
    for _, tokens in new:
        of_group = []
        for row in tokens or () if tokenizer is not None else ():
            trained = row.loss_mask.nonzero()[0]
            begin = int(trained[0]) if len(trained) else len(row.loss_mask)
            pair = row.input_ids[:begin], row.input_ids[begin:]
            of_group.append((pair[0].tobytes(), pair[1].tobytes()))
            for key, ids in zip(of_group[-1], pair, strict=True):
                if key not in wanted:
                    wanted[key] = ids.tolist()
        parts.append(of_group)
    found = decoded(list(wanted.values()), tokenizer) if tokenizer and wanted else []
    texts_of = {key: text.encode() for key, text in zip(wanted, found, strict=True)}
    for (group, _), of_group in zip(new, parts, strict=True):
        prompt = group.prompt.encode()
        texts = [(texts_of[first], texts_of[second]) for first, second in of_group]
        texts += [(prompt, b"")] * (len(group.rows) - len(texts))
        yield texts + [(prompt, rejection.message.encode()) for rejection in group.rejected]


def decoded(rows: Sequence[list[int]], tokenizer: Tokenizer) -> list[str]:
    """The text of each of some lists of tokens; what is the number of none is left out."""
    try:
        found: list[str] = tokenizer.decode_batch(rows, skip_special_tokens=False)
    except (OverflowError, TypeError):  # a number is below 0
        found = [
            tokenizer.decode([it for it in ids if it >= 0], skip_special_tokens=False)
            for ids in rows
        ]
    return found
