from __future__ import annotations

import errno
import io
import os
import pty
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from threading import Thread

import pytest
from rich.console import Console
from waiting import wait_until

from areal_sc.errors import (
    ArealError,
    CheckpointError,
    ConfigError,
    ModelError,
    RemoteError,
    RunFolderError,
    TooManyRejections,
    WorkerLost,
    WorkerStartError,
)
from areal_sc.system.process import SNAPSHOT_SIGNALS
from areal_sc.trainer.failure import Terminated, report_failure, run_script


def report(error: BaseException, run_dir: Path | None = None) -> tuple[int, str]:
    """Exit code and text."""
    console = Console(file=io.StringIO(), width=40, color_system=None)
    code = report_failure(error, console, run_dir)
    assert isinstance(console.file, io.StringIO)
    return code, console.file.getvalue()


def raised(raise_it: Callable[[], object]) -> BaseException:
    with pytest.raises(BaseException) as caught:  # noqa: PT011
        raise_it()
    return caught.value


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    (tmp_path / "logs").mkdir()
    return tmp_path


@pytest.mark.parametrize(
    ("error", "exit_code"),
    [
        (ArealError("x"), 1),
        (ConfigError("x"), 2),
        (RunFolderError("x"), 3),
        (WorkerLost("x"), 5),
        (ModelError("x"), 6),
        (TooManyRejections("x"), 7),
        (CheckpointError("x"), 8),
        (RemoteError("x", error_type="E", remote_traceback="t", remote_exit_code=6), 6),
        (KeyboardInterrupt(), 130),
        (Terminated(), 143),
        (ValueError("x"), 1),
    ],
)
def test_exit_codes(error: BaseException, exit_code: int) -> None:
    assert report(error)[0] == exit_code


def test_config_error_shows_only_its_message(run_dir: Path) -> None:
    message = "rollout.max_staleness=-1: expected >= 0\n[did you mean] 1?"
    assert report(ConfigError(message), run_dir)[1] == (
        "ERROR The configuration cannot be used\n"
        "  rollout.max_staleness=-1: expected >= 0\n"
        "  [did you mean] 1?\n"
    )
    assert list((run_dir / "logs").iterdir()) == []


def test_failed_worker_shows_the_end_of_its_log(run_dir: Path) -> None:
    def fail() -> None:
        try:
            raise OSError("exit code 1")
        except OSError as error:
            tail = [f"line {i}" for i in range(30)] + ["\x1b[31mno model.safetensors\x1b[0m"]
            raise WorkerStartError(
                "rollout/0 did not come up", log_path="logs/rollout-0.log", log_tail=tail
            ) from error

    code, text = report(raised(fail), run_dir)
    lines = text.splitlines()
    log = run_dir / "logs" / "controller.log"
    assert code == 5
    assert lines[:4] == [
        "ERROR A worker failed",
        "  rollout/0 did not come up",
        "  because of OSError: exit code 1",
        "last lines of logs/rollout-0.log:",
    ]
    assert lines[4] == "  | line 16"  # the last 15
    assert lines[-3:] == [
        "  | no model.safetensors",
        f"full traceback: {log}",
        f"logs of the workers: {log.parent}",
    ]
    assert "Traceback" not in text
    assert "WorkerStartError: rollout/0 did not come up" in log.read_text()
    assert "OSError: exit code 1" in log.read_text()


def test_remote_error_shows_the_end_of_the_remote_traceback_once(run_dir: Path) -> None:
    remote_traceback = "Traceback:\n" + "\n".join(f"  frame {i}" for i in range(9)) + "\nE: bad"
    error = RemoteError(
        "ppo_update on train/0 raised E: bad", error_type="E", remote_traceback=remote_traceback
    )
    error.add_note(f"raised by ppo_update on train/0:\n{remote_traceback}")
    lines = report(error, run_dir)[1].splitlines()
    assert lines[:3] == [
        "ERROR A worker reported an error",
        "  ppo_update on train/0 raised E: bad",
        "raised by ppo_update on train/0:",
    ]
    assert lines[3:-2] == [*(f"  |   frame {i}" for i in range(4, 9)), "  | E: bad"]
    assert "frame 0" in (run_dir / "logs" / "controller.log").read_text()


