"""The file of samples: what is written is read, whatever happened to the run."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest
from sample_rows import sample

from areal_sc.errors import RunFolderError
from areal_sc.records.samples import Sample, read_samples, shortened
from areal_sc.system.json_lines import JsonLines


def write(path: Path, *samples: Sample) -> None:
    with closing(JsonLines(path)) as lines:
        lines.append(*samples)


def test_samples_are_read_as_they_were_written(tmp_path: Path) -> None:
    path, written = tmp_path / "samples.jsonl", [sample(1), sample(1, group=4), sample(2)]
    write(path, *written[:2])
    write(path, written[2])
    assert read_samples(path) == written


def test_a_torn_last_line_is_left_out_and_cut_off_by_the_next_writer(tmp_path: Path) -> None:
    path = tmp_path / "samples.jsonl"
    write(path, sample(1), sample(2, answer="ä\n"))
    whole = path.read_bytes()
    for length in range(whole.index(b"\n") + 1, len(whole)):
        path.write_bytes(whole[:length])
        assert read_samples(path) == [sample(1)]
    write(path, sample(3))
    assert read_samples(path) == [sample(1), sample(3)]


def test_steps_that_were_trained_again_have_their_last_samples(tmp_path: Path) -> None:
    path = tmp_path / "samples.jsonl"
    write(path, *(sample(step, time=10.0 + step) for step in (1, 2, 3, 4)))
    again = [sample(3, time=20.0, group=7), sample(3, time=20.0, group=8)]
    write(path, *again)
    assert read_samples(path) == [sample(1, time=11.0), sample(2, time=12.0), *again]


def test_a_line_that_is_no_sample_is_an_error_with_its_place(tmp_path: Path) -> None:
    path = tmp_path / "samples.jsonl"
    path.write_text('{"step": 1}\n')
    with pytest.raises(RunFolderError, match=r"samples\.jsonl, line 1: .* missing required field"):
        read_samples(path)


def test_a_long_text_keeps_its_beginning_and_its_end() -> None:
    assert shortened("x" * 20, 20) == "x" * 20
    assert shortened("a" * 500 + "b" * 501, 20) == f"{'a' * 10} [... 981 characters ...] {'b' * 10}"
