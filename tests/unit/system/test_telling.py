"""Outputs that fail, and listeners that raise: the run goes on, and says so once."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from typing import IO

import pytest

from areal_sc.system.telling import Outlet, tell
from areal_sc.trainer.display import make_display


class Failing(io.StringIO):
    """Fails with an error as long as there is one."""

    error: Exception | None = None

    def write(self, text: str) -> int:
        if self.error is not None:
            raise self.error
        return super().write(text)


@pytest.mark.parametrize(
    "error",
    [
        BrokenPipeError(32, "Broken pipe"),
        OSError(28, "No space left on device"),
        OSError(5, "Input/output error"),
        ValueError("I/O operation on closed file"),
    ],
)
def test_an_output_that_fails_is_told_once_and_ends_nothing(
    error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    stream = Failing()
    outlet = Outlet.of(stream)
    outlet.write("a")
    stream.error = error
    outlet.write("b")
    outlet.write("c")
    outlet.flush()
    assert len(caplog.records) == 1
    assert str(error) in caplog.text
    stream.error = None
    outlet.write("d")  # a disk may have room again
    assert stream.getvalue() == "ad"


class Tee:
    """As scripts put in place of standard output: what `print` needs, and no more."""

    def __init__(self) -> None:
        self.text = ""

    def write(self, text: str) -> None:
        if text == "broken":
            raise SystemExit(3)
        self.text += text


def test_an_output_of_the_users_need_not_be_a_file(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tee = Tee()
    monkeypatch.setattr(sys, "stdout", tee)
    display = make_display()
    display.note("shown")
    display.close()
    assert "shown" in tee.text
    outlet = Outlet.of(sys.stdout)
    outlet.write("broken")
    outlet.write("more")
    outlet.flush()
    assert tee.text.endswith("more")
    assert "SystemExit: 3" in caplog.text


def test_text_that_an_output_cannot_encode_is_escaped() -> None:
    written = io.BytesIO()
    outlet = Outlet.of(io.TextIOWrapper(written, encoding="ascii"))
    outlet.write("épée\n")
    outlet.flush()
    assert written.getvalue() == b"\\xe9p\\xe9e\n"


def test_without_an_output_nothing_is_written() -> None:
    closed: IO[str] | None = None
    Outlet.of(closed).write("a")


def test_a_listener_that_raises_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    def listener(text: str) -> None:
        raise RuntimeError(f"cannot say {text}")

    tell(listener, "a")
    tell(listener, "b")
    assert "cannot say a" in caplog.text
    assert "cannot say b" not in caplog.text


SCRIPT = """
import sys, time
from areal_sc.trainer.display import make_display
from areal_sc.trainer.failure import run_script

def main(argv):
    display = make_display()
    print("begun", flush=True)
    sys.stdin.readline()  # the reader has left
    for _ in range(3):
        display.warning("a worker has died")
    print("of the user")
    if argv:
        raise ValueError("told on standard error, which is gone, too")

sys.exit(run_script(main))
"""


@pytest.mark.parametrize(("arguments", "code"), [([], 0), (["fails"], 1)])
def test_a_script_outlives_the_readers_of_its_output(arguments: list[str], code: int) -> None:
    """Its exit code is that of its work, not of its output."""
    read, write = os.pipe()
    command = [sys.executable, "-c", SCRIPT, *arguments]
    script = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=write, stderr=write)
    os.close(write)
    with os.fdopen(read) as output:
        assert output.readline() == "begun\n"
    script.communicate(b"\n")
    assert script.returncode == code


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="stands for a full disk")
def test_a_script_outlives_a_full_disk_under_its_output() -> None:
    script = "\n".join(line for line in SCRIPT.splitlines() if "print" not in line)
    with open("/dev/full", "w") as full:
        ended = subprocess.run([sys.executable, "-c", script], input=b"\n", stdout=full)
    assert ended.returncode == 0
