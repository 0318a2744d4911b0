"""The reward of programs over a sandbox that a test plays: what is run, and what it makes of it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest

from areal_sc.errors import ConfigError, RewardError, SandboxError, WorkflowError
from areal_sc.rewards.code.reward import FAULTS, TEST_LIMITS, CodeReward, code_reward
from areal_sc.sources.reference import ObjectReference, reference_of, resolve
from areal_sc.system.sandbox.program import End, Ended, Limits, Program
from areal_sc.workflows.single_turn import SingleTurnWorkflow

ANSWER = "```python\nprint(input())\n```"


def row(*outputs: str) -> dict[str, Any]:
    """Each test's input is its number."""
    return {"tests": {"inputs": [*map(str, range(len(outputs)))], "outputs": [*outputs]}}


def ended(stdout: str = "", end: End = End.exited, exit_code: int = 0) -> Ended:
    return Ended(end=end, exit_code=exit_code, stdout=stdout.encode(), stderr=b"", seconds=0.0)


class Sandbox:
    """Ends each program as `how` says of its input, once all that are to run are there.

    Attributes:
        at_once: so many programs have to run beside each other before the first one ends.
    """

    def __init__(self, how: Callable[[str], Ended | Exception], at_once: int = 1) -> None:
        self.how = how
        self.at_once = at_once
        self.programs: list[Program] = []
        self.limits: list[Limits | None] = []
        self.num_running = 0
        self.num_cancelled = 0
        self.most_running = 0
        self._enough = asyncio.Event()
        self._wanted = 0
        self._are_there = asyncio.Event()

    async def wait_for(self, num_running: int) -> None:
        self._wanted = num_running
        await self._are_there.wait()

    async def __call__(
        self, code: str | Program, stdin: str = "", limits: Limits | None = None
    ) -> Ended:
        assert isinstance(code, Program)
        self.programs.append(code)
        self.limits.append(limits)
        self.num_running += 1
        if self.num_running == self._wanted:
            self._are_there.set()
        self.most_running = max(self.most_running, self.num_running)
        if self.num_running == self.at_once:
            self._enough.set()
        try:
            await self._enough.wait()
            result = self.how(code.stdin.decode())
            if isinstance(result, Exception):
                raise result
            return result
        except asyncio.CancelledError:
            self.num_cancelled += 1
            raise
        finally:
            self.num_running -= 1


def echo(stdin: str) -> Ended:
    return ended(stdin)


async def test_all_tests_have_to_pass() -> None:
    score = await code_reward(row("0", "1", "2"), ANSWER, Sandbox(echo))
    assert score == 1.0
    assert score.parts == {"passed": 1.0, **dict.fromkeys(map(str, FAULTS), 0.0)}
    score = await code_reward(row("0", "9", "2"), ANSWER, Sandbox(echo))
    assert score == 0.0
    assert score.parts == {"passed": 1 / 3, **dict.fromkeys(map(str, FAULTS), 0.0)}


async def test_a_share_of_tests() -> None:
    score = await CodeReward(pass_share=True)(row("0", "9", "2", "9"), ANSWER, Sandbox(echo))
    assert score == score.parts["passed"] == 0.5


@pytest.mark.parametrize(
    ("how", "fault"),
    [
        (ended("1", End.timeout, -9), "timeout"),
        (ended("1", End.memory, 1), "memory"),
        (ended("1", End.output, -9), "crashed"),
        (ended("1", End.files, -9), "crashed"),
        (ended("1", End.crashed, -11), "crashed"),
        (ended("1", End.exited, 1), "crashed"),
    ],
)
async def test_the_candidates_own_faults_have_their_number(how: Ended, fault: str) -> None:
    """Though the right output stands there."""

    def one_fails(stdin: str) -> Ended:
        return how if stdin == "1" else ended(stdin)

    reward, share = (CodeReward(fault_reward=-0.5, pass_share=it) for it in (False, True))
    score = await reward(row("0", "1", "2", "3"), ANSWER, Sandbox(one_fails))
    assert score == -0.5
    assert score.parts == {
        "passed": 0.25,
        **{it: float(it == fault) for it in ("no_code", "timeout", "memory", "crashed")},
    }
    score = await share(row("0", "1", "2", "3"), ANSWER, Sandbox(one_fails))
    assert score == (3 - 0.5) / 4
    assert score.parts["passed"] == 0.75
    assert score.parts[fault] == 1.0
    assert await code_reward(row("0", "1"), ANSWER, Sandbox(one_fails)) == 0.0


async def test_no_program_runs_nothing() -> None:
    sandbox = Sandbox(echo)
    score = await CodeReward(fault_reward=-1.0)(row("0"), "print(0)", sandbox)
    assert score == -1.0
    assert score.parts["no_code"] == 1.0
    assert sandbox.programs == []


async def test_so_many_run_at_once_and_no_more_begin_after_a_failure() -> None:
    sandbox = Sandbox(echo, at_once=3)
    outputs = [*map(str, range(10_000))]
    assert await CodeReward(tests_at_once=3)(row(*outputs), ANSWER, sandbox) == 1.0
    assert sandbox.most_running == 3
    assert [int(it.stdin) for it in sandbox.programs] == [*range(10_000)]
    outputs[5] = "wrong"
    sandbox = Sandbox(echo, at_once=3)
    score = await CodeReward(tests_at_once=3)(row(*outputs), ANSWER, sandbox)
    assert score == 0.0
    assert score.parts["passed"] == 5 / 10_000
    assert len(sandbox.programs) <= 8
    assert sandbox.num_running == 0


