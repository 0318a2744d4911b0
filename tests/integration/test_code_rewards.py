"""Programs of answers in the real sandbox: right ones pass, and no attack on the judge does."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from integration.run_process import tiny_run

from areal_sc.config.sandbox_settings import SandboxConfig
from areal_sc.errors import RewardError, SandboxError
from areal_sc.rewards.code.reward import CodeReward, code_reward
from areal_sc.rewards.running import CodeRunner
from areal_sc.system.sandbox.program import Limits

pytestmark = pytest.mark.asyncio(loop_scope="module")

SUMS = {"inputs": ["1 2\n", "3 4\n", "-5 5\n"], "outputs": ["3\n", "7\n", "0\n"]}
SUM_CALLS = {"inputs": [[[1, 2]], [[3, 4]], [[]]], "outputs": [3, 7, 0], "fn_name": "total"}
LONG = {"inputs": ["1\n"], "outputs": ["1\n"]}


def fenced(code: str, language: str = "python") -> str:
    return f"So:\n```{language}\n{code}\n```\n"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def run_code() -> AsyncIterator[CodeRunner]:
    run_code = CodeRunner(SandboxConfig())
    yield run_code
    await run_code.close()


@pytest.mark.parametrize(
    ("code", "tests"),
    [
        ("print(sum(map(int, input().split())))", SUMS),
        (
            "import sys\ndef main():\n    print(sum(map(int, sys.stdin.read().split())), '')\n"
            "if __name__ == '__main__':\n    main()",
            SUMS,
        ),
        ("import sys\nprint(sum(map(int, input().split())))\nsys.exit(0)", SUMS),
        ("def total(numbers: List[int]) -> int:\n    return reduce(add, numbers, 0)", SUM_CALLS),
        (
            "class Solution:\n    def total(self, numbers):\n        print('debug', numbers)\n"
            "        return sum(numbers)\n\n\nif __name__ == '__main__':\n    print(input())",
            SUM_CALLS,
        ),
        (
            "def total(n):\n    return 0 if n == 0 else 1 + total(n - 1)",  # deeper than by default
            {"inputs": [[5000]], "outputs": [[5000]], "fn_name": "total"},
        ),
        (
            "def total(n):\n    return (pow(n, 3, 5), copy.deepcopy([n]), [*accumulate([n, n])])",
            {"inputs": [[2]], "outputs": [[3, [2], [2, 4]]], "fn_name": "total"},
        ),
        ("print(input()[::-1])", {"inputs": ["añ日\n"], "outputs": ["日ña"]}),
        ("print(10 ** int(input()))", {"inputs": ["5000\n"], "outputs": [10**5000]}),
        (
            "def total(n):\n    return [10**n, -(10**n)]",
            {"inputs": [[5000]], "outputs": [[10**5000, -(10**5000)]], "fn_name": "total"},
        ),
    ],
)
async def test_right_programs_pass(code: str, tests: Any, run_code: CodeRunner) -> None:
    score = await code_reward({"tests": tests}, fenced(code), run_code)
    assert score == score.parts["passed"] == 1.0, score.parts


EQUAL = """
class Equal(int):
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    def __hash__(self): return 0
    def __repr__(self): return "3"
"""
PATCHES = """
import builtins, json, sys, unittest, unittest.mock
sys.exit = exit = lambda *a: None
builtins.open = lambda *a, **k: (_ for _ in ()).throw(SystemExit(0))
json.dumps = lambda *a, **k: "3"
json.JSONEncoder.default = lambda self, it: 3
unittest.TestCase.assertEqual = lambda *a: None
unittest.main = lambda *a, **k: None
sys.setrecursionlimit = sys.settrace = lambda *a: None
"""
SEARCH = """
import os, sys
texts = [repr(sys.argv), repr(os.environ), repr(vars(sys.modules["__main__"]))]
paths = [f"/proc/{process}/{name}" for process in ("self", 1) for name in ("cmdline", "environ")]
for folder in {".", "..", "/tmp", os.environ.get("HOME", "."), os.environ.get("TMPDIR", ".")}:
    try:
        paths += [os.path.join(folder, name) for name in os.listdir(folder)[:1000]]
    except OSError:
        pass
for path in [*paths, *range(3, 64)]:  # files, and descriptors that were left open
    try:
        with open(path, errors="replace", closefd=isinstance(path, str)) as file:
            texts.append(file.read(1 << 16))
    except OSError:
        pass
