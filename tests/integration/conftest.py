"""Fixtures of tests that start workers without a script."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from integration.run_process import TINY_YAML

from areal_sc import GRPOConfig, load_config, make_scheduler
from areal_sc.schedulers.base import Scheduler


@pytest.fixture(scope="module")
def tiny_config(
    tiny_model_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., GRPOConfig]:
    """`tiny_run.yaml` with overrides; one run folder for all of a module."""
    run_dir = tmp_path_factory.mktemp("runs") / "run"

    def config(*overrides: str) -> GRPOConfig:
        paths = (f"run_dir={run_dir}", f"actor.path={tiny_model_folder}", "task.gate=unused")
        return load_config(["--config", str(TINY_YAML), *paths, *overrides], GRPOConfig)

    return config


@pytest.fixture(scope="module")
def scheduler(tiny_config: Callable[..., GRPOConfig]) -> Iterator[Scheduler]:
    """One fork server for all of a module."""
    scheduler = make_scheduler(tiny_config().scheduler)
    yield scheduler
    scheduler.close()
