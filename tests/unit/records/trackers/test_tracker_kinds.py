"""What each tracker keeps of a run, read by its own reader.

Runs and readers are processes of their own: trackers leave threads and services behind.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from builders import make_evaluation, make_step

from areal_sc.config.follow_settings import TrackerKind
from areal_sc.config.schema import ActorConfig, GRPOConfig
from areal_sc.errors import ConfigError
from areal_sc.preflight import checks
from areal_sc.preflight.checks import check_config

RUN = """
import json, sys
from pathlib import Path
from areal_sc.config.follow_settings import TrackerKind
from areal_sc.records.metrics import EvaluationResult, StepMetrics, Summary
from areal_sc.records.trackers.background import BackgroundTracker
from areal_sc.records.trackers.base import RunDescription
from areal_sc.records.trackers.kinds import make_tracker

kind, folder, steps, evaluation = sys.argv[1:]
warnings = []
tracker = BackgroundTracker(make_tracker(TrackerKind(kind)), warnings.append)
run = RunDescription("0123456789ab", "run-7", Path(folder), "sorting", {"actor": {"path": "m"}})
tracker.tell(lambda it: it.on_start(run))
for record in json.loads(steps):
    step = StepMetrics.from_record(record)
    tracker.tell(lambda it, step=step: it.on_step(step))
result = EvaluationResult.from_record(json.loads(evaluation))
tracker.tell(lambda it: it.on_evaluation(result))
tracker.tell(lambda it: it.on_finish(Summary(num_steps=3, wall_time_s=2.0)))
tracker.close()
assert not warnings, warnings
"""

READ_WANDB = """
import glob, json, struct, sys
from wandb.proto.wandb_internal_pb2 import Record

def records(path):  # LevelDB's log format: blocks of 32 KiB, whose parts have a head of 7 bytes
    with open(path, "rb") as file:
        content = file.read()
    position, whole = 7, b""
    while position + 7 <= len(content):
        if 32768 - position % 32768 < 7:  # no head fits into what is left of the block
            position += 32768 - position % 32768
            continue
        _, length, kind = struct.unpack_from("<IHB", content, position)
        whole += content[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # a whole one, or its last part
            yield whole
            whole = b""

points = []
for path in sorted(glob.glob(sys.argv[1] + "/wandb/offline-run-*/*.wandb")):
    for packed in records(path):
        record = Record()
        record.ParseFromString(packed)
        for item in record.history.item:
            name = "/".join(item.nested_key) or item.key
            points.append((record.history.step.num, name, json.loads(item.value_json)))
print(json.dumps(points))
"""

READ_TENSORBOARD = """
import json, sys
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.util.tensor_util import make_ndarray

events = EventAccumulator(sys.argv[1] + "/tensorboard").Reload()
print(json.dumps([
    (point.step, name, float(make_ndarray(point.tensor_proto)))
    for name in events.Tags()["tensors"] for point in events.Tensors(name)
]))
"""

READ_TRACKIO = """
import json
from trackio.sqlite_storage import SQLiteStorage

[run] = SQLiteStorage.get_runs("sorting")
print(json.dumps([
    (record["step"], name, value)
    for record in SQLiteStorage.get_logs("sorting", run) for name, value in record.items()
]))
"""

READERS = {
    TrackerKind.wandb: READ_WANDB,
    TrackerKind.tensorboard: READ_TENSORBOARD,
    TrackerKind.trackio: READ_TRACKIO,
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", TrackerKind)
def test_a_tracker_keeps_steps_and_evaluations_also_of_a_run_that_was_resumed(
    kind: TrackerKind, tmp_path: Path
) -> None:
    evaluation = json.dumps(make_evaluation("after", reward=0.75).to_record())
    for numbers in ([1, 2], [3]):
        steps = [make_step(step, reward=step / 10).to_record() for step in numbers]
        called(tmp_path, RUN, kind.value, str(tmp_path), json.dumps(steps), evaluation)
    points = json.loads(called(tmp_path, READERS[kind], str(tmp_path)).splitlines()[-1])
    rewards = [(step, value) for step, name, value in points if name == "reward"]
    assert rewards == [(step, pytest.approx(step / 10)) for step in (1, 2, 3)]
    names = {name for _, name, _ in points}
    assert {"workflow/accuracy", "train/loss", "step_time_s"} <= names
    assert [v for _, name, v in points if name == "evaluation/after/reward"] == [0.75, 0.75]


def called(folder: Path, program: str, *arguments: str) -> str:
    environment: dict[str, Any] = {
        **os.environ,
        "HOME": str(folder),
        "WANDB_MODE": "offline",
        "TRACKIO_DIR": str(folder / "trackio"),
    }
    command = [sys.executable, "-c", program, *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_tracker_that_is_not_installed_is_named_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    config = GRPOConfig(
        run_dir=str(tmp_path),
        total_steps=1,
        actor=ActorConfig(path=str(tmp_path)),
        trackers=[TrackerKind.wandb],
    )
    monkeypatch.setattr(checks, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="pip install wandb"):
        check_config(config)
