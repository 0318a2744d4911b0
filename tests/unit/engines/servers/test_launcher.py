"""A server leaves the signals that are sent to all processes of a run to the script."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

from areal_sc.engines.servers import launcher
from areal_sc.system.process import FOR_SCRIPT

SERVER = """
import os, signal, subprocess, sys, time
def end(number, frame):
    os.write(1, b"asked to end\\n")  # it may come in the midst of a print
    sys.exit(7)
signal.signal(signal.SIGTERM, end)
child = subprocess.Popen(["sleep", "60"])
print(child.pid, flush=True)
while True:
    time.sleep(60)
"""


def test_a_server_and_what_it_starts_end_by_one_signal_alone(tmp_path: Path) -> None:
    (tmp_path / "served.py").write_text(SERVER)
    start = {"parent_pid": os.getpid(), "module": "served", "arguments": []}
    with subprocess.Popen(
        [sys.executable, launcher.__file__],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        start_new_session=True,
    ) as server:
        assert server.stdin
        assert server.stdout
        server.stdin.write(json.dumps(start).encode())
        server.stdin.close()
        child = int(server.stdout.readline())
        for signum in {*FOR_SCRIPT} - {signal.SIGQUIT}:  # which is the server's own
            for pid in (server.pid, child):
                os.kill(pid, signum)
        assert server.poll() is None
        server.send_signal(launcher.END_SIGNAL)
        assert server.stdout.readline() == b"asked to end\n"  # by nothing before that
        assert server.wait(60) == 7
        os.kill(child, 0)  # it lives
        os.kill(child, signal.SIGKILL)