async def test_the_first_test_that_fails_decides_whichever_ends_first() -> None:
    slow = asyncio.Event()

    async def run_code(code: str | Program, stdin: str = "", limits: Limits | None = None) -> Ended:
        assert isinstance(code, Program)
        if code.stdin == b"0":
            await slow.wait()
            return ended("wrong")
        slow.set()
        return ended("", End.timeout, -9)

    score = await CodeReward(fault_reward=-1.0)(row("0", "1"), ANSWER, run_code)
    assert score == 0.0
    assert score.parts["timeout"] == 0.0


async def test_a_sandbox_that_fails_gives_no_score() -> None:
    sandbox = Sandbox(lambda stdin: SandboxError("gone") if stdin == "1" else ended(stdin))
    with pytest.raises(SandboxError, match="gone"):
        await CodeReward(fault_reward=-1.0)(row("0", "1", "2"), ANSWER, sandbox)
    assert sandbox.num_running == 0


async def test_programs_end_with_the_call_that_runs_them() -> None:
    sandbox = Sandbox(echo, at_once=99)
    call = asyncio.create_task(code_reward(row(*"0123456789"), ANSWER, sandbox))
    await sandbox.wait_for(4)
    call.cancel()
    await asyncio.wait([call])
    assert call.cancelled()
    assert (sandbox.num_running, sandbox.num_cancelled) == (0, 4)


async def test_no_expected_output_leaves_this_process() -> None:
    programs = [({"inputs": ["1"], "outputs": ["secret"]}), [{"input": "1", "output": "secret"}]]
    calls = [{"inputs": [[1]], "outputs": ["secret"], "fn_name": "f"}]
    for tests in [*programs, *calls]:
        sandbox = Sandbox(lambda _: ended("secret"))
        await code_reward({"tests": tests}, "```python\ndef f(x): ...\n```", sandbox)
        (program,) = sandbox.programs
        assert "1" in program.stdin.decode()
        assert "secret" not in repr(program)


async def test_limits_and_the_longest_tests_are_settings() -> None:
    sandbox, limits = Sandbox(echo), Limits(time_s=1.0)
    tests = {"inputs": ["1", "333", "22"], "outputs": ["1", "333", "22"]}
    reward = CodeReward("cases", limits=limits, max_tests=2)
    score = await reward({"cases": json.dumps(tests)}, ANSWER, sandbox)
    assert score == score.parts["passed"] == 1.0
    assert [program.stdin for program in sandbox.programs] == [b"333", b"22"]
    assert sandbox.limits == [limits, limits]
    await code_reward({"tests": tests}, ANSWER, sandbox)
    assert sandbox.limits[-1] == TEST_LIMITS


async def test_other_languages_run_by_their_command() -> None:
    reward = CodeReward(commands={"CPP": ["sh", "-c", "g++ main.cpp && ./a.out"]})
    assert resolve(ObjectReference.from_wire(reference_of(reward).to_wire()))
    sandbox = Sandbox(echo)
    await reward(row("0"), "```cpp\nint main() {}\n```", sandbox)
    await reward(row("0"), f"```rust\nfn main() {{}}\n```\n{ANSWER}", sandbox)
    cpp, python = sandbox.programs
    assert cpp.command == ("sh", "-c", "g++ main.cpp && ./a.out")
    assert cpp.files == {"main.cpp": b"int main() {}"}
    assert cpp.source == ""
    assert python == Program(source="print(input())", stdin=b"0")


async def test_half_a_surrogate_pair_is_no_failure_of_ours() -> None:
    sandbox = Sandbox(echo)
    await code_reward(row("0"), "```python\nprint('\ud800')\n```", sandbox)
    assert sandbox.programs[0].source == "print('?')"


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ({"prompt": "p"}, r"column 'tests': the row has no tests, only \['prompt'\]"),
        ({"tests": [{"input": "1"}]}, "column 'tests': test 0: it has no output"),
        ({"tests": "[}"}, "column 'tests': Expecting value"),
        (row("1", "2" * 2_000_000), "an output has 2000000 bytes, more than a program may"),
        ({"tests": "[]", "metadata": "{"}, "column 'tests': there are none"),
    ],
)
async def test_tests_that_cannot_be_read_are_told(prompt: dict[str, Any], message: str) -> None:
    with pytest.raises(RewardError, match=message) as refusal:
        await code_reward(prompt, ANSWER, Sandbox(echo))
    assert refusal.value.kind == "dataset_error"
    with pytest.raises(WorkflowError, match=message):
        SingleTurnWorkflow({"right": code_reward}).check_row({"prompt": "p", **prompt})
    with pytest.raises(ConfigError, match=r"the tests of 7 rows .* cannot be read") as refused:
        code_reward.check_tests([row("0"), *[prompt] * 7])
    assert "row 1: " in str(refused.value)
    assert "and 2 more" in str(refused.value)
    code_reward.check_tests([row("0")])


@pytest.mark.parametrize(
    "settings",
    [
        {"max_tests": -1},
        {"tests_at_once": 0},
        {"tolerance": -1.0},
        {"fault_reward": float("nan")},
        {"commands": {"cpp": "g++"}},
        {"commands": {"cpp": []}},
        {"commands": {"python": ["pypy3"]}},
    ],
)
def test_settings_are_checked(settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="expected"):
        CodeReward(**settings)