found = "hidden-" + "expected-output"
print(next((found for text in texts if found in text), "nothing"))
"""
FORGED = """
import os
for fd in range(256):
    for reply in (b'["value", 1.0]', b'{"end": "exited", "exit_code": 0, "passed": 1.0}'):
        try:
            os.write(fd, len(reply).to_bytes(4, "big") + reply)
        except OSError:
            pass
os._exit(0)
"""


@pytest.mark.parametrize(
    ("code", "tests"),
    [
        (f"{EQUAL}\nprint(Equal(3))", SUMS),
        (f"{EQUAL}\ndef total(numbers): return Equal(3)", SUM_CALLS),
        (f"{EQUAL}\nclass Solution(Equal):\n    total = lambda self, n: self", SUM_CALLS),
        (f"{PATCHES}\nprint(3)", SUMS),
        (f"{PATCHES}\ndef total(numbers): return object()", SUM_CALLS),
        ("import os\nos._exit(0)", SUMS),
        ("import os\ndef total(numbers): os._exit(0)", SUM_CALLS),
        ("import sys\nsys.exit(0)", SUMS),
        ("def total(numbers): raise SystemExit(0)", SUM_CALLS),
        (FORGED, SUMS),
        (f"def total(numbers):\n    exec({FORGED!r})", SUM_CALLS),
        ("print('3', end='')\nraise SystemExit(1)", {"inputs": ["1 2"], "outputs": ["3"]}),
        ("import sys\nsys.stdout.buffer.write(bytes(range(256)) * 100)", SUMS),
        ("print('[' * 100_000)", SUMS),
        ("def total(n):\n    print('3')", SUM_CALLS),
        ("def other(n): return 3", SUM_CALLS),
        ("def total(:", SUM_CALLS),
        ("print(3", SUMS),
    ],
)
async def test_no_attack_on_the_judge_pays(code: str, tests: Any, run_code: CodeRunner) -> None:
    """Nor does it cost the next answer anything."""
    score = await code_reward({"tests": json.dumps(tests)}, fenced(code), run_code)
    assert score == 0.0, score.parts
    assert score.parts["passed"] < 1.0
    honest = fenced("print(sum(map(int, input().split())))")
    assert await code_reward({"tests": SUMS}, honest, run_code) == 1.0


SEARCHING_CALL = f"""
def total(n):
    out = []
    exec({SEARCH!r}, {{"print": out.append}})
    return out[0]
"""


@pytest.mark.parametrize(
    ("code", "tests", "found"),
    [
        (SEARCH, {"inputs": ["1\n"]}, ["nothing", "hidden-expected-output"]),
        (
            SEARCHING_CALL,
            {"inputs": [[1]], "fn_name": "total"},
            ["nothing", "hidden-expected-output"],
        ),
    ],
)
async def test_the_expected_output_is_nowhere_to_be_found(
    code: str, tests: Any, found: list[str], run_code: CodeRunner
) -> None:
    """It looks for one text and prints whether it was there."""
    scores = [
        await code_reward({"tests": {**tests, "outputs": [expected]}}, fenced(code), run_code)
        for expected in found
    ]
    assert scores == [1.0, 0.0]
    assert not any(scores[1].parts.values())


@pytest.mark.parametrize(
    ("code", "fault", "time_s"),
    [
        ("while True: pass", "timeout", 1.0),
        ("import time\nprint(1, flush=True)\ntime.sleep(100)", "timeout", 1.0),
        ("print(1)\nx = bytearray(8 << 30)", "memory", 30.0),
        ("print(1)\nimport os\nos.kill(os.getpid(), 11)", "crashed", 30.0),
        ("print(1)\nraise ValueError", "crashed", 30.0),
        ("while True: print(1)", "crashed", 30.0),
    ],
)
async def test_faults_are_the_candidates_own(
    code: str, fault: str, time_s: float, run_code: CodeRunner
) -> None:
    limits = Limits(time_s=time_s, memory_bytes=512 << 20)
    reward = CodeReward(limits=limits, fault_reward=-0.25)
    score = await reward({"tests": LONG}, fenced(code), run_code)
    assert score == -0.25
    assert {name for name, value in score.parts.items() if value} == {fault}


async def test_other_languages(run_code: CodeRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    """A command that is not there is no fault of the answer."""
    monkeypatch.setattr("areal_sc.rewards.running._PAUSES_S", ())
    reward = CodeReward(commands={"sh": ("sh", "main.sh"), "cobol": ("no-such-compiler", "x")})
    code = "read one two\necho $((one + two))"
    assert await reward({"tests": SUMS}, fenced(code, "sh"), run_code) == 1.0
    assert await reward({"tests": SUMS}, fenced(code, "bash"), run_code) == 0.0
    with pytest.raises(SandboxError, match="no-such-compiler"):
        await reward({"tests": SUMS}, fenced(code, "cobol"), run_code)


async def test_a_test_of_50_mb(run_code: CodeRunner) -> None:
    """As text in JSON, so it is read, sent to the program, and compared."""
    line = "7" * 99 + "\n"
    tests = json.dumps([{"input": line * (260 << 10), "output": line * (260 << 10)}])
    assert len(tests) > 50 << 20
    code = "import shutil, sys\nshutil.copyfileobj(sys.stdin, sys.stdout)"
    reward = CodeReward(limits=Limits(time_s=60.0, output_bytes=64 << 20))
    assert await reward({"tests": tests}, fenced(code), run_code) == 1.0
    with pytest.raises(RewardError, match="an output has 26624000 bytes, more than"):
        await code_reward({"tests": tests}, fenced(code), run_code)


SCRIPT = """
import sys

