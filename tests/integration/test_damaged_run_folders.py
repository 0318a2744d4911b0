"""A run whose files are damaged, each in every way, goes on from right state or says why not.

A real run is killed. Its folder is damaged and gone on from in this process, by the `Run` of a
script whose only rank is here, too, and loads the snapshots.
"""

from __future__ import annotations

import hashlib
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, nullcontext, suppress
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from integration.run_process import TINY_YAML, gate_of, open_gate, tiny_run
from small_disk import small_disk

from areal_sc import FSDPPPOActor, GRPOConfig, load_config
from areal_sc.__main__ import main
from areal_sc.config.loading import differences
from areal_sc.config.schema import ActorConfig
from areal_sc.controller.rollout.rejections import RolloutState
from areal_sc.errors import ArealError, RunFolderError
from areal_sc.records.trackers.base import Tracker
from areal_sc.run.run_folder import RunFolder
from areal_sc.run.status_board import StatusBoard
from areal_sc.trainer import run as run_module
from areal_sc.trainer.run import Run
from areal_sc.trainer.snapshots import describe_resume

NEWEST = 4
SECOND = "step-000003"
UNREAD = (
    *("agents", "keys.json", "logs", "model", "tokenizer.json", "sources", "status.json"),
    *("histories", "records", "tensorboard"),
)
"""Written anew, appended to, for people to read, or for who takes ranks over; their damages are
tried all at once."""
ROWS_A_STEP = 4 * 2
SETTINGS = ("total_steps=9", "rollout.max_staleness=0", "checkpoint.every_steps=1")

Damage = Callable[[Path], None]


def cut(share: float, num_more: int = 0) -> Damage:
    def damage(path: Path) -> None:
        content = path.read_bytes()
        path.write_bytes(content[: max(0, int(share * len(content)) - num_more)])

    return damage


def flip(share: float, bit: int = 0) -> Damage:
    """One bit, at this share of the file's length."""

    def damage(path: Path) -> None:
        content = bytearray(path.read_bytes())
        if content:
            content[min(int(share * len(content)), len(content) - 1)] ^= 1 << bit
        path.write_bytes(content)

    return damage


def make_unreadable(path: Path) -> None:
    """In a way that also root cannot read it."""
    path.unlink()
    path.mkdir()


DAMAGES: dict[str, Damage] = {
    "empty": cut(0),
    "half": cut(0.5),
    "without its last byte": cut(1, 1),
    "flipped at the start": flip(0),
    "flipped in the middle": flip(0.5, bit=7),
    "flipped at the end": flip(1),
    "unreadable": make_unreadable,
}


class Ranks:
    """The controllers of a run that goes on: its only rank, and what the others are told."""

    def __init__(self, model: Path, folder: Path) -> None:
        self.handle = FSDPPPOActor(ActorConfig(path=str(model), device="cpu"))
        self.engine: Any = self.handle.build()
        self.engine.initialize(0, 1, "")
        self.folder = RunFolder(folder)
        self.step = 0
        self.rejections = SimpleNamespace()
        self._restored = b""

    def load_snapshot(self, step: int) -> None:
        self.step = step
        self.folder.begin_lineage()
        self.engine.load_snapshot(self.folder.snapshot_path(step) / "engine")

    def go_back(self, state: RolloutState) -> None:
        self._restored = msgspec.msgpack.encode(state, order="deterministic")

    def share_weights(self, rollout: object) -> None:
        pass

    def heard_by(self, listener: object) -> AbstractContextManager[None]:
        return nullcontext()

    def digest(self) -> str:
        """Of weights, random state and ledger."""
        hashed = hashlib.sha256(self._restored + torch.get_rng_state().numpy().tobytes())
        for bucket in self.engine.gather_weights(1 << 20):
            for _, values in bucket:
                hashed.update(values.numpy().tobytes())
        return hashed.hexdigest()


class KilledRun:
    """The folder of a run that was killed; `restore` gives it back undamaged."""

    def __init__(self, path: Path, model: Path) -> None:
        self.folder = RunFolder(path)
        self._original = path.with_name("original")
        shutil.copytree(path, self._original)
        files = sorted(f.relative_to(path) for f in path.rglob("*") if f.is_file())
        self.unread = [
            # what was being written when the run was killed is deleted
            f
            for f in files
            if f.parts[0] in UNREAD or SECOND in f.parts or ".partial" in str(f)
        ]
        self.files = [file for file in files if file not in self.unread]
        paths = (f"run_dir={path}", f"actor.path={model}", f"task.gate={gate_of(path)}")
        given = (*paths, *SETTINGS, f"task.num_free_episodes={ROWS_A_STEP}")
        self._config = load_config(["--config", str(TINY_YAML), *given], GRPOConfig)
        self.ranks: Any = Ranks(model, path)
        self.digests = {}
        for snapshot in self.folder.snapshots()[::-1]:
            self.go_on()
            self.digests[self.ranks.step] = self.ranks.digest()
            shutil.rmtree(snapshot)
        self.restore()

    def restore(self) -> None:
        shutil.rmtree(self.folder.path)
        shutil.copytree(self._original, self.folder.path)

    def foretold(self) -> int | None:
        """The step that `--dry-run` says; None: it refuses."""
        try:
            self.folder.preview(config_text=run_module.config_text(self._config))
            said = "\n".join(describe_resume(self.folder, self.ranks.handle))
        except ArealError:
            return None
        return int(re.findall(r"would go on after step (\d+), of lineage 1:", said)[0])

    def go_on(self) -> int:
        """The step that a run goes on after. Raises: ArealError."""
        with (
            Run(self._config, [Tracker()]) as run,
            run.training(self.ranks, self.ranks),
        ):
            return int(self.ranks.step)


