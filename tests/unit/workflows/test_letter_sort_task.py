"""The letter-sort task has the statistics that the example relies on."""

from __future__ import annotations

import importlib.util
import json
import statistics
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

EXAMPLES = Path(__file__).parents[3] / "examples"


@pytest.fixture(scope="module")
def task() -> ModuleType:
    spec = importlib.util.spec_from_file_location("task", EXAMPLES / "letter_sort_task.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_prompts_are_distinct_letters_and_their_answer(task: ModuleType) -> None:
    prompts = task.LetterSortPrompts(seed=1)
    rows = [prompts[i * 997] for i in range(2000)]
    for row in rows:
        letters = row["prompt"].removesuffix("=")
        assert len(set(letters)) == len(letters)
        assert row["answer"] == "".join(sorted(letters))
    lengths = [len(row["answer"]) for row in rows]
    assert statistics.median(lengths) == 7
    assert (min(lengths), max(lengths)) == (2, 26)
    assert len({row["prompt"] for row in rows if len(row["answer"]) > 6}) == sum(
        n > 6 for n in lengths
    )


def test_prompts_depend_on_seed_and_index_only(task: ModuleType) -> None:
    again = task.LetterSortPrompts(seed=1, size=10)
    assert [again[i] for i in range(10)] == [task.LetterSortPrompts(1)[i] for i in range(10)]
    assert again[3] != task.LetterSortPrompts(seed=2)[3]
    with pytest.raises(IndexError, match=r"prompts 0\.\.9, not 10"):
        again[10]


def test_about_a_quarter_of_the_demonstrations_is_right(task: ModuleType) -> None:
    prompts = task.LetterSortPrompts(seed=3)
    answers = [prompts[i]["answer"] for i in range(4000)]
    written = [task.demonstration(answer, 3, i) for i, answer in enumerate(answers)]
    pairs = list(zip(written, answers, strict=True))
    assert sum(a == b for a, b in pairs) / 4000 == pytest.approx(0.245, abs=0.025)
    assert sum(len(a) < len(b) for a, b in pairs) / 4000 == pytest.approx(0.1, abs=0.02)
    untouched = [(a, b) for a, b in pairs if sorted(a) == list(b)]
    share = sum(a == b[::-1] for a, b in untouched) / len(untouched)
    assert share == pytest.approx(0.6, abs=0.04)


def test_demonstrations_are_tokens_of_prompt_and_answer(task: ModuleType) -> None:
    row = task.LetterSortDemonstrations(seed=3)[5]
    prompt = task.LetterSortPrompts(seed=3)[5]
    text = "".join(task.VOCABULARY[token] for token in row["input_ids"])
    written = task.demonstration(prompt["answer"], 3, 5)
    assert text == f"{prompt['prompt']}{written}$"
    assert row["loss_mask"] == [False] * len(prompt["prompt"]) + [True] * (len(written) + 1)


def test_the_control_reward_tells_nothing_about_the_answer(task: ModuleType) -> None:
    prompts = task.LetterSortPrompts(seed=4)
    rows = [prompts[i] for i in range(4000)]
    right = statistics.mean(task.shuffled_reward(row, row["answer"]) for row in rows)
    wrong = statistics.mean(task.shuffled_reward(row, row["answer"][::-1]) for row in rows)
    assert right == pytest.approx(0.2, abs=0.025)
    assert wrong == pytest.approx(0.2, abs=0.025)
    assert all(task.letter_sort_reward(row, row["answer"]) == 1.0 for row in rows)
    assert all(task.letter_sort_reward(row, row["answer"][::-1]) == 0.0 for row in rows)


def test_the_untrained_folder_is_a_small_decoder_and_its_tokenizer(
    task: ModuleType, tmp_path: Path
) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    task.write_untrained_folder(tmp_path)
    config = AutoConfig.from_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_config(config)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert sum(p.numel() for p in model.parameters()) == 336_192
    assert len(tokenizer) == config.vocab_size == 30
    token_ids = tokenizer.encode("szr=rsz$", add_special_tokens=False)
    assert [task.VOCABULARY[token] for token in token_ids] == list("szr=rsz$")
    assert tokenizer.decode(token_ids) == "szr=rsz$"
    assert tokenizer.decode(token_ids, skip_special_tokens=True) == "szr=rsz"
    assert token_ids[-1] == tokenizer.eos_token_id == config.eos_token_id
    assert config.max_position_embeddings >= task.MAX_TOKENS


def test_the_task_is_imported_without_torch() -> None:
    code = "import sys, letter_sort_task; sys.exit('torch' in sys.modules)"
    environment = {"PYTHONPATH": f"{EXAMPLES}:{EXAMPLES.parent}"}
    finished = subprocess.run([sys.executable, "-c", code], env=environment, timeout=60)
    assert finished.returncode == 0


def test_the_shipped_questions_have_the_answers_they_claim() -> None:
    lines = (EXAMPLES / "data" / "arithmetic.jsonl").read_text().splitlines()
    assert len(lines) == 64
    for line in lines:
        row = json.loads(line)
        left, operator, right = row["prompt"].removeprefix("What is ").removesuffix("?").split()
        a, b = int(left), int(right)
        expected = {"+": a + b, "-": a - b, "*": a * b, "/": a / b}[operator]
        assert float(row["answer"]) == expected
