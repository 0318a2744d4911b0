"""What a process was doing when it was killed, or does while it hangs."""

from __future__ import annotations

import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

from recorded_groups import recorder_of
from waiting import wait_until

from areal_sc.records.reading import spans, unended
from areal_sc.records.spans import RecordedSpan

HUNG = """
import sys, time
from pathlib import Path
from areal_sc.config.follow_settings import RecordsConfig
from areal_sc.records.record_files import FilesOfProcess
from areal_sc.records.recorder import Recorder
files = FilesOfProcess(Path(sys.argv[1]) / "records", "train/3", 1 << 20)
recorder = Recorder(files, "train/3", RecordsConfig())
with recorder.span("pulling rows", version=7):
    pass
with recorder.span("update", version=7), recorder.span("all-reduce"):
    time.sleep(600)
"""


def kinds(run: Path) -> list[str]:
    return [span.kind for span in unended(run)]


def test_a_killed_process_leaves_what_it_was_doing(tmp_path: Path) -> None:
    began = time.time()
    process = subprocess.Popen([sys.executable, "-c", HUNG, str(tmp_path)])
    try:
        wait_until(lambda: "all-reduce" in kinds(tmp_path))
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
    with closing(recorder_of(tmp_path, process="train/0")) as recorder:
        with recorder.span("update"):
            wait_until(lambda: kinds(tmp_path) == ["update"])
        wait_until(lambda: not kinds(tmp_path))
        recorder.find_open = lambda until: [
            RecordedSpan(process="train/0", kind=kind, began=until, took_s=0.0) for kind in "ab"
        ]
        wait_until(lambda: kinds(tmp_path) == ["a", "b"])
    assert kinds(tmp_path) == []
    assert [span.kind for span in spans(tmp_path)] == ["update"]


def test_a_run_that_records_nothing_has_no_such_file(tmp_path: Path) -> None:
    with (
        closing(recorder_of(tmp_path, keep="none")) as recorder,
        recorder.span("update"),
    ):
        assert recorder._thread is None
    assert list(tmp_path.iterdir()) == []
