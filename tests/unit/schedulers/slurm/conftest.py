"""Stand-ins of SLURM's commands."""

from __future__ import annotations

from pathlib import Path

import pytest

from areal_sc.schedulers.slurm import commands

SILENT = "echo 'Socket timed out on send/recv operation' >&2; exit 1"


@pytest.fixture
def bin_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """For stand-ins of the commands, each of whose calls adds a line to `<name>.calls`."""
    monkeypatch.delenv("SLURM_CONF", raising=False)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr(commands, "_silence", commands._ClusterSilence())
    return tmp_path


def stand_in(folder: Path, name: str, does: str) -> Path:
    calls = folder / f"{name}.calls"
    (folder / name).write_text(f'#!/bin/sh\ncat >/dev/null\necho "$*" >> {calls}\n{does}\n')
    (folder / name).chmod(0o755)
    return calls
