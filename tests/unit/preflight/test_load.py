"""Settings from Python: one function, with the checks and messages of a YAML."""

from __future__ import annotations

import dataclasses
import logging
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from areal_sc.config.fields import join_sections
from areal_sc.config.loading.loader import typed
from areal_sc.config.schema import (
    ActorConfig,
    GenerationConfig,
    GRPOConfig,
    OverBound,
    RolloutConfig,
)
from areal_sc.errors import ConfigError
from areal_sc.preflight.load import load_config

WriteYaml = Callable[..., Path]

REQUIRED: dict[str, Any] = {"run_dir": "r", "total_steps": 3, "actor.path": "m"}


@dataclass
class OwnConfig(GRPOConfig):
    level: int = 1


def load(source: Any, *rest: Any) -> Any:
    return load_config(source, *rest, count_devices=lambda: 0)


def test_the_same_settings_from_everywhere_are_the_same(write_yaml: WriteYaml) -> None:
    text = (
        "run_dir: r\ntotal_steps: 3\nactor: {path: m, optimizer: {lr: 1e-3}}\n"
        "rollout: {over_bound: mask}\nseed: 4\n"
    )
    flat = {**REQUIRED, "actor.optimizer.lr": 1e-3, "rollout.over_bound": "mask", "seed": 4}
    nested = {
        "run_dir": Path("r"),
        "total_steps": 3,
        "actor": {"path": "m", "optimizer.lr": 1e-3},
        "rollout": {"over_bound": OverBound.mask},
        "seed": 4,
    }
    by_hand = GRPOConfig(
        run_dir=Path("r"),  # type: ignore[arg-type]
        total_steps=3,
        actor=ActorConfig(path="m"),
        rollout=RolloutConfig(over_bound="mask"),  # type: ignore[arg-type]
        seed=4,
    )
    by_hand.actor.optimizer.lr = 1e-3
    join_sections(by_hand)
    expected = load(["--config", str(write_yaml(text))], GRPOConfig)
    assert type(expected.rollout.over_bound) is OverBound
    arguments = [f"{key}={value}" for key, value in flat.items()]
    for found in (
        load(write_yaml(text)),
        load(str(write_yaml(text))),
        load(write_yaml(), "run_dir=r", "total_steps=3", "seed=4", *arguments[2:5]),
        load(arguments),
        load(flat),
        load(nested),
        load(flat | {"seed": 1}, "seed=4"),
        load(by_hand),
        typed(by_hand),  # as a run does
    ):
        assert found == expected
        assert type(found.run_dir) is str
        assert type(found.rollout.over_bound) is OverBound


def test_a_schema_of_ones_own_is_the_second_argument(write_yaml: WriteYaml) -> None:
    for source in (write_yaml(), dict(REQUIRED), [f"{k}={v}" for k, v in REQUIRED.items()]):
        config = load(source, OwnConfig, "level=5")
        assert type(config) is OwnConfig
        assert config.level == 5
        assert type(load(source)) is GRPOConfig
    own = OwnConfig(run_dir="r", total_steps=3, actor=ActorConfig(path="m"), level=7)
    assert load(own) == own


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"max_staleness": 2}, "unknown setting max_staleness; did you mean rollout.max_staleness"),
        ({"rollout": {"max_stalness": 2}}, "did you mean rollout.max_staleness?"),
        ({"rollout.over_bound": "drop"}, "rollout.over_bound: expected one of train, mask, wait, "),
        ({"total_steps": "many"}, "total_steps: expected an integer, got 'many'"),
        ({"total_steps": 0}, "total_steps: expected an integer at least 1, got 0"),
        ({"actor": 3}, "actor: expected a section with the keys path, "),
        ({"rollout.group_size": 1}, "rollout.group_size: expected at least 2 with "),
        ({1: 2}, "unknown setting 1"),
        ({"task": {"reward": load}}, "task: expected numbers, strings, lists and mappings, got {"),
    ],
)
def test_a_mapping_is_checked_as_a_yaml_is(change: dict[Any, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(REQUIRED | change)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"total_steps": "many"}, "total_steps: expected an integer, got 'many'"),
        ({"rollout": RolloutConfig(over_bound="drop")}, "rollout.over_bound: expected one of "),  # type: ignore[arg-type]
        ({"rollout": RolloutConfig(group_size=0)}, "rollout.group_size: expected an integer at "),
        ({"actor": ActorConfig()}, "no value for actor.path"),
    ],
)
def test_settings_built_in_python_are_checked_as_a_yaml_is(
    change: dict[str, Any], message: str
) -> None:
    whole = GRPOConfig(run_dir="r", total_steps=3, actor=ActorConfig(path="m"))
    with pytest.raises(ConfigError) as caught:
        load(dataclasses.replace(whole, **change))
    assert message in str(caught.value)


def test_a_section_as_a_mapping_names_the_way_that_takes_it() -> None:
    with pytest.raises(ConfigError, match=r"actor: expected an ActorConfig, got a dict; .*load_co"):
        GRPOConfig(run_dir="r", total_steps=3, actor={"path": "m"})  # type: ignore[arg-type]