def test_foreseen_error_from_a_worker_needs_no_traceback(run_dir: Path) -> None:
    error = ModelError("runs/warm: no weights in it")
    error.add_note("raised by load on train/0:\nTraceback\n  frame")
    assert report(error, run_dir)[1].splitlines()[:3] == [
        "ERROR The model cannot be used",
        "  runs/warm: no weights in it",
        "  raised by load on train/0",
    ]
    assert "frame" not in report(error, run_dir)[1]
    assert "  |   frame" in report(error)[1].splitlines()  # no log that would have it


def test_unexpected_error_shows_its_innermost_frames(run_dir: Path) -> None:
    def outer() -> None:
        inner()

    def inner() -> None:
        {}["missing"]

    code, text = report(raised(outer), run_dir)
    lines = text.splitlines()
    assert code == 1
    assert lines[:3] == [
        "ERROR The run ended with an unexpected error",
        "  KeyError: 'missing'",
        "at (innermost first):",
    ]
    assert lines[3].endswith('in inner: {}["missing"]')
    assert lines[4].endswith("in outer: inner()")
    assert "KeyError: 'missing'" in (run_dir / "logs" / "controller.log").read_text()


@pytest.mark.parametrize("has_folder", [False, True])
def test_unexpected_error_without_a_log_is_shown_whole(tmp_path: Path, has_folder: bool) -> None:
    error = raised(lambda: [][0])
    text = report(error, tmp_path if has_folder else None)[1]
    assert "  | Traceback (most recent call last):" in text.splitlines()
    assert "  | IndexError: list index out of range" in text.splitlines()
    assert "full traceback" not in text
    assert list(tmp_path.iterdir()) == []


def test_log_on_a_full_disk_does_not_hide_the_error(run_dir: Path) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("needs /dev/full")
    (run_dir / "logs" / "controller.log").symlink_to("/dev/full")
    assert "  | IndexError" in report(raised(lambda: [][0]), run_dir)[1]


def test_the_log_of_another_run_is_left_alone(run_dir: Path) -> None:
    report(RunFolderError("runs/quickstart is in use by process 17"), run_dir)
    assert list((run_dir / "logs").iterdir()) == []


