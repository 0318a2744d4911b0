"""No program in a sandbox reads, reaches, leaves or delays anything: each layer, as root and not.

`sandbox_attacks.py` has the attacks. They are run by a process of their own for each layer and user.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from integration.sandbox_attacks import BOMBS, HIDDEN, READING

import areal_sc
from areal_sc.system.sandbox.isolation import LAYERS
from areal_sc.system.sandbox.kernel import landlock_version

ATTACKS = Path(__file__).with_name("sandbox_attacks.py")
PACKAGE = Path(areal_sc.__file__).parents[1]
NOBODY = 65534
USERS = ["itself", "nobody"] if os.geteuid() == 0 else ["itself"]
CASES = [(layer, user) for layer in LAYERS for user in USERS]

ENDS = {
    "forks": {"timeout", "memory", "crashed"},
    "daemons": {"exited"},
    "daemons that hold its output": {"exited"},
    "memory": {"memory"},
    "memory of many processes": {"memory"},
    "one large file": {"files"},
    "many files": {"files"},
    "files without a name": {"files"},
    "deep folders": {"exited", "files"},
    "output": {"output"},
    "errors": {"output"},
    "no end": {"timeout"},
    "no end and no signals": {"timeout"},
    "os._exit": {"exited"},
    "threads": {"exited", "memory", "timeout"},
}


@cache
def results(layer: str, user: str, folder: Path) -> dict[str, Any]:
    """What came of all attacks, once for all tests; skips where the layer does not work here."""
    folder = folder / f"{layer}-{user}"
    folder.mkdir(mode=0o755)
    python, who = sys.executable, {}
    if user == "nobody":
        who = {"user": NOBODY, "group": NOBODY, "extra_groups": []}
        python = python_of_everybody(who)
        os.chown(folder, NOBODY, NOBODY)
    done = subprocess.run(
        [python, str(ATTACKS), layer, str(folder)],
        env={"PATH": os.environ["PATH"], "PYTHONPATH": str(PACKAGE), "SECRET": "LOOT"},
        capture_output=True,
        text=True,
        timeout=300,
        cwd="/",
        **who,  # type: ignore[call-overload]
    )
    assert done.returncode == 0, done.stderr[-3000:]
    told: dict[str, Any] = json.loads(done.stdout)
    return told


@cache
def _python_of_everybody(user: int) -> str:
    who: dict[str, Any] = {"user": user, "group": user, "extra_groups": []}
    for python in (sys.executable, shutil.which("python3", path="/usr/local/bin:/usr/bin")):
        if python is None:
            continue
        try:
            check = (
                "import sys; sys.path.insert(0, sys.argv[1]); import areal_sc.system.sandbox.local"
            )
            subprocess.run([python, "-c", check, PACKAGE], check=True, cwd="/", timeout=60, **who)
            return python
        except (OSError, subprocess.CalledProcessError):
            continue
    return ""


def python_of_everybody(who: dict[str, Any]) -> str:
    """A Python that another user may run, with this package; that of root's own folder may not."""
    python = _python_of_everybody(who["user"])
    if not python:
        pytest.skip(
            "no Python of 3.11 or later that another user may run together with the package"
        )
    return python


@pytest.fixture(params=CASES, ids="-".join)
def came(request: pytest.FixtureRequest, folder_of_all: Path) -> dict[str, Any]:
    layer, user = request.param
    told = results(layer, user, folder_of_all)
    if "unavailable" in told:
        pytest.skip(f"{layer} does not work here as {user}: {told['unavailable']}")
    return told


def test_no_program_reads_or_reaches_anything_of_others(came: dict[str, Any]) -> None:
    assert came["unprotected"] == [], "these attacks show nothing"
    for name in (*READING, *HIDDEN):
        end, code, stdout, stderr, _ = came[name]
        assert "LOOT" not in stdout + stderr, name
        assert end == "exited", (name, end)
        assert name not in READING or code != 0 or name == "a file left in /dev/shm", name
    assert came["victim"] is None, "a program has ended a process of others"
    assert came["permissions"] == 0o644


def test_no_program_forges_its_end(came: dict[str, Any]) -> None:
    assert came["a forged answer"][:3] == ["exited", 7, ""]
    assert came["os._exit"][:2] == ["exited", 0]


def test_a_bomb_ends_at_its_limit_and_delays_nobody(came: dict[str, Any]) -> None:
    assert ENDS.keys() == BOMBS.keys()
    for name, ends in ENDS.items():
        assert came[name][0] in ends, (name, came[name])
        assert came[f"honest beside {name}"][:3] == ["exited", 0, "499500\n"], name


def test_no_process_and_no_file_is_left(came: dict[str, Any]) -> None:
    assert came["left"] == 0
    assert came["files"] == []


def test_a_layer_works_wherever_the_kernel_has_one(folder_of_all: Path) -> None:
    unshare = shutil.which("unshare")
    spaces = [unshare, "--user", "--map-root-user", "--pid", "--fork", "--mount-proc", "true"]
    has_namespaces = (
        unshare is not None and subprocess.run(spaces, capture_output=True).returncode == 0
    )
    if not (has_namespaces or landlock_version()):
        pytest.skip("this kernel, or this container, has neither namespaces nor Landlock")
    assert any("unavailable" not in results(layer, "itself", folder_of_all) for layer in LAYERS)
