"""What a process records: read again as it was, within its limit, and never at the run's cost."""

from __future__ import annotations

import errno
import logging
import os
import signal
import subprocess
import sys
import threading
import weakref
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from recorded_groups import MEBI, add_span, add_trained, played, recorder_of, trajectory

from areal_sc.page.time_line import TimeLine
from areal_sc.records import record_files as record_files_module
from areal_sc.records import recorder as recorder_module
from areal_sc.records.blocks import RecordBlock, block, read_blocks, read_body
from areal_sc.records.reading import rows, spans, trace_events, trained_rows
from areal_sc.records.record_files import Series, record_files
from areal_sc.records.recorded_calls import RecordedCall, RecordedMessage
from areal_sc.records.recorded_rows import RecordedGroup, RecordedRejection, unpack_group
from areal_sc.records.spans import LOST


def test_rows_come_back(tmp_path: Path) -> None:
    given = {1: [trajectory(1), trajectory(2, 21)], 17: [trajectory(3, 22)]}
    recorder = recorder_of(tmp_path)
    for number, episodes in given.items():
        recorder.add_group(played(number, *([it] for it in episodes)))
    recorder.close()
    back = sorted(rows(tmp_path), key=lambda it: (it.group, it.episode))
    assert [(it.group, it.episode) for it in back] == [(1, 0), (1, 1), (17, 0)]
    for row, was in zip(back, [*given[1], *given[17]], strict=True):
        assert row.input_ids.tolist() == list(was.input_ids)
        assert row.loss_mask.tolist() == list(was.loss_mask)
        assert row.versions.tolist() == list(was.versions)
        assert row.behavior_logprobs.tolist() == np.float16(was.behavior_logprobs).tolist()
        assert (row.reward, row.metrics) == (was.reward, was.metrics)
        assert (row.prompt, row.index, row.began) == ("{'prompt': 'sort <script>‮'}", 7, 1000.5)


def test_calls_of_rows_come_back_each_stored_once(tmp_path: Path) -> None:
    asked = {"content": "x" * 5000, "role": "user", "reasoning_content": None}
    parts = {"content": [{"type": "text", "text": "\ud800"}], "role": "tool", "tool_call_id": "a"}
    tools = [{"id": "a", "function": {"name": "python", "arguments": {"code": "é", "of": {1}}}}]
    answer = {"content": None, "role": "assistant", "reasoning_content": "hm", "tool_calls": tools}
    calls = [
        RecordedCall(
            number=number,
            after=number - 1,
            new_row="",
            model="m",
            began=1000.5,
            took_s=0.25,
            num_given=3,
            num_sampled=4,
            given=tuple(map(RecordedMessage.of, given)),
            answer=RecordedMessage.of(answer),
        )
        for number, given in enumerate(([asked], [parts], []))
    ]
    begun, plain = trajectory(1), trajectory(4)
    ways = [calls[:2], [calls[0], calls[2]]]
    recorder = recorder_of(tmp_path)
    recorder.add_group(played(1, [replace(begun, calls=way) for way in ways], [plain]))
    recorder.close()
    back = sorted(rows(tmp_path), key=lambda it: (it.episode, it.row))
    assert [list(it.calls) for it in back] == [*ways, []]
    assert back[0].calls[0] is back[1].calls[0]
    (question,), (result,) = (call.given for call in back[0].calls)
    assert len(question.text) < 2100
    assert "[... 3000 characters ...]" in question.text
    assert (result.text, result.answers) == ('[{"type": "text", "text": "?"}]', "a")
    said = back[0].calls[0].answer
    assert (said.text, said.reasoning) == ("", "hm")
    assert [(it.name, it.arguments) for it in said.tool_calls] == [
        ("python", '{"code": "é", "of": "{1}"}')
    ]
    assert back[2].input_ids.tolist() == list(plain.input_ids)


def test_a_group_that_an_earlier_areal_sc_has_recorded_has_no_calls(tmp_path: Path) -> None:
    recorder = recorder_of(tmp_path)
    recorder.add_group(played(1, [trajectory(1)]))
    recorder.close()
    (file,) = record_files(tmp_path / "records")
    with file.path.open("rb") as opened:
        (found,) = read_blocks(opened.fileno(), 0, file.path.stat().st_size)
        assert isinstance(found, RecordBlock)
        body = read_body(opened.fileno(), found)
    head = msgspec.msgpack.decode(zlib.decompress(found.head))
    assert head.pop("num_call_bytes") == 0
    file.path.write_bytes(block(zlib.compress(msgspec.msgpack.encode(head)), body))
    (row,) = rows(tmp_path)
    assert row.calls == ()
    assert row.input_ids.tolist() == list(trajectory(1).input_ids)


def test_a_group_without_rows_tells_why(tmp_path: Path) -> None:
    cause = RecordedRejection("reward_error: KeyError at task.py:12", "no answer", 2)
    recorder = recorder_of(tmp_path, keep="sample")
    recorder.add_group(played(1, rejected=(cause,)))
    recorder.add_group(played(2, [trajectory(1)], rejected=(cause,)))
    recorder.add_group(played(3, [trajectory(2)]))  # unremarkable
    recorder.add_group(played(32, [trajectory(3)]))
    recorder.close()
    assert [(it.group, it.num_rejected) for it in rows(tmp_path)] == [(2, 2), (32, 0)]


