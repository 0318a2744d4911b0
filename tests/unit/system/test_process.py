from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable

import pytest

from areal_sc import GRPOConfig, Run, load_config, make_scheduler, run_script, start
from areal_sc.config.schema import SchedulerConfig
from areal_sc.errors import ConfigError
from areal_sc.system.process import (
    bury_left,
    children_of,
    environment_of_workers,
    heard_from,
    process_state,
    refuse_in_worker,
    start_ticks,
    take_arguments_of_script,
)

RAISE = """
import resource
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 512))
from areal_sc.system.process import allow_open_files
allow_open_files()
print(*resource.getrlimit(resource.RLIMIT_NOFILE))
"""


def test_the_limit_is_raised_as_far_as_is_allowed() -> None:
    done = subprocess.run(
        [sys.executable, "-c", RAISE], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == "512 512\n"


def test_the_dead_that_nobody_waits_for_are_reaped_at_the_second_look() -> None:
    pid = os.posix_spawn(sys.executable, [sys.executable, "-c", ""], os.environ)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    left = bury_left(set())
    assert pid in left, "who has started it may wait for it now"
    assert pid not in bury_left({pid})
    with pytest.raises(ChildProcessError):
        os.waitpid(pid, 0)


def test_what_a_child_tells_is_found_among_what_else_is_printed() -> None:
    code = "from areal_sc.system.process import tell_starter; print('hello', end='', flush=True); "
    told = {"": b"", "tell_starter(b'[1]')": b"[1]"}
    for call, said in told.items():
        child = subprocess.Popen([sys.executable, "-c", code + call], stdout=subprocess.PIPE)
        assert child.stdout is not None
        assert heard_from(child.stdout, 60.0) == said
        child.communicate(timeout=60)


def test_a_script_that_a_launcher_has_started_once_a_rank_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in {"RANK": "1", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    for begin in (lambda: Run(GRPOConfig()), lambda: make_scheduler(SchedulerConfig())):
        with pytest.raises(ConfigError, match=r"torchrun, .* has started the script 2 times"):
            begin()


def test_a_child_that_prints_more_than_it_tells_does_not_wait_for_a_reader() -> None:
    code = "from areal_sc.system.process import tell_starter; tell_starter(b'up')"
    code += "; print('x' * 200_000)"
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    child = subprocess.Popen([sys.executable, "-c", code], **pipes)
    assert child.stdout is not None
    assert heard_from(child.stdout, 60.0) == b"up"
    assert child.wait(60.0) == 0
    child.stdout.close()


def test_a_worker_has_the_scripts_arguments_and_begins_no_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "argv", ["a script.py", "--tag=x,y"])
    refuse_in_worker("Run")
    for name, value in environment_of_workers().items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "argv", ["agent"])
    take_arguments_of_script()
    assert sys.argv == ["a script.py", "--tag=x,y"]
    begins: list[Callable[[], object]] = [
        load_config,
        lambda: run_script(print),
        lambda: Run(GRPOConfig()),
        lambda: start().__enter__(),
        lambda: make_scheduler(SchedulerConfig()),
    ]
    for begin in begins:
        with pytest.raises(ConfigError, match='if __name__ == "__main__":'):
            begin()
    settings = {"run_dir": "r", "total_steps": 1, "actor.path": "m"}
    assert load_config({**settings, "rollout.max_context_tokens": 256}).total_steps == 1


def test_a_process_may_have_any_bytes_as_its_name() -> None:
    naming = "import ctypes; ctypes.CDLL(None).prctl(15, b'caf\\xe9', 0, 0, 0); print(); input()"
    with subprocess.Popen(
        [sys.executable, "-c", naming], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as named:
        assert named.stdout is not None
        named.stdout.readline()
        assert named.pid in children_of(os.getpid())
        assert start_ticks(named.pid) > 0
        assert process_state(named.pid) != "is gone"
        named.communicate(b"\n")
