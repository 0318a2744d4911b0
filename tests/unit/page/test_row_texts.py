"""Texts of tokens are those that the tokenizer gives, by whichever way they are read."""

from __future__ import annotations

import random

import numpy as np
import pytest
from msgspec import structs
from recorded_groups import played
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from areal_sc.page.row_texts import TextReader, decoded
from areal_sc.records.recorded_rows import RecordedRow, RecordedTokens

TEXT = "Straße, привет, 数えて\n\tprint('<|end|>')  e\u0301 \U0001f600 " * 3


@pytest.fixture(scope="module")
def of_bytes() -> Tokenizer:
    """As most models have it: byte pairs, and tokens that were added."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=320, show_progress=False, initial_alphabet=alphabet)
    made.train_from_iterator([TEXT], trainer)
    made.add_special_tokens([AddedToken("<|end|>"), AddedToken("<ünd so>")])
    made.add_tokens([AddedToken("数")])
    return made


def texts_of(tokenizer: Tokenizer, *rows: list[int]) -> list[str]:
    """By `TextReader`, of rows without a prompt."""
    reader = TextReader(tokenizer)
    made = [np.array(ids, np.int32) for ids in rows]
    tokens = [RecordedTokens(it, np.ones(len(it), bool), it * 0.0, it * 0) for it in made]
    numbers = tuple(RecordedRow(it, 0, len(row), 0.0, (), {}) for it, row in enumerate(rows))
    group = structs.replace(played(0).group, rows=numbers)
    (found,) = reader.texts([(group, tokens)])
    return [answer.decode(errors="replace") for _, answer in found]


def test_text_of_byte_pairs(of_bytes: Tokenizer) -> None:
    ids = of_bytes.encode(TEXT).ids
    assert len({*ids}) > 10
    assert texts_of(of_bytes, ids) == [TEXT]
    rng = random.Random(0)
    most = of_bytes.get_vocab_size()
    drawn = [[rng.randrange(most) for _ in range(50)] for _ in range(200)]
    expected = [of_bytes.decode(ids, skip_special_tokens=False) for ids in drawn]
    assert texts_of(of_bytes, *drawn) == expected


def test_numbers_of_no_token_are_left_out(of_bytes: Tokenizer) -> None:
    ids = of_bytes.encode("a b").ids
    assert texts_of(of_bytes, [-1, *ids, 9999]) == ["a b"]
    assert texts_of(of_bytes, [-1, *ids]) == ["a b"]
    assert decoded([np.array([-5, *ids, 9999], np.int32)], of_bytes) == ["a b"]


def test_text_of_other_tokenizers() -> None:
    words = Tokenizer(models.WordLevel({"▁a": 0, "▁b": 1}))
    words.decoder = decoders.Metaspace()
    assert texts_of(words, [0, 1, 0], []) == ["a b a", ""]
