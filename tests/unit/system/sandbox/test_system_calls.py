"""The filter of a kernel whose Landlock is older than this machine's, in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

PROGRAM = """
import os, signal, sys
from areal_sc.system.sandbox import kernel
from areal_sc.system.sandbox.system_calls import SystemCallFilter, refuse_network
import socket

def outcome(attempt):
    try:
        attempt()
        return "done"
    except OSError as error:
        return type(error).__name__

kernel.drop_capabilities()
if sys.argv[1] == "network":
    refuse_network()
    print(outcome(socket.socket), outcome(lambda: socket.socket(socket.AF_UNIX)),
          outcome(lambda: socket.socket(socket.AF_INET6)), outcome(socket.socketpair))
else:
    SystemCallFilter(hides_files=True, own_signals_alone=True, truncates=False).install()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    print(outcome(lambda: os.kill(os.getpid(), 15)), outcome(lambda: os.kill(os.getppid(), 0)),
          outcome(lambda: os.truncate(sys.argv[2], 0)), outcome(lambda: os.chmod(sys.argv[2], 0)),
          flush=True)
    os.abort()
"""


@pytest.mark.parametrize(
    ("which", "says", "code"),
    [
        ("network", "PermissionError done PermissionError done", 0),
        ("old landlock", "done PermissionError PermissionError done", -6),
    ],
)
def test_a_filter_refuses_what_it_should_and_nothing_else(
    which: str, says: str, code: int, tmp_path: os.PathLike[str]
) -> None:
    file = os.path.join(tmp_path, "file")
    with open(file, "w") as content:
        content.write("content")
    os.chmod(file, 0o644)
    done = subprocess.run(
        [sys.executable, "-X", "faulthandler=0", "-c", PROGRAM, which, file],
        capture_output=True,
        text=True,
        timeout=60,
    )
    if "seccomp" in done.stderr:
        pytest.skip(f"no seccomp here: {done.stderr[-200:]}")
    assert (done.stdout.strip(), done.returncode) == (says, code), done.stderr
    assert os.stat(file).st_size == 7
    assert os.stat(file).st_mode & 0o777 == 0o644, (
        "the change of permissions only seemed to be made"
    )
