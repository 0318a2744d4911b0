"""The folder of a run that an earlier areal_sc left: it is readable, and the run goes on.

`old_runs/` holds a `tiny_run.py` of commit a32ae4a that was killed after its third step of nine,
without the keys, logs and agents of its processes.
"""

from __future__ import annotations

import json
import re
import tarfile
from pathlib import Path

import pytest
from integration.run_process import tiny_run

from areal_sc.__main__ import main
from areal_sc.errors import CommandError

OLD_RUN = Path(__file__).with_name("old_runs") / "tiny_run_a32ae4a.tar.xz"
LAST_STEP = 3


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    with tarfile.open(OLD_RUN) as archive:
        archive.extractall(tmp_path, filter="data")
    return tmp_path / "tiny"


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("status", "step      3 of 9, policy version 3"),
        ("ledger", "group 0: admitted at version 0, run by rollout/0, 2 rows of"),
    ],
)
def test_it_can_be_read(
    run_dir: Path, command: str, expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    main([command, str(run_dir)])
    assert expected in capsys.readouterr().out


def test_its_answers_are_in_a_file_that_it_names(run_dir: Path) -> None:
    with pytest.raises(CommandError, match=r"kept answers in its samples\.jsonl, which has a JSON"):
        main(["samples", str(run_dir)])
    lines = (run_dir / "samples.jsonl").read_text().splitlines()
    assert json.loads(lines[-1])["step"] == LAST_STEP


def test_the_run_goes_on(run_dir: Path, tiny_model_folder: Path) -> None:
    more = ("total_steps=5", "checkpoint.every_steps=1", "checkpoint.memory_snapshots=false")
    settings = run_dir / "config.yaml"
    of_model = re.search(r"(?<=  path: )/.*tiny_model0$", settings.read_text(), re.MULTILINE)
    assert of_model
    # the model was elsewhere
    settings.write_text(settings.read_text().replace(of_model[0], str(tiny_model_folder)))
    with tiny_run(run_dir, tiny_model_folder, *more) as run:
        run.finish()
        assert f"resumed after step {LAST_STEP}" in run.output, run.story()
        assert run.steps() == [1, 2, 3, 4, 5]
        assert run.summary()["num_rows_trained_twice"] == 0
