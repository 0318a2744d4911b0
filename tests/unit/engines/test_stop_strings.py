"""Where a stop string is complete, with tokenizers of several kinds; and what the text is then."""

from __future__ import annotations

import random
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from areal_sc.config.schema import GenerationConfig
from areal_sc.engines.base import Completion
from areal_sc.engines.request_checks import check_sampling
from areal_sc.engines.stop_strings import StopStrings
from areal_sc.errors import ConfigError
from areal_sc.workflows.text import decode_completion

TEXT = " Q: 2 + 2?\n\nA: vier, é, 中文, 🛑🛑 and </answer>.\n"
PIECES = ("\n\n", "A:", " vier", "</ans", "wer>.", "?\n", " a", "nd", " 🛑")
BYTE_LEVEL = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)


def symbols_of(text: str) -> str:
    """One symbol a byte."""
    [(symbols, _)] = BYTE_LEVEL.pre_tokenize_str(text)
    return symbols


def byte_level() -> Any:
    """As those of GPT-2, Qwen and Llama 3. One token is a space and half a character."""
    pieces = [*map(symbols_of, PIECES), symbols_of(" 🛑")[:3]]
    tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *pieces]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, []))
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, extra_special_tokens=["<|x|>"])


def byte_fallback() -> Any:
    """As that of Llama 2: characters without a token are bytes; a text's first space is dropped."""
    letters = sorted({letter for letter in TEXT if letter < "\x7f"})
    tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    tokens += [piece.replace(" ", "▁") for piece in [*letters, *PIECES[:-1]]]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, []))
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(content=" ", left=1),
        ]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, extra_special_tokens=["<|x|>"])


def any_tokens(tokenizer: Any, text: str, rng: random.Random) -> list[int]:
    """Tokens of the text, cut at random; special ones may stand between them."""
    vocabulary, token_ids = tokenizer.get_vocab(), list[int]()
    special = vocabulary.pop("<|x|>")
    has_bytes = "<0x00>" in vocabulary
    rest = text.replace(" ", "▁") if has_bytes else symbols_of(text)
    while rest:
        pieces = [rest[:n] for n in range(1, 9) if rest[:n] in vocabulary]
        piece = rng.choice(pieces) if pieces else rest[0]
        names = [piece] if pieces else [f"<0x{byte:02X}>" for byte in piece.encode()]
        token_ids += [vocabulary[name] for name in names]
        token_ids += [special] * rng.choice([0] * 9 + [1, 20])
        rest = rest[len(piece) :]
    return token_ids


def decoded(tokenizer: Any, token_ids: list[int]) -> str:
    return str(
        tokenizer.decode(token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    )


@pytest.mark.parametrize("make_tokenizer", [byte_level, byte_fallback])
def test_the_first_token_that_completes_one_is_found(make_tokenizer: Any) -> None:
    tokenizer, rng, num_found = make_tokenizer(), random.Random(0), 0
    for _ in range(30):
        text = "".join(rng.choice([TEXT, TEXT[3:], " 🛑", "é" * 9]) for _ in range(2))
        token_ids = any_tokens(tokenizer, text, rng)
        starts = [rng.randrange(1, len(text)) for _ in range(2)]
        stops = [text[start : start + rng.choice([1, 2, 5, 20])] for start in starts] + ["Q:2"]
        texts = [decoded(tokenizer, token_ids[: n + 1]) for n in range(len(token_ids))]
        first = next((n for n, t in enumerate(texts) if any(s in t for s in stops)), None)
        reader = StopStrings(tokenizer, stops)
        assert next((n for n, t in enumerate(token_ids) if reader.completes(t)), None) == first
        if first is None:
            continue
        num_found += 1
        answer = Completion(token_ids[: first + 1], [], [], "stop", 1.0, tuple(stops))
        before = min(texts[first].find(s) for s in stops if s in texts[first])
        assert decode_completion(tokenizer, answer) == texts[first][:before]
    assert num_found > 20


def test_what_is_no_text_is_not_waited_for() -> None:
    """Bytes of no character are read in a time that does not grow, and hide nothing."""
    tokenizer = byte_level()
    vocabulary = tokenizer.get_vocab()
    reader = StopStrings(tokenizer, ["ab"])
    junk = vocabulary[symbols_of("é")[1]]  # the second byte of two
    for token in [vocabulary["a"], *[junk] * 500, vocabulary["b"], vocabulary["a"]]:
        assert not reader.completes(token)
        assert len(reader._text._token_ids) < 50
    assert reader.completes(vocabulary["b"])


def test_an_answer_that_ended_otherwise_has_its_whole_text() -> None:
    tokenizer, stop = byte_level(), ("b\n",)
    token_ids = [tokenizer.get_vocab()[letter] for letter in "abc"]
    for reason, text in (("length", "abc"), ("stop", "ab")):  # a stop token is no text
        assert decode_completion(tokenizer, Completion(token_ids, [], [], reason, 1, stop)) == text


def test_a_special_token_is_no_stop_string() -> None:
    said = (
        r"generation\.stop: '<\|x\|>' is a special token of the model.*generation\.stop_token_ids"
    )
    with pytest.raises(ConfigError, match=said):
        StopStrings(byte_level(), ["\n", "end<|x|>"])


@pytest.mark.parametrize("stop", ["\n", [""], ["x" * 65], ["x"] * 17, [1], None])
def test_what_is_no_list_of_stop_strings(stop: Any) -> None:
    with pytest.raises(ConfigError, match=r"generation\.stop must be at most 16 strings of 1 to 6"):
        check_sampling(GenerationConfig(stop=stop))
    check_sampling(GenerationConfig(stop=["x" * 64] * 16))