def test_a_changed_section_that_is_shared_is_refused() -> None:
    config = GRPOConfig(run_dir="r", total_steps=3, actor=ActorConfig(path="m"))
    config.generation = GenerationConfig(max_new_tokens=3)
    with pytest.raises(ConfigError, match=r"rollout\.generation: differs from generation"):
        load(config)


def test_a_whole_configuration_takes_no_override() -> None:
    config = GRPOConfig(run_dir="r", total_steps=3, actor=ActorConfig(path="m"))
    with pytest.raises(ConfigError, match=r"override seed=3: .*dataclasses\.replace"):
        load(config, "seed=3")


def test_what_is_missing_is_named_with_the_way_to_give_it() -> None:
    with pytest.raises(ConfigError, match=r"settings: no value for total_steps; give it a value"):
        load({"run_dir": "r", "actor.path": "m"})
    with pytest.raises(ConfigError, match=r"command line: no value for run_dir, actor\.path; name"):
        load(["total_steps=3"])


def test_flags_work_from_python_too(capsys: pytest.CaptureFixture[str]) -> None:
    assert load(REQUIRED, "--overwrite").overwrite
    with pytest.raises(SystemExit):
        load(REQUIRED, "--print-config")
    assert "total_steps: 3\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    "further",
    [(), ("scheduler.slurm.gang=false", "rollout.autoscale.max=9")],
    ids=["gang", "single"],
)
def test_a_dry_run_shows_the_jobs_that_slurm_would_get_and_their_workers(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    further: tuple[str, ...],
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("SBATCH_ACCOUNT", "mine")
    settings = {**REQUIRED, "run_dir": tmp_path / "run", "scheduler.slurm.gpus_per_node": 8}
    words = ["train.nodes=1", "rollout.nodes=2", "rollout.gpus_per_node=2"]
    words = [f"scheduler.slurm.{word}" for word in words] + ["rollout.num_workers=3"]
    words += ["scheduler.type=slurm", *further, "--dry-run"]
    load_config(settings, *words, makes_model=True)
    shown = capsys.readouterr().out
    _, train, rollout = shown.split("#!/bin/bash\n")
    assert "sbatch obeys the environment before the script: {'SBATCH_ACCOUNT': 'mine'}" in shown
    assert train.startswith("#SBATCH --nodes=1\n")
    assert "#SBATCH --gpus-per-node=8\n" in train
    assert "would not be taken: scheduler.type=slurm: there is no command sbatch on PATH" in train
    assert "#SBATCH --gpus-per-node=2\n" in rollout
    nodes = re.findall(r"^node (\S+):\n((?:  .*\n)+)", rollout, re.MULTILINE)
    workers = {node: re.findall(r"((?:train|rollout)/\d)\s+(\S+)", its) for node, its in nodes}
    assert workers == {
        "train/0": [("train/0", "cuda:0")],
        "rollout/0": [("rollout/0", "cuda:0"), ("rollout/1", "cuda:1")],
        "rollout/1": [("rollout/2", "cuda:0")],
    }
    assert not (tmp_path / "run").exists()


def test_a_mapping_stays_as_it_is_and_warns_as_a_yaml(caplog: pytest.LogCaptureFixture) -> None:
    given: dict[str, Any] = {**REQUIRED, "generation": {"top_k": 5}, "task": {"names": ["a"]}}
    with caplog.at_level(logging.WARNING):
        config = load(given)
    assert "generation.top_k=5" in caplog.text
    config.task["names"].append("b")
    assert given == {**REQUIRED, "generation": {"top_k": 5}, "task": {"names": ["a"]}}


def test_the_ways_that_the_guide_shows(
    write_yaml: WriteYaml, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    guide = (Path(__file__).parents[3] / "docs" / "settings.md").read_text()
    section = guide.partition("## From Python, a notebook or a REPL\n")[2]
    calls = section.partition("```python\n")[2].partition("```")[0].strip().splitlines()
    write_yaml()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["script.py", "run_dir=r", "total_steps=9", "actor.path=m"])
    # a worker of pytest-xdist has no script of its own
    monkeypatch.setattr(sys.modules["__main__"], "__file__", "script.py", raising=False)
    assert len(calls) == 4
    for call in calls:
        assert eval(call).total_steps == 9


SCRIPT = "from areal_sc import load_config\nconfig = load_config()\nprint(config.total_steps)\n"


def test_without_arguments_it_takes_the_command_line_of_the_script(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    root = str(Path(__file__).parents[3])
    arguments = ["run_dir=r", "total_steps=12", "actor.path=./m", "actor.device=cpu"]
    arguments += ["rollout.device=cpu"]
    for command, output in (([str(script), *arguments], "12\n"), (["-c", SCRIPT], "")):
        done = subprocess.run(
            [sys.executable, *command],
            cwd=tmp_path,
            env={"PYTHONPATH": root},
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.stdout == output, done.stderr
    assert 'interactive session; give it settings: load_config("x.yaml", ' in done.stderr