def test_an_error_of_too_many_open_files_gets_advice_however_it_is_wrapped() -> None:
    too_many = OSError(errno.EMFILE, os.strerror(errno.EMFILE))
    wrapped = ArealError("the bulk socket cannot be opened")
    wrapped.__cause__ = too_many
    limit = str(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    of_worker = WorkerStartError("train/0 ended", log_tail=["Traceback", f"OSError: {too_many}"])
    for error in (too_many, wrapped, of_worker, ArealError(f"rollout/0: {too_many}")):
        text = report(error)[1]
        assert limit in text
        assert "ulimit" in text
    assert "ulimit" not in report(OSError(errno.ENOENT, "no such file"))[1]


def test_of_an_exception_group_the_first_error_is_shown() -> None:
    group = ExceptionGroup("g", [ExceptionGroup("h", [WorkerLost("rollout/1")]), ValueError("a")])
    code, text = report(group)
    assert code == 5
    assert text.splitlines()[:2] == ["ERROR A worker failed", "  rollout/1"]


def test_run_script_returns_zero_and_passes_arguments() -> None:
    seen: list[Sequence[str]] = []
    assert run_script(seen.append, ["--config", "x.yaml"]) == 0
    assert seen == [["--config", "x.yaml"]]


def test_run_script_leaves_sys_exit_alone() -> None:
    with pytest.raises(SystemExit) as caught:
        run_script(lambda argv: sys.exit(3), [])
    assert caught.value.code == 3


SCRIPT = """
import asyncio, signal, sys, time
from pathlib import Path
from areal_sc.errors import ModelError
from areal_sc.trainer.failure import run_script

async def wait():
    print("ready", flush=True)
    await asyncio.sleep(60)

def main(argv):
    try:
        if argv[0] == "fail":
            raise ModelError("no weights")
        if argv[0] == "bug":
            print(argv[9])
        if argv[0] == "asyncio":
            asyncio.run(wait())
        print("ready", flush=True)
        time.sleep(60)
    except BaseException as error:
        error.run_dir = Path(argv[1])  # as a `Run` does
        raise
    finally:
        print("cleaned up", flush=True)

for number in (signal.SIGHUP, signal.SIGQUIT):  # tests may run under nohup, or in the background
    signal.signal(number, signal.SIG_DFL)
sys.exit(run_script(main))
"""


@pytest.mark.parametrize(
    ("how", "signal_number", "exit_code", "text"),
    [
        ("sleep", signal.SIGTERM, 143, "stopped by SIGTERM\n"),
        ("asyncio", signal.SIGTERM, 143, "stopped by SIGTERM\n"),
        ("sleep", signal.SIGHUP, 129, "stopped by SIGHUP\n"),
        ("asyncio", signal.SIGQUIT, 131, "stopped by SIGQUIT\n"),
        ("sleep", signal.SIGINT, 130, "stopped by Ctrl-C\n"),
        ("asyncio", signal.SIGINT, 130, "stopped by Ctrl-C\n"),
    ],
)
def test_signals_stop_cleanly(
    how: str, signal_number: int, exit_code: int, text: str, run_dir: Path
) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, how, str(run_dir)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        os.kill(process.pid, signal_number)
        output, errors = process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()
    assert (process.returncode, output, errors) == (exit_code, "cleaned up\n", text)
    # the terminal that shows it may be gone
    assert (run_dir / "logs" / "controller.log").read_text().endswith(f"controller: {text}")


@pytest.mark.parametrize(
    ("does", "code", "shown", "logged"),
    [
        ("fail", 6, "full traceback: ", "ModelError: no weights"),
        ("bug", 1, " in main: (no source)", "IndexError: list index out of range"),
    ],
)
def test_a_script_finds_the_log_that_it_writes_and_frames_begin_in_it(
    does: str, code: int, shown: str, logged: str, run_dir: Path
) -> None:
    command = [sys.executable, "-c", SCRIPT, does, str(run_dir)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60)
    log = run_dir / "logs" / "controller.log"
    assert result.returncode == code
    assert shown in result.stderr
    assert f"full traceback: {log}" in result.stderr.splitlines()
    assert "run_script" not in result.stderr
    assert logged in log.read_text()


def test_a_warning_of_a_cluster_does_nothing_where_nothing_is_trained() -> None:
    def main(argv: list[str]) -> None:
        for number in SNAPSHOT_SIGNALS:
            signal.raise_signal(number)

    before = [signal.getsignal(number) for number in SNAPSHOT_SIGNALS]
    assert run_script(main, []) == 0
    assert [signal.getsignal(number) for number in SNAPSHOT_SIGNALS] == before


HANG_UP = """
import signal, sys, time
from areal_sc.trainer.failure import Terminated, run_script
from areal_sc.trainer.stopping import stop_wishes

def main(argv):
    if argv == ["ignored"]:
        signal.raise_signal(signal.SIGHUP)
        print("ended", flush=True)
        return
    if argv == ["trains"]:
        with stop_wishes(60.0, lambda name: None) as wish:
            print("ready", flush=True)
            while wish.asked_by is None:
                time.sleep(0.01)
            print("of a loop of the user's", flush=True)
            raise Terminated(wish.asked_by)
    try:
        print("ready", flush=True)
        time.sleep(60)
    finally:
        print("x" * 10_000, flush=True)  # as a display does that shows its last state

is_ignored = sys.argv[1:] == ["ignored"]
signal.signal(signal.SIGHUP, signal.SIG_IGN if is_ignored else signal.SIG_DFL)
sys.exit(run_script(main))
"""


@pytest.mark.parametrize("does", ["waits", "trains"])
def test_a_closed_terminal_ends_the_script(does: str) -> None:
    """And no error of what it prints there on the way."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.execv(sys.executable, [sys.executable, "-c", HANG_UP, does])
    try:
        assert os.read(terminal, 100).startswith(b"ready")
        os.close(terminal)
        wait_until(lambda: os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT))
    finally:
        os.kill(pid, signal.SIGKILL)
        status = os.waitpid(pid, 0)[1]
    assert os.waitstatus_to_exitcode(status) == 129


def test_a_script_under_nohup_goes_on() -> None:
    finished = subprocess.run(
        [sys.executable, "-c", HANG_UP, "ignored"], capture_output=True, text=True, timeout=60
    )
    assert (finished.returncode, finished.stdout) == (0, "ended\n")


def test_a_script_runs_in_a_thread_and_shows_what_its_terminal_can(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Python takes handlers of signals in the main thread alone."""
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="latin-1"))
    codes: list[int] = []
    begin = Thread(target=lambda: codes.append(run_script(lambda argv: print("a\u2026"), [])))
    begin.start()
    begin.join(60)
    assert codes == [0]
    assert written.getvalue() == b"a?\n"