def test_numbers_of_trained_rows_come_back(tmp_path: Path) -> None:
    given = add_trained(tmp_path, 16, {(0, 0): 34, (0, 1): 3, (2, 0): 1}, rank=1)
    assert list(rows(tmp_path)) == list(spans(tmp_path)) == []
    for (row, tokens), (name, was) in zip(trained_rows(tmp_path), given.items(), strict=True):
        assert (row.worker, row.group, row.attempt, row.step) == ("train/1", 16, 0, 5)
        assert (row.episode, row.row) == name
        for back, values in zip(tokens, was, strict=True):
            np.testing.assert_array_equal(back, np.float16(values).astype(np.float32))


def test_spans_come_back_also_as_a_trace(tmp_path: Path) -> None:
    recorder = recorder_of(tmp_path)
    add_span(
        recorder, "generation", 1e9, 0.25, lane=3, about="5.0.9", versions=(1, 2), num_tokens=40
    )
    recorder.add_event("serving")
    with pytest.raises(KeyError), recorder.span("updating weights", version=7):
        raise KeyError
    recorder.close()
    generation, serving, updating = spans(tmp_path)
    assert (generation.process, generation.kind, generation.lane) == ("rollout/0", "generation", 3)
    assert (generation.began, generation.took_s, generation.about) == (1e9, 0.25, "5.0.9")
    assert (generation.first_version, generation.last_version, generation.num_tokens) == (1, 2, 40)
    assert (serving.kind, serving.took_s, serving.lane) == ("serving", 0.0, -1)
    assert (updating.kind, updating.first_version) == ("updating weights", 7)
    name, *events = trace_events(spans(tmp_path))
    assert name["args"] == {"name": "rollout/0"}
    assert [it["ph"] for it in events] == ["X", "i", "X"]
    assert (events[0]["ts"], events[0]["dur"], events[0]["tid"]) == (1e15, 250_000.0, 4)


def test_with_none_best_and_worst_of_some_groups_are_written_and_nothing_else(
    tmp_path: Path,
) -> None:
    before = set(threading.enumerate())
    recorder = recorder_of(tmp_path, keep="none", groups_per_step=8)
    add_span(recorder, "episode", 1e9, 1.0)
    with recorder.span("updating weights"):
        recorder.add_event("serving")
    assert set(threading.enumerate()) <= before
    rejected = (RecordedRejection("rejected", "", 1),)
    rewards = (0.25, 1.0, 0.5, 0.0, 1.0)
    differing = [[trajectory(n, reward=reward)] for n, reward in enumerate(rewards)]
    alike = [[trajectory(n)] for n in range(4)]
    for number in range(8):
        recorder.add_group(played(number, *(differing if number < 4 else alike)))
    recorder.add_group(played(8, rejected=rejected))
    recorder.add_group(played(9, [trajectory(1)], rejected=rejected))
    recorder.close()
    assert list(spans(tmp_path)) == []
    assert [(it.group, it.episode, it.reward) for it in rows(tmp_path)] == [
        (0, 1, 1.0),
        (0, 3, 0.0),
        (4, 0, 0.5),
    ]
    for file, mean in zip(record_files(tmp_path / "records"), (0.55, 0.5), strict=True):
        assert only_group(file.path).mean_reward == mean


def test_what_an_episode_wrote_is_recorded(tmp_path: Path) -> None:
    recorder = recorder_of(tmp_path)
    recorder.add_group(played(1, [replace(trajectory(1), output="x" * 5000)]))
    recorder.close()
    (file,) = record_files(tmp_path / "records")
    assert "[... 3000 characters ...]" in only_group(file.path).rows[0].output


def only_group(path: Path) -> RecordedGroup:
    with path.open("rb") as opened:
        (found,) = read_blocks(opened.fileno(), 0, path.stat().st_size)
    assert isinstance(found, RecordBlock)
    return unpack_group(found.head)


def test_the_oldest_unremarkable_rows_go_first(tmp_path: Path) -> None:
    rejected = (RecordedRejection("rejected", "", 1),)
    recorder = recorder_of(tmp_path, max_bytes=MEBI)
    recorder.add_event("serving")
    recorder.add_group(played(1, [trajectory(1, 2000)], rejected=rejected))
    for number in range(2, 800):
        recorder.add_group(played(number, [trajectory(number, 2000)]))
        if number % 100 == 0:
            recorder.close()  # a life of the worker ends
            recorder = recorder_of(tmp_path, max_bytes=MEBI)
    recorder.close()
    files = record_files(tmp_path / "records")
    assert sum(it.path.stat().st_size for it in files) <= MEBI
    kept = {it.group for it in rows(tmp_path)}
    assert kept >= {1, *range(16, 800, 16)}  # 16 of them in a share that has room for all
    newest = {number for number in kept if number % 16 and number > 1}
    assert newest == {number for number in range(min(newest), 800) if number % 16}
    assert min(newest) > 400
    assert [it.kind for it in spans(tmp_path)] == ["serving"]
    first = {it.series: it.number for it in reversed(files)}
    assert first[Series.rows] > 1, "the missing numbers tell that files are gone"
    assert first[Series.kept] == 1


