"""What the loader composes, and that it leaves nothing behind."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from threading import Thread

import pytest
from builders import load

from areal_sc.config.fields import is_section, known_keys
from areal_sc.config.loading.loader import config_text
from areal_sc.config.schema import Device, Dtype, GRPOConfig, LrSchedule, OverBound, Resume
from areal_sc.controller.ledger.ledger_records import LedgerState
from areal_sc.controller.rollout.rejections import RejectionCounts
from areal_sc.controller.rollout.rollout_controller import RolloutState
from areal_sc.engines.training.snapshot_index import INDEX_NAME, SnapshotIndex
from areal_sc.errors import ConfigError, ModelError, RunFolderError
from areal_sc.preflight.load import load_config
from areal_sc.run.run_folder import RunFolder
from areal_sc.trainer.snapshots import CONTROLLERS, sealed

WriteYaml = Callable[..., Path]


@dataclass
class Game:
    size: int = 3


@dataclass
class GameConfig(GRPOConfig):
    game: Game = field(default_factory=Game)


def run_python(code: str, *arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[4])},
    )


LOAD_AND_SHOW = """
import sys
from areal_sc.preflight.load import load_config
from areal_sc.config.schema import GRPOConfig
config = load_config(sys.argv[1:], GRPOConfig)
print(config.run_dir, config.rollout.num_workers, config.rollout.group_size)
"""


@pytest.mark.parametrize("given", ["sglang.args={log_level:warn}", "sglang.args.log_level=warn"])
def test_arguments_of_sglang_need_no_plus(given: str) -> None:
    config = load(given, "servers.environment.NCCL_DEBUG=INFO")
    assert config.sglang.args == config.rollout.sglang.args == {"log_level": "warn"}
    assert config.servers.environment == {"NCCL_DEBUG": "INFO"}
    with pytest.raises(ConfigError, match=r"unknown setting sglang\.arguments"):
        load("sglang.arguments.log_level=warn")


def test_values_have_the_types_of_the_schema() -> None:
    config = load(
        "actor.dtype=bfloat16",
        "actor.device=cpu",
        "actor.optimizer.lr=1",
        "actor.optimizer.schedule=cosine",
        "rollout.over_bound=mask",
        "generation.stop_token_ids=[3,4]",
        "+task.name=sort",
    )
    assert type(config) is GRPOConfig
    assert config.actor.dtype is Dtype.bfloat16
    assert config.actor.device is Device.cpu
    assert type(config.actor.optimizer.lr) is float
    assert config.actor.optimizer.schedule is LrSchedule.cosine
    assert config.rollout.over_bound is OverBound.mask
    assert config.generation.stop_token_ids == [3, 4]
    assert type(config.generation.stop_token_ids) is list
    assert config.task == {"name": "sort"}
    assert type(config.task) is dict


def test_settings_follow_those_they_are_taken_from() -> None:
    config = load("seed=7", "generation.temperature=0.7", "actor.dtype=bfloat16")
    assert (config.actor.seed, config.rollout.seed) == (7, 7)
    assert config.rollout.generation.temperature == 0.7
    assert config.rollout.dtype is Dtype.bfloat16
    assert config.rollout.path == "no_such_model"
    assert config.actor.optimizer.total_steps == 10
    assert config.scheduler.run_dir == "runs/test"
    assert config.scheduler.transport == config.transport


def test_override_wins_over_yaml_wins_over_its_defaults_win_over_schema(
    write_yaml: WriteYaml,
) -> None:
    write_yaml(
        "run_dir: base\ntotal_steps: 1\nseed: 1\nactor: {path: base, num_threads: 2}\n", "base.yaml"
    )
    path = write_yaml("defaults: [base]\ntotal_steps: 2\nseed: 2\nactor: {path: derived}\n")
    config = load_config(["--config", str(path), "seed=3"], GRPOConfig)
    assert config.run_dir == "base"
    assert config.total_steps == 2
    assert config.seed == 3
    assert config.actor.path == "derived"
    assert config.actor.num_threads == 2
    assert config.rollout.group_size == GRPOConfig().rollout.group_size
    path = write_yaml("defaults: [_self_, base]\ntotal_steps: 2\n")  # base comes last
    assert load_config(["--config", str(path)], GRPOConfig).total_steps == 1


def test_composition_from_another_working_directory(tmp_path: Path) -> None:
    folder = tmp_path / "a folder (of mine)"
    elsewhere = tmp_path / "elsewhere"
    folder.mkdir()
    elsewhere.mkdir()
    (folder / "base.yaml").write_text("run_dir: there\ntotal_steps: 1\nactor: {path: m}\n")
    (folder / "x.yaml").write_text("defaults: [base]\nrollout: {num_workers: 1, group_size: 3}\n")
    relative = os.path.relpath(folder / "x.yaml", elsewhere)
    done = run_python(LOAD_AND_SHOW, "--config", relative, "actor.device=cpu", cwd=elsewhere)
    assert (done.stdout, done.stderr) == ("there 1 3\n", "")
    assert list(elsewhere.iterdir()) == []


def test_user_schema_adds_typed_settings(write_yaml: WriteYaml) -> None:
    path = write_yaml()
    config = load_config(["--config", str(path), "game.size=5"], GameConfig)
    assert isinstance(config, GameConfig)
    assert config.game.size == 5
    with pytest.raises(ConfigError, match=r"game\.size: expected an integer, got 'big'"):
        load_config(["--config", str(path), "game.size=big"], GameConfig)


def test_flags_stand_for_settings() -> None:
    assert load("--overwrite").overwrite
    assert load("--resume").resume is Resume.must
    plain = load()
    assert (plain.overwrite, plain.resume) == (False, Resume.auto)


def test_dry_run_shows_workers_memory_and_run_folder(
    write_yaml: WriteYaml, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["--config", str(write_yaml()), "--dry-run", "actor.parallel.data=2"]
    config = load_config(argv, GRPOConfig, makes_model=True, count_devices=lambda: 0)
    assert config.scheduler.dry_run
    assert Path(config.run_dir).is_dir(), "whatever the script writes goes with its process"
    assert config.scheduler.run_dir == config.run_dir
    shown = capsys.readouterr().out
    assert "train/1" in shown
    assert "rollout/0" in shown
    assert "would start a new run" in shown
    assert "not there yet, the script makes it" in shown
    assert re.search(r"shared memory in /\S+: up to .+ of .+B", shown)


def test_dry_run_says_what_each_kind_of_loop_would_do(
    write_yaml: WriteYaml, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    argv = ["--config", str(write_yaml()), f"run_dir={tmp_path / 'run'}"]
    config = load_config(argv, GRPOConfig)
    with RunFolder(config.run_dir) as folder:
        folder.open(config_text=config_text(config))
        state = RolloutState(LedgerState(version=10), RejectionCounts({}, 0))
        (folder.snapshot_path(10) / "engine").mkdir(parents=True)
        (folder.snapshot_path(10) / CONTROLLERS).write_bytes(sealed(state))
        index = SnapshotIndex(architecture="", num_updates=0, shapes={}, files=())
        (folder.snapshot_path(10) / "engine" / INDEX_NAME).write_bytes(index.encode())
        folder.begin_lineage()
        folder.metrics_path.touch()
    for flags, said in (
        ((), "a loop without a `Run` would start again from nothing"),
        (("--resume",), "a loop without a `Run` would refuse --resume"),
    ):
        load_config([*argv, "--dry-run", *flags], GRPOConfig, makes_model=True)
        shown = capsys.readouterr().out
        assert "would go on from the last snapshot" in shown
        assert "would go on after step 10, of lineage 0" in shown
        assert said in shown
    folder.summary_path.touch()
    with pytest.raises(RunFolderError, match="its run is finished"):  # before the missing model
        load_config([*argv, "--dry-run"], GRPOConfig)


def test_dry_run_misses_a_model_that_the_script_does_not_make() -> None:
    with pytest.raises(ModelError, match="no_such_model: there is no such folder") as missing:
        load("--dry-run")
    assert missing.value.exit_code == 6


def test_flags_and_overrides_stand_in_any_order(write_yaml: WriteYaml) -> None:
    argv = ["seed=4", "--overwrite", "total_steps=3", "--config", str(write_yaml()), "+task.a=b"]
    config = load_config(argv, GRPOConfig)
    assert (config.seed, config.total_steps, config.overwrite) == (4, 3, True)
    assert config.task == {"a": "b"}


def test_print_config_gives_the_same_configuration_again(
    write_yaml: WriteYaml, capsys: pytest.CaptureFixture[str]
) -> None:
    overrides = [
        "actor.optimizer.lr=4e-4",
        "rollout.over_bound=wait",
        "generation.stop_token_ids=[7]",
        "actor.ppo.behavior_weight_cap=inf",
        "+task.nested={a: [1, x], b: null}",
        "run_dir='1e3'",
    ]
    argv = ["--config", str(write_yaml()), *overrides]
    with pytest.raises(SystemExit) as exit_:
        load_config([*argv, "--print-config"], GRPOConfig)
    assert exit_.value.code == 0
    printed = capsys.readouterr().out
    assert "${" not in printed
    again = write_yaml(printed, "printed.yaml")
    expected = load_config(argv, GRPOConfig)
    assert load_config(["--config", str(again)], GRPOConfig) == expected
    assert expected.run_dir == "1e3"
    assert config_text(expected) == printed


@pytest.mark.parametrize("columns", ["60", "80", "120"])
def test_help_tells_every_setting_and_fits_the_terminal(
    columns: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    with pytest.raises(SystemExit) as exit_:
        load_config(["--help"], GameConfig)
    assert exit_.value.code == 0
    text = capsys.readouterr().out
    for expected in ("--config", "--print-config", "--dry-run", "--overwrite", "--resume"):
        assert expected in text
    assert "  10   a worker dies again and again\n" in text
    settings = text.partition("\nsettings:\n")[2]
    assert max(map(len, settings.splitlines())) <= int(columns)
    assert (
        "  rollout.num_threads=1\n      CPU threads a worker (an integer, at least 1)\n" in settings
    )
    assert "run_dir=(required)\n" in settings
    assert "overwrite=false\n" in settings
    assert "rollout.dtype=${actor.dtype}\n" in settings
    for unit in ("seconds, above 0", "minutes, at least 0", "bytes, at least 0"):
        assert f", in {unit})" in " ".join(settings.split())
    lines = settings.splitlines()
    assert lines.index("  actor.device=auto") < lines.index("  actor.parallel.data=1")
    assert lines.index("  trackers=[]") < lines.index("  generation.top_k=0")  # of no section
    assert "\n        finish_running: no new ones start, " in settings  # a choice's own meaning
    assert "actor.ppo: Decoupled PPO (" in settings
    assert "  game.size=3\n      (an integer)\n" in settings  # a field without a meaning
    shown = {line.split("=")[0].strip() for line in settings.splitlines() if "=" in line}
    sections = {key for key, kind in known_keys(GameConfig).items() if is_section(kind)}
    assert shown == set(known_keys(GameConfig)) - sections


def test_warnings_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    load()
    assert caplog.records == []
    load("generation.top_k=5")
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "generation.top_k=5" in caplog.text


def test_loader_imports_no_tensor_library(tmp_path: Path) -> None:
    code = """
import sys
import areal_sc.preflight.load
print([name for name in ("torch", "transformers", "numpy") if name in sys.modules])
"""
    done = run_python(code, cwd=tmp_path)
    assert (done.stdout, done.stderr) == ("[]\n", "")


def test_a_home_folder_is_one_in_every_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    config = load("actor.path=~/model", "weight_update.folder=~/weights", "actor.lora.path='a~b'")
    assert (config.actor.path, config.actor.lora.path) == ("/home/me/model", "a~b")
    assert config.weight_update.folder == "/home/me/weights"


def test_settings_may_come_from_a_pipe(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    text = b"run_dir: r\ntotal_steps: 3\nactor: {path: m}\nrollout: {max_context_tokens: 256}\n"
    writer = Thread(target=pipe.write_bytes, args=[text])
    writer.start()
    assert load_config(pipe).total_steps == 3
    writer.join(60)
