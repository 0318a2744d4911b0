"""No damage of one file takes a run's settings, or that it is a run."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from areal_sc.errors import RunFolderError
from areal_sc.run.run_folder import FORMAT_VERSION, Opening, RunFolder
from areal_sc.run.run_marker import RunMarker

CONFIG = "seed: 3\ntotal_steps: 5\n"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    with RunFolder(tmp_path / "run") as folder:
        folder.open(config_text=CONFIG)
        folder.snapshot_path(1).mkdir()
    return folder.path


@pytest.mark.parametrize("name", ["run.json", ".run.json", "config.yaml", "begun.json"])
def test_any_flipped_bit_is_made_good(path: Path, name: str) -> None:
    """With the settings of then: a seed of 1 in place of 3 is told from a change of the command."""
    file = path / name
    whole = file.read_bytes()
    for bit in range(0, 8 * len(whole), 11):
        damaged = bytearray(whole)
        damaged[bit // 8] ^= 1 << bit % 8
        file.write_bytes(damaged)
        assert RunMarker.read(path) == RunMarker(FORMAT_VERSION, CONFIG)
        assert RunFolder(path).preview(config_text=CONFIG) is Opening.resume
    for damage in (bytes(damaged), b""):
        file.write_bytes(damage)
        with pytest.raises(RunFolderError, match="seed: 3 -> 1"):
            RunFolder(path).open(config_text="seed: 1\n")
        with RunFolder(path) as folder:
            assert folder.open(config_text=CONFIG) is Opening.resume
        assert file.read_bytes() == whole
        told = [f"{file} was damaged"] if name.endswith("run.json") else []
        assert [warning.partition(";")[0] for warning in folder.warnings] == told


def test_where_both_are_damaged_the_message_says_what_helps(path: Path) -> None:
    for name in ("run.json", ".run.json"):
        (path / name).write_text("{")
    with pytest.raises(RunFolderError, match=r"is damaged \((\{.*\}) in it makes") as raised:
        RunFolder(path).decide()
    (path / "run.json").write_text(str(raised.value).partition("damaged (")[2].partition(" in")[0])
    with RunFolder(path) as folder:
        assert folder.open(config_text=CONFIG) is Opening.resume


def make_old(path: Path) -> None:
    """The folder as it was before there were copies."""
    (path / ".run.json").unlink()
    (path / "begun.json").unlink()
    marker = {"kind": "areal_sc run", "format_version": FORMAT_VERSION}
    (path / "run.json").write_text(json.dumps(marker))


def delete_settings(path: Path) -> None:
    (path / "config.yaml").unlink()


def break_settings(path: Path) -> None:
    (path / "config.yaml").write_text("seed: [")


@pytest.mark.parametrize(
    ("change", "settings", "said"),
    [
        (lambda path: None, CONFIG, None),
        (lambda path: None, "seed: 1\n", "seed: 3 -> 1"),
        (break_settings, CONFIG, "config.yaml cannot be read; move it out of the folder"),
        (delete_settings, CONFIG, None),
    ],
)
def test_a_run_without_copies_goes_on_and_gets_them(
    path: Path, change: Callable[[Path], None], settings: str, said: str | None
) -> None:
    make_old(path)
    change(path)
    with RunFolder(path) as folder:
        if said is not None:
            with pytest.raises(RunFolderError, match=said):
                folder.open(config_text=settings)
            return
        assert folder.open(config_text=settings) is Opening.resume
    assert RunMarker.read(path) == RunMarker(FORMAT_VERSION, CONFIG)
    (path / "run.json").unlink()
    assert RunFolder(path).decide() is Opening.resume


@pytest.mark.parametrize("name", ["run.json", ".run.json", "config.yaml", "begun.json"])
def test_a_preview_refuses_what_cannot_be_written(path: Path, name: str) -> None:
    (path / name).unlink()
    (path / name).mkdir()
    for look in (RunFolder(path).preview, RunFolder(path).open):
        with pytest.raises(RunFolderError, match=rf"{name} is a folder, not a file"):
            look(config_text=CONFIG)


def test_a_run_that_is_overwritten_has_no_marker_left(path: Path) -> None:
    folder = RunFolder(path)
    folder._empty()
    assert folder.decide() is Opening.start
    assert folder.marker() is None
