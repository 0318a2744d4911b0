"""Tests of the task in first_project.py: its reward, and a run of two steps.

python -m unittest test_first_project.py
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import unittest

from first_project import PROMPTS, reward

COMMAND = [sys.executable, "examples/first_project.py", "--config", "configs/first_project.yaml"]


class TestTask(unittest.TestCase):
    def test_the_right_answer_has_the_highest_reward(self) -> None:
        for prompt in PROMPTS:
            assert reward(prompt, prompt["answer"]) == 1.0

    def test_other_answers_have_none(self) -> None:
        for completion in ("", ",", PROMPTS[0]["answer"] * 2):
            assert reward(PROMPTS[0], completion) == 0.0

    def test_two_steps_of_training(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            settings = ["total_steps=2", f"run_dir={folder}/run"]
            done = subprocess.run(
                [*COMMAND, *settings], capture_output=True, text=True, timeout=600
            )
        assert done.returncode == 0, done.stdout + done.stderr
        assert "step=2/2 " in done.stdout
