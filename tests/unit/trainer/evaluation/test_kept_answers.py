"""Answers that stay in a folder: the last one of each place, and how a reader sees them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from areal_sc.errors import CommandError
from areal_sc.records.samples import Place
from areal_sc.rejection import Rejection, RejectionKind
from areal_sc.system.durable import write_atomic
from areal_sc.system.json_lines import JsonLines
from areal_sc.trainer.evaluation import kept_answers
from areal_sc.trainer.evaluation.kept_answers import (
    ANSWERS,
    KeptAnswer,
    as_samples,
    check_prompts,
    check_settings,
    note_settings,
    read_answers,
    replace_answers,
    write_answers,
)
from areal_sc.workers.calls import EvaluatedText, EvaluationReply, KeptCompletion

TEXT = EvaluatedText("1+1=", "2$", (KeptCompletion([5, 1], "stop", 0.5, ("$",)),))
RIGHT = EvaluationReply(1.0, {"accuracy": 1.0}, (3, 4), vote="2", text=TEXT)
REJECTED = EvaluationReply(
    None, rejection=Rejection(RejectionKind.timeout, "too slow", place="task.py:3"), text=TEXT
)


def test_answers_come_back_equal_and_the_last_one_of_a_place_counts(tmp_path: Path) -> None:
    assert read_answers(tmp_path) == []
    first = KeptAnswer.of("a", 0, 0, REJECTED)
    second, other = KeptAnswer.of("a", 0, 0, RIGHT), KeptAnswer.of("a", 0, 1, REJECTED)
    lines = JsonLines(tmp_path / ANSWERS)
    lines.append(first, other, second)
    lines.close()
    with (tmp_path / ANSWERS).open("a") as file:
        file.write('{"set": "a", "pro')  # killed here
    found = read_answers(tmp_path)
    assert found == [second, other]
    assert [it.reply for it in found] == [RIGHT, REJECTED]
    assert found[1].rejected == "timeout: task.py:3"
    write_answers(tmp_path, found)
    assert read_answers(tmp_path) == found


def test_settings_count_where_there_are_answers(tmp_path: Path) -> None:
    first = {"model": "m", "tokens": 1, "rewards of a": 1}
    note_settings(tmp_path, check_settings(tmp_path, first))
    note_settings(tmp_path, check_settings(tmp_path, {**first, "tokens": 2}))
    write_answers(tmp_path, [KeptAnswer.of("a", 0, 0, RIGHT)])
    other = {"model": "./m", "tokens": 2, "rewards of a": 2, "rewards of b": 1}
    assert check_settings(tmp_path, other, may_differ=("model", "rewards of ")) == other
    for _ in range(2):  # comparing does not note anything
        with pytest.raises(CommandError, match=r"other settings \(rewards of a: 1 -> 2\)"):
            check_settings(tmp_path, other, may_differ=("model",))


def test_killed_between_answers_and_settings_they_name_no_rewards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = {"model": "m", "rewards of a": 1, "rewards of b": 1}
    new = {**old, "rewards of a": 2}
    note_settings(tmp_path, old)
    write_answers(tmp_path, [KeptAnswer.of("a", 0, 0, REJECTED)])
    later = [KeptAnswer.of("a", 0, 0, RIGHT)]
    for num_files in (1, 2):  # written before the kill
        monkeypatch.setattr(kept_answers, "write_file", killed_after(num_files))
        with pytest.raises(KeyboardInterrupt):
            replace_answers(tmp_path, later, new)
        for settings in (old, new):
            with pytest.raises(CommandError, match=r"rewards of a: None -> .*--rescore"):
                check_settings(tmp_path, settings)
        monkeypatch.undo()
    assert check_settings(tmp_path, new, may_differ=("rewards of ",)) == new
    replace_answers(tmp_path, later, new)
    assert read_answers(tmp_path) == later
    assert check_settings(tmp_path, new) == new


def killed_after(num_files: int) -> Callable[[Path, bytes], None]:
    left = [None] * num_files

    def write(path: Path, content: bytes) -> None:
        if not left:
            raise KeyboardInterrupt
        left.pop()
        write_atomic(path, content)

    return write


def test_prompts_of_two_folders_are_compared_by_their_content(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"

    def note(folder: Path, path: str, content: str, **others: object) -> None:
        folder.mkdir(exist_ok=True)
        a_set = {"prompts": path, "template": "", "temperature": None, **others}
        rewards = {"reward": path, "prompts": {path: content}}
        note_settings(folder, {"set a": a_set, "rewards of a": rewards})

    note(one, "a.jsonl", "1f")
    note(two, "b.jsonl", "1f", temperature=0.5)
    check_prompts(one, two, "a")
    note(two, "a.jsonl", "2f")
    with pytest.raises(CommandError, match=r"other prompts of a .*2f.* there, .*1f.* here"):
        check_prompts(one, two, "a")
    note(two, "a.jsonl", "1f", template="{q}")
    with pytest.raises(CommandError, match=r"template: \{q\} there,  here"):
        check_prompts(one, two, "a")


def test_samples_show_answers_to_a_prompt_together_with_what_was_rejected() -> None:
    wrong = EvaluationReply(0.25, {}, (3, 3), text=TEXT)
    answers = [
        KeptAnswer.of("b", 0, 0, RIGHT),
        KeptAnswer.of("a", 1, 0, EvaluationReply(None, rejection=REJECTED.rejection)),
        KeptAnswer.of("a", 0, 0, wrong),
        KeptAnswer.of("a", 0, 1, RIGHT),
        KeptAnswer.of("a", 0, 2, REJECTED),
    ]
    found = as_samples(answers)
    assert [(it.group, it.place, it.reward) for it in found] == [
        (0, Place.best, 1.0),
        (0, Place.worst, 0.25),
        (0, Place.worst, 0.0),
        (1, Place.equal, 0.0),
        (2, Place.equal, 1.0),
    ]
    assert [it.answer for it in found] == [
        "2$",
        "2$",
        "[rejected: timeout: task.py:3] 2$",
        "[rejected: timeout: task.py:3] ",
        "2$",
    ]
    assert (found[0].num_tokens, found[0].prompt) == (2, "1+1=")
    assert found[3].prompt == "prompt 1 of a"
