from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

MINIMAL = "run_dir: runs/test\ntotal_steps: 10\nactor: {path: no_such_model}\n"


@pytest.fixture
def write_yaml(tmp_path: Path) -> Callable[..., Path]:
    """Writes a YAML file that, with the default text, has all that a run needs."""

    def write(text: str = MINIMAL, name: str = "x.yaml") -> Path:
        path = tmp_path / name
        path.write_text(text)
        return path

    return write
