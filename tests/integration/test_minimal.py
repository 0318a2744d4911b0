"""The example that new users copy: it runs as printed, from nothing, and learns."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from integration.run_process import REPOSITORY

EXAMPLE = REPOSITORY / "examples" / "minimal.py"


def test_the_minimal_example_makes_its_model_and_learns(tmp_path: Path) -> None:
    config = REPOSITORY / "configs" / "minimal.yaml"
    settings = ("total_steps=40", "actor.optimizer.lr=2e-3")
    done = subprocess.run(  # no fork, nor are its workers
        [sys.executable, EXAMPLE, "--config", config, *settings],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stderr
    accuracies = [float(value) for value in re.findall(r"accuracy=(\S+)", done.stdout)]
    assert len(accuracies) == 40
    assert sum(accuracies[:5]) / 5 < 0.3
    assert sum(accuracies[-5:]) / 5 > 0.6
    assert (tmp_path / "runs" / "minimal" / "model" / "model.safetensors").is_file()


def test_the_loop_in_the_readme_is_the_one_of_the_example() -> None:
    """All of it but the making of the model."""
    example = EXAMPLE.read_text()
    readme = (REPOSITORY / "README.md").read_text()
    before, _, rest = example.partition("\n\ndef make_model")
    after = rest[rest.index("\n\ndef main") :]
    without_docstring = before.split('"""')[2].replace("from __future__ import annotations\n", "")
    shown = f"{without_docstring}{after}".replace("from pathlib import Path\n", "")
    shown = re.sub(r"MODEL = .*\n", "", shown)
    shown = re.sub(r" *if not Path.*\n.*make_model.*\n", "", shown)
    assert f"```python\n{shown.strip()}\n```" in readme