from areal_sc import GRPOConfig, PPOTrainer, Workflow, load_config, run_script
from areal_sc.rewards.code.reward import CodeReward
from areal_sc.system.sandbox.program import Limits
from areal_sc.workflows.text import encode_text
from areal_sc.workflows.transcript import Transcript

ANSWERS = {
    "right": "```python\\nprint(2 * int(input()))\\n```",
    "wrong": "```python\\nprint(int(input()))\\n```",
    "large": "```python\\nx = bytearray(8 << 30)\\n```",
    "none": "I do not know.",
}
TESTS = {"inputs": ["1", "2"], "outputs": ["2", "4"]}


class Written(Workflow):
    \"\"\"The model's tokens are trained by what the row's own answer gets.\"\"\"

    def __init__(self, reward):
        self.reward = reward

    async def run_episode(self, prompt, engine):
        transcript = Transcript()
        transcript.add_context(encode_text(engine.tokenizer, prompt["prompt"]))
        transcript.add_completion(await engine.generate(transcript.input_ids))
        ended = await engine.run_code("print(input() + '!')", "tool", Limits(time_s=60.0))
        score = await engine.score(self.reward, prompt, ANSWERS[prompt["kind"]])
        return transcript.trajectory(score, {"tool": float(ended.stdout == b"tool!\\n")})


def main(argv):
    config = load_config(argv, GRPOConfig)
    rows = [{"prompt": "ab=", "kind": kind, "tests": TESTS} for kind in ANSWERS]
    workflow = Written(CodeReward(fault_reward=-1.0, limits=Limits(time_s=60.0)))
    PPOTrainer(config).fit(workflow, rows, evaluation_prompts=rows)


if __name__ == "__main__":
    sys.exit(run_script(main))
"""


async def test_a_run_is_trained_by_programs(tmp_path: Path, tiny_model_folder: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    settings = ("total_steps=1", "evaluation.num_prompts=4")
    with tiny_run(tmp_path / "run", tiny_model_folder, *settings, script=script) as run:
        run.finish()
        (step,), evaluations = run.records("step"), run.records("evaluation")
    # a step and an evaluation have each of the four rows once
    for record in (step, *evaluations):
        assert record["reward"] == (1 + 0 - 1 - 1) / 4
        assert record["workflow"] == {
            "tool": 1.0,
            "reward/passed": 0.25,
            "reward/no_code": 0.25,
            "reward/timeout": 0.0,
            "reward/memory": 0.25,
            "reward/crashed": 0.0,
        }


async def test_a_run_whose_code_nothing_keeps_apart_does_not_start(
    tmp_path: Path, tiny_model_folder: Path
) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    settings = ("total_steps=1", "rollout.sandbox.isolation=none")
    with tiny_run(tmp_path / "run", tiny_model_folder, *settings, script=script) as run:
        assert run.wait() == SandboxError.exit_code, run.story()
        assert "A sandbox cannot be had" in run.output
        assert "code that a model wrote is not run without isolation" in run.output
        assert list((run.run_dir / "logs").glob("rollout*.log")) == []