def test_a_full_disk_costs_one_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    recorder = recorder_of(tmp_path)
    recorder.add_group(played(1, [trajectory(1)]))
    recorder.close()
    whole = record_files(tmp_path / "records")[0].path.read_bytes()

    def half(file: Any, content: bytes) -> None:
        file.write(content[: len(content) // 2])
        file.truncate(os.fstat(file.fileno()).st_size - len(content) // 2)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(record_files_module, "append_or_undo", half)
    recorder = recorder_of(tmp_path)
    for number in range(2, 9):
        recorder.add_group(played(number, [trajectory(number)]))
    recorder.close()
    (warning,) = [it for it in caplog.records if it.levelno >= logging.WARNING]
    assert "records nothing more" in warning.getMessage()
    assert "No space left" in warning.getMessage()
    assert record_files(tmp_path / "records")[0].path.read_bytes() == whole
    assert [it.group for it in rows(tmp_path)] == [1]


def test_a_folder_that_cannot_be_made_costs_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "records").write_text("a file")
    recorder = recorder_of(tmp_path)
    recorder.add_group(played(1, [trajectory(1)]))
    recorder.close()
    assert [it.levelno for it in caplog.records] == [logging.WARNING]


def test_whatever_fails_ends_the_records_with_one_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    may_fail = threading.Event()

    def fails(group: object) -> bytes:
        may_fail.wait()
        raise TypeError("no such value")

    monkeypatch.setattr(recorder_module, "pack_group", fails)
    recorder = recorder_of(tmp_path)
    left = [played(number, [trajectory(number)]) for number in range(1, 9)]
    groups = [weakref.ref(it) for it in left]
    while left:
        recorder.add_group(left.pop())
    (thread,) = [it for it in threading.enumerate() if it.name == "records"]
    may_fail.set()
    thread.join()
    assert not recorder.is_on
    assert [it() for it in groups] == [None] * 8, "what nobody will write is not kept"
    recorder.add_event("serving")
    recorder.close()
    (warning,) = [it for it in caplog.records if it.levelno >= logging.WARNING]
    assert "records nothing more of what it does: TypeError: no such" in warning.getMessage()


def test_the_tokens_that_wait_for_a_slow_disk_are_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_write, append = threading.Event(), record_files_module.append_or_undo

    def slow(file: Any, content: bytes) -> None:
        may_write.wait()
        append(file, content)

    monkeypatch.setattr(record_files_module, "append_or_undo", slow)
    monkeypatch.setattr(recorder_module, "MAX_WAITING_TOKENS", 160)
    recorder = recorder_of(tmp_path)
    for number in range(1, 10):
        recorder.add_group(played(number, [trajectory(number, 40)]))
    recorder.add_event("serving")  # which is small
    may_write.set()
    while 10 not in {it.group for it in rows(tmp_path)}:  # what is written waits no more
        recorder.add_group(played(10, [trajectory(10, 40)]))
    recorder.close()
    assert {it.group for it in rows(tmp_path)} == {1, 2, 3, 4, 5, 10}
    serving, *lost = spans(tmp_path)
    assert [it.kind for it in (serving, *lost)] == ["serving", *(LOST for _ in lost)]
    num_lost = sum(int(it.about) for it in lost)
    assert num_lost >= 4
    line = TimeLine(tmp_path / "records")
    line.follow()
    [told] = line.lost
    assert told.startswith(f"{num_lost} records are lost")


KILLED = """
import os, sys
from pathlib import Path
sys.path[:0] = sys.argv[2:]
from recorded_groups import played, recorder_of, trajectory
recorder = recorder_of(Path(sys.argv[1]))
number = 0
while True:
    number += 1
    recorder.add_group(played(number, [trajectory(number, 3000)]))
    if number == 50:
        print("writes", flush=True)
"""


def test_what_a_killed_process_has_written_is_read(tmp_path: Path) -> None:
    command = [sys.executable, "-c", KILLED, str(tmp_path), *filter(None, sys.path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"writes\n"
        files = tmp_path / "records"
        while sum(it.path.stat().st_size for it in record_files(files)) < 200_000:
            assert process.poll() is None
        process.send_signal(signal.SIGKILL)
    recorder = recorder_of(tmp_path)  # the next life
    recorder.add_group(played(1_000_001, [trajectory(5)]))
    recorder.close()
    back = list(rows(tmp_path))
    assert len(back) > 10
    for row in back[:-1]:
        if row.group <= 1_000_000:
            assert row.input_ids.tolist() == trajectory(row.group, 3000).input_ids
    assert 1_000_001 in {row.group for row in back}
