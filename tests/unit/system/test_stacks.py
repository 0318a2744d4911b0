"""Stacks of a real process, and what is shown of them."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest

from areal_sc.system import stacks
from areal_sc.system.stacks import MAX_FRAMES, MAX_LINES, STACKS_SIGNAL, shortened, written_stacks

HANGS = """
import faulthandler, sys, threading
from areal_sc.system.stacks import STACKS_SIGNAL

def hangs_here():
    threading.Event().wait(60)

log = open(sys.argv[1], "a")
faulthandler.register(STACKS_SIGNAL, log)
thread = threading.Thread(target=hangs_here, daemon=True)
thread.start()
print("begun", flush=True)
sys.stdin.read()
"""


def test_a_process_tells_where_its_threads_are_beside_what_it_logs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stacks, "WAIT_S", 60.0)
    path = tmp_path / "log"
    path.write_text('Thread 0x1 (most recent call first):\n  File "old.py", line 1 in old\n')
    with subprocess.Popen(
        [sys.executable, "-c", HANGS, path],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == "begun\n"
        lines = asyncio.run(written_stacks(path, lambda: process.send_signal(STACKS_SIGNAL)))
        process.stdin.close()
    text = "\n".join(lines)
    assert "in hangs_here" in text
    assert "in <module>" in text
    assert "old.py" not in text


def test_one_that_writes_nothing_has_no_stacks(tmp_path: Path) -> None:
    assert asyncio.run(written_stacks(tmp_path / "none", lambda: None)) == []


def test_idle_threads_are_left_out_and_busy_ones_come_last() -> None:
    def thread(number: int, frames: list[str]) -> str:
        lines = [f"Thread 0x{number:x} (most recent call first):"]
        return "\n".join(lines + [f'  File "{frame}' for frame in frames]) + "\n"

    idle = thread(1, ['/lib/concurrent/futures/thread.py", line 81 in _worker'])
    waiting = thread(2, ['/lib/threading.py", line 331 in wait', '/x/user.py", line 1 in b'])
    busy = thread(3, [f'/x/user.py", line {n} in f{n}' for n in range(100)])
    lines = shortened(f"INFO a line of the log\n{busy}\n{idle}12:00 another\n{waiting}")
    assert [line for line in lines if "Thread" in line] == [
        f"Thread 0x{n} (most recent call first):" for n in (2, 3)
    ]
    assert len(lines) == 3 + 1 + MAX_FRAMES
    assert "line 0 in f0" in lines[4]
    assert len(shortened(busy * 100)) == MAX_LINES
