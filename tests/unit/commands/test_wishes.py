"""What `pause`, `resume` and `scale` refuse, and what of their files counts."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from builders import OPENS_RUN, running_python

from areal_sc import __main__ as program
from areal_sc.commands import pause, resume, scale, wishing
from areal_sc.errors import CommandError, RunFolderError, WaitTimeout
from areal_sc.run import run_status
from areal_sc.run.run_folder import RunFolder
from areal_sc.run.run_status import (
    PAUSE_END,
    SCRIPT,
    HeardWishes,
    PauseWish,
    RoleStatus,
    RunStatus,
    RunWishes,
    ScaleAnswer,
    ScaleWish,
    Wait,
    drop_scale,
    take_back,
    write_wish,
)
from areal_sc.run.verdict import State, verdict
from areal_sc.system.process import machine_id

PAUSE, SCALE = PauseWish(1000.0, "me"), ScaleWish(3, "a1", "me")


def status_of(pid: int, now: float, **changes: object) -> RunStatus:
    values = {
        **{"host": "host-a", "machine": machine_id(), "pid": pid, "began": now - 60},
        **{"orphan_timeout_s": 300.0, "written": now, "progressed": now},
        **changes,
    }
    return RunStatus(**values)  # type: ignore[arg-type]


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    """Of a run that nobody has."""
    folder = RunFolder(tmp_path / "run")
    with folder:
        folder.open(config_text="")
    return folder


@pytest.fixture
def owner(folder: RunFolder) -> Iterator[int]:
    """A process that has the folder, and hears nothing."""
    with running_python(OPENS_RUN, folder.path, says="open") as process:
        yield process.pid


def tell(folder: RunFolder, status: RunStatus) -> None:
    folder.status_path.write_bytes(msgspec.json.encode(status))


@pytest.mark.parametrize(("name", "words"), [("pause", ()), ("scale", ("rollout=2",))])
def test_what_is_no_run_that_goes_on_is_refused(
    folder: RunFolder, tmp_path: Path, name: str, words: tuple[str, ...]
) -> None:
    with pytest.raises(CommandError, match="there is no folder"):
        program.main([name, str(tmp_path / "none"), *words])
    with pytest.raises(CommandError, match="not the folder of a run"):
        program.main([name, str(tmp_path), *words])
    with pytest.raises(CommandError, match=r"no run goes on in .*No script has the folder"):
        program.main([name, str(folder.path), *words])
    folder.summary_path.write_text('{"num_steps": 7}')
    with pytest.raises(CommandError, match="All of its 7 steps are done"):
        program.main([name, str(folder.path), *words])
    for path in (folder.path / "run.json", folder.path / ".run.json"):
        path.write_text(json.dumps({"kind": "areal_sc run", "format_version": 4}))
    with pytest.raises(CommandError, match="expected format 5, got 4"):
        program.main([name, str(folder.path), *words])
    assert not folder.pause_path.exists()
    assert not folder.scale_path.exists()


@pytest.mark.parametrize("word", ["rollout=0", "rollout=-1", "rollout=two", "train=2", "3"])
def test_a_number_that_is_none_is_refused(
    folder: RunFolder, word: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        program.main(["scale", str(folder.path), word])
    assert ended.value.code == 2
    assert f"expected rollout=N with a number of workers from 1, got {word!r}" in (
        capsys.readouterr().err
    )


def test_a_script_that_does_not_answer_is_named(
    folder: RunFolder, owner: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = time.time()
    tell(folder, status_of(owner, now, roles={"train": RoleStatus(now, 1)}))
    with pytest.raises(CommandError, match="has no rollout workers"):
        program.main(["scale", str(folder.path), "rollout=2"])
    monkeypatch.setattr(wishing, "TIMEOUT_S", 0.2)
    with pytest.raises(WaitTimeout, match=r"has not answered within 0\.2 s .*acts as soon"):
        program.main(["pause", str(folder.path)])
    assert folder.pause_path.stat().st_mode & 0o777 == 0o600


def test_a_pause_of_a_dead_run_is_told_and_taken_back(
    folder: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(CommandError, match="is not paused: No script has the folder"):
        program.main(["resume", str(folder.path)])
    write_wish(folder.pause_path, PAUSE)
    assert "It is paused, and stays so" in verdict(folder).text
    with folder:
        folder.open(config_text="")  # begins again from nothing
    assert folder.pause_path.exists()
    program.main(["resume", str(folder.path)])
    assert "its next start is not paused" in capsys.readouterr().out
    assert not folder.pause_path.exists()


def test_what_a_paused_run_does_is_told(folder: RunFolder, owner: int) -> None:
    now = time.time()
    role = RoleStatus(now, 3, num_running=4, is_held=True)
    status = status_of(owner, now - 5000, wishes=HeardWishes(PauseWish(now - 300, "me on host-a")))
    status.written, status.roles = now, {"rollout": role}
    tell(folder, status)
    found = verdict(folder, now)
    assert found.state is State.paused
    assert "By me on host-a, 5m00s ago. It still ends what goes on: 4 groups run" in found.text
    role.num_running = 0
    tell(folder, status)
    assert "Nothing is computed; `resume` lets it go on." in verdict(folder, now).text
    role.is_held, role.waits = False, [Wait(SCRIPT, PAUSE_END, now)]  # in an evaluation
    tell(folder, status)
    assert "Nothing is computed" in verdict(folder, now).text
    update = Wait(SCRIPT, "train.ppo_update", now)
    status.roles["train"] = RoleStatus(now, 3, waits=[update])  # beside a step
    tell(folder, status)
    assert "a step is in progress" in verdict(folder, now).text
    assert not found.have_workers_ended


def test_wishes_are_read_until_they_are_gone(folder: RunFolder) -> None:
    told: list[str] = []
    nothing = RunWishes()
    assert nothing.renewed(folder, told.append) == nothing
    write_wish(folder.pause_path, PAUSE)
    write_wish(folder.scale_path, SCALE)
    both = nothing.renewed(folder, told.append)
    assert both == RunWishes(PAUSE, SCALE)
    drop_scale(folder, ScaleWish(3, "another", "me"))
    assert folder.scale_path.exists()
    drop_scale(folder, SCALE)
    assert both.renewed(folder, told.append) == RunWishes(PAUSE)
    assert told == []


def test_a_wish_that_comes_while_another_is_dropped_stays(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    newer = ScaleWish(4, "b2", "me")
    read = run_status._read

    def written_meanwhile(path: Path, kind: Any) -> Any:
        found = read(path, kind)
        write_wish(folder.scale_path, newer)
        return found

    for dropped in (SCALE, ScaleWish(5, "c3", "me")):
        write_wish(folder.scale_path, SCALE)
        with monkeypatch.context() as patch:
            patch.setattr(run_status, "_read", written_meanwhile)
            drop_scale(folder, dropped)
        assert RunWishes().renewed(folder, pytest.fail).scale == newer
        assert [it for it in folder.path.glob(".scale*") if it != folder.scale_path] == []


def test_who_pauses_at_the_same_time_as_another_is_answered(
    folder: RunFolder, owner: int, capsys: pytest.CaptureFixture[str]
) -> None:
    now = time.time()
    tell(folder, status_of(owner, now))
    write = pause.write_wish

    def write_and_hear(path: Path, wish: PauseWish) -> None:
        write(path, wish)
        tell(folder, status_of(owner, now, wishes=HeardWishes(PAUSE)))  # the other's

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(wishing, "TIMEOUT_S", 0.2)
        patch.setattr(pause, "write_wish", write_and_hear)
        program.main(["pause", str(folder.path)])
    assert capsys.readouterr().out.startswith("paused: ")


@pytest.mark.parametrize("is_answered", [False, True])
def test_of_two_that_scale_at_once_one_hears_that_the_other_counts(
    folder: RunFolder, owner: int, monkeypatch: pytest.MonkeyPatch, is_answered: bool
) -> None:
    """Whether the script has answered the newer wish already, or heard none of them yet."""
    newer, past = ScaleWish(5, "b2", "you"), HeardWishes(scale=ScaleAnswer("z9", 1))
    tell(folder, status_of(owner, time.time(), wishes=past))
    write = scale.write_wish

    def write_and_replace(path: Path, wish: ScaleWish) -> None:
        write(path, wish)
        write(path, newer)
        if is_answered:
            heard = HeardWishes(scale=ScaleAnswer(newer.id, newer.num_workers))
            tell(folder, status_of(owner, time.time(), wishes=heard))
            drop_scale(folder, newer)

    monkeypatch.setattr(scale, "write_wish", write_and_replace)
    with pytest.raises(CommandError, match=r"has asked for 5 rollout .* counts, and not 3"):
        program.main(["scale", str(folder.path), "rollout=3"])
    assert folder.scale_path.exists() is not is_answered


def test_an_answer_to_an_earlier_wish_replaces_none(
    folder: RunFolder, owner: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    past = ScaleAnswer("z9", 1)
    tell(folder, status_of(owner, time.time(), wishes=HeardWishes(scale=past)))
    answers = iter([past, None])

    def answer_later(seconds: float) -> None:
        wish = RunWishes().renewed(folder, pytest.fail).scale
        assert wish is not None
        answer = next(answers) or ScaleAnswer(wish.id, wish.num_workers)
        tell(folder, status_of(owner, time.time(), wishes=HeardWishes(scale=answer)))

    monkeypatch.setattr(wishing.time, "sleep", answer_later)
    program.main(["scale", str(folder.path), "rollout=3"])
    assert next(answers, "none is left") == "none is left"


def test_a_pause_that_is_taken_back_is_told(
    folder: RunFolder, owner: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    tell(folder, status_of(owner, time.time()))
    write = pause.write_wish

    def write_and_take_back(path: Path, wish: PauseWish) -> None:
        write(path, wish)
        assert take_back(path)

    monkeypatch.setattr(pause, "write_wish", write_and_take_back)
    with pytest.raises(CommandError, match="`resume` has taken the pause back"):
        program.main(["pause", str(folder.path)])


def test_a_pause_beside_a_resume_that_is_not_heard_yet_is_one_of_its_own(
    folder: RunFolder, owner: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the script says of the pause before neither refuses nor confirms it."""
    now = time.time()
    tell(folder, status_of(owner, now, wishes=HeardWishes(PAUSE)))
    heard = list[PauseWish | None]()

    def hear(seconds: float) -> None:
        heard.append(RunWishes().renewed(folder, pytest.fail).pause)
        tell(folder, status_of(owner, now, wishes=HeardWishes(heard[-1])))

    monkeypatch.setattr(wishing.time, "sleep", hear)
    program.main(["pause", str(folder.path)])
    assert len(heard) == 1
    assert heard[0] not in (None, PAUSE)


