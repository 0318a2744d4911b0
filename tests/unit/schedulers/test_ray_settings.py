"""What the ray scheduler refuses before it asks a cluster, and what agents get of its settings."""

from __future__ import annotations

import importlib.util
import math
from dataclasses import replace
from pathlib import Path

import pytest

from areal_sc import make_scheduler
from areal_sc.config.schema import SchedulerConfig
from areal_sc.config.slurm_settings import RayConfig
from areal_sc.errors import ConfigError
from areal_sc.run.run_folder import RunFolder
from areal_sc.schedulers.open_run import settings_of_agents
from areal_sc.schedulers.ray.scheduler import RayScheduler


def test_without_ray_its_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"needs the package ray.* pip install 'areal-sc\[ray\]'"):
        make_scheduler(SchedulerConfig(type="ray", run_dir=str(tmp_path)))


@pytest.mark.parametrize("number", [0, -1, math.nan, math.inf])
def test_amounts_that_no_node_can_have_are_named(tmp_path: Path, number: float) -> None:
    ray = RayConfig(resources={"CPU": 1, "GPU": number})
    config = SchedulerConfig(type="ray", run_dir=str(tmp_path), ray=ray)
    with pytest.raises(
        ConfigError, match=r"scheduler\.ray\.resources\.GPU: expected a number above 0"
    ):
        make_scheduler(config)


def settings_of(ray: RayConfig, tmp_path: Path) -> dict[str, object]:
    scheduler = RayScheduler.__new__(RayScheduler)
    scheduler.config = SchedulerConfig(type="ray", run_dir=str(tmp_path), ray=ray)
    scheduler.folder = RunFolder(tmp_path)
    return settings_of_agents(scheduler.config_of_agents)


def test_agents_are_the_same_under_another_address_and_no_other_setting(tmp_path: Path) -> None:
    ray = RayConfig(runtime_env={"env_vars": {"TOKEN": "very-secret"}})
    settings = settings_of(ray, tmp_path)
    assert "very-secret" not in str(settings)
    assert settings_of(replace(ray, address="head:6379"), tmp_path) == settings
    for other in (
        replace(ray, runtime_env={"env_vars": {"TOKEN": "another"}}),
        replace(ray, runtime_env={}),
        replace(ray, resources={"CPU": 1}),
        replace(ray, nodes=2),
    ):
        assert settings_of(other, tmp_path) != settings


def test_agents_of_other_schedulers_do_not_go_by_the_section() -> None:
    for kind in ("local", "slurm", "mine:Scheduler"):
        settings = settings_of_agents(SchedulerConfig(type=kind, run_dir="run"))
        assert "ray" not in settings
        assert ("slurm" in settings) == (kind == "slurm")
