"""`python -m areal_sc evaluate`: answers that stay through `kill -9`, and are judged again."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from integration.agent_forks import environment_of_scripts
from integration.run_process import LIMIT_S, SCRIPTS
from waiting import wait_until

NUM_FREE, NUM_WAITING, NUM_SAMPLES = 5, 4, 3
NUM_ANSWERS = (NUM_FREE + NUM_WAITING) * NUM_SAMPLES


class Evaluation:
    """The command, with a set of prompts of which the last ones wait for a file."""

    def __init__(self, folder: Path, model: Path) -> None:
        self.out = folder / "out"
        self.gate = folder / "gate"
        prompts = folder / "letters.jsonl"
        gates = [""] * NUM_FREE + [str(self.gate)] * NUM_WAITING
        rows = [{"prompt": f"{chr(97 + i)}=", "gate": gate} for i, gate in enumerate(gates)]
        prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
        self._words = [
            *(sys.executable, "-m", "areal_sc", "evaluate", str(model), "--out", str(self.out)),
            *("rollout.device=cpu", "actor.device=cpu", "generation.max_new_tokens=8"),
            "generation.cut_answers=judged",
        ]
        self._set = f"name=letters,prompts={prompts},answer_key=,num_samples={NUM_SAMPLES}"

    def start(self, reward: str, *words: str) -> subprocess.Popen[str]:
        chosen = ["--set", f"{self._set},reward=judged:{reward}"]
        return subprocess.Popen(
            [*self._words, *chosen, *words],
            cwd=SCRIPTS,
            env=environment_of_scripts(),
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def run(self, reward: str, *words: str) -> str:
        process = self.start(reward, *words)
        said, _ = process.communicate(timeout=LIMIT_S)
        assert process.returncode == 0, said
        return said

    def lines(self) -> list[str]:
        path = self.out / "answers.jsonl"
        return path.read_text().split("\n")[:-1] if path.exists() else []

    def summary(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.out / "summary.json").read_text())["letters"]
        return found


@pytest.mark.slow
def test_answers_outlive_the_command_and_are_judged_again(
    tiny_model_folder: Path, tmp_path: Path
) -> None:
    evaluation = Evaluation(tmp_path, tiny_model_folder)
    killed = evaluation.start("vowels")
    wait_until(lambda: killed.poll() or len(evaluation.lines()) >= NUM_FREE * NUM_SAMPLES)
    assert killed.poll() is None, killed.communicate()
    os.kill(killed.pid, signal.SIGKILL)
    killed.communicate()
    before = evaluation.lines()
    assert len(before) == NUM_FREE * NUM_SAMPLES, "the others wait"

    evaluation.gate.touch()
    evaluation.run("vowels")
    lines = evaluation.lines()
    assert lines[: len(before)] == before, "what was there is not generated again"
    answers = [json.loads(line) for line in lines]
    places = {(it["set"], it["prompt"], it["sample"]) for it in answers}
    assert len(places) == len(lines) == NUM_ANSWERS
    assert {it["text"]["prompt"] for it in answers} == {f"{letter}=" for letter in "abcdefghi"}
    written = [it["text"]["answer"].replace("<pad>", "") for it in answers]
    rights = [bool(set(text) & set("aeiou")) for text in written]
    assert [it["reward"] == 1.0 for it in answers] == rights
    accuracy = evaluation.summary()["accuracy"]
    assert accuracy == pytest.approx(sum(rights) / NUM_ANSWERS)

    evaluation.run("no_vowels", "--rescore")
    assert evaluation.summary()["accuracy"] == pytest.approx(1 - accuracy)
    texts = {line["sample"]: line["text"] for line in answers if line["prompt"] == 2}
    again = map(json.loads, evaluation.lines())
    assert {it["sample"]: it["text"] for it in again if it["prompt"] == 2} == texts
