"""Prompts of too many tokens are left out of every kind of source, and counted."""

from __future__ import annotations

import itertools
import json
import logging
from pathlib import Path
from typing import Any

import datasets
import pytest
from chat_templates import QWEN, tokenizer_for

from areal_sc.errors import WorkflowError
from areal_sc.sources.load_prompts import load_prompts

TEXTS = ["a", "abc", "abcdef", "ab", "abcdefghij"]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return tokenizer_for(QWEN)


def rows_of(prompts: list[Any], folder: Path) -> Path:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps({"prompt": it, "answer": ""}) + "\n" for it in prompts))
    return path


def test_long_prompts_are_left_out_and_counted(
    tokenizer: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: Any
) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    path = rows_of(TEXTS, tmp_path)
    datasets.Dataset.from_list([{"prompt": it, "answer": ""} for it in TEXTS]).to_parquet(
        tmp_path / "rows.parquet"
    )
    limit = len(tokenizer.encode("abc"))
    short = [it for it in TEXTS if len(tokenizer.encode(it)) <= limit]
    assert short != TEXTS
    told = f"{len(TEXTS) - len(short)} of {len(TEXTS)} prompts have more than max_tokens={limit}"
    for source in (path, tmp_path / "rows.parquet"):
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            kept = load_prompts(source, max_tokens=limit, tokenizer=tokenizer)
        assert [row["prompt"] for row in kept] == short
        assert told in caplog.text, "how many"
    rows, held_out = load_prompts(path, max_tokens=limit, tokenizer=tokenizer, num_held_out=1)
    assert [row["prompt"] for row in (*rows, *held_out)] == short, "held out is what is kept"


def test_streams_tell_the_first_one(
    tokenizer: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = rows_of(TEXTS, tmp_path)
    limit = len(tokenizer.encode("abc"))
    with caplog.at_level(logging.WARNING):
        stream = load_prompts(path, streaming=True, max_tokens=limit, tokenizer=tokenizer)
        kept = [row["prompt"] for row in itertools.islice(stream, 10)]
    assert kept == [it for it in TEXTS if len(tokenizer.encode(it)) <= limit]
    assert caplog.text.count("is left out") == 1


def test_messages_count_with_their_template(tokenizer: Any, tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "abc"}]
    path = rows_of([chat], tmp_path)
    whole = len(tokenizer.apply_chat_template(chat, add_generation_prompt=True)["input_ids"])
    assert len(list(load_prompts(path, max_tokens=whole, tokenizer=tokenizer))) == 1
    with pytest.raises(WorkflowError, match=f"all 1 prompts have more than max_tokens={whole - 1}"):
        load_prompts(path, max_tokens=whole - 1, tokenizer=tokenizer)


def test_a_limit_without_what_it_needs_is_refused(tokenizer: Any, tmp_path: Path) -> None:
    path = rows_of(["a"], tmp_path)
    with pytest.raises(WorkflowError, match=r"tokenizer=config\.actor\.path"):
        load_prompts(path, max_tokens=3)
    with pytest.raises(WorkflowError, match="max_tokens=0"):
        load_prompts(path, max_tokens=0, tokenizer=tokenizer)
    with pytest.raises(WorkflowError, match="of rows with a prompt alone"):
        load_prompts(path, prompt_key="", max_tokens=3, tokenizer=tokenizer)
    with pytest.raises(WorkflowError, match="tokenizer='/nowhere'"):
        load_prompts(path, max_tokens=3, tokenizer="/nowhere")