def test_a_resume_that_another_pause_follows_is_told(
    folder: RunFolder, owner: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    tell(folder, status_of(owner, time.time(), wishes=HeardWishes(PAUSE)))
    write_wish(folder.pause_path, PAUSE)

    def take_back_and_pause(path: Path) -> bool:
        has_taken = take_back(path)
        write_wish(path, PauseWish(2000.0, "you"))
        return has_taken

    monkeypatch.setattr(resume, "take_back", take_back_and_pause)
    with pytest.raises(CommandError, match="the run is paused by you"):
        program.main(["resume", str(folder.path)])


def test_two_that_resume_at_once_both_hear_that_the_run_goes_on(
    folder: RunFolder,
    owner: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    now = time.time()
    tell(folder, status_of(owner, now, wishes=HeardWishes(PAUSE)))  # whose file is gone already

    def hear(seconds: float) -> None:
        tell(folder, status_of(owner, now + 1))

    monkeypatch.setattr(wishing.time, "sleep", hear)
    program.main(["resume", str(folder.path)])
    assert capsys.readouterr().out == "the run goes on\n"


def test_a_script_that_was_stopped_is_let_go_on_and_has_to_say_so_itself(
    folder: RunFolder,
    owner: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """It was stopped before it heard of the pause: what it has written says nothing."""
    now = time.time()
    tell(folder, status_of(owner, now))
    write_wish(folder.pause_path, PAUSE)
    os.kill(owner, signal.SIGSTOP)
    os.waitid(os.P_PID, owner, os.WSTOPPED | os.WNOWAIT)
    monkeypatch.setattr(wishing, "TIMEOUT_S", 0.0)
    with pytest.raises(WaitTimeout, match="has not answered"):
        program.main(["resume", str(folder.path)])
    assert capsys.readouterr().out == f"process {owner} was stopped by a signal, and goes on now\n"
    os.waitid(os.P_PID, owner, os.WCONTINUED | os.WNOWAIT)
    write_wish(folder.pause_path, PAUSE)

    def write_anew(seconds: float) -> None:
        tell(folder, status_of(owner, now + 1))

    monkeypatch.setattr(wishing, "TIMEOUT_S", 60.0)
    monkeypatch.setattr(wishing.time, "sleep", write_anew)
    program.main(["resume", str(folder.path)])
    assert capsys.readouterr().out == "the run goes on\n"


def test_a_script_that_ends_leaves_no_wish_for_workers(folder: RunFolder, owner: int) -> None:
    tell(folder, status_of(owner, time.time()))
    write = scale.write_wish

    def write_and_end(path: Path, wish: ScaleWish) -> None:
        write(path, wish)
        os.kill(owner, signal.SIGKILL)
        os.waitid(os.P_PID, owner, os.WEXITED | os.WNOWAIT)  # the fixture reaps it

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scale, "write_wish", write_and_end)
        with pytest.raises(CommandError, match="no run goes on"):
            program.main(["scale", str(folder.path), "rollout=2"])
    assert not folder.scale_path.exists()


def test_files_that_others_may_have_written_do_not_count(folder: RunFolder) -> None:
    told: list[str] = []
    write_wish(folder.pause_path, PAUSE)
    folder.pause_path.chmod(0o622)
    assert RunWishes().renewed(folder, told.append) == RunWishes()
    assert "nobody else can write to" in told[-1]
    folder.pause_path.chmod(0o600)
    folder.pause_path.write_bytes(b"{")
    before = RunWishes(PAUSE)
    assert before.renewed(folder, told.append) == before, "what was heard before counts"
    assert "is damaged" in told[-1]
    folder.pause_path.unlink()
    folder.pause_path.symlink_to(folder.status_path)
    assert RunWishes().renewed(folder, told.append) == RunWishes()
    assert "is a link" in told[-1]
    if os.getuid() == 0:
        folder.pause_path.unlink()
        write_wish(folder.pause_path, PAUSE)
        os.chown(folder.pause_path, 1234, -1)
        assert RunWishes().renewed(folder, told.append) == RunWishes()
        assert "got one of user 1234" in told[-1]


def test_a_wish_that_cannot_be_written_is_named(folder: RunFolder) -> None:
    with pytest.raises(RunFolderError, match=r"cannot write .*No such file"):
        write_wish(folder.status_path / "x", PAUSE)
