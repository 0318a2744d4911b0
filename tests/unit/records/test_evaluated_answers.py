"""Answers of evaluations are read again as they were recorded."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from recorded_groups import answered, recorder_of, trajectory

from areal_sc.records.reading import evaluated_answers, rows
from areal_sc.records.record_files import Series, record_files
from areal_sc.records.recorded_calls import RecordedCall, RecordedMessage
from areal_sc.records.recorded_rows import (
    PlayedAnswer,
    RecordedRejection,
    pack_answers,
    unpack_answers,
    unpack_contents,
)

REJECTION = RecordedRejection("timeout", "too long", 1)


def test_answers_come_back(tmp_path: Path) -> None:
    given = [
        answered(3, [trajectory(1), trajectory(2, 25)], evaluation="math/periodic", step=8),
        answered(3, [trajectory(3)], sample=1, evaluation="math/periodic", step=8),
        answered(4, [], rejected=REJECTION),
    ]
    recorder = recorder_of(tmp_path)
    for it in given:
        recorder.add_answer(it)
    recorder.close()
    back = list(evaluated_answers(tmp_path))
    assert len(back) == len(given)
    for it, (was, its_rows, _) in zip(back, given, strict=True):
        for name in ("evaluation", "step", "dataset", "index", "sample", "prompt", "rejected"):
            assert getattr(it.answer, name) == getattr(was, name)
        for tokens, row in zip(it.tokens, its_rows, strict=True):
            assert tokens.input_ids.tolist() == list(row.input_ids)
            assert tokens.loss_mask.tolist() == list(row.loss_mask)
            assert tokens.versions.tolist() == list(row.versions)
            expected = np.float16(row.behavior_logprobs).tolist()
            assert tokens.behavior_logprobs.tolist() == expected
        assert [it.reward for it in it.answer.rows] == [row.reward for row in its_rows]
    assert list(rows(tmp_path)) == [], "they are no rows of training"


def test_calls_of_answers_stay_apart() -> None:
    calls = [
        RecordedCall(
            number=0,
            after=-1,
            new_row="",
            model="",
            began=1.0,
            took_s=1.0,
            num_given=5,
            num_sampled=35,
            given=(),
            answer=RecordedMessage("assistant", text),
        )
        for text in ("first", "second")
    ]
    given = [answered(index, [trajectory(index)]) for index in range(3)]
    for (_, (row,), _), call in zip(given, calls, strict=False):  # the third one has none
        row.calls = (call,)
    head, body = pack_answers(given)
    back = list(unpack_contents(body, unpack_answers(head)))
    assert [it.calls for it in back] == [[(calls[0],)], [(calls[1],)], [()]]


def test_where_rows_are_thinned_the_same_prompts_stay(tmp_path: Path) -> None:
    for keep, kept in (("all", range(40)), ("sample", (0, 5, 16, 32)), ("none", ())):
        run = tmp_path / keep
        run.mkdir()
        recorder = recorder_of(run, keep=keep)
        for index in range(40):
            recorder.add_answer(answered(index, [], rejected=REJECTION if index == 5 else None))
        recorder.close()
        assert [it.answer.index for it in evaluated_answers(run)] == list(kept)


def test_many_tokens_are_several_blocks(tmp_path: Path) -> None:
    recorder = recorder_of(tmp_path)
    long = trajectory(1, 30_000)
    for index in range(7):
        recorder.add_answer(answered(index, [long]))
    recorder.close()
    assert [it.answer.index for it in evaluated_answers(tmp_path)] == [*range(7)]
    (file,) = [it for it in record_files(tmp_path / "records") if it.series is Series.evaluated]
    assert file.path.read_bytes().count(b"\xa5AREC\r\n\x1a") >= 3


def test_what_is_something_else_is_said() -> None:
    with pytest.raises(ValueError, match="evaluated answers cannot be read"):
        unpack_answers(b"something")
    head, body = pack_answers([answered(0, [trajectory(0)])])
    (answer,) = unpack_answers(head)
    with pytest.raises(ValueError, match="expected 80 tokens"):
        list(unpack_contents(body, [answer, answer]))


def test_an_answer_costs_little_more_than_its_tokens() -> None:
    """Alike ones share what their heads have in common."""
    given = [
        PlayedAnswer(it.answer, it.rows) for it in (answered(n, [trajectory(n)]) for n in range(64))
    ]
    sizes = [sum(map(len, pack_answers(given[:number]))) for number in (1, 64)]
    assert sizes[1] < 0.75 * 64 * sizes[0]
