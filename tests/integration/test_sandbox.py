"""No program in a sandbox reads, reaches, leaves or delays anything: each layer, as root and not.

`sandbox_attacks.py` has the attacks. A process of its own runs them for each layer and user.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from integration.other_users import USERS, told_by
from integration.sandbox_attacks import BOMBS, HIDDEN, READING

from areal_sc.system.sandbox.isolation import LAYERS
from areal_sc.system.sandbox.kernel import landlock_version

ATTACKS = Path(__file__).with_name("sandbox_attacks.py")
CASES = [(layer, user) for layer in LAYERS for user in USERS]

ENDS = {
    "forks": {"timeout", "memory", "crashed"},
    "daemons": {"exited"},
    "daemons that hold its output": {"exited"},
    "memory": {"memory"},
    "memory of many processes": {"memory", "timeout"},
    "one large file": {"files"},
    "many files": {"files"},
    "files without a name": {"files", "exited"},  # so many open ones are a limit, too
    "deep folders": {"exited", "files"},
    "output": {"output"},
    "errors": {"output"},
    "no end": {"timeout"},
    "no end and no signals": {"timeout"},
    "os._exit": {"exited"},
    "threads": {"exited", "memory", "timeout", "crashed"},
}


@pytest.fixture(scope="module")
def results(folder_of_all: Path) -> dict[tuple[str, str], dict[str, Any]]:
    return told_by(ATTACKS, CASES, folder_of_all)


@pytest.fixture(params=CASES, ids="-".join)
def came(request: pytest.FixtureRequest, results: dict[tuple[str, str], Any]) -> dict[str, Any]:
    layer, user = request.param
    told: dict[str, Any] = results[layer, user]
    if "unavailable" in told:
        pytest.skip(f"{layer} does not work here for {user}: {told['unavailable']}")
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


def test_a_layer_works_wherever_the_kernel_has_one(
    results: dict[tuple[str, str], Any],
) -> None:
    unshare = shutil.which("unshare")
    spaces = [unshare, "--user", "--map-root-user", "--pid", "--fork", "--mount-proc", "true"]
    has_namespaces = (
        unshare is not None and subprocess.run(spaces, capture_output=True).returncode == 0
    )
    if not (has_namespaces or landlock_version()):
        pytest.skip("this kernel, or this container, has neither namespaces nor Landlock")
    assert any("unavailable" not in results[layer, "itself"] for layer in LAYERS)
