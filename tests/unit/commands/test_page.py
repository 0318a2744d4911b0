"""`python -m areal_sc page`: what it refuses, and the names that it gives to runs."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from areal_sc import __main__ as program
from areal_sc.commands.page import named_runs
from areal_sc.run.run_folder import RunFolder
from areal_sc.trainer.failure import run_script

Told = pytest.CaptureFixture[str]


def call(*words: object) -> int | str | None:
    """The exit code."""
    try:
        return run_script(program.main, ["page", *map(str, words)])
    except SystemExit as end:
        return end.code


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    with RunFolder(tmp_path / "a" / "run") as folder:
        folder.open(config_text="seed: 0\n")
    return folder.path


def test_it_says_which_folder_is_no_run(run_dir: Path, tmp_path: Path, capsys: Told) -> None:
    assert call() == 2
    for path, told in (
        (tmp_path / "none", f"there is no folder {tmp_path / 'none'}"),
        (tmp_path, "is not the folder of a run: it has no sound run.json"),
        (run_dir, "is given twice"),
        (run_dir / "run.json", "there is no folder"),
    ):
        capsys.readouterr()
        assert call(run_dir, path) == 2
        assert told in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize("port", ["-1", "65536", "x", "1.5"])
def test_a_port_is_a_number(run_dir: Path, port: str, capsys: Told) -> None:
    assert call(run_dir, f"--port={port}") == 2
    assert f"expected a number from 0 to 65535, got '{port}'" in capsys.readouterr().err


def test_a_port_in_use_is_told(run_dir: Path, capsys: Told) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert call(run_dir, "--port", port) == 2
    told = " ".join(capsys.readouterr().err.split())
    assert f"cannot listen at 127.0.0.1, port {port}" in told
    assert "choose another --port" in told


def test_an_address_of_another_machine_is_told(run_dir: Path, capsys: Told) -> None:
    assert call(run_dir, "--bind", "192.0.2.1") == 2
    assert "cannot listen at 192.0.2.1" in " ".join(capsys.readouterr().err.split())


def test_runs_of_the_same_name_are_told_apart(run_dir: Path, tmp_path: Path) -> None:
    with RunFolder(tmp_path / "b" / "run") as folder:
        folder.open(config_text="seed: 0\n")
    assert [run.name for run in named_runs([run_dir])] == ["run"]
    names = [run.name for run in named_runs([run_dir, folder.path])]
    assert names == [str(run_dir), str(folder.path)]


def test_it_is_exported_to_a_file(run_dir: Path, tmp_path: Path, capsys: Told) -> None:
    path = tmp_path / "page.html"
    assert call(run_dir, "--export", path) == 0
    assert f"{path}: {path.stat().st_size:,} bytes" in capsys.readouterr().out
    assert path.read_text().startswith("<!doctype html>")
    assert call(run_dir, "--export", path, "--control") == 2
    assert "--control: a file asks no run for anything" in " ".join(capsys.readouterr().err.split())
    assert call(run_dir, "--export", tmp_path / "none" / "page.html") == 2
    assert "cannot be written: No such file" in " ".join(capsys.readouterr().err.split())
