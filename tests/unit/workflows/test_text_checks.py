"""Texts that tokens do not hold, and answers that cannot end: told of broken tokenizers alone."""

from __future__ import annotations

import re
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from tokenizer_families import BROKEN, FAMILIES, RARE, TEXTS, Made

from areal_sc.config.schema import GenerationConfig
from areal_sc.engines.tokenizer import check_ends, load_tokenizer
from areal_sc.errors import ConfigError
from areal_sc.workflows.text import encode_chat, encode_text
from areal_sc.workflows.text_checks import MAX_JUDGED, PromptTexts, lost_from, why_endless

SMOLLM = Path(__file__).parents[3] / ".venv-models" / "SmolLM2-135M-Instruct"


def told(folder: Path, sampling: GenerationConfig | None = None) -> str:
    """What the dry run refuses the tokenizer of a model's folder for, "" where it does not.

    Prompts are plain, and in the chat format where there is one.
    """
    tokenizer = load_tokenizer(folder)
    sampling = sampling or GenerationConfig()
    try:
        ends = check_ends(folder, tokenizer, sampling)
    except ConfigError as error:
        return str(error)
    for encode in (encode_text, encode_chat)[: 1 + bool(tokenizer.chat_template)]:
        texts = PromptTexts(tokenizer)
        for text in (*TEXTS, RARE):
            tokens = encode(tokenizer, text)
            if not sampling.stop and (why := why_endless(tokenizer, tokens, ends)):
                return why
            texts.judge({"prompt": text, "answer": "42", "parts": [1, "other"]}, tokens)
        try:
            texts.check()
        except ConfigError as error:
            return str(error)
    return ""


@pytest.fixture
def saved(tmp_path: Path) -> Any:
    def save(made: Made) -> Path:
        made.save(tmp_path)
        return tmp_path

    return save


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_is_not_refused(family: str, saved: Any) -> None:
    assert told(saved(FAMILIES[family]())) == ""


@pytest.mark.skipif(not SMOLLM.exists(), reason="needs the real model")
def test_the_tokenizer_of_a_real_model_is_not_refused() -> None:
    assert told(SMOLLM) == ""


@pytest.mark.parametrize("broken", BROKEN)
def test_a_broken_one_is_refused_by_what_is_broken(broken: str, saved: Any) -> None:
    make, said = BROKEN[broken]
    assert re.search(said, told(saved(make())))


def test_a_stop_of_the_settings_mends_an_end(saved: Any) -> None:
    make, _ = BROKEN["a base model's end with a template for chats"]
    folder = saved(make())
    token = load_tokenizer(folder).convert_tokens_to_ids("<|im_end|>")
    assert told(folder, GenerationConfig(stop_token_ids=[token])) == ""
    assert told(folder, GenerationConfig(stop=["<|done|>"])) == ""
    make, _ = BROKEN["a template of another tokenizer"]
    assert told(saved(make()), GenerationConfig(stop=["<|im_end|>"])) == ""


def test_prompts_that_are_not_the_templates_may_have_another_end(saved: Any) -> None:
    make, _ = BROKEN["llama3 that ends as its base model"]
    tokenizer = load_tokenizer(saved(make()))
    plain = encode_text(tokenizer, "How many is 1 + 1?")
    assert why_endless(tokenizer, plain, [tokenizer.eos_token_id]) == ""


def test_what_is_lost_is_named(saved: Any) -> None:
    make, _ = BROKEN["unknown characters are the end"]
    tokenizer = load_tokenizer(saved(make()))
    assert lost_from(tokenizer, "how many is 0>") == ""
    texts = PromptTexts(tokenizer)
    for prompt in ("WIE viel?", "how many is 0>"):
        texts.judge({"prompt": prompt}, encode_text(tokenizer, prompt))
    assert texts.describe() == (
        "the model's tokenizer loses the text of 1 of 2 prompts: 'WIE viel?' comes back as "
        "'$$$ viel$': it has lost w i e ? (its tokens: $ $ $   v i e l $)"
    )


def test_a_text_that_is_not_in_the_prompt_says_nothing(saved: Any) -> None:
    make, _ = BROKEN["unknown characters are the end"]
    tokenizer = load_tokenizer(saved(make()))
    texts = PromptTexts(tokenizer)
    texts.judge({"prompt": "how", "note": "NOT SHOWN"}, encode_text(tokenizer, "how"))
    assert texts.lost == []


@pytest.mark.parametrize(("num_lost", "is_refused"), [(0, False), (8, False), (9, True)])
def test_a_set_is_refused_once_most_of_it_is_lost_for_certain(
    saved: Any, num_lost: int, is_refused: bool
) -> None:
    make, _ = BROKEN["unknown characters are the end"]
    tokenizer = load_tokenizer(saved(make()))
    texts = PromptTexts(tokenizer)
    for number in range(MAX_JUDGED):
        prompt = "WIE viel?" if number < num_lost else "how many is 0>"
        texts.judge({"prompt": prompt}, encode_text(tokenizer, prompt))
        left = MAX_JUDGED - texts.num_judged
        with pytest.raises(ConfigError) if texts.num_judged >= 9 and is_refused else nullcontext():
            texts.check(left)  # what a worker asks after each prompt
    with pytest.raises(ConfigError) if is_refused else nullcontext():
        texts.check()  # what the dry run asks at the end
