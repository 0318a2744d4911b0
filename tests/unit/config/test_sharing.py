"""Settings built in Python: each section is whole, and a run's sections share what they should."""

from __future__ import annotations

from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from areal_sc.config.fields import join_sections
from areal_sc.config.follow_settings import EvaluationConfig, TrackerKind
from areal_sc.config.loading.plain import from_plain, to_plain
from areal_sc.config.schema import (
    ActorConfig,
    CheckpointConfig,
    Dtype,
    GenerationConfig,
    GRPOConfig,
    RolloutConfig,
    SchedulerConfig,
    TransportConfig,
    WeightUpdateConfig,
    WeightUpdateMethod,
)
from areal_sc.errors import ConfigError
from areal_sc.preflight.checks import check_config
from areal_sc.preflight.load import load_config


def values_of(section: Any) -> list[Any]:
    values = []
    for setting in fields(section):
        value = getattr(section, setting.name)
        values += values_of(value) if is_dataclass(value) else [value]
    return values


@pytest.mark.parametrize(
    "section",
    [ActorConfig(path="m"), RolloutConfig(path="m"), SchedulerConfig(run_dir="r")],
    ids=lambda section: type(section).__name__,
)
def test_a_section_alone_has_real_values_and_reaches_a_worker(section: Any) -> None:
    assert not [value for value in values_of(section) if isinstance(value, str) and "${" in value]
    assert from_plain(type(section), to_plain(section)) == section


def test_a_section_without_its_model_is_refused() -> None:
    with pytest.raises(ConfigError, match="RolloutConfig: no value for path"):
        to_plain(RolloutConfig())


def test_sections_of_a_run_share_what_they_were_not_given() -> None:
    config = GRPOConfig(
        run_dir="runs/by_hand",
        total_steps=5,
        seed=9,
        generation=GenerationConfig(max_new_tokens=7, temperature=0.7),
        actor=ActorConfig(path="m", dtype=Dtype.bfloat16),
        rollout=RolloutConfig(group_size=2, dtype=Dtype.float32),
        weight_update=WeightUpdateConfig(method=WeightUpdateMethod.disk),
        transport=TransportConfig(encrypt=True),
        checkpoint=CheckpointConfig(every_steps=2),
    )
    check_config(config, count_devices=lambda: 0)
    assert config.rollout.dtype is Dtype.float32  # as given, although it is the default
    assert (config.actor.seed, config.rollout.seed, config.rollout.path) == (9, 9, "m")
    assert config.rollout.generation == config.generation
    assert config.actor.optimizer.total_steps == 5
    assert config.actor.weight_update.folder == "runs/by_hand/weights"
    assert config.actor.weight_update == config.rollout.weight_update == config.weight_update
    assert config.scheduler.run_dir == "runs/by_hand"
    assert config.scheduler.transport.encrypt


def test_settings_by_hand_are_those_that_a_yaml_gives(tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    path.write_text("run_dir: r\ntotal_steps: 3\nseed: 4\nactor: {path: m}\n")
    loaded = load_config(["--config", str(path), "rollout.num_workers=2"], GRPOConfig)
    by_hand = GRPOConfig(
        run_dir="r",
        total_steps=3,
        seed=4,
        actor=ActorConfig(path="m"),
        rollout=RolloutConfig(num_workers=2),
    )
    assert by_hand == loaded


def test_a_changed_or_copied_run_shares_anew() -> None:
    first = GRPOConfig(run_dir="r", total_steps=3, actor=ActorConfig(path="m"))
    second = replace(first, seed=6)
    assert (first.actor.seed, second.actor.seed) == (0, 6)
    second.actor.path = "other"
    join_sections(second)
    assert second.rollout.path == "other"


def test_what_was_read_is_shared_anew_after_a_change() -> None:
    config = load_config({"run_dir": "r", "total_steps": 3, "actor.path": "m"})
    config.seed, config.generation.top_p = 6, 0.5
    join_sections(config)
    check_config(config, count_devices=lambda: 0)
    assert (config.actor.seed, config.rollout.generation.top_p) == (6, 0.5)


def test_fields_that_are_no_settings_stay_as_python_gives_them() -> None:
    actor, transport = ActorConfig(path="m"), TransportConfig(chunk_bytes=2048)
    config = GRPOConfig(run_dir="r", total_steps=3, actor=actor, transport=transport)
    found = load_config(config)
    assert found.transport.chunk_bytes == found.scheduler.transport.chunk_bytes == 2048


def test_a_loop_without_a_run_knows_what_it_does_not_read() -> None:
    actor = ActorConfig(path="m")
    config = GRPOConfig(run_dir="r", total_steps=3, actor=actor)
    assert config.scheduler.run_only == SchedulerConfig(run_dir="r").run_only == ()
    changed = replace(
        config,
        trackers=[TrackerKind.wandb],
        evaluation=EvaluationConfig(greedy=False),
        checkpoint=CheckpointConfig(every_steps=3, memory_snapshots=False),
    )
    assert changed.scheduler.run_only == (
        *("trackers=[wandb]", "evaluation.greedy=false", "checkpoint.every_steps=3"),
    )


def test_what_is_missing_or_contradicts_itself_is_named() -> None:
    with pytest.raises(ConfigError, match="run_dir: no value"):
        check_config(GRPOConfig())
    late = GRPOConfig(run_dir="r", total_steps=3)
    late.actor.path = "m"
    with pytest.raises(ConfigError, match=r"rollout\.path: differs from actor.path"):
        check_config(late)
    config = GRPOConfig(run_dir="r", total_steps=3, actor=ActorConfig(path="m"))
    config.generation = GenerationConfig(max_new_tokens=3)
    with pytest.raises(ConfigError, match=r"rollout\.generation: differs from generation"):
        check_config(config)
    config = GRPOConfig(run_dir="r", total_steps=3, actor=ActorConfig(path="m"))
    with pytest.raises(ConfigError, match=r"rollout\.seed: differs from seed"):
        load_config(replace(config, rollout=RolloutConfig(seed=3)))
    with pytest.raises(ConfigError, match="total_steps: expected a number, got '3'"):
        check_config(replace(config, total_steps="3"))  # type: ignore[arg-type]
