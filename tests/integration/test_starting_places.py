"""The same run from a script, `python -m`, Python's own prompt, and a notebook."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import yaml
from integration.agent_forks import environment_of_scripts
from integration.run_process import LIMIT_S, REPOSITORY

pytestmark = pytest.mark.slow

Process = subprocess.Popen[str]

IMPORTS = "from areal_sc import PPOTrainer, SingleTurnWorkflow, load_config\n"

REWARD = '''
import string

BONUS = 0.25


def is_letter(text):
    return text in string.ascii_lowercase


def reward(prompt, completion):
    """Never 0, so that a 0 would be no answer's reward."""
    return BONUS + is_letter(completion[:1])
'''

TRAIN = """
prompts = [{"prompt": letter + "="} for letter in "abcdefgh"]
summary = PPOTrainer(config).fit(SingleTurnWorkflow(reward), prompts)
print("trained", summary.num_steps)
"""

SCRIPT = f"""{IMPORTS}{REWARD}

if __name__ == "__main__":
    config = load_config()
    {TRAIN.strip().replace(chr(10), chr(10) + "    ")}
"""


def settings(run_dir: Path, model: Path) -> dict[str, Any]:
    return {
        "run_dir": str(run_dir),
        "total_steps": 2,
        "generation.max_new_tokens": 8,
        "actor": {"path": str(model), "device": "cpu"},
        "rollout": {"device": "cpu", "train_batch_groups": 4, "group_size": 2},
        "rollout.max_context_tokens": 64,
        "rollout.max_staleness": 0,
    }


def command_line(given: dict[str, Any], prefix: str = "") -> list[str]:
    words = []
    for key, value in given.items():
        inner = isinstance(value, dict)
        words += command_line(value, f"{prefix}{key}.") if inner else [f"{prefix}{key}={value}"]
    return words


def notebook(*cells: str) -> str:
    code = {"cell_type": "code", "metadata": {}, "execution_count": None, "outputs": []}
    content = [code | {"id": f"c{i}", "source": cell} for i, cell in enumerate(cells)]
    return json.dumps({"cells": content, "metadata": {}, "nbformat": 4, "nbformat_minor": 5})


def begin(stack: ExitStack, folder: Path, arguments: list[str], typed: str) -> Process:
    """Starts Python in the folder; what it says goes to `output.txt`."""
    (folder / "typed.txt").write_text(typed)
    env = environment_of_scripts() | {"IPYTHONDIR": str(folder / "ipython")}
    env["PYTHONPATH"] += f"{os.pathsep}{REPOSITORY}"
    process = subprocess.Popen(
        [sys.executable, *arguments],
        cwd=folder,
        env=env | {"JUPYTER_RUNTIME_DIR": str(folder / "jupyter")},
        stdin=stack.enter_context((folder / "typed.txt").open()),
        stdout=stack.enter_context((folder / "output.txt").open("w")),
        stderr=subprocess.STDOUT,
        text=True,
    )
    stack.callback(process.wait, LIMIT_S)
    stack.callback(process.terminate)  # what is left of a failed run ends by its orphan timeout
    return process


def test_the_same_run_from_every_place(tmp_path: Path, tiny_model_folder: Path) -> None:
    folders = {name: tmp_path / name for name in ("script", "module", "prompt", "notebook")}
    given = {name: settings(folder / "run", tiny_model_folder) for name, folder in folders.items()}
    for folder in folders.values():
        folder.mkdir()
    (folders["script"] / "first.py").write_text(SCRIPT)
    (folders["module"] / "first.py").write_text(SCRIPT)
    at_prompt = [IMPORTS, f"config = load_config({given['prompt']!r})", REWARD, TRAIN, ""]
    overrides = ", ".join(map(repr, command_line(given["notebook"])[:2]))
    rest = dict(list(given["notebook"].items())[2:])
    book = notebook(
        IMPORTS,
        REWARD.lstrip(),
        f"config = load_config({rest!r}, {overrides})",
        "import asyncio\nassert asyncio.get_running_loop().is_running()" + TRAIN,
    )
    (folders["notebook"] / "first.ipynb").write_text(book)
    execute = "from nbclient.cli import main; main()"
    starts = {
        "script": (["first.py", *command_line(given["script"])], ""),
        "module": (["-m", "first", *command_line(given["module"])], ""),
        "prompt": (["-i", "-q"], "\n".join(at_prompt)),
        "notebook": (["-c", execute, "--inplace", "first.ipynb"], ""),
    }
    with ExitStack() as stack:
        processes = {
            name: begin(stack, folders[name], arguments, typed)
            for name, (arguments, typed) in starts.items()
        }
        give_up = time.monotonic() + LIMIT_S
        for name, process in processes.items():
            code = process.wait(max(1.0, give_up - time.monotonic()))
            assert code == 0, (name, (folders[name] / "output.txt").read_text())

    told = {name: (folder / "output.txt").read_text() for name, folder in folders.items()}
    told["notebook"] = (folders["notebook"] / "first.ipynb").read_text()
    configs = []
    for name, folder in folders.items():
        assert "trained 2" in told[name], (name, told[name])
        lines = (folder / "run" / "metrics.jsonl").read_text().splitlines()
        steps = [record for record in map(json.loads, lines) if record["kind"] == "step"]
        assert [record["step"] for record in steps] == [1, 2]
        assert all(0.25 <= record["reward"] <= 1.25 for record in steps)
        text = (folder / "run" / "config.yaml").read_text().replace(str(folder), "")
        configs.append(yaml.safe_load(text))
    assert all(config == configs[0] for config in configs)
