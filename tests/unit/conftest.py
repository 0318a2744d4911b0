from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from areal_sc.config.schema import GRPOConfig
from areal_sc.preflight.load import load_config

MINIMAL = "run_dir: runs/test\ntotal_steps: 10\nactor: {path: no_such_model}\n"


@pytest.fixture
def write_yaml(tmp_path: Path) -> Callable[..., Path]:
    """Writes a YAML file that, with the default text, has all that a run needs."""

    def write(text: str = MINIMAL, name: str = "x.yaml") -> Path:
        path = tmp_path / name
        path.write_text(text)
        return path

    return write


@pytest.fixture
def load(write_yaml: Callable[..., Path]) -> Callable[..., GRPOConfig]:
    """Loads the minimal YAML with overrides, on a machine without CUDA devices."""

    def load_minimal(*overrides: str, num_devices: int = 0) -> GRPOConfig:
        argv = ["--config", str(write_yaml()), *overrides]
        return load_config(argv, GRPOConfig, count_devices=lambda: num_devices)

    return load_minimal
