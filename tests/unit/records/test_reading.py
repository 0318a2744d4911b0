"""Records of other programs among those of a run are left out, with a warning."""

from __future__ import annotations

import logging
import zlib
from pathlib import Path

import msgspec
import pytest
from recorded_groups import played, recorder_of, trajectory

from areal_sc.records.blocks import block
from areal_sc.records.reading import rows, spans
from areal_sc.records.record_files import record_files
from areal_sc.records.spans import SpanColumns
from areal_sc.system.json_lines import to_json


@pytest.mark.parametrize(
    "foreign",
    [
        {"kind": "step", "time": 1.0, "step": 1, "wait_s": 1.0},
        {"kind": "step", "time": 10**400},
        {"kind": "event", "name": "resumed", "time": "noon"},
        {"kind": "event", "name": "workers_lost", "time": 1.0, "workers": 5},
        {"level": "info"},
    ],
)
def test_of_metrics_what_is_no_span_is_left_out(
    tmp_path: Path, foreign: object, caplog: pytest.LogCaptureFixture
) -> None:
    event = {"kind": "event", "time": 1.0, "name": "snapshot"}
    lines = [to_json(it) + b"\n" for it in (event, foreign, event)]
    (tmp_path / "metrics.jsonl").write_bytes(b"".join(lines))
    assert [it.kind for it in spans(tmp_path)] == ["snapshot", "snapshot"]
    (warning,) = caplog.records
    assert "metrics.jsonl, line 2 is left out" in warning.getMessage()


def test_a_whole_block_of_something_else_is_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    recorder = recorder_of(tmp_path)
    recorder.add_group(played(1, [trajectory(1)]))
    recorder.add_event("serving")
    recorder.close()
    unnamed = SpanColumns((), (), b"\0", bytes(20), bytes(16))
    foreign = block(b"", b"text"), block(b"", zlib.compress(msgspec.msgpack.encode(unnamed)))
    for file in record_files(tmp_path / "records"):
        file.path.write_bytes(foreign[0] + file.path.read_bytes() + foreign[1])
    assert [it.group for it in rows(tmp_path)] == [1]
    assert [it.kind for it in spans(tmp_path)] == ["serving"]
    assert [it.levelno for it in caplog.records] == [logging.WARNING] * 4
