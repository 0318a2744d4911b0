"""What a process was doing when it was killed, or does while it hangs."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

from areal_sc.config.follow_settings import KeepRecords, RecordsConfig
from areal_sc.records.open_spans import MAX_LIVES, OpenSpans, open_files
from areal_sc.records.reading import spans, unended
from areal_sc.records.recorder import Recorder
from areal_sc.records.spans import RecordedSpan

LIMIT_S = 60.0
HUNG = """
import sys, time
from pathlib import Path
from areal_sc.config.follow_settings import RecordsConfig
from areal_sc.records.recorder import Recorder
recorder = Recorder(Path(sys.argv[1]) / "records", "train/3", RecordsConfig(), 1 << 20)
with recorder.span("pulling rows", version=7):
    pass
with recorder.span("update", version=7), recorder.span("all-reduce"):
    time.sleep(600)
"""


def until(is_so: Callable[[], object]) -> None:
    give_up = time.monotonic() + LIMIT_S
    while not is_so():
        assert time.monotonic() < give_up
        time.sleep(0.05)


def kinds(run: Path) -> list[str]:
    return [span.kind for span in unended(run)]


def test_a_killed_process_leaves_what_it_was_doing(tmp_path: Path) -> None:
    began = time.time()
    process = subprocess.Popen([sys.executable, "-c", HUNG, str(tmp_path)])
    try:
        until(lambda: "all-reduce" in kinds(tmp_path))
    finally:
        process.kill()
        process.wait()
    killed = time.time()
    update, inner = unended(tmp_path)
    assert (update.process, update.kind, update.first_version) == ("train/3", "update", 7)
    assert inner.kind == "all-reduce"
    assert began < update.began <= inner.began
    assert 0.9 < update.took_s <= killed - update.began
    assert [span.kind for span in spans(tmp_path)] == ["pulling rows"]


def test_what_has_ended_is_not_told(tmp_path: Path) -> None:
    with closing(Recorder(tmp_path / "records", "train/0", RecordsConfig(), 1 << 20)) as recorder:
        with recorder.span("update"):
            until(lambda: kinds(tmp_path) == ["update"])
        until(lambda: not kinds(tmp_path))
        recorder.find_open = lambda until: [
            RecordedSpan(process="train/0", kind=kind, began=until, took_s=0.0) for kind in "ab"
        ]
        until(lambda: kinds(tmp_path) == ["a", "b"])
    assert kinds(tmp_path) == []
    assert [span.kind for span in spans(tmp_path)] == ["update"]


def test_a_run_that_records_nothing_has_no_such_file(tmp_path: Path) -> None:
    off = RecordsConfig(keep=KeepRecords.none)
    with (
        closing(Recorder(tmp_path / "records", "train/0", off, 1 << 20)) as recorder,
        recorder.span("update"),
    ):
        assert recorder._thread is None
    assert list(tmp_path.iterdir()) == []


def test_what_a_kill_left_half_written_goes_with_the_next_life(tmp_path: Path) -> None:
    left, other = (
        tmp_path / f".{name}.open.000005.partial" for name in ("rollout-1", "rollout-10")
    )
    left.write_bytes(b"ha")
    other.write_bytes(b"of another process")
    span = RecordedSpan(process="rollout/1", kind="generating", began=1.0, took_s=0.0)
    OpenSpans(tmp_path, "rollout/1").write([span])
    assert not left.exists()
    assert other.exists()


def test_lives_keep_apart_and_the_oldest_go(tmp_path: Path) -> None:
    span = RecordedSpan(process="rollout/0", kind="episode", began=1.0, took_s=0.0)
    other = OpenSpans(tmp_path, "rollout/1")
    other.write([span])
    for _ in range(MAX_LIVES + 3):
        OpenSpans(tmp_path, "rollout/0").write([span])
    found = open_files(tmp_path)
    assert [it.number for it in found if it.process == "rollout/0"] == [*range(4, MAX_LIVES + 4)]
    assert [it.number for it in found if it.process == "rollout/1"] == [1]