@pytest.fixture(scope="module")
def killed_run(
    tmp_path_factory: pytest.TempPathFactory, tiny_model_folder: Path
) -> Iterator[KilledRun]:
    path = tmp_path_factory.mktemp("killed") / "run"
    free = f"task.num_free_episodes={ROWS_A_STEP}"
    with tiny_run(path, tiny_model_folder, *SETTINGS, "trackers=[tensorboard]", free) as run:
        for _ in range(NEWEST - 1):  # the first step is free
            open_gate(path)
        run.wait_until(lambda: len(run.events("snapshot")) == NEWEST, "the snapshots")
    with pytest.MonkeyPatch.context() as patch:
        scheduler = SimpleNamespace(close=lambda: None, status=StatusBoard())
        patch.setattr(run_module, "make_scheduler", lambda *_: scheduler)
        patch.setattr(run_module, "start", lambda *_: nullcontext())
        patch.setattr(run_module, "typed", lambda config: config)  # `load_config` did it
        patch.setattr(run_module, "complete_config", lambda _, **__: [])
        text = (path / "config.yaml").read_text()
        patch.setattr(run_module, "config_text", lambda _: text)
        patch.setattr(differences, "settings_of", cache(differences.settings_of))
        killed = KilledRun(path, tiny_model_folder)
        assert sorted(killed.digests) == [NEWEST - 1, NEWEST]
        with closing(killed.ranks.engine):
            yield killed


def may_be_quiet(file: Path, kind: str) -> bool:
    """Whether the damage may change nothing that a run goes on from."""
    if file.parts[0] == "checkpoints":
        return False
    if kind == "without its last byte":
        return True
    if kind == "flipped at the end":
        return file.parts[0] != "ledger"
    unknown = ("empty", "unreadable")
    return {
        ".lock": kind != "unreadable",  # what it says is for messages
        ".lineage": kind == "half",  # of two bytes
        "tracker_id": kind not in unknown,
        "config.yaml": True,  # for people: the marker has the settings, too
    }.get(file.name, False)


@pytest.mark.parametrize("kind", DAMAGES)
def test_a_run_goes_on_from_right_state_or_says_why_not(
    killed_run: KilledRun,
    kind: str,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    faults, folder = [], killed_run.folder
    for file in killed_run.files:
        killed_run.restore()
        DAMAGES[kind](folder.path / file)
        foretold = killed_run.foretold()
        capsys.readouterr()
        caplog.clear()
        try:
            step = killed_run.go_on()
        except ArealError as error:
            step = None
            said, is_right = str(error), file.parts[0] in str(error)
        else:
            said = "".join(x for x in capsys.readouterr().out.splitlines(True) if "WARN" in x)
            told = (file.name, "since the run began")
            said += "".join(x for x in caplog.messages if any(part in x for part in told))
            is_right = killed_run.ranks.digest() == killed_run.digests[step]
        if foretold != step and file.name != "tracker_id":  # which a run only writes
            faults.append(f"{file}: a dry run foretold {foretold}, not {step}")
        if not is_right or not (said or may_be_quiet(file, kind)):
            faults.append(f"{file}: {said or 'nothing was said'}")
    assert not faults, "\n".join(faults)


@pytest.mark.parametrize("kind", DAMAGES)
def test_what_nobody_reads_may_be_damaged(killed_run: KilledRun, kind: str) -> None:
    killed_run.restore()
    for file in killed_run.unread:
        DAMAGES[kind](killed_run.folder.path / file)
    if kind == "unreadable":
        shutil.rmtree(killed_run.folder.logs)  # a log that cannot be opened ends the run
        killed_run.folder.logs.mkdir()
    assert killed_run.go_on() == NEWEST
    assert killed_run.ranks.digest() == killed_run.digests[NEWEST]


@pytest.mark.parametrize("kind", DAMAGES)
def test_commands_that_show_a_run_say_what_is_damaged(killed_run: KilledRun, kind: str) -> None:
    killed_run.restore()
    path = killed_run.folder.path
    DAMAGES[kind](path / "ledger" / "000001.journal")
    may_show = kind in ("half", "without its last byte", "flipped at the end")
    with suppress(ArealError) if may_show else pytest.raises(ArealError, match="ledger"):
        main(["ledger", str(path)])


def test_a_folder_of_snapshots_that_cannot_be_read_is_no_empty_one(killed_run: KilledRun) -> None:
    killed_run.restore()
    shutil.rmtree(killed_run.folder.checkpoints)
    killed_run.folder.checkpoints.write_text("")
    with pytest.raises(RunFolderError, match="checkpoints: Not a directory"):
        killed_run.go_on()


def test_a_full_disk_at_the_start_is_named(
    killed_run: KilledRun, capsys: pytest.CaptureFixture[str]
) -> None:
    killed_run.restore()
    with small_disk(0), pytest.raises(RunFolderError, match="File too large"):
        killed_run.go_on()
    assert "Traceback" not in capsys.readouterr().err
    assert killed_run.go_on() == NEWEST
