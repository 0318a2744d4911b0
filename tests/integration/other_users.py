"""Runs a script of tests as whoever runs them and, if that is root, as an ordinary user, too."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import areal_sc

USERS = ["itself", "nobody"] if os.geteuid() == 0 else ["itself"]
_NOBODY = {"user": 65534, "group": 65534, "extra_groups": ()}
_PACKAGE = str(Path(areal_sc.__file__).parents[1])


def told_by(script: Path, cases: Sequence[tuple[str, str]], folder: Path) -> dict[Any, Any]:
    """What `python SCRIPT LAYER FOLDER` prints as JSON, for each layer and user, all at one time.

    `{"unavailable": why}` where no Python with this package can be run by another user.
    """
    with ThreadPoolExecutor(len(cases)) as threads:
        told = threads.map(lambda case: _told(script, *case, folder), cases)
        return dict(zip(cases, told, strict=True))


def _told(script: Path, layer: str, user: str, folder: Path) -> Any:
    folder = folder / f"{layer}-{user}"
    folder.mkdir(mode=0o755)
    python, who = sys.executable, {}
    if user == "nobody":
        python, who = _python_of_everybody(), _NOBODY
        os.chown(folder, 65534, 65534)
        if not python:
            return {"unavailable": "no Python with this package that another user may run"}
    done = subprocess.run(
        [python, str(script), layer, str(folder)],
        env={**_environment(), "SECRET": "LOOT", "TOKEN": "kept"},
        capture_output=True,
        text=True,
        timeout=300,
        cwd="/",
        **who,  # type: ignore[call-overload]
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


def _environment() -> dict[str, str]:
    """Another Python gets the packages of this one: it is only used if it can import them."""
    found = importlib.util.find_spec("msgspec")
    assert found is not None
    assert found.origin is not None
    packages = Path(found.origin).parents[1]
    return {"PATH": os.environ["PATH"], "PYTHONPATH": f"{_PACKAGE}:{packages}"}


@cache
def _python_of_everybody() -> str:
    """That of root's own folder is closed to others; the system's may do."""
    check = "import areal_sc.rewards.pool, areal_sc.system.sandbox.local"
    for python in (sys.executable, shutil.which("python3", path="/usr/local/bin:/usr/bin")):
        if python is not None:
            try:
                subprocess.run(
                    [python, "-c", check],
                    check=True,
                    cwd="/",
                    env=_environment(),
                    capture_output=True,
                    **_NOBODY,  # type: ignore[call-overload]
                )
                return python
            except (OSError, subprocess.CalledProcessError):
                continue
    return ""
