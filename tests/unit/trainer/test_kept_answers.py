"""Answers that stay in a folder: the last one of each place, and how a reader sees them."""

from __future__ import annotations

from pathlib import Path

from areal_sc.records.samples import Place
from areal_sc.rejection import Rejection, RejectionKind
from areal_sc.system.json_lines import JsonLines
from areal_sc.trainer.kept_answers import (
    ANSWERS,
    KeptAnswer,
    as_samples,
    read_answers,
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
