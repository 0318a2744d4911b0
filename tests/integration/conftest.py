"""Fixtures of tests that start workers without a script."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from integration.agent_forks import AROUND, address_of_forks, fork_agents
from integration.run_process import REPOSITORY, TINY_YAML

from areal_sc import GRPOConfig, LocalGenerator, RolloutController, load_config, make_scheduler
from areal_sc import start as start_controllers
from areal_sc.schedulers import agent_process
from areal_sc.schedulers.base import Scheduler


@pytest.fixture(scope="session", autouse=True)
def forked_agents(cache_home: None) -> None:
    """Runs fork their agents, see `agent_forks`."""
    AROUND.update(os.environ)
    fork_agents(agent_process, address_of_forks)


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


@pytest.fixture(scope="module")
def start_rollout(
    tiny_config: Callable[..., GRPOConfig], scheduler: Scheduler
) -> Callable[..., Any]:
    """A rollout controller with one worker, as a context manager."""

    @contextmanager
    def started_rollout(*overrides: str) -> Iterator[RolloutController]:
        config = tiny_config(*overrides).rollout
        rollout = RolloutController(LocalGenerator(config), scheduler)
        with start_controllers(rollout):
            yield rollout

    return started_rollout


@pytest.fixture(scope="module")
def chat_model(tiny_model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model, with a chat template."""
    folder = tmp_path_factory.mktemp("chat") / "model"
    shutil.copytree(tiny_model_folder, folder)
    path = folder / "tokenizer_config.json"
    template = "{% for message in messages %}{{ message.content }}{% endfor %}="
    path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": template}))
    return folder


@pytest.fixture(scope="session")
def real_model() -> Path:
    """SmolLM2-135M-Instruct as a Hugging Face folder; written if it is not there."""
    install = REPOSITORY / "tests" / "real_model" / "install.sh"
    subprocess.run(
        [str(install)], env=os.environ | {"PYTHON": sys.executable}, check=True, timeout=900
    )
    return REPOSITORY / ".venv-models" / "SmolLM2-135M-Instruct"


@pytest.fixture(scope="module")
def folder_of_all() -> Iterator[Path]:
    """A folder that every user can reach; those of pytest are their owner's alone."""
    with TemporaryDirectory(prefix="areal-sc-test-") as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)
